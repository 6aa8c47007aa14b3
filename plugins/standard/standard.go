// SPDX-License-Identifier: Apache-2.0

// Package standard lists the routing plugins that Headgate is built with. A
// build with others has a list of its own; see docs/routing.md.
package standard

import (
	"encoding/json"

	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/cost"
	"github.com/headgate/headgate/plugins/idlest"
	"github.com/headgate/headgate/plugins/kvcache"
	"github.com/headgate/headgate/plugins/label"
	"github.com/headgate/headgate/plugins/leastload"
	"github.com/headgate/headgate/plugins/loraaffinity"
	"github.com/headgate/headgate/plugins/prefixcache"
	"github.com/headgate/headgate/plugins/queuedepth"
	"github.com/headgate/headgate/plugins/random"
	"github.com/headgate/headgate/plugins/session"
)

// Plugins are the plugins by the name that a configuration uses.
var Plugins = map[string]plugin.Factory{
	"cost":         cost.New,
	"idlest":       idlest.New,
	"kvcache":      kvcache.New,
	"label":        label.New,
	"leastload":    leastload.New,
	"loraaffinity": loraaffinity.New,
	"prefixcache":  prefixcache.New,
	"queuedepth":   queuedepth.New,
	"random":       random.New,
	"session":      session.New,
}

// Profiles are the named sets of plugins.
var Profiles = map[string][]schedule.Use{
	"cost": {{Plugin: "cost"}, {Plugin: "idlest", Options: near}},
	"weighted": {
		{Plugin: "leastload", Weight: 2}, {Plugin: "queuedepth", Weight: 2}, {Plugin: "kvcache", Weight: 2},
		{Plugin: "prefixcache", Weight: 3}, {Plugin: "loraaffinity", Weight: 1}, {Plugin: "session", Weight: 1},
	},
}

// near is how close two costs are that count as one: 2 ms or 1 %.
func near(into any) error { return json.Unmarshal([]byte(`{"within": 0.002, "share": 0.01}`), into) }

// Default is the profile of a pool that names none.
const Default = "cost"

// Profile builds a named profile.
func Profile(name string) (*schedule.Profile, error) {
	return schedule.NewProfile(Plugins, Profiles[name])
}
