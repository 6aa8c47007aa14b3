// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/dialect/openai"
	kind "github.com/headgate/headgate/internal/engine"
	"github.com/headgate/headgate/internal/route"
	"github.com/headgate/headgate/internal/upstream"
)

const (
	modelsTime   = 2 * time.Second  // for an engine to list its models
	modelsMax    = 4 << 20          // bytes of its list
	modelsFresh  = 5 * time.Second  // how long a list is good for
	modelsEvery  = 30 * time.Second // how often it is looked at unasked
	modelsAgain  = time.Second      // at least between two looks, whatever happens
	modelsKept   = 2 * modelsEvery  // how long one that does not answer is thought to serve what it did
	modelsAtOnce = 64               // engines of a pool asked at a time

	modelsPath = "/v1/models"
	chatPath   = "/v1/chat/completions"
)

// serveModels answers the model list and its single entries: what engines list,
// as far as a request for it would be routed to them, and the names that routes
// give.
func (g *Gateway) serveModels(ex Exchange, id inference.RequestID) {
	head := ex.Head()
	who, err := g.state.Load().keys.Authenticate(head.Header)
	if err != nil {
		g.refuse(ex, id, openai.Chat, err)
		return
	}
	list := slices.DeleteFunc(g.models(ex.Gone(), head), func(m model) bool { return !who.May(m.name) })
	if name, single := strings.CutPrefix(head.Path, modelsPath+"/"); single {
		i := slices.IndexFunc(list, func(m model) bool { return m.name == name })
		if i < 0 {
			g.refuse(ex, id, openai.Chat, route.ModelNotFound(name, func(yield func(string) bool) {
				for _, m := range list {
					if !yield(m.name) {
						return
					}
				}
			}))
			return
		}
		writeJSON(ex, id, list[i].entry)
		return
	}
	entries := make([]json.RawMessage, len(list))
	for i := range list {
		entries[i] = list[i].entry
	}
	writeJSON(ex, id, struct {
		Object string            `json:"object"`
		Data   []json.RawMessage `json:"data"`
	}{"list", entries})
}

// model is one entry of the list.
type model struct {
	name  string
	entry json.RawMessage
	base  string // of an adapter: the model that it adapts; "" for none
}

// inferencePaths are those of dialects, in order.
var inferencePaths = slices.Sorted(maps.Keys(dialects))

// theFirst draws the first of several backends.
func theFirst(int) int { return 0 }

// whereTo finds where a request for the model would go, at whichever inference
// path takes it: a route may be for embeddings alone.
func (s *state) whereTo(head *Head, name string) (route.Result, bool) {
	for _, path := range inferencePaths {
		q := route.Query{Host: head.Host, Path: path, Header: head.Header, Model: name, Brief: true}
		if found, err := s.match(q, theFirst); err == nil {
			return found, true
		}
	}
	return route.Result{}, false
}

// match is routes.Match, and finds adapters that no route names: they go where
// their base models go. A model that is not found is told with the nearest names
// that would be, unless the query is brief.
func (s *state) match(q route.Query, intn func(int) int) (route.Result, *inference.Error) {
	if !q.Brief {
		q.Listed = s.listed
		q.Takes = func(name string) bool {
			asked := q
			asked.Model, asked.Brief = name, true
			_, err := s.match(asked, theFirst)
			return err == nil
		}
	}
	found, err := s.routes.Match(q, intn)
	if err != nil && err.Code == inference.ModelNotFound {
		if to, ok := s.matchAdapter(q, "", intn); ok {
			return to, nil
		}
	}
	return found, err
}

// matchAdapter finds the route of an adapter by its base model, to one pool only
// unless that is "".
func (s *state) matchAdapter(q route.Query, only string, intn func(int) int) (route.Result, bool) {
	tried := ""
	for _, name := range s.names {
		base := s.pools[name].listed.Load().bases[q.Model]
		if base == "" || base == tried || only != "" && name != only {
			continue
		}
		tried = base
		serves := func(pool string) bool {
			return (only == "" || pool == only) && s.pools[pool].listed.Load().bases[q.Model] == base
		}
		if to, found := s.routes.MatchBase(q, base, serves, intn); found {
			return to, true
		}
	}
	return route.Result{}, false
}

// listed are the names that engines list, pool by pool.
func (s *state) listed(yield func(string) bool) {
	for _, pool := range s.names {
		for _, name := range s.pools[pool].listed.Load().names {
			if !yield(name) {
				return
			}
		}
	}
}

// leads reports whether a request for the model may go to the pool, at some path.
func (s *state) leads(head *Head, name, pool string) bool {
	for _, path := range inferencePaths {
		q := route.Query{Host: head.Host, Path: path, Header: head.Header, Model: name, Brief: true}
		if s.routes.Leads(q, pool) {
			return true
		}
		if _, found := s.matchAdapter(q, pool, theFirst); found {
			return true
		}
	}
	return false
}

// models merges what the pools list with the names of routes, in the order of
// the names, each once.
func (g *Gateway) models(ctx context.Context, head *Head) []model {
	state := g.state.Load()
	lists := state.ask(ctx)
	found := map[string]model{}
	for _, pool := range slices.Sorted(maps.Keys(lists)) {
		for _, m := range lists[pool] {
			to, routed := state.whereTo(head, m.name)
			// What a route renames is listed below, by what it stands for.
			if routed && to.Model == m.name && state.leads(head, m.name, pool) {
				found[m.name] = m
			}
		}
	}
	for _, name := range state.routes.Models() {
		to, routed := state.whereTo(head, name)
		if !routed {
			continue // of another host, say
		}
		if _, ok := found[name]; !ok {
			found[name] = alias(name, to.Model, lists[to.Pool])
		}
	}
	list := slices.Collect(maps.Values(found))
	slices.SortFunc(list, func(a, b model) int { return strings.Compare(a.name, b.name) })
	return list
}

// alias is the entry of a route's name: the one of the model that it stands for
// under that name, or a plain one where the engine does not list that model.
func alias(name, target string, list []model) model {
	for _, m := range list {
		if m.name != target {
			continue
		}
		id := gjson.GetBytes(m.entry, "id")
		quoted, _ := json.Marshal(name)
		entry := slices.Concat(m.entry[:id.Index], quoted, m.entry[id.Index+len(id.Raw):])
		return model{name: name, entry: entry}
	}
	entry, _ := json.Marshal(map[string]any{"id": name, "object": "model", "created": 0, "owned_by": "headgate"})
	return model{name: name, entry: entry}
}

// ask asks the engines of each pool for their models. One that hangs costs the list
// of no other.
func (s *state) ask(ctx context.Context) map[string][]model {
	ctx, cancel := context.WithTimeout(ctx, modelsTime)
	defer cancel()
	each := make([][]model, len(s.names))
	var wg sync.WaitGroup
	for i, name := range s.names {
		p := s.pools[name]
		wg.Go(func() { each[i] = p.models(ctx, p.authorization) })
	}
	wg.Wait()
	lists := make(map[string][]model, len(s.names))
	for i, name := range s.names {
		lists[name] = each[i]
	}
	return lists
}

// models asks the engines for their models and notes who serves what.
func (m *members) models(ctx context.Context, authorization string) []model {
	set := m.now.Load()
	lists := make([][]model, len(set.fleet.Endpoints))
	var wg sync.WaitGroup
	places := make(chan struct{}, modelsAtOnce)
	for i, e := range set.fleet.Endpoints {
		places <- struct{}{}
		wg.Go(func() {
			defer func() { <-places }()
			lists[i] = m.modelsOf(ctx, e.ID, set.engines[e.ID], authorization)
		})
	}
	wg.Wait()
	return slices.Concat(lists...)
}

// modelsOf is the list of one engine, as fresh as it needs to be.
func (m *members) modelsOf(ctx context.Context, id inference.EndpointID, e *engine, authorization string) []model {
	known := e.listed.Load()
	if known != nil && !known.due && time.Since(known.at) < modelsFresh {
		return known.models
	}
	list, ok := listModels(ctx, e.aside, authorization)
	switch {
	case !ok && known != nil && time.Since(known.at) < modelsKept:
		return known.models
	case !ok:
		return nil
	}
	e.listed.Store(&listing{at: time.Now(), models: list})
	names := make([]string, len(list))
	for i := range list {
		names[i] = list[i].name
	}
	m.book.SetModels(id, names)
	m.note()
	m.pump()
	return list
}

// lists is what the engines of a pool have listed, together.
type lists struct {
	names []string          // in order, each once
	bases map[string]string // of adapters
}

// note puts together what the engines have listed.
func (m *members) note() {
	m.noting.Lock()
	defer m.noting.Unlock()
	all := &lists{bases: map[string]string{}}
	for _, e := range m.now.Load().engines {
		known := e.listed.Load()
		if known == nil {
			continue
		}
		for _, x := range known.models {
			all.names = append(all.names, x.name)
			if x.base != "" {
				all.bases[x.name] = x.base
			}
		}
	}
	slices.Sort(all.names)
	all.names = slices.Compact(all.names)
	m.listed.Store(all)
}

// forgetModels lets the next look ask the engine, whenever the last one was.
func (e *engine) forgetModels() {
	if known := e.listed.Load(); known != nil {
		e.listed.Store(&listing{at: known.at, due: true, models: known.models})
	}
}

// relist has the engine asked for its models again soon.
func (e *engine) relist() {
	select {
	case e.changed <- struct{}{}:
	default: // they will be
	}
}

// relist has engines asked again that may have a model that nobody has listed.
func (s *state) relist() {
	for _, p := range s.pools {
		for _, e := range p.now.Load().engines {
			if known := e.listed.Load(); known == nil || time.Since(known.at) >= modelsFresh {
				e.relist()
			}
		}
	}
}

// lists reports whether the engine has said that it serves the model.
func (e *engine) lists(name string) bool {
	known := e.listed.Load()
	return known != nil && slices.ContainsFunc(known.models, func(m model) bool { return m.name == name })
}

// listing is what an engine listed, and when.
type listing struct {
	at     time.Time
	due    bool // it is to be asked again, however fresh this is
	models []model
}

func listModels(ctx context.Context, conn *upstream.Pool, authorization string) ([]model, bool) {
	body, ok := lookUp(ctx, conn, modelsPath, authorization)
	if !ok {
		return nil, false
	}
	var list []model
	for _, entry := range gjson.GetBytes(body, "data").Array() {
		if name := entry.Get("id"); name.Type == gjson.String && name.Str != "" {
			m := model{name: name.Str, entry: json.RawMessage(entry.Raw)}
			if base := entry.Get("parent"); base.Type == gjson.String && base.Str != name.Str {
				m.base = base.Str
			}
			list = append(list, m)
		}
	}
	return list, true
}

// lookUp asks an engine for a document.
func lookUp(ctx context.Context, conn *upstream.Pool, target, authorization string) ([]byte, bool) {
	res, end := conn.Do(ctx, &upstream.Request{Method: http.MethodGet, Target: target, Header: authorizationHeader(authorization)})
	if end != nil {
		return nil, false
	}
	body, err := io.ReadAll(io.LimitReader(res, modelsMax))
	_ = res.Close()
	return body, err == nil && res.Status == http.StatusOK && gjson.ValidBytes(body)
}

// revisionOf asks an engine which revision of its model it serves, if it is of a
// kind that tells. What a guard says of it goes first.
func (m *members) revisionOf(ctx context.Context, id inference.EndpointID, e *engine, authorization string) {
	of := kind.Kind(e.scraped.kind.Load())
	path := of.RevisionPath()
	if path == "" || e.line != nil && e.line.Status().Engine.Revision != "" {
		return
	}
	if body, ok := lookUp(ctx, e.aside, path, authorization); ok {
		m.book.SetRevision(id, of.Revision(body))
		m.reportRevisions()
	}
}
