// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netfaults

import (
	"context"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/headgate/headgate/test/real"
)

// watch waits for the end of the answer. When another attempt reaches an engine
// it notes how much the victim's guard had let through.
func (s *story) watch() {
	s.t.Helper()
	s.passed = -1
	s.await("an answer", func() bool {
		if s.passed < 0 && s.guarded && s.victim.relay != nil && len(s.attempts()) > 1 {
			s.passed = len(s.published())
		}
		return s.asked.isOver()
	})
	s.answered(s.asked)
}

// published is what came over the victim's relay as an answer to the request.
// A guard's own refusal is none.
func (s *story) published() (all []byte) {
	for _, x := range s.victim.relay.Posts() {
		if x.Request == s.attempts()[0].Request && x.Status == http.StatusOK {
			all = append(all, x.Body...)
		}
	}
	return all
}

// silent: from the moment when another attempt reached an engine the guard of the
// first one let nothing through (I3, I8), or it counted what came late. What
// gateways dropped late is counted too.
func (s *story) silent() {
	s.t.Helper()
	metrics, err := s.get(adminPort, "/metrics")
	s.must(err)
	dropped := 0
	for line := range strings.Lines(string(metrics)) {
		if n, ok := strings.CutPrefix(line, "headgate_late_chunks_total "); ok {
			dropped, err = strconv.Atoi(strings.TrimSpace(n))
			s.must(err)
		}
	}
	table.count("late chunks that gateways dropped", dropped)
	if !s.guarded {
		return
	}
	late := 0
	for _, g := range s.guardians() {
		late += int(g.LateWrites)
	}
	table.count("late writes that guards counted", late)
	if s.passed < 0 {
		return
	}
	table.count("guards watched by a relay while another attempt ran", 1)
	if all := s.published(); len(all) > s.passed && late == 0 {
		s.t.Errorf("I8: guard %s let %d bytes through after another attempt had begun: %q", s.victim.name, len(all)-s.passed, clip(all[s.passed:]))
	}
}

// arm puts one hold on all relays. It catches the request's connection: towards
// the engine all of it, towards the gateway what comes once the fault struck.
func (s *story) arm() {
	s.hold = &real.Hold{Direction: real.ToGateway}
	if s.point.name == "unread" {
		s.hold.Direction = real.ToEngine
	} else {
		passed := 0
		s.hold.Pass = func(since []byte) int {
			if !s.armed.Load() {
				passed = len(since)
			}
			return passed
		}
	}
	for _, b := range s.replicas {
		b.relay.Hold(s.hold)
	}
}

// find waits until the hold has its connection, and learns whose it is. On a busy
// machine the answer may be over before the engine speaks.
func (s *story) find() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	go func() {
		select {
		case <-s.asked.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	held, err := s.hold.Caught(ctx)
	if err != nil {
		s.missed = true
		return
	}
	s.held = held
	for _, b := range s.replicas {
		if slices.Contains(b.relay.Conns(), s.held) {
			s.victim = b
		}
	}
}

// holds says that bytes are held back.
func (s *story) holds() bool {
	record, passed := s.held.Bytes(s.hold.Direction)
	return len(record) > passed
}
