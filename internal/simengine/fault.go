// SPDX-License-Identifier: Apache-2.0

package simengine

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Fault is one scripted misbehaviour. Its text form is one line:
//
//	[engine=NAME;][attempt=N;][request=ID;][path=PREFIX;][times=K;]KIND[@POINT][:arg…]
//
// Several, separated by commas, make a script for one request. README.md lists
// kinds, points and arguments.
type Fault struct {
	Engine  string // only on the engine of this name
	Attempt int    // only on this attempt
	Request string // only for this X-Request-Id
	Path    string // only for paths with this prefix; "" means the two inference endpoints
	Times   int    // requests (or connections) it applies to; 0 means 1, Forever means all
	Kind    string
	Point   Point
	Args    []string
}

// Forever is the Times of a fault that is never used up, "times=*" in text.
const Forever = -1

// Point is where in an answer a fault strikes.
type Point struct {
	Name   string
	K      int // which token or byte, for points that have one
	Offset int // byte within the event, for in-chunk
}

// The points, in the order in which a request passes them, with how many
// numbers each takes.
var pointNumbers = map[string]int{
	"listen":   0, // the listening socket itself
	"accept":   0, // a connection was accepted, nothing read
	"body":     1, // N bytes of the request body were read
	"head":     0, // the whole request was read, nothing answered
	"headers":  0, // the response head was sent
	"role":     0, // the role-only chunk was sent (streams)
	"computed": 1, // token K is computed and not sent
	"in-chunk": 2, // the first OFFSET bytes of the event of token K were sent (streams)
	"in-char":  1, // the first byte of the "·" of token K was sent (streams)
	"token":    1, // the event of token K was sent; without streaming: it is computed
	"in-body":  1, // the first N bytes of the body were sent (without streaming)
	"finish":   0, // every finish_reason was sent; without streaming: all is computed
	"usage":    0, // the usage chunk was sent (streams that have one)
	"done":     0, // [DONE] was sent, the last chunk not; without streaming: the whole body was
}

// A kindRule says where a kind may strike and how its arguments are checked.
type kindRule struct {
	points []string // the first is the default; none: it changes the whole answer
	args   int      // at most this many
}

var (
	everywhere = []string{"head", "accept", "body", "headers", "role", "computed", "in-chunk", "in-char",
		"token", "in-body", "finish", "usage", "done"}
	beforeHead = []string{"head", "body", "computed", "token", "finish"}
	inStream   = []string{"token", "headers", "role", "computed", "finish", "usage", "done"}
)

var kindRules = map[string]kindRule{
	// At a point.
	"refuse":  {points: []string{"accept", "listen"}, args: 1},
	"rst":     {points: everywhere},
	"fin":     {points: everywhere},
	"end":     {points: []string{"token", "headers", "role", "computed", "in-chunk", "in-char", "finish", "usage", "done"}},
	"stall":   {points: everywhere, args: 2},
	"exit":    {points: everywhere},
	"status":  {points: beforeHead, args: 3},
	"html":    {points: []string{"head"}, args: 1},
	"garbage": {points: append([]string{"head"}, inStream...)},
	"error":   {points: inStream, args: 4},
	"tool":    {points: []string{"computed", "token", "role", "finish"}, args: 1},
	"bigline": {points: []string{"token"}, args: 1},
	"delta":   {points: []string{"token"}, args: 1},

	// The whole answer.
	"slow":      {args: 1},
	"role":      {args: 1},
	"errornull": {},
	"nodone":    {args: 1},
	"nofinish":  {},
	"finish":    {args: 1},
	"empty":     {},
	"early":     {args: 1},
	"comment":   {},
	"sse":       {args: 1},
	"bytewise":  {},
	"wrongtype": {args: 1},
	"gzip":      {args: 1},
	"badhead":   {args: 2},
	"shortbody": {args: 1},
	"usage":     {args: 1},
}

var errorWords = []string{"object", "string", "number", "event", "choices", "done"}

// argWords are the words that an argument may be, for kinds where any other
// word would be silently without effect.
var argWords = map[string][]string{
	"nodone":  {"clean", "fin", "open"},
	"gzip":    {"plain", "broken"},
	"usage":   {"none", "always", "final", "each", "choices", "null", "wrong"},
	"sse":     {"nospace", "crlf", "cr", "bom", "event", "id", "noeol", "multiline"},
	"delta":   {"reasoning", "tool", "refusal", "logprobs", "audio", "empty", "null", "unknown"},
	"badhead": {"clte", "cl2", "negative", "nocolon", "space", "nul", "huge", "version", "status", "lf", "fold", "te", "badchunk", "close", "continue", "hints", "trailer"},
}

// faultQueue holds the scripts of a whole engine that wait for requests.
type faultQueue struct {
	mu      sync.Mutex
	scripts [][]Fault
	max     int
}

// ErrFaultsFull is returned by Inject when the queue has no room.
var ErrFaultsFull = errors.New("simengine: the fault queue is full")

// ParseFaults reads a script. An empty text is an empty script.
func ParseFaults(text string) ([]Fault, error) {
	var script []Fault
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		f, err := parseFault(part)
		if err != nil {
			return nil, fmt.Errorf("fault %q: %w", part, err)
		}
		script = append(script, f)
	}
	return script, nil
}

func parseFault(text string) (Fault, error) {
	f := Fault{Times: 1}
	conditions := strings.Split(text, ";")
	for _, c := range conditions[:len(conditions)-1] {
		if err := f.condition(c); err != nil {
			return f, err
		}
	}
	what := conditions[len(conditions)-1]
	at := strings.IndexAny(what, "@:")
	if at < 0 {
		at = len(what)
	}
	f.Kind = what[:at]
	rule, ok := kindRules[f.Kind]
	if !ok {
		return f, fmt.Errorf("unknown kind %q", f.Kind)
	}
	words := strings.Split(strings.TrimPrefix(what[at:], ":"), ":")
	if strings.HasPrefix(what[at:], "@") {
		var err error
		if words, err = f.point(words, rule); err != nil {
			return f, err
		}
	} else if len(rule.points) > 0 {
		f.Point = Point{Name: rule.points[0]}
		if pointNumbers[f.Point.Name] > 0 {
			f.Point.K = 1
		}
	}
	if len(words) > 0 && words[0] != "" {
		f.Args = words
	}
	if err := f.checkArgs(rule); err != nil {
		return f, err
	}
	if f.Kind == "role" { // a shorter way to write it
		f.Kind, f.Point = "stall", Point{Name: "role"}
	}
	return f, nil
}

func (f *Fault) condition(text string) error {
	name, value, ok := strings.Cut(strings.TrimSpace(text), "=")
	if !ok || value == "" {
		return fmt.Errorf("condition %q is not name=value", text)
	}
	var err error
	switch name {
	case "engine":
		f.Engine = value
	case "request":
		f.Request = value
	case "path":
		f.Path = value
	case "attempt":
		f.Attempt, err = positive(value)
	case "times":
		if value == "*" {
			f.Times = Forever
		} else {
			f.Times, err = positive(value)
		}
	default:
		return fmt.Errorf("unknown condition %q", name)
	}
	return err
}

// point reads "@NAME" and its numbers and returns the words that follow.
func (f *Fault) point(words []string, rule kindRule) ([]string, error) {
	f.Point.Name = strings.TrimPrefix(words[0], "@")
	numbers, known := pointNumbers[f.Point.Name]
	switch {
	case !known:
		return nil, fmt.Errorf("unknown point %q", f.Point.Name)
	case !slices.Contains(rule.points, f.Point.Name):
		return nil, fmt.Errorf("%s cannot strike at %q", f.Kind, f.Point.Name)
	case len(words) < 1+numbers:
		return nil, fmt.Errorf("point %q takes %d number(s)", f.Point.Name, numbers)
	}
	for i, field := range []*int{&f.Point.K, &f.Point.Offset}[:numbers] {
		n, err := strconv.Atoi(words[1+i])
		if err != nil || n < 0 || n == 0 && i == 0 && f.Point.counts() {
			return nil, fmt.Errorf("point %q: bad number %q", f.Point.Name, words[1+i])
		}
		*field = n
	}
	return words[1+numbers:], nil
}

// counts says that the point's K is a token, from 1.
func (p Point) counts() bool {
	switch p.Name {
	case "computed", "in-chunk", "in-char", "token":
		return true
	}
	return false
}

func (f *Fault) checkArgs(rule kindRule) error {
	if len(f.Args) > rule.args {
		return fmt.Errorf("%s takes at most %d argument(s)", f.Kind, rule.args)
	}
	if words := argWords[f.Kind]; words != nil && len(f.Args) > 0 && !slices.Contains(words, f.Args[0]) {
		return fmt.Errorf("%s: %q is none of %s", f.Kind, f.Args[0], strings.Join(words, ", "))
	}
	bad := func(arg string, err error) error {
		if err != nil {
			return fmt.Errorf("%s: bad argument %q", f.Kind, arg)
		}
		return nil
	}
	switch f.Kind {
	case "delta", "usage", "sse", "badhead", "slow", "status", "bigline":
		if len(f.Args) == 0 && f.Kind != "status" {
			return fmt.Errorf("%s needs an argument", f.Kind)
		}
	}
	if f.Kind == "error" {
		for _, arg := range f.Args {
			if _, err := strconv.Atoi(arg); err != nil && !slices.Contains(errorWords, arg) {
				return fmt.Errorf("error: %q is no number and none of %s", arg, strings.Join(errorWords, ", "))
			}
		}
	}
	if len(f.Args) == 0 {
		return nil
	}
	arg := f.Args[0]
	switch f.Kind {
	case "slow", "stall", "early", "role", "refuse":
		if f.Kind == "stall" && len(f.Args) > 1 && f.Args[1] != "comments" {
			return fmt.Errorf("stall: %q is not comments", f.Args[1])
		}
		if f.Kind == "stall" && (arg == "" || arg == "forever") {
			return nil
		}
		d, err := time.ParseDuration(arg)
		if d < 0 {
			err = errors.New("negative")
		}
		return bad(arg, err)
	case "bigline", "shortbody":
		_, err := positive(arg)
		return bad(arg, err)
	case "status", "html":
		n, err := strconv.Atoi(arg)
		if n < 200 || n > 599 {
			err = errors.New("no final status")
		}
		if err == nil && len(f.Args) > 1 && !slices.Contains([]string{"json", "html", "empty"}, f.Args[1]) {
			return fmt.Errorf("status: body %q is none of json, html, empty", f.Args[1])
		}
		return bad(arg, err)
	}
	return nil
}

func positive(text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%q is no number above 0", text)
	}
	return n, nil
}

// String gives the text form. ParseFaults reads it back to the same fault.
func (f Fault) String() string {
	var b strings.Builder
	condition := func(name, value string) {
		if value != "" {
			b.WriteString(name + "=" + value + ";")
		}
	}
	condition("engine", f.Engine)
	if f.Attempt > 0 {
		condition("attempt", strconv.Itoa(f.Attempt))
	}
	condition("request", f.Request)
	condition("path", f.Path)
	if f.Times == Forever {
		condition("times", "*")
	} else if f.Times > 1 {
		condition("times", strconv.Itoa(f.Times))
	}
	b.WriteString(f.Kind)
	if f.Point.Name != "" {
		b.WriteString("@" + f.Point.Name)
		if n := pointNumbers[f.Point.Name]; n > 0 {
			b.WriteString(":" + strconv.Itoa(f.Point.K))
			if n > 1 {
				b.WriteString(":" + strconv.Itoa(f.Point.Offset))
			}
		}
	}
	for _, arg := range f.Args {
		b.WriteString(":" + arg)
	}
	return b.String()
}

// arg returns argument i, or otherwise.
func (f Fault) arg(i int, otherwise string) string {
	if i < len(f.Args) && f.Args[i] != "" {
		return f.Args[i]
	}
	return otherwise
}

// duration returns argument i as a duration. checkArgs has seen it.
func (f Fault) duration(i int, otherwise time.Duration) time.Duration {
	if d, err := time.ParseDuration(f.arg(i, "")); err == nil {
		return d
	}
	return otherwise
}

func (f Fault) number(i, otherwise int) int {
	if n, err := strconv.Atoi(f.arg(i, "")); err == nil {
		return n
	}
	return otherwise
}

// target is what a fault's conditions are compared with.
type target struct {
	engine  string
	request string
	attempt int
	path    string
}

func (f Fault) applies(t target) bool {
	path := f.Path != "" && strings.HasPrefix(t.path, f.Path) || f.Path == "" && inference(t.path)
	return path &&
		(f.Engine == "" || f.Engine == t.engine) &&
		(f.Attempt == 0 || f.Attempt == t.attempt) &&
		(f.Request == "" || f.Request == t.request)
}

func inference(path string) bool {
	return path == "/v1/chat/completions" || path == "/v1/completions" || path == apiResponses || path == apiMessages ||
		slices.Contains(valuePaths, path)
}

func (f Fault) atConnection() bool { return f.Point.Name == "accept" || f.Point.Name == "listen" }

// push adds a script at the end.
func (q *faultQueue) push(script []Fault) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.scripts) >= q.max {
		return ErrFaultsFull
	}
	q.scripts = append(q.scripts, slices.Clone(script))
	return nil
}

// take returns the faults of the first script that has any for which applies
// is true, one use of each spent. A spent script leaves the queue, so the
// scripts of a queue strike one request each, in order.
func (q *faultQueue) take(applies func(Fault) bool) []Fault {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i, script := range q.scripts {
		var taken []Fault
		left := script[:0]
		for _, f := range script {
			if applies(f) {
				taken = append(taken, f)
				if f.Times != Forever {
					if f.Times--; f.Times <= 0 {
						continue
					}
				}
			}
			left = append(left, f)
		}
		if q.scripts[i] = left; len(left) == 0 {
			q.scripts = slices.Delete(q.scripts, i, i+1)
		}
		if taken != nil {
			return taken
		}
	}
	return nil
}

func (q *faultQueue) reset() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.scripts = nil
}

func (q *faultQueue) len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.scripts)
}

// script is what is to happen to one answer.
type script []Fault

// at returns the faults that strike at p, in the order in which they were
// written.
func (s script) at(p Point) []Fault {
	var found []Fault
	for _, f := range s {
		if f.Point == p {
			found = append(found, f)
		}
	}
	return found
}

// whole returns the fault of that kind that changes the whole answer.
func (s script) whole(kind string) (Fault, bool) {
	for _, f := range s {
		if f.Kind == kind && f.Point.Name == "" {
			return f, true
		}
	}
	return Fault{}, false
}

func (s script) has(kind string) bool {
	_, ok := s.whole(kind)
	return ok
}

// word returns the first argument of the whole-answer fault of that kind.
func (s script) word(kind, otherwise string) string {
	f, ok := s.whole(kind)
	if !ok {
		return ""
	}
	return f.arg(0, otherwise)
}

// cuts are the points inside the event of token k, by position in event.
func (s script) cuts(k int, charAt, length int) []cut {
	var found []cut
	for _, f := range s {
		if f.Point.K != k || f.Point.Name != "in-chunk" && f.Point.Name != "in-char" {
			continue
		}
		at := min(f.Point.Offset, length-1)
		if f.Point.Name == "in-char" {
			at = charAt
		}
		c := cut{at: at, point: f.Point}
		if !slices.Contains(found, c) {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b cut) int { return a.at - b.at })
	return found
}

type cut struct {
	at    int
	point Point
}

// holdAfter is how many tokens the engine may compute before the next thing
// happens to token after+1 or a later one: a fault at token K finds the engine
// at token K, neither behind nor ahead. ok is false when nothing is left.
func (s script) holdAfter(after int) (k int, ok bool) {
	if s.has("slow") {
		return after + 1, true
	}
	for _, f := range s {
		if f.Point.counts() && f.Point.K > after && (!ok || f.Point.K < k) {
			k, ok = f.Point.K, true
		}
	}
	return k, ok
}

// bodyPoints are the points inside the request body, first ones first.
func (s script) bodyPoints() []Point {
	var found []Point
	for _, f := range s {
		if f.Point.Name == "body" && !slices.Contains(found, f.Point) {
			found = append(found, f.Point)
		}
	}
	slices.SortFunc(found, func(a, b Point) int { return a.K - b.K })
	return found
}

// bodyCuts are the points inside a whole answer's body, first ones first.
func (s script) bodyCuts(length int) []cut {
	var found []cut
	for _, f := range s {
		c := cut{at: min(f.Point.K, length), point: f.Point}
		if f.Point.Name == "in-body" && !slices.Contains(found, c) {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b cut) int { return a.at - b.at })
	return found
}
