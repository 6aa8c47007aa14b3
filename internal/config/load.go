// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// fileMax bounds a configuration file, in bytes.
const fileMax = 4 << 20

// A Check finds what Validate cannot know of, with paths like Validate's. It is
// called for a Config that has problems too, so that all are reported at once; what
// it says of a field with a problem is left out.
type Check func(*Config) Problems

// Load reads and checks a configuration file. What is wrong with its content
// comes back as Problems, all at once.
func Load(path string, also ...Check) (*Config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, fileMax+1))
	if err != nil {
		return nil, fmt.Errorf("read configuration: %w", err)
	}
	return Parse(path, data, also...)
}

// Parse reads and checks the content of a configuration file. The name stands
// in messages, and file names in the content are relative to its folder. An
// empty file is Default.
func Parse(name string, data []byte, also ...Check) (*Config, error) {
	root, problems := document(name, data)
	if len(problems) > 0 {
		return nil, problems
	}
	c := Default()
	d := newDecoder(name)
	if root != nil {
		d.decode(root, root, field{}, reflect.ValueOf(c).Elem())
	}
	files(reflect.ValueOf(c).Elem(), filepath.Dir(name))
	if d.nodes <= nodesMax {
		d.addChecks(append(c.Validate(), d.doubleChoices(c)...))
		for _, check := range also {
			d.addChecks(check(c))
		}
	}
	if err := d.problems.sorted().err(); err != nil {
		return nil, err
	}
	return c, nil
}

// FromUpstreams is the default configuration with one pool, default, of these
// engines, and without a journal: no file says where one may be written.
func FromUpstreams(urls []string) (*Config, error) {
	c := Default()
	c.Journal.Driver = DriverNone
	if err := c.AddUpstreams(urls); err != nil {
		return nil, err
	}
	return c, nil
}

// AddUpstreams adds a pool, default, of these engines to a configuration
// without pools.
func (c *Config) AddUpstreams(urls []string) error {
	if len(c.Pools) > 0 {
		return errors.New("upstreams can't be added to a configuration that has pools")
	}
	var p Pool
	p.setDefaults()
	var problems Problems
	for i, text := range urls {
		var u URL
		if err := u.set(text); err != nil {
			problems = append(problems, Problem{Path: "upstream[" + strconv.Itoa(i) + "]", Message: err.Error()})
			continue
		}
		p.Discovery.Static = append(p.Discovery.Static, Endpoint{URL: u})
	}
	if len(problems) > 0 {
		return problems
	}
	c.Pools = map[string]Pool{"default": p}
	return c.Validate().sorted().err()
}

// document returns the root of the one document in data, nil when it is empty.
func document(name string, data []byte) (*yaml.Node, Problems) {
	if p, bad := unreadable(data); bad {
		p.File = name
		return nil, Problems{p}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc, next yaml.Node
	switch err := dec.Decode(&doc); {
	case err == io.EOF:
		return nil, nil
	case err != nil:
		return nil, Problems{syntax(name, data, err)}
	}
	switch err := dec.Decode(&next); {
	case err == io.EOF:
	case err != nil:
		return nil, Problems{syntax(name, data, err)}
	default:
		return nil, Problems{{File: name, Line: next.Line, Column: next.Column,
			Message: "a second document begins here: one file is one configuration"}}
	}
	if len(doc.Content) == 0 {
		return nil, nil
	}
	return doc.Content[0], nil
}

// unreadable finds what no YAML file may hold.
func unreadable(data []byte) (Problem, bool) {
	if len(data) > fileMax {
		return Problem{Message: fmt.Sprintf("the file is larger than %s", Size(fileMax))}, true
	}
	if bytes.HasPrefix(data, []byte{0xff, 0xfe}) || bytes.HasPrefix(data, []byte{0xfe, 0xff}) {
		return Problem{Line: 1, Column: 1, Message: "text in UTF-16: the file must be UTF-8"}, true
	}
	for i := 0; i < len(data); {
		r, n := utf8.DecodeRune(data[i:])
		message := ""
		switch {
		case r == 0:
			message = "a NUL byte: the file must be text"
		case r == utf8.RuneError && n == 1:
			message = "not valid UTF-8"
		case r < ' ' && r != '\t' && r != '\n' && r != '\r', r >= 0x7f && r < 0xa0 && r != 0x85:
			message = "a control character: in quotes it can be written as in \"\\x1b\""
		}
		if message != "" {
			line, column := lineColumn(data, i)
			return Problem{Line: line, Column: column, Message: message}, true
		}
		i += n
	}
	return Problem{}, false
}

func lineColumn(data []byte, at int) (line, column int) {
	before := data[:at]
	start := bytes.LastIndexByte(before, '\n') + 1
	return 1 + bytes.Count(before, []byte("\n")), 1 + utf8.RuneCount(before[start:])
}

var (
	errorLine     = regexp.MustCompile(`^yaml: line (\d+): `)
	unknownAnchor = regexp.MustCompile(`^unknown anchor '(.*)' referenced$`)
)

// syntax is the problem behind an error of the YAML parser, which knows the
// line at most.
func syntax(name string, data []byte, err error) Problem {
	p := Problem{File: name, Line: 1, Message: strings.TrimPrefix(err.Error(), "yaml: ")}
	if m := errorLine.FindStringSubmatch(err.Error()); m != nil {
		p.Line, _ = strconv.Atoi(m[1])
		p.Message = err.Error()[len(m[0]):]
	}
	if m := unknownAnchor.FindStringSubmatch(p.Message); m != nil {
		// The name may be a secret that lacks its quotes.
		if i := bytes.Index(data, []byte("*"+m[1])); i >= 0 {
			p.Line, p.Column = lineColumn(data, i)
		}
		p.Message = "an alias that no anchor before it defines: put the value in quotes if it begins with *"
		return p
	}
	if line, column, ok := tabIndent(data, p.Line); ok {
		p.Line, p.Column = line, column
		p.Message = "a tab in the indentation: YAML allows spaces only"
		return p
	}
	if strings.HasPrefix(p.Message, "did not find expected") {
		// The parser counts from 0 here, without naming line 0, and names the
		// beginning of the block in which it lost its way.
		if errorLine.MatchString(err.Error()) {
			p.Line++
		}
		p.Message = "not valid YAML at or below this line: " + p.Message
		return p
	}
	p.Message = "not valid YAML: " + p.Message
	return p
}

// tabIndent finds a tab among the white space that begins the line or a
// neighbour of it.
func tabIndent(data []byte, line int) (int, int, bool) {
	lines := bytes.Split(data, []byte("\n"))
	for n := max(1, line-1); n <= min(line+1, len(lines)); n++ {
		text := lines[n-1]
		indent := text[:len(text)-len(bytes.TrimLeft(text, " \t"))]
		if i := bytes.IndexByte(indent, '\t'); i >= 0 && len(indent) < len(text) {
			return n, i + 1, true
		}
	}
	return 0, 0, false
}

// addChecks adds what Validate found, with its place in the file, and leaves
// out what follows from a value that couldn't be read.
func (d *decoder) addChecks(found Problems) {
	broken, around := map[string]bool{}, map[string]bool{}
	for _, p := range d.problems {
		if p.Message == badName {
			continue // what has the name can be looked at all the same
		}
		broken[p.Path] = true
		for outer := range outwards(p.Path) {
			around[outer] = true
		}
	}
	for _, p := range found {
		at := d.placeOf(p.Path)
		p.File, p.Line, p.Column, p.Path = d.file, at.line, at.column, at.path
		follows := around[p.Path]
		for outer := range outwards(p.Path) {
			follows = follows || broken[outer]
		}
		if !follows {
			d.problems = append(d.problems, p)
		}
	}
}

// doubleChoices finds pools with plugins beside a profile that the file names and
// that is the default: in the Config such a profile looks like none.
func (d *decoder) doubleChoices(c *Config) (found Problems) {
	for name, p := range c.Pools {
		at := PoolPath(name) + ".routing.profile"
		if len(p.Routing.Plugins) > 0 && p.Routing.Profile == ProfileCost && d.given[at] {
			found = append(found, Problem{Path: at, Message: doubleChoice})
		}
	}
	return found
}

// outwards is a field and the blocks around it, innermost first.
func outwards(path string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for outer := path; outer != "" && yield(outer); {
			outer = outer[:max(0, strings.LastIndexAny(outer, ".["))]
		}
	}
}

// placeOf is the place of a field, or of the nearest block around it that the
// file has.
func (d *decoder) placeOf(path string) place {
	for outer := range outwards(path) {
		if at, ok := d.places[outer]; ok {
			at.path += path[len(outer):]
			return at
		}
	}
	return place{path: path}
}
