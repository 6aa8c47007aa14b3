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

// A modelPattern says which model names a route takes. Names are compared byte
// for byte: colons, slashes, spaces and letter case all count.
type modelPattern struct {
	kind int
	text string // the name or the prefix
	re   *regexp.Regexp
}

// CheckModel says what is wrong with a model pattern.
func CheckModel(pattern string) error {
	_, err := parseModel(pattern)
	return err
}

func parseModel(text string) (modelPattern, error) {
	if text == "" || text == "*" {
		return modelPattern{kind: modelAny}, nil
	}
	if len(text) > 2 && text[0] == '/' && text[len(text)-1] == '/' {
		return parseRegexp(text[1 : len(text)-1])
	}
	prefix, wild := strings.CutSuffix(text, "*")
	if strings.Contains(prefix, "*") {
		return modelPattern{}, fmt.Errorf("model %s has a * before its end: write a regular expression as /…/", quote(text, 64))
	}
	if wild {
		return modelPattern{kind: modelPrefix, text: prefix}, nil
	}
	return modelPattern{kind: modelExact, text: text}, nil
}

func parseRegexp(text string) (modelPattern, error) {
	if len(text) > regexpMax {
		return modelPattern{}, fmt.Errorf("model has a regular expression of more than %d bytes", regexpMax)
	}
	if _, err := regexp.Compile(text); err != nil {
		// Compiled by itself first: the message must not show our anchors,
		// and a stray parenthesis must not close our group.
		return modelPattern{}, errors.New("model: " + err.Error())
	}
	re, err := regexp.Compile(`^(?:` + text + `)$`)
	if err != nil {
		return modelPattern{}, errors.New("model: " + err.Error())
	}
	return modelPattern{kind: modelRegexp, re: re}, nil
}

// holds reports whether a request that names this model, or none, may pass.
func (p modelPattern) holds(model string) bool {
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
func (p modelPattern) compare(o modelPattern) int {
	if p.kind == modelPrefix && o.kind == modelPrefix {
		return cmp.Compare(len(o.text), len(p.text))
	}
	return cmp.Compare(p.kind, o.kind)
}
