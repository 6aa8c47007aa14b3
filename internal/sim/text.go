// SPDX-License-Identifier: Apache-2.0

package sim

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// A plan as text has one line for each part: a word, then the fields that are
// not zero, as name=value. Lines that begin with "#" are comments.

// String writes the plan.
func (p *Plan) String() string {
	var out strings.Builder
	line := func(word string, v any) {
		out.WriteString(word)
		for field, value := range reflect.ValueOf(v).Fields() {
			if value.IsZero() || field.Name == "long" {
				continue
			}
			if kind := field.Type.Kind(); kind == reflect.Slice || kind == reflect.Struct {
				continue
			}
			fmt.Fprintf(&out, " %s=%v", strings.ToLower(field.Name), value.Interface())
		}
		out.WriteByte('\n')
	}
	line("plan", *p)
	line("terms", p.Terms)
	line("net", p.Net)
	for _, n := range p.Nodes {
		line("node", n)
	}
	for _, a := range p.Requests {
		line("ask", a)
	}
	for _, f := range p.Faults {
		line("fault", f)
	}
	return out.String()
}

// Parse reads what String writes.
func Parse(text string) (*Plan, error) {
	p := &Plan{}
	for i, line := range strings.Split(text, "\n") {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(line, "#") {
			continue
		}
		var node Node
		var ask Ask
		var fault Fault
		into, ok := map[string]any{"plan": p, "terms": &p.Terms, "net": &p.Net, "node": &node, "ask": &ask, "fault": &fault}[words[0]]
		if !ok {
			return nil, fmt.Errorf("line %d: unknown word %q", i+1, words[0])
		}
		for _, w := range words[1:] {
			if err := set(into, w); err != nil {
				return nil, fmt.Errorf("line %d: %w", i+1, err)
			}
		}
		switch words[0] {
		case "node":
			p.Nodes = append(p.Nodes, node)
		case "ask":
			p.Requests = append(p.Requests, ask)
		case "fault":
			p.Faults = append(p.Faults, fault)
		}
	}
	return p, p.valid()
}

func (p *Plan) valid() error {
	if len(p.Nodes) == 0 || p.Terms.TTL <= 0 || p.Terms.Heartbeat <= 0 || p.Calm <= 0 || p.Terms.DriftPPM >= million {
		return fmt.Errorf("a plan needs nodes, a ttl, a heartbeat, a drift below a million and an end of its faults")
	}
	return nil
}

func set(into any, word string) error {
	name, value, _ := strings.Cut(word, "=")
	field := reflect.ValueOf(into).Elem().FieldByNameFunc(func(n string) bool { return strings.EqualFold(n, name) && n != "long" })
	if !field.IsValid() {
		return fmt.Errorf("unknown field %q", name)
	}
	var v any
	var err error
	switch field.Interface().(type) {
	case time.Duration:
		v, err = time.ParseDuration(value)
	case int64:
		v, err = strconv.ParseInt(value, 10, 64)
	case uint64:
		v, err = strconv.ParseUint(value, 10, 64)
	case int:
		v, err = strconv.Atoi(value)
	case float64:
		v, err = strconv.ParseFloat(value, 64)
	case bool:
		v, err = strconv.ParseBool(value)
	case Strike:
		v = Strike(value)
	default:
		return fmt.Errorf("%q is no field with a value", name)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	field.Set(reflect.ValueOf(v))
	return nil
}

// Shrink looks for a smaller plan that still fails: it leaves out one thing after
// another for as long as the first violation stays of the same kind.
func Shrink(p *Plan) *Plan {
	fails := func(q *Plan) string {
		if q.valid() != nil {
			return ""
		}
		if v := Run(q).Violations; len(v) > 0 {
			return v[0].Invariant
		}
		return ""
	}
	want := fails(p)
	for smaller := true; smaller; {
		smaller = false
		for _, q := range p.parts() {
			if fails(q) == want {
				p, smaller = q, true
				break
			}
		}
	}
	return p
}

// parts are the plan with one thing less, each.
func (p *Plan) parts() []*Plan {
	var all []*Plan
	with := func(change func(*Plan)) {
		q := *p
		q.Nodes = append([]Node(nil), p.Nodes...)
		q.Requests = append([]Ask(nil), p.Requests...)
		q.Faults = append([]Fault(nil), p.Faults...)
		change(&q)
		all = append(all, &q)
	}
	for i := range p.Requests {
		with(func(q *Plan) { q.Requests = append(q.Requests[:i], q.Requests[i+1:]...) })
	}
	for i := range p.Faults {
		with(func(q *Plan) { q.Faults = append(q.Faults[:i], q.Faults[i+1:]...) })
	}
	for _, chance := range []func(*Plan) *float64{
		func(q *Plan) *float64 { return &q.Net.Hold }, func(q *Plan) *float64 { return &q.Net.Lose },
		func(q *Plan) *float64 { return &q.Net.Repeat }, func(q *Plan) *float64 { return &q.Net.Stale },
		func(q *Plan) *float64 { return &q.Net.Split },
	} {
		if *chance(p) > 0 {
			with(func(q *Plan) { *chance(q) = 0 })
		}
	}
	if len(p.Nodes) > 2 {
		with(func(q *Plan) { q.Nodes = q.Nodes[:2] })
	}
	return all
}
