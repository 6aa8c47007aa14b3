// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"slices"
	"sync"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/prefix"
	"github.com/headgate/headgate/internal/schedule"
)

// aim is what the choice of an endpoint goes by, for all attempts of a request.
type aim struct {
	want schedule.Ask // but for what differs from attempt to attempt
	sent int          // output tokens written
}

var hashers = sync.Pool{New: func() any { return new(prefix.Hasher) }}

func newAim(a *admission) aim {
	h := hashers.Get().(*prefix.Hasher)
	defer hashers.Put(h)
	keys, n := h.Request(a.body, a.req, a.found.Model)
	return aim{want: schedule.Ask{
		Model: a.found.Model, Prompt: a.req.PromptTokens, Keys: slices.Clone(keys), PromptBytes: n,
		Stream: a.req.Stream, Arrived: a.arrived, Session: a.session, Adapter: a.adapter, Explain: a.debug,
		TTFT: a.treatment.ttft, TPOT: a.treatment.tpot,
	}}
}

// ask is what one attempt needs of an endpoint.
func (m *aim) ask(attempt schedule.Ask) schedule.Ask {
	ask := m.want
	ask.Exclude, ask.PreferRevision, ask.Retry = attempt.Exclude, attempt.PreferRevision, attempt.Retry
	return ask
}

// began tells the book that the engine has computed the prompt.
func (f *flight) began(now time.Time) {
	f.aim.want.Keys = nil // there is no further attempt
	if f.place == nil {
		return
	}
	if f.req.Stream {
		f.place.FirstOutput(now)
		f.pool.pump()
	}
	f.progressed(f.try.heldTokens)
}

// progressed tells the book how far the answer is.
func (f *flight) progressed(tokens int) {
	f.aim.sent += tokens
	if f.place != nil && tokens > 0 {
		f.place.Tokens(f.aim.sent)
	}
}

// writing and wrote tell the book of the time that goes into writing to the client.
func (f *flight) writing(now time.Time) {
	if f.place != nil {
		f.place.Writing(now)
	}
}

func (f *flight) wrote(now time.Time) {
	if f.place != nil {
		f.place.Wrote(now)
	}
}

// completed tells the book how long the answer is, and what was cached.
func (f *flight) completed() {
	if f.place == nil {
		return
	}
	usage, known := f.try.usage, f.try.hasUsage
	if f.try.stream != nil {
		usage, known = f.try.stream.Usage()
	}
	if !known {
		usage = inference.Usage{Prompt: -1, Completion: f.aim.sent, Cached: -1}
	}
	if usage.Prompt >= 0 && usage.Cached >= 0 {
		f.fresh = max(usage.Prompt-usage.Cached, 0)
	}
	f.place.Finished(time.Now(), usage)
}
