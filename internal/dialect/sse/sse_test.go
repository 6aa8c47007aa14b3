// SPDX-License-Identifier: Apache-2.0

package sse

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// read feeds stream to a splitter in pieces of the sizes that cut returns and
// describes what came out. A negative size drains the splitter at the end only.
func read(stream []byte, max int, cut func(left int) int) (events []string, raw []byte, err error) {
	s := NewSplitter(max)
	note := func(e Event, how string) {
		if e.Lines > 0 && e.At >= 0 && !bytes.Equal(e.Raw[e.At:e.At+len(e.Data)], e.Data) {
			panic("At does not point to Data")
		}
		events = append(events, fmt.Sprintf("%s raw=%q name=%q data=%q lines=%d ended=%v", how, e.Raw, e.Name, e.Data, e.Lines, e.Ended))
		raw = append(raw, e.Raw...)
	}
	for len(stream) > 0 {
		free := s.Buffer()
		n := copy(free[:min(len(free), cut(len(stream)))], stream)
		stream = stream[n:]
		s.Filled(n)
		for {
			e, ok, err := s.Next()
			if err != nil {
				return events, raw, err
			}
			if !ok {
				break
			}
			note(e, "event")
		}
	}
	if e, ok := s.Close(); ok {
		note(e, "rest")
	}
	if s.err != nil {
		return events, raw, s.err
	}
	return events, raw, nil
}

func whole(left int) int { return left }

func one(int) int { return 1 }

func TestEvents(t *testing.T) {
	for _, tt := range []struct {
		name, stream string
		want         []string // data of the events that have data, joined by LF
	}{
		{"LF", "data: a\n\ndata: b\n\n", []string{"a", "b"}},
		{"CRLF", "data: a\r\n\r\ndata: b\r\n\r\n", []string{"a", "b"}},
		{"CR", "data: a\r\rdata: b\r\r", []string{"a", "b"}},
		{"mixed line ends", "data: a\r\n\ndata: b\n\r\ndata: c\r\n\r", []string{"a", "b", "c"}},
		{"no space after the colon", "data:a\n\n", []string{"a"}},
		{"only one space is dropped", "data:  a\n\n", []string{" a"}},
		{"many lines", "data: a\ndata:b\ndata\ndata: c\n\n", []string{"a\nb\n\nc"}},
		{"byte order mark", "\xef\xbb\xbfdata: a\n\n", []string{"a"}},
		{"byte order mark later is a name", "data: a\n\n\xef\xbb\xbfdata: b\n\n", []string{"a"}},
		{"comments", ": hi\n\n:\ndata: a\n: ho\n\n", []string{"a"}},
		{"id, retry and unknown fields", "id: 1\nretry: 5\nfoo: x\ndata: a\nnothing\n\nid: 2\n\nretry: 1\n\n", []string{"a"}},
		{"empty data", "data:\n\ndata: \n\ndata\n\n", []string{"", "", ""}},
		{"name is not a prefix", "data2: a\nDATA: b\n data: c\n\n", nil},
		{"colons in the value", "data: a: b\n\n", []string{"a: b"}},
		{"blank lines between", "\n\r\n\rdata: a\n\n\n\n", []string{"a"}},
		{"text outside ASCII", "data: é漢字😀\n\n", []string{"é漢字😀"}},
		{"no blank line at the end", "data: a\n\ndata: b\n", []string{"a", "b"}},
		{"no line end at the end", "data: a\n\ndata: b", []string{"a", "b"}},
		{"half a CRLF at the end", "data: a\n\ndata: b\r", []string{"a", "b"}},
		{"NUL", "data: a\x00b\n\n", []string{"a\x00b"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got []string
			s := NewSplitter(1 << 10)
			s.Filled(copy(s.Buffer(), tt.stream))
			for e, ok, _ := s.Next(); ok; e, ok, _ = s.Next() {
				if e.Lines > 0 {
					got = append(got, string(e.Data))
				}
			}
			if e, ok := s.Close(); ok && e.Lines > 0 {
				got = append(got, string(e.Data))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
			all, raw, err := read([]byte(tt.stream), 1<<10, whole)
			if err != nil || string(raw) != tt.stream {
				t.Errorf("raw %q, %v", raw, err)
			}
			single, _, _ := read([]byte(tt.stream), 1<<10, one)
			if diff := cmp.Diff(all, single); diff != "" {
				t.Errorf("byte by byte: %s", diff)
			}
		})
	}
}

func TestLastNameOfAnEventCounts(t *testing.T) {
	s := NewSplitter(100)
	s.Filled(copy(s.Buffer(), "event: a\nevent:b\ndata: x\n\ndata: y\n\n"))
	if e, _, _ := s.Next(); string(e.Name) != "b" {
		t.Errorf("name %q", e.Name)
	}
	if e, _, _ := s.Next(); string(e.Name) != "" {
		t.Errorf("name %q is left over", e.Name)
	}
}

// Events larger than a line scanner's 64 KiB arrive whole, and small ones
// around them do not wait (SSE-1).
func TestLargeEventsArriveWhole(t *testing.T) {
	for _, size := range []int{65535, 65537, 300 << 10, 2 << 20, 12 << 20} {
		stream := "data: a\n\ndata: " + strings.Repeat("x", size) + "\n\ndata: b\n\n"
		events, raw, err := read([]byte(stream), 16<<20, func(int) int { return 32 << 10 })
		if err != nil || len(events) != 3 || string(raw) != stream {
			t.Errorf("%d: %d events, %v", size, len(events), err)
		}
	}
}

func TestBufferShrinksAfterALargeEvent(t *testing.T) {
	s := NewSplitter(16 << 20)
	feed := func(b []byte) {
		for len(b) > 0 {
			n := copy(s.Buffer(), b)
			s.Filled(n)
			b = b[n:]
			for ok := true; ok; _, ok, _ = s.Next() {
			}
		}
	}
	feed([]byte("data: " + strings.Repeat("x", 4<<20) + "\n\n"))
	if s.Buffer(); cap(s.buf) > bufKeep {
		t.Errorf("%d bytes are kept", cap(s.buf))
	}
	feed([]byte("data: " + strings.Repeat("x", 5000) + "\n\n"))
}

func TestEventOverTheBoundIsAnErrorThatStays(t *testing.T) {
	for _, stream := range []string{
		"data: 3456789\n\n",               // 15 bytes, whole
		"data: " + strings.Repeat("x", 9), // unfinished
		strings.Repeat(":\n", 8) + "\n",   // many small lines
		strings.Repeat("x", 100<<10),      // larger than the buffer
	} {
		for _, cut := range []func(int) int{whole, one} {
			events, _, err := read([]byte(stream), 14, cut)
			if !errors.Is(err, ErrTooLarge) || len(events) > 0 {
				t.Errorf("%.20q: %v, %v", stream, events, err)
			}
		}
	}
	s := NewSplitter(4)
	s.Filled(copy(s.Buffer(), "data: x\n\ndata: y\n\n"))
	for range 2 {
		if _, ok, err := s.Next(); ok || !errors.Is(err, ErrTooLarge) {
			t.Errorf("%v, %v", ok, err)
		}
		s.Filled(copy(s.Buffer(), "\n\n"))
	}
}

func TestACallerThatNeverTakesEventsGetsBoundedMemory(t *testing.T) {
	s := NewSplitter(64 << 10)
	for range 1000 {
		s.Filled(len(s.Buffer()))
	}
	if len(s.buf) > 512<<10 {
		t.Errorf("buffer of %d bytes", len(s.buf))
	}
}

// Goal: how the network cuts a stream must not show. Method: any sequence of
// lines, cut in any way, against the same stream in one piece.
func TestEventsDoNotDependOnReads(t *testing.T) {
	line := rapid.SampledFrom([]string{"data: {\"a\":\"é漢😀\"}", "data:x", "data:", "data", "event: e", ": c", "id: 1", "", "", "\xef\xbb\xbf", "\xff"})
	end := rapid.SampledFrom([]string{"\n", "\r\n", "\r", "\n\n", "\r\n\r\n", "\r\r"})
	rapid.Check(t, func(t *rapid.T) {
		var stream []byte
		for range rapid.IntRange(0, 20).Draw(t, "lines") {
			stream = append(append(stream, line.Draw(t, "line")...), end.Draw(t, "end")...)
		}
		stream = stream[:rapid.IntRange(0, len(stream)).Draw(t, "length")]
		size := rapid.IntRange(1, 9)
		want, raw, _ := read(stream, 1<<20, whole)
		got, _, _ := read(stream, 1<<20, func(int) int { return size.Draw(t, "read") })
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
		if !bytes.Equal(raw, stream) {
			t.Fatalf("raw %q, want %q", raw, stream)
		}
	})
}

func TestDataIsReplacedLineByLine(t *testing.T) {
	for _, tt := range []struct{ raw, data, want string }{
		{"id: 1\ndata: a\ndata: b\nevent: x\n\n", "c", "id: 1\ndata: c\nevent: x\n\n"},
		{": c\r\ndata: a\r\ndata: b\r\n\r\n", "c\nd", ": c\r\ndata: c\ndata: d\n\r\n"},
		{"\xef\xbb\xbfdata: a\ndata: b\n\n", "c", "data: c\n\n"},
		{"data: a\ndata", "c", "data: c\n"},
		{"data: a\rdata: b\r\r", "c", "data: c\n\r"},
	} {
		if got := string(AppendWithData(nil, []byte(tt.raw), []byte(tt.data))); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.raw, got, tt.want)
		}
	}
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	s := NewSplitter(1 << 20)
	stream := []byte(strings.Repeat("data: {\"choices\":[]}\n\ndata: a\ndata: b\n\n", 20))
	run := func() {
		s.Filled(copy(s.Buffer(), stream))
		for ok := true; ok; _, ok, _ = s.Next() {
		}
	}
	run()
	if n := testing.AllocsPerRun(100, run); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzSplitter(f *testing.F) {
	f.Add([]byte("data: a\n\ndata: b\r\n\r\n: c\r\rdata:\ndata: x\n\nevent: error\ndata: {}\n\n"), uint64(0x12345))
	f.Add([]byte("\xef\xbb\xbfdata: a\r\n\rdata: b\r"), uint64(1))
	f.Add([]byte("data: "+strings.Repeat("x", 300)+"\n\n"), uint64(7))
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		const max = 256
		cut := func(int) int {
			seed = seed*6364136223846793005 + 1442695040888963407
			return 1 + int(seed>>33)%17
		}
		want, raw, wantErr := read(stream, max, whole)
		got, _, err := read(stream, max, cut)
		if !errors.Is(err, wantErr) {
			t.Fatalf("%v, in one piece %v", err, wantErr)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatal(diff)
		}
		if err == nil && !bytes.Equal(raw, stream) {
			t.Fatalf("raw %q", raw)
		}
	})
}

func BenchmarkNext(b *testing.B) {
	for name, event := range map[string]string{
		"240B":  "data: {" + strings.Repeat("x", 231) + "}\n\n",
		"16KiB": "data: {" + strings.Repeat("x", 16<<10) + "}\n\n",
	} {
		b.Run(name, func(b *testing.B) {
			s := NewSplitter(1 << 20)
			b.SetBytes(int64(len(event)))
			b.ReportAllocs()
			for b.Loop() {
				for left := event; left != ""; {
					n := copy(s.Buffer(), left)
					s.Filled(n)
					left = left[n:]
					for ok := true; ok; _, ok, _ = s.Next() {
					}
				}
			}
		})
	}
}
