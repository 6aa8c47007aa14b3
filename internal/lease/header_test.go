// SPDX-License-Identifier: Apache-2.0

package lease

import (
	"math"
	"strings"
	"testing"
)

const headerValue = `req="req_01J", n=1, guard="g/100/boot-1", not_after=60000000000, gw="gw-1", gen=4`

func TestHeader(t *testing.T) {
	g := Grant{Key: Key{"req_01J", 1}, Guard: first, NotAfter: 60_000_000_000, Gateway: Gateway{"gw-1", 4}}
	if got := g.String(); got != headerValue {
		t.Errorf("wrote %s\nwant  %s", got, headerValue)
	}
	long := g
	long.NotAfter, long.Gateway = math.MaxInt64, Gateway{`a "b" \c`, math.MaxUint64}
	for _, want := range []Grant{g, long} {
		if got, err := ParseGrant(want.String()); err != nil || got != want {
			t.Errorf("%s: read as %+v, %v", want, got, err)
		}
	}
	if got, err := ParseGrant(`later="x, y=1",` + strings.ReplaceAll(headerValue, ", ", " ,\t") + ", more=?1"); err != nil || got != g {
		t.Errorf("with members of a later version: %+v, %v", got, err)
	}
}

func TestHeaderThatIsNone(t *testing.T) {
	for _, change := range [][2]string{
		{headerValue, ""},
		{`, gen=4`, ``},
		{`gen=4`, `gen=`},
		{`gen=4`, `gen=-4`},
		{`gen=4`, `gen="4"`},
		{`gen=4`, `gen=4, gen=5`},
		{`gen=4`, `gen=4,`},
		{`gen=4`, `gen=4 x`},
		{`gen=4`, `gen`},
		{`n=1`, `n=0`},
		{`n=1`, `n=1.0`},
		{`"gw-1"`, `gw-1`},
		{`"gw-1"`, `""`},
		{`"gw-1"`, `"gw-1`},
		{`"gw-1"`, `"gw\1"`},
		{`"gw-1"`, "\"gw\n\""},
		{`g/100/boot-1`, `g/boot-1`},
		{`60000000000`, `99999999999999999999`},
	} {
		value := strings.Replace(headerValue, change[0], change[1], 1)
		if g, err := ParseGrant(value); err == nil {
			t.Errorf("%s is read as %+v", value, g)
		}
	}
}

func FuzzParseGrant(f *testing.F) {
	f.Add(headerValue)
	f.Add(`req="", n=1`)
	f.Fuzz(func(t *testing.T, value string) {
		g, err := ParseGrant(value)
		if err != nil {
			return
		}
		if again, err := ParseGrant(g.String()); err != nil || again != g {
			t.Errorf("%q is read as %+v, which is written as %s and read as %+v, %v", value, g, g, again, err)
		}
	})
}
