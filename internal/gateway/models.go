// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"context"
	"encoding/json"
	"io"
	"maps"
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

// serveModels answers the model list and its single entries: what one engine of
// each pool lists, as far as a request for it would be routed, and the names
// that routes give.
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
			_, err := g.whereTo(head, one)
			if err == nil || err.Code != inference.ModelNotFound {
				err = inference.Errorf(inference.ModelNotFound, "no such model")
			}
			g.refuse(ex, id, openai.Chat, err)
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

// whereTo finds where a request for the model would go, at whichever inference
// path takes it: a route may be for embeddings alone.
func (g *Gateway) whereTo(head *Head, name string) (route.Result, *inference.Error) {
	var last *inference.Error
	for _, path := range slices.Sorted(maps.Keys(dialects)) {
		query := route.Query{Host: head.Host, Path: path, Header: head.Header, Model: name}
		found, err := g.routes.Match(query, func(int) int { return 0 })
		if err == nil {
			return found, nil
		}
		if last == nil || err.Code == inference.ModelNotFound {
			last = err // it may name models that are near
		}
	}
	return route.Result{}, last
}

// models merges what the pools list with the names of routes, in the order of
// the names, each once.
func (g *Gateway) models(ctx context.Context, head *Head) []model {
	lists := g.listed(ctx)
	found := map[string]model{}
	for _, pool := range slices.Sorted(maps.Keys(lists)) {
		for _, m := range lists[pool] {
			to, err := g.whereTo(head, m.name)
			// What a route renames is listed below, by what it stands for.
			if err != nil || to.Model != m.name {
				continue
			}
			if _, ok := found[m.name]; !ok || to.Pool == pool {
				found[m.name] = m
			}
		}
	}
	for _, name := range g.routes.Models() {
		to, err := g.whereTo(head, name)
		if err != nil {
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
		return model{name, entry}
	}
	entry, _ := json.Marshal(map[string]any{"id": name, "object": "model", "created": 0, "owned_by": "headgate"})
	return model{name, entry}
}

// listed asks one engine of each pool.
func (g *Gateway) listed(ctx context.Context) map[string][]model {
	ctx, cancel := context.WithTimeout(ctx, modelsTime)
	defer cancel()
	var mu sync.Mutex
	var wg sync.WaitGroup
	lists := map[string][]model{}
	for name, p := range g.pools {
		wg.Go(func() {
			list := p.models(ctx)
			mu.Lock()
			lists[name] = list
			mu.Unlock()
		})
	}
	wg.Wait()
	return lists
}

// models asks the pool's engines in random order until one lists its models.
func (p *pool) models(ctx context.Context) []model {
	for _, i := range rand.Perm(len(p.fleet.Endpoints)) {
		header := []upstream.Field{}
		if p.authorization != "" {
			header = append(header, upstream.Field{Name: "Authorization", Value: p.authorization})
		}
		res, end := p.conns[p.fleet.Endpoints[i].ID].Do(ctx, &upstream.Request{Method: http.MethodGet, Target: "/v1/models", Header: header})
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
