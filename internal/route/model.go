// SPDX-License-Identifier: Apache-2.0

package route

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Kinds of model patterns, strongest first.
const (
	modelExact = iota
	modelPrefix
	modelRegexp
	modelAny
)

// regexpMax bounds the text of a regular expression.
const regexpMax = 1024

// A Pattern says which model names are meant: an exact name, prefix*, /regex/
// for the whole name, or "" or "*" for any and none. Names are compared byte
// for byte: colons, slashes, spaces and letter case all count.
type Pattern struct {
	kind int
	text string // the name or the prefix
	re   *regexp.Regexp
}

// CheckModel says what is wrong with a model pattern.
func CheckModel(pattern string) error {
	_, err := ParsePattern(pattern)
	return err
}

// ParsePattern reads a pattern. CheckModel has the same error.
func ParsePattern(text string) (Pattern, error) {
	if text == "" || text == "*" {
		return Pattern{kind: modelAny}, nil
	}
	if len(text) > 2 && text[0] == '/' && text[len(text)-1] == '/' {
		return parseRegexp(text[1 : len(text)-1])
	}
	prefix, wild := strings.CutSuffix(text, "*")
	if strings.Contains(prefix, "*") {
		return Pattern{}, fmt.Errorf("model %s has a * before its end: write a regular expression as /…/", quote(text, 64))
	}
	if wild {
		return Pattern{kind: modelPrefix, text: prefix}, nil
	}
	return Pattern{kind: modelExact, text: text}, nil
}

func parseRegexp(text string) (Pattern, error) {
	if len(text) > regexpMax {
		return Pattern{}, fmt.Errorf("model has a regular expression of more than %d bytes", regexpMax)
	}
	if _, err := regexp.Compile(text); err != nil {
		// Compiled by itself first: the message must not show our anchors,
		// and a stray parenthesis must not close our group.
		return Pattern{}, errors.New("model: " + err.Error())
	}
	re, err := regexp.Compile(`^(?:` + text + `)$`)
	if err != nil {
		return Pattern{}, errors.New("model: " + err.Error())
	}
	return Pattern{kind: modelRegexp, re: re}, nil
}

// Holds reports whether a request that names this model, or none, may pass.
func (p Pattern) Holds(model string) bool {
	switch p.kind {
	case modelExact:
		return model == p.text
	case modelPrefix:
		return strings.HasPrefix(model, p.text)
	case modelRegexp:
		return model != "" && p.re.MatchString(model)
	}
	return true
}

// compare puts the pattern that wins first.
func (p Pattern) compare(o Pattern) int {
	if p.kind == modelPrefix && o.kind == modelPrefix {
		return cmp.Compare(len(o.text), len(p.text))
	}
	return cmp.Compare(p.kind, o.kind)
}
