// SPDX-License-Identifier: Apache-2.0

package gateway

import (
	"fmt"
	"math/rand/v2"
	"net/url"
	"time"

	"github.com/headgate/headgate/inference"
	"github.com/headgate/headgate/internal/attempt"
	"github.com/headgate/headgate/internal/config"
	"github.com/headgate/headgate/internal/fleet"
	"github.com/headgate/headgate/internal/schedule"
	"github.com/headgate/headgate/internal/upstream"
)

// noLimit stands for a limit that is turned off where one must be given; the
// kernel gives up long before.
const noLimit = 24 * time.Hour

// pool is one configured pool at work.
type pool struct {
	name   string
	fleet  *fleet.Pool
	book   *schedule.Book
	conns  map[inference.EndpointID]*upstream.Pool
	policy attempt.Policy
	limits inference.Timeouts

	bodyMax       int64 // 0: the listener's
	collectMax    int64
	authorization string // what engines are sent; "" for none
	forwardAuth   bool
}

func newPool(name string, c config.Pool) (*pool, error) {
	p := &pool{
		name:       name,
		fleet:      &fleet.Pool{Name: name, Endpoints: c.Endpoints()},
		conns:      map[inference.EndpointID]*upstream.Pool{},
		limits:     c.Timeouts.Limits(),
		bodyMax:    int64(c.MaxBody),
		collectMax: int64(c.CollectMax),
		policy: attempt.Policy{
			MaxAttempts:         c.Failover.BeforeFirstDelta.MaxAttempts,
			AllowTransportFence: c.Failover.AllowTransportFence,
			ExecutesTools:       c.ExecutesTools,
		},
		forwardAuth: c.ForwardAuthorization,
	}
	bearer, err := c.Credential.Bearer()
	if err != nil {
		return nil, fmt.Errorf("pool %s: credential: %w", name, err)
	}
	if !bearer.IsZero() {
		p.authorization = "Bearer " + bearer.Reveal()
	}
	p.book = schedule.NewBook(schedule.Config{
		Retry: schedule.BudgetConfig{
			Ratio:        float64(c.Failover.RetryBudget.Ratio),
			MinPerSecond: c.Failover.RetryBudget.MinPerSecond,
		},
		RetryCost: schedule.CostLimit{
			PromptTokens: c.Failover.RetryCostLimit.PromptTokens,
			Prefill:      time.Duration(c.Failover.RetryCostLimit.EstimatedPrefill),
		},
	}, rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64())))
	connect := p.limits.Connect
	if connect == 0 {
		connect = noLimit
	}
	for _, e := range p.fleet.Endpoints {
		u, err := url.Parse(e.URL)
		if err != nil {
			return nil, fmt.Errorf("pool %s: %w", name, err)
		}
		if p.conns[e.ID], err = upstream.New(upstream.Config{URL: u, ConnectTimeout: connect}); err != nil {
			return nil, fmt.Errorf("pool %s: %w", name, err)
		}
	}
	return p, nil
}

func (p *pool) close() {
	for _, c := range p.conns {
		c.Close()
	}
}
