// SPDX-License-Identifier: Apache-2.0

package config

import (
	"net/url"
	"time"
)

// Bounds of ScaleFromZero.
const (
	webhookMax  = Duration(time.Minute)
	emptyTTL    = Duration(5 * time.Minute)
	commandArgs = 1000
)

// Hooks reports whether somebody is told that engines are wanted, or not any
// more.
func (s ScaleFromZero) Hooks() bool {
	return s.Webhook.URL != "" || len(s.Command) > 0 || len(s.Start.Command) > 0
}

// Wait is how long a request waits for an engine while there is none; 0 is not at
// all.
func (s ScaleFromZero) Wait() time.Duration {
	if s.TTL == 0 && s.Hooks() {
		return time.Duration(emptyTTL)
	}
	return time.Duration(s.TTL)
}

// Idle is after how long without requests engines are let go; 0 is never.
func (s ScaleFromZero) Idle() time.Duration {
	if len(s.Start.Command) > 0 {
		return time.Duration(s.Start.Idle)
	}
	return time.Duration(s.ReleaseAfter)
}

// Target takes the URL apart: the server as an engine is named, and the path with
// its query.
func (u HookURL) Target() (server *url.URL, target string, err error) {
	p, err := url.Parse(string(u))
	if err != nil {
		return nil, "", err
	}
	return &url.URL{Scheme: p.Scheme, Host: p.Host}, p.RequestURI(), nil
}

// Bearer reads the token's file. It returns an empty Secret where there is none.
func (w Webhook) Bearer() (Secret, error) { return readToken(w.BearerFile) }

func (k *checker) scale(path string, p Pool) {
	s := p.Flow.ScaleFromZero
	if s.TTL != 0 {
		k.noShorter(path+".ttl", s.TTL, Duration(time.Second))
	}
	k.oneHook(path, s)
	if s.Wait() > 0 && p.Health.Interval == 0 {
		k.problem(path, "health.interval is 0s: without checks nobody knows when an engine is there")
	}
	k.webhook(path+".webhook", s.Webhook)
	k.argv(path+".command", s.Command)
	switch told := s.Webhook.URL != "" || len(s.Command) > 0; {
	case s.ReleaseAfter == 0:
	case !told:
		k.problem(path+".release_after", "nobody is told: there is neither webhook nor command")
	default:
		k.noShorter(path+".release_after", s.ReleaseAfter, Duration(time.Second))
	}
	k.start(path+".start", s.Start, p.Discovery)
}

// oneHook complains where several would start engines for one want.
func (k *checker) oneHook(path string, s ScaleFromZero) {
	first := ""
	for _, hook := range []struct {
		name string
		set  bool
	}{{"webhook", s.Webhook.URL != ""}, {"command", len(s.Command) > 0}, {"start", len(s.Start.Command) > 0}} {
		switch {
		case !hook.set:
		case first != "":
			k.problem(path+"."+hook.name, "%s is set too: keep one, or engines would be started twice", first)
		default:
			first = hook.name
		}
	}
}

func (k *checker) webhook(path string, w Webhook) {
	var def Pool
	def.setDefaults()
	if w.URL == "" {
		if w != def.Flow.ScaleFromZero.Webhook {
			k.problem(path, "has no url")
		}
		return
	}
	k.noShorter(path+".timeout", w.Timeout, Duration(time.Millisecond))
	if w.Timeout > webhookMax {
		k.problem(path+".timeout", "%s is more than %s", w.Timeout, webhookMax)
	}
	if _, err := w.Bearer(); err != nil {
		k.problem(path+".bearer_file", "%v", err)
	}
}

func (k *checker) argv(path string, argv []string) {
	switch {
	case len(argv) > commandArgs:
		k.problem(path, "has more than %d arguments", commandArgs)
	case len(argv) > 0 && argv[0] == "":
		k.problem(path, "begins with nothing: the first is the program")
	}
}

func (k *checker) start(path string, s Start, d Discovery) {
	var def Pool
	def.setDefaults()
	k.atLeast(path+".stop_timeout", s.StopTimeout)
	if len(s.Command) == 0 {
		if was := def.Flow.ScaleFromZero.Start; s.Idle != was.Idle || s.StopTimeout != was.StopTimeout {
			k.problem(path, "has no command")
		}
		return
	}
	k.argv(path+".command", s.Command)
	if s.Idle != 0 {
		k.noShorter(path+".idle", s.Idle, Duration(time.Second))
	}
	if len(d.Static) != 1 || d.File != "" || d.DNS.Name != "" {
		k.problem(path, "starts one engine: the pool must have exactly one, under discovery.static")
	}
}
