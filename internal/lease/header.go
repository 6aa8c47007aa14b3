// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/headgate/headgate/inference"
)

// Header is the request header that carries an attempt's initial lease.
const Header = "Headgate-Lease"

// String is the header's value: a dictionary (RFC 9651 §3.2). Its integers may
// have more than that page's fifteen digits, which nanoseconds since boot need
// after eleven days.
func (g Grant) String() string {
	var b strings.Builder
	b.WriteString("req=" + quote(string(g.Request)))
	fmt.Fprintf(&b, ", n=%d, guard=%s, not_after=%d", g.N, quote(g.Guard.String()), g.NotAfter)
	fmt.Fprintf(&b, ", gw=%s, gen=%d", quote(g.Gateway.ID), g.Gateway.Generation)
	return b.String()
}

func quote(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}

// ParseGrant reads what String writes. Members that it does not know are
// skipped; one that is missing, there twice or not well-formed is an error,
// because a lease that is half understood is none.
func ParseGrant(value string) (Grant, error) {
	var g Grant
	seen := map[string]bool{}
	for rest := value; ; {
		key, after, found := strings.Cut(strings.TrimLeft(rest, " \t"), "=")
		if !found || key == "" || seen[key] {
			return Grant{}, fmt.Errorf("%s: a member without a value, or twice: %.40q", Header, rest)
		}
		seen[key] = true
		item, quoted, tail, err := cutItem(after)
		if err == nil {
			err = g.set(key, item, quoted)
		}
		if err != nil {
			return Grant{}, fmt.Errorf("%s: %s: %w", Header, key, err)
		}
		tail = strings.TrimLeft(tail, " \t")
		if tail == "" {
			break
		}
		if rest, found = strings.CutPrefix(tail, ","); !found {
			return Grant{}, fmt.Errorf("%s: %s is followed by %.40q", Header, key, tail)
		}
	}
	for _, key := range []string{"req", "n", "guard", "not_after", "gw", "gen"} {
		if !seen[key] {
			return Grant{}, fmt.Errorf("%s: no %s", Header, key)
		}
	}
	return g, nil
}

func (g *Grant) set(key, item string, quoted bool) (err error) {
	text := map[string]bool{"req": true, "guard": true, "gw": true}
	number := map[string]bool{"n": true, "not_after": true, "gen": true}
	if text[key] && (!quoted || item == "") || number[key] && quoted {
		return errors.New("not of its kind")
	}
	switch key {
	case "req":
		g.Request = inference.RequestID(item)
	case "n":
		if g.N, err = strconv.Atoi(item); err == nil && g.N < 1 {
			err = errors.New("attempts count from 1")
		}
	case "guard":
		g.Guard, err = ParseIncarnation(item)
	case "not_after":
		var n int64
		n, err = strconv.ParseInt(item, 10, 64)
		g.NotAfter = Boottime(n)
	case "gw":
		g.Gateway.ID = item
	case "gen":
		g.Gateway.Generation, err = strconv.ParseUint(item, 10, 64)
	}
	return err
}

// cutItem takes a string or a bare item off the front.
func cutItem(s string) (item string, quoted bool, rest string, err error) {
	if !strings.HasPrefix(s, `"`) {
		end := strings.IndexAny(s, ", \t")
		if end < 0 {
			end = len(s)
		}
		if item = s[:end]; item == "" || strings.ContainsAny(item, "\";=") {
			return "", false, "", errors.New("no value")
		}
		return item, false, s[end:], nil
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			return b.String(), true, s[i+1:], nil
		case c == '\\' && i+1 < len(s) && (s[i+1] == '"' || s[i+1] == '\\'):
			i++
			b.WriteByte(s[i])
		case c == '\\' || c < ' ' || c > '~':
			return "", false, "", errors.New("a string with a character that none has")
		default:
			b.WriteByte(c)
		}
	}
	return "", false, "", errors.New("a string without an end")
}
