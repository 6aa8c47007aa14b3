// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/json"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
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
	modelsTime = 2 * time.Second // for an engine to list its models
	modelsMax  = 4 << 20         // bytes of its list
)

// serveModels answers the model list and its single entries: the names that
// routes give, and what one engine of each pool lists, as far as a request for
// it would be routed there.
func (g *Gateway) serveModels(ex Exchange, id inference.RequestID) {
	head := ex.Head()
	list := g.models(ex.Gone(), head)
	one, single := strings.CutPrefix(head.Path, "/v1/models/")
	var body []byte
	if !single {
		entries := make([]json.RawMessage, len(list))
		for i := range list {
			entries[i] = list[i].entry
		}
		body, _ = json.Marshal(struct {
			Object string            `json:"object"`
			Data   []json.RawMessage `json:"data"`
		}{"list", entries})
	} else {
		i := slices.IndexFunc(list, func(m model) bool { return m.name == one })
		if i < 0 {
			g.refuse(ex, id, openai.Chat, inference.Errorf(inference.ModelNotFound, "no such model"))
			return
		}
		body = list[i].entry
	}
	ex.WriteHead(http.StatusOK, http.Header{
		"Content-Type":   {"application/json"},
		"Content-Length": {strconv.Itoa(len(body))},
		"X-Request-Id":   {string(id)},
	})
	_, _ = ex.Write(body)
}

// model is one entry of the list.
type model struct {
	name  string
	entry json.RawMessage
}

// models asks one engine of each pool and merges the answers, in the order of
// the names, each once.
func (g *Gateway) models(ctx context.Context, head *Head) []model {
	ctx, cancel := context.WithTimeout(ctx, modelsTime)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	found := map[string]model{}
	state := g.state.Load()
	for _, p := range state.pools {
		wg.Go(func() {
			for _, m := range p.models(ctx) {
				query := route.Query{Host: head.Host, Path: "/v1/chat/completions", Header: head.Header, Model: m.name}
				if _, err := state.routes.Match(query, rand.IntN); err != nil {
					continue
				}
				mu.Lock()
				found[m.name] = m
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for _, name := range state.routes.Models() {
		if _, ok := found[name]; !ok {
			entry, _ := json.Marshal(map[string]any{"id": name, "object": "model", "created": 0, "owned_by": "headgate"})
			found[name] = model{name, entry}
		}
	}
	list := make([]model, 0, len(found))
	for _, m := range found {
		list = append(list, m)
	}
	slices.SortFunc(list, func(a, b model) int { return strings.Compare(a.name, b.name) })
	return list
}

// models asks the pool's engines in random order until one lists its models.
func (p *pool) models(ctx context.Context) []model {
	set := p.now.Load()
	for _, i := range rand.Perm(len(set.fleet.Endpoints)) {
		res, end := set.engines[set.fleet.Endpoints[i].ID].conn.Do(ctx, &upstream.Request{
			Method: http.MethodGet, Target: "/v1/models", Header: authorizationHeader(p.authorization),
		})
		if end != nil {
			continue
		}
		body, err := io.ReadAll(io.LimitReader(res, modelsMax))
		_ = res.Close()
		if err != nil || res.Status != http.StatusOK || !gjson.ValidBytes(body) {
			continue
		}
		var list []model
		for _, entry := range gjson.GetBytes(body, "data").Array() {
			if name := entry.Get("id"); name.Type == gjson.String && name.Str != "" {
				list = append(list, model{name.Str, json.RawMessage(entry.Raw)})
			}
		}
		return list
	}
	return nil
}
