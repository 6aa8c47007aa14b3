// SPDX-License-Identifier: Apache-2.0

package config_test

import (
	"net/netip"
	"testing"

	"github.com/headgate/headgate/internal/config"
)

// What an option is not taken for is told with what it must be, in the words of the
// file and not of Go or JSON.
func TestOptionsSayWhatTheyMustBe(t *testing.T) {
	for options, want := range map[string]string{
		`{texts: eu}`:         "option texts: must be a list of texts, not a text",
		`{texts: {a: eu}}`:    "option texts: must be a list of texts, not a block of fields",
		`{lists: {zone: eu}}`: "option lists: must be a list of texts, not a text",
		`{lists: [eu]}`:       "option lists: must be a block of fields, not a list",
		`{number: 5ms}`:       "option number: must be a number, not a text",
		`{number: [1]}`:       "option number: must be a number, not a list",
		`{whole: 1.5}`:        "option whole: must be a whole number, not 1.5",
		`{whole: true}`:       "option whole: must be a whole number, not true or false",
		`{text: 1}`:           "option text: must be a text, not a number",
		`{yes: 1}`:            "option yes: must be true or false, not a number",
		`{there: 1}`:          "option there: must be a text, not a number",
		`{address: 1}`:        "option address: must be a text, not a number",
		`{other: 1}`:          `unknown option "other"`,
	} {
		c, err := config.Parse("x", []byte("pools: {p: {discovery: {static: [{url: 'http://a'}]}, routing: {plugins: [{plugin: x, options: "+options+"}]}}}"))
		if err != nil {
			t.Fatal(err)
		}
		var into struct {
			Texts   []string            `json:"texts"`
			Lists   map[string][]string `json:"lists"`
			Number  float64             `json:"number"`
			Whole   int                 `json:"whole"`
			Text    string              `json:"text"`
			Yes     bool                `json:"yes"`
			There   *string             `json:"there"`
			Address netip.Addr          `json:"address"`
		}
		if err := c.Pools["p"].Routing.Plugins[0].Options.Into(&into); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", options, err, want)
		}
	}
}
