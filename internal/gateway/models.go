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
	"github.com/headgate/headgate/internal/route"
	"github.com/headgate/headgate/internal/upstream"
)

const (
	modelsTime   = 2 * time.Second  // for an engine to list its models
	modelsMax    = 4 << 20          // bytes of its list
	modelsFresh  = 5 * time.Second  // how long a list is good for
	modelsEvery  = 30 * time.Second // how often it is looked at unasked
	modelsAtOnce = 16               // engines asked at a time

	modelsPath = "/v1/models"
	chatPath   = "/v1/chat/completions"
)

// serveModels answers the model list and its single entries: the names that
// routes give, and what engines list, as far as a request for it would be routed
// to them.
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
			g.refuse(ex, id, openai.Chat, inference.Errorf(inference.ModelNotFound, "no such model"))
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
}

// models merges what every engine lists, in the order of the names, each once.
func (g *Gateway) models(ctx context.Context, head *Head) []model {
	ctx, cancel := context.WithTimeout(ctx, modelsTime)
	defer cancel()
	state := g.state.Load()
	found := map[string]model{}
	for _, name := range state.routes.Models() {
		entry, _ := json.Marshal(map[string]any{"id": name, "object": "model", "created": 0, "owned_by": "headgate"})
		found[name] = model{name, entry}
	}
	for _, p := range state.pools {
		for _, m := range p.models(ctx, p.authorization) {
			if state.routes.Leads(route.Query{Host: head.Host, Path: chatPath, Header: head.Header, Model: m.name}, p.name) {
				found[m.name] = m
			}
		}
	}
	list := slices.Collect(maps.Values(found))
	slices.SortFunc(list, func(a, b model) int { return strings.Compare(a.name, b.name) })
	return list
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
	if known != nil && time.Since(known.at) < modelsFresh {
		return known.models
	}
	list, ok := listModels(ctx, e.conn, authorization)
	if !ok {
		return nil
	}
	e.listed.Store(&listing{at: time.Now(), models: list})
	names := make([]string, len(list))
	for i := range list {
		names[i] = list[i].name
	}
	m.book.SetModels(id, names)
	return list
}

// listing is what an engine listed, and when.
type listing struct {
	at     time.Time
	models []model
}

func listModels(ctx context.Context, conn *upstream.Pool, authorization string) ([]model, bool) {
	res, end := conn.Do(ctx, &upstream.Request{Method: http.MethodGet, Target: modelsPath, Header: authorizationHeader(authorization)})
	if end != nil {
		return nil, false
	}
	body, err := io.ReadAll(io.LimitReader(res, modelsMax))
	_ = res.Close()
	if err != nil || res.Status != http.StatusOK || !gjson.ValidBytes(body) {
		return nil, false
	}
	var list []model
	for _, entry := range gjson.GetBytes(body, "data").Array() {
		if name := entry.Get("id"); name.Type == gjson.String && name.Str != "" {
			list = append(list, model{name.Str, json.RawMessage(entry.Raw)})
		}
	}
	return list, true
}
