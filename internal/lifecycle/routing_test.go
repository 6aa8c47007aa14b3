// SPDX-License-Identifier: Apache-2.0

package lifecycle_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/lifecycle"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

var example = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// TestExamplesOfPluginsAreTrue: what a plugin's README shows is an entry of a
// pool's routing.plugins that makes this plugin.
func TestExamplesOfPluginsAreTrue(t *testing.T) {
	for name, factory := range standard.Plugins {
		text, err := os.ReadFile(filepath.Join("../../plugins", name, "README.md"))
		if err != nil {
			t.Error(err)
			continue
		}
		block := example.FindSubmatch(text)
		if block == nil || !strings.HasPrefix(string(block[1]), "plugin: "+name+"\n") {
			t.Errorf("%s: the README shows no configuration of it", name)
			continue
		}
		uses := "- " + strings.ReplaceAll(strings.TrimSpace(string(block[1])), "\n", "\n  ") + "\n"
		made, err := factory(plugin.None)
		if _, scores := made.(plugin.Scorer); err == nil && !scores {
			uses += "- plugin: cost\n" // a profile needs one that scores
		}
		if _, err := parse("plugins:\n" + uses); err != nil {
			t.Errorf("%s: %v\n%s", name, err, uses)
		}
	}
}

// parse reads a configuration with this as its pool's routing.
func parse(routing string) (*config.Config, error) {
	yaml := "pools:\n  p:\n    discovery: {static: [{url: 'http://x'}]}\n    routing:\n"
	for line := range strings.Lines(routing) {
		yaml += "      " + line
	}
	return config.Parse("x", []byte(yaml), lifecycle.Plugins(standard.Plugins).Check)
}

func TestBadPluginsAreRefusedWithTheirPlace(t *testing.T) {
	for routing, want := range map[string]string{
		"plugins: [{plugin: cots}]":                                                         `x:5:26: pools.p.routing.plugins[0].plugin: there is no plugin "cots"; there are cost, `,
		"plugins: [{plugin: cost, options: {adapterLaod: 1s}}]":                             `x:5:41: pools.p.routing.plugins[0].options: unknown option "adapterLaod"`,
		"plugins: [{plugin: cost, options: {adapterLoad: 5}}]":                              `x:5:41: pools.p.routing.plugins[0].options: adapterLoad 5: must be a duration`,
		"plugins: [{plugin: cost, options: {adapterLoad: soon}}]":                           `x:5:41: pools.p.routing.plugins[0].options: adapterLoad "soon": must be a duration`,
		"plugins: [{plugin: cost, options: [1]}]":                                           `x:5:41: pools.p.routing.plugins[0].options: must be a block of fields, not a list`,
		"plugins: [{plugin: cost, options: {adapterLoad: 2020-01-01}}]":                     `adapterLoad: must be a text, a number, or true or false, not a date`,
		"plugins: [{plugin: cost, options: {a: 1, a: 2}}]":                                  `pools.p.routing.plugins[0].options.a: is set twice`,
		"plugins: [{plugin: label}]":                                                        `x:5:7: pools.p.routing.plugins: a profile needs a plugin that scores or picks`,
		"plugins: [{plugin: label, weight: 2}, {plugin: cost}]":                             `weight: has no effect: label does not score`,
		"plugins: [{plugin: cost, weight: 0}]":                                              `x:5:40: pools.p.routing.plugins[0].weight: 0 is not above 0`,
		"plugins: [{weight: 1}]":                                                            `pools.p.routing.plugins[0]: has no plugin`,
		"profile: weighted\nplugins: [{plugin: cost}]":                                      `x:5:16: pools.p.routing.profile: plugins are given`,
		"fallbacks: [{profile: weighted}]":                                                  `x:5:19: pools.p.routing.fallbacks[0]: is never used: nothing filters before it`,
		"profile: least_load\nfallbacks: [{profile: weighted}]":                             `fallbacks[0]: is never used`,
		"plugins: [{plugin: label}, {plugin: cost}]\nfallbacks: [{}]":                       `x:6:19: pools.p.routing.fallbacks[0]: has neither a profile nor plugins`,
		"plugins: [{plugin: label}, {plugin: cost}]\nfallbacks: [{profile: fast}]":          `pools.p.routing.fallbacks[0].profile: must be cost, weighted or least_load`,
		"plugins: [{plugin: label}, {plugin: cost}]\nfallbacks: [{plugins: [{plugin: x}]}]": `pools.p.routing.fallbacks[0].plugins[0].plugin: there is no plugin "x"`,
	} {
		if _, err := parse(routing); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\ngot  %v\nwant %s", routing, err, want)
		}
	}
}

func TestFallbacksAreMade(t *testing.T) {
	for _, routing := range []string{
		"plugins: [{plugin: label}, {plugin: cost}]\nfallbacks: [{profile: least_load}]",
		"plugins: [{plugin: label}, {plugin: cost}]\nfallbacks: [{plugins: [{plugin: label, options: {in: {zone: [a]}}}, {plugin: leastload, weight: 2.5}]}, {profile: weighted}]",
		"profile: least_load",
	} {
		c, err := parse(routing)
		if err != nil {
			t.Errorf("%s: %v", routing, err)
			continue
		}
		if _, err := lifecycle.Plugins(standard.Plugins).Profile(c.Pools["p"].Routing); err != nil {
			t.Errorf("%s: %v", routing, err)
		}
	}
}
