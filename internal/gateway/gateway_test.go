// SPDX-License-Identifier: Apache-2.0

package gateway_test

import (
	"strings"
	"testing"
)

func TestStreamIsRelayedWhole(t *testing.T) {
	r := newRig(t, 2, "")
	got := r.stream("")
	t.Log(got.body)
	if got.status != 200 || got.err != nil || got.code() != "" || !strings.HasSuffix(got.body, "data: [DONE]\n\n") {
		t.Fatalf("%+v", got)
	}
	if outcome := r.records.wait(t); outcome != "completed" {
		t.Errorf("outcome %q", outcome)
	}
	r.idle()
}

func TestDeathBeforeOutputIsRetried(t *testing.T) {
	r := newRig(t, 2, "")
	for _, fault := range []string{"attempt=1;rst@head", "attempt=1;rst@headers", "attempt=1;fin@role", "attempt=1;rst@computed:1", "attempt=1;fin@in-chunk:1:20", "attempt=1;status@head:500", "attempt=1;status@head:503", "attempt=1;html@head", "attempt=1;garbage@head", "attempt=1;empty"} {
		got := r.stream(fault)
		if got.status != 200 || got.err != nil || got.code() != "" || !strings.HasSuffix(got.body, "data: [DONE]\n\n") {
			t.Errorf("%s: %+v", fault, got)
		}
		t.Log(fault, r.records.wait(t), got.text())
	}
	r.idle()
}

func TestDeathAfterOutputEndsInAnError(t *testing.T) {
	r := newRig(t, 2, "")
	for _, fault := range []string{"rst@token:1", "fin@token:2", "rst@in-char:3", "fin@in-chunk:3:20", "error@token:2", "stall@finish:1"} {
		before := r.totalReceived()
		got := r.stream(fault)
		t.Log(fault, r.records.wait(t), got.body)
		if got.err != nil || strings.HasSuffix(got.body, "data: [DONE]\n\n") {
			t.Errorf("%s: %+v", fault, got)
		}
		if n := r.totalReceived() - before; n != 1 {
			t.Errorf("%s: %d engines got the request", fault, n)
		}
	}
	r.idle()
}

func TestWholeAnswer(t *testing.T) {
	r := newRig(t, 2, "")
	for _, fault := range []string{"", "attempt=1;rst@headers", "attempt=1;fin@in-body:30", "attempt=1;shortbody@headers", "status@head:400", "error@head"} {
		got := r.whole(fault)
		t.Log(fault, got, r.records.wait(t))
	}
}
