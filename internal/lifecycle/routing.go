// SPDX-License-Identifier: Apache-2.0

package lifecycle

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/gateway"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/plugin"
	"github.com/headgate/headgate/plugins/standard"
)

// Plugins are the routing plugins that a build has, by the names that a
// configuration uses.
type Plugins map[string]plugin.Factory

// Option starts a process with these plugins. Default: those of plugins/standard.
func (known Plugins) Option() Option {
	return func(c *gateway.Config) { c.Routing = known.Profile }
}

// Profile makes what a pool's endpoints are chosen by: nil for least load. Each
// call makes plugins anew.
func (known Plugins) Profile(r config.Routing) (*schedule.Profile, error) {
	profile, problems := known.chain(r)
	if len(problems) > 0 {
		return nil, problems
	}
	return profile, nil
}

// Check is a config.Check: it finds plugins that this build does not have, what
// they refuse of their options, and fallbacks that nothing leads to.
func (known Plugins) Check(c *config.Config) (found config.Problems) {
	for _, name := range c.PoolNames() {
		_, problems := known.chain(c.Pools[name].Routing)
		for _, p := range problems {
			p.Path = config.PoolPath(name) + ".routing" + p.Path
			found = append(found, p)
		}
	}
	return found
}

// chain makes the profile and its fallbacks. Problems have paths below the pool's
// routing.
func (known Plugins) chain(r config.Routing) (chain *schedule.Profile, found config.Problems) {
	var profiles []*schedule.Profile
	for i := range 1 + len(r.Fallbacks) {
		at, name, uses := "", r.Profile, r.Plugins
		if i > 0 {
			f := r.Fallbacks[i-1]
			at, name, uses = fmt.Sprintf(".fallbacks[%d]", i-1), f.Profile, f.Plugins
		}
		p, problems := known.profile(at, name, uses)
		if len(problems) == 0 && i < len(r.Fallbacks) && (p == nil || !p.Filters()) {
			problems = config.Problems{{Path: fmt.Sprintf(".fallbacks[%d]", i), Message: "is never used: nothing filters before it"}}
		}
		profiles, found = append(profiles, p), append(found, problems...)
	}
	if len(found) > 0 {
		return nil, found
	}
	chain = profiles[len(profiles)-1]
	for _, p := range slices.Backward(profiles[:len(profiles)-1]) {
		chain = p.Else(chain)
	}
	return chain, nil
}

// profile makes one profile.
func (known Plugins) profile(at, name string, uses []config.PluginUse) (*schedule.Profile, config.Problems) {
	if len(uses) == 0 {
		list := standard.Profiles[name]
		if name == config.ProfileLeastLoad {
			if at == "" {
				return nil, nil // what a book does by itself
			}
			list = []schedule.Use{{Plugin: "leastload"}}
		}
		p, err := schedule.NewProfile(known, list)
		if err != nil {
			return nil, config.Problems{{Path: at + ".profile", Message: err.Error()}}
		}
		return p, nil
	}
	if found := known.each(at, uses); len(found) > 0 {
		return nil, found
	}
	list := make([]schedule.Use, len(uses))
	for i, u := range uses {
		list[i] = schedule.Use{Plugin: u.Plugin, Weight: u.Weight, Options: u.Options.Into}
	}
	p, err := schedule.NewProfile(known, list)
	if err != nil {
		return nil, config.Problems{{Path: at + ".plugins", Message: err.Error()}}
	}
	return p, nil
}

// each finds what is wrong with the plugins of one list, each by itself: what it is,
// its options, a weight without effect, a second picker.
func (known Plugins) each(at string, uses []config.PluginUse) (found config.Problems) {
	problem := func(path, format string, args ...any) {
		found = append(found, config.Problem{Path: path, Message: fmt.Sprintf(format, args...)})
	}
	picker := ""
	for i, u := range uses {
		place := fmt.Sprintf("plugins[%d]", i)
		at := at + "." + place
		factory := known[u.Plugin]
		if factory == nil {
			problem(at+".plugin", "there is no plugin %q; there are %s", u.Plugin, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
			continue
		}
		made, err := factory(u.Options.Into)
		if err != nil {
			problem(at+".options", "%v", err)
			continue
		}
		if _, scores := made.(plugin.Scorer); !scores && u.Weight != 1 {
			problem(at+".weight", "has no effect: %s does not score", u.Plugin)
		}
		switch _, picks := made.(plugin.Picker); {
		case !picks:
		case picker != "":
			problem(at+".plugin", "%s picks, and %s does already: keep one", u.Plugin, picker)
		default:
			picker = place
		}
	}
	return found
}
