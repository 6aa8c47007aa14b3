// SPDX-License-Identifier: Apache-2.0

package standard

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/plugin"
)

// TestFoldersAreListed: a plugin that is in no list can't be used, and every one
// refuses what it doesn't know. internal/lifecycle checks the examples of READMEs.
func TestFoldersAreListed(t *testing.T) {
	folders, err := os.ReadDir("..")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range folders {
		if f.Name() == "standard" {
			continue
		}
		if Plugins[f.Name()] == nil {
			t.Errorf("plugins/%s is in no list", f.Name())
		} else if _, err := Plugins[f.Name()](options(t, map[string]any{"noSuchOption": 1})); err == nil {
			t.Errorf("%s takes an option that it does not have", f.Name())
		}
	}
	if len(folders) != len(Plugins)+1 {
		t.Errorf("%d folders and %d plugins", len(folders), len(Plugins))
	}
}

func options(t *testing.T, values map[string]any) plugin.Options {
	return func(into any) error {
		raw, err := json.Marshal(values)
		if err != nil {
			t.Fatal(err)
		}
		d := json.NewDecoder(bytes.NewReader(raw))
		d.DisallowUnknownFields()
		return d.Decode(into)
	}
}

func TestProfilesBuild(t *testing.T) {
	for name := range Profiles {
		if _, err := Profile(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Profile(Default); err != nil {
		t.Error(err)
	}
}

func candidates(n int) []plugin.Candidate {
	list := make([]plugin.Candidate, n)
	for i := range list {
		list[i].Endpoint = &inference.Endpoint{ID: inference.EndpointID('a' + rune(i))}
		list[i].PerToken, list[i].Intercept = 1e-4, 0.03
	}
	return list
}

func score(t *testing.T, name string, r *plugin.Request, list []plugin.Candidate) []float64 {
	t.Helper()
	made, err := Plugins[name](plugin.None)
	if err != nil {
		t.Fatal(err)
	}
	scores := make([]float64, len(list))
	made.(plugin.Scorer).Score(r, list, scores)
	return scores
}

// MET-2: what is not known is neither empty nor full.
func TestUnknownIsNeitherBestNorWorst(t *testing.T) {
	list := candidates(3)
	list[0].Queued, list[2].Queued = plugin.Value{V: 8, Known: true}, plugin.Value{V: 2, Known: true}
	list[0].KVUsage, list[2].KVUsage = plugin.Value{V: 0.9, Known: true}, plugin.Value{V: 0.1, Known: true}
	for _, name := range []string{"queuedepth", "kvcache"} {
		s := score(t, name, &plugin.Request{}, list)
		if s[0] >= s[1] || s[1] >= s[2] {
			t.Errorf("%s: scores %v, want the unknown one between the others", name, s)
		}
		if s := score(t, name, &plugin.Request{}, candidates(3)); s[0] != s[1] || s[1] != s[2] {
			t.Errorf("%s: nothing is known, and the scores differ: %v", name, s)
		}
	}
}

func TestPluginsPrefer(t *testing.T) {
	for name, set := range map[string]func(*plugin.Request, *plugin.Candidate){
		"leastload":    func(_ *plugin.Request, c *plugin.Candidate) { c.InFlight = -3 },
		"prefixcache":  func(r *plugin.Request, c *plugin.Candidate) { r.Prompt.N, c.Cached = 100, 40 },
		"loraaffinity": func(r *plugin.Request, c *plugin.Candidate) { r.Adapter, c.Resident = "x", true },
		"cost":         func(r *plugin.Request, c *plugin.Candidate) { r.Prompt.N, c.Cached = 1000, 900 },
	} {
		r, list := &plugin.Request{}, candidates(3)
		set(r, &list[1])
		s := score(t, name, r, list)
		if s[1] <= s[0] || s[1] <= s[2] {
			t.Errorf("%s: scores %v, want the second to be best", name, s)
		}
	}
}

func TestSessionsStay(t *testing.T) {
	made, err := Plugins["session"](options(t, map[string]any{"sessionsMax": 4, "stays": "1m"}))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	list, scores := candidates(3), make([]float64, 3)
	at := func(session string, now time.Time) int {
		made.(plugin.Scorer).Score(&plugin.Request{Session: session, Now: now}, list, scores)
		for i, s := range scores {
			if s > 0 {
				return i
			}
		}
		return -1
	}
	chosen := func(session string, i int) {
		made.(plugin.Observer).Chosen(&plugin.Request{Session: session, Now: now}, &list[i])
	}
	chosen("s", 1)
	chosen("", 2)
	if at("s", now) != 1 || at("other", now) != -1 || at("", now) != -1 {
		t.Error("a session is not sent where it was")
	}
	if at("s", now.Add(2*time.Minute)) != -1 {
		t.Error("a session is remembered for ever")
	}
	for _, other := range []string{"a", "b", "c", "d"} {
		chosen(other, 0)
	}
	if at("s", now) != -1 || at("d", now) != 0 {
		t.Error("more sessions are remembered than may be")
	}
}

func TestRandomPicksAmongTheNearBest(t *testing.T) {
	made, err := Plugins["random"](options(t, map[string]any{"within": 0.1}))
	if err != nil {
		t.Fatal(err)
	}
	r := &plugin.Request{Rand: rand.New(rand.NewPCG(1, 2))}
	got := map[int]int{}
	for range 300 {
		got[made.(plugin.Picker).Pick(r, candidates(4), []float64{1, 0.95, 0.5, 1})]++
	}
	if got[2] != 0 || got[0] < 70 || got[1] < 70 || got[3] < 70 {
		t.Errorf("picked %v", got)
	}
}

func TestIdlestPicksTheLeastLoadedOfTheNearBest(t *testing.T) {
	made, err := Plugins["idlest"](options(t, map[string]any{"within": 0.1}))
	if err != nil {
		t.Fatal(err)
	}
	r, list := &plugin.Request{Rand: rand.New(rand.NewPCG(1, 2))}, candidates(5)
	list[0].InFlight, list[1].InFlight, list[2].InFlight, list[3].InFlight = 5, 3, 0, 2
	list[4].InFlight, list[3].Ghosts = 3, 1 // a quick error counts like a request
	got := map[int]int{}
	for range 300 {
		got[made.(plugin.Picker).Pick(r, list, []float64{1, 0.95, 0.5, 0.91, 0.95})]++
	}
	if got[0] != 0 || got[2] != 0 || got[1] < 70 || got[3] < 70 || got[4] < 70 {
		t.Errorf("picked %v, want one of the three that carry 3", got)
	}
}

func TestLabelsFilter(t *testing.T) {
	made, err := Plugins["label"](options(t, map[string]any{"in": map[string]any{"zone": []string{"a", "b"}}, "absent": []string{"spot"}}))
	if err != nil {
		t.Fatal(err)
	}
	for want, labels := range map[string]map[string]string{
		"":                                   {"zone": "b", "other": "x"},
		"has no zone":                        {"other": "x"},
		"zone is c, not one of a, b":         {"zone": "c"},
		`zone is "", not one of a, b`:        {"zone": ""},
		`spot is "", and must not be there`:  {"zone": "a", "spot": ""},
		`spot is yes, and must not be there`: {"zone": "a", "spot": "yes"},
	} {
		c := plugin.Candidate{Endpoint: &inference.Endpoint{Labels: inference.NewLabels(labels)}}
		if got := made.(plugin.Filter).Filter(&plugin.Request{}, &c); got != want {
			t.Errorf("%v: out because of %q, want %q", labels, got, want)
		}
	}
	if got := made.(plugin.Filter).Filter(&plugin.Request{}, &plugin.Candidate{Endpoint: &inference.Endpoint{}}); got != "has no zone" {
		t.Errorf("without labels: %q", got)
	}
}

// A filter is asked for every request: its reasons are put together once, of as many
// values as may be kept, and one is short however many values are wanted.
func TestLabelsTellCheaply(t *testing.T) {
	var many []string
	for i := range 20 {
		many = append(many, strconv.Itoa(i))
	}
	made, err := Plugins["label"](options(t, map[string]any{"in": map[string]any{"zone": many}}))
	if err != nil {
		t.Fatal(err)
	}
	at := func(zone string) plugin.Candidate {
		return plugin.Candidate{Endpoint: &inference.Endpoint{Labels: inference.NewLabels(map[string]string{"zone": zone})}}
	}
	r, f := &plugin.Request{}, made.(plugin.Filter)
	c := at("x")
	const want = "zone is x, not one of 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
	if got := f.Filter(r, &c); got != want {
		t.Errorf("out because of %q, want %q", got, want)
	}
	if n := testing.AllocsPerRun(100, func() { f.Filter(r, &c) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	for i := range 1000 {
		c := at("x" + strconv.Itoa(i))
		f.Filter(r, &c)
	}
	c = at("new")
	if got := f.Filter(r, &c); got != "zone is not one of 0, 1, 2, 3, 4, 5, 6, 7 and 12 more" {
		t.Errorf("past the bound: %q", got)
	}
	if n := testing.AllocsPerRun(100, func() { f.Filter(r, &c) }); n != 0 {
		t.Errorf("past the bound: %v allocations", n)
	}
}

func TestDurationsAreAskedFor(t *testing.T) {
	for name, option := range map[string]string{"cost": "adapterLoad", "session": "stays"} {
		for _, value := range []any{1, "soon", "-1s", []int{1}, true} {
			raw, _ := json.Marshal(value)
			_, err := Plugins[name](options(t, map[string]any{option: value}))
			if want := fmt.Sprintf("%s %s: must be a duration such as 1s or 500ms", option, raw); err == nil || err.Error() != want {
				t.Errorf("%s: %v, want %s", name, err, want)
			}
		}
		for _, value := range []any{nil, "3s"} {
			if _, err := Plugins[name](options(t, map[string]any{option: value})); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	if _, err := Plugins["session"](options(t, map[string]any{"stays": "0s"})); err == nil || err.Error() != "stays: must be above 0" {
		t.Errorf("session: %v", err)
	}
}
