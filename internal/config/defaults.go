// SPDX-License-Identifier: Apache-2.0

package config

import (
	"os"
	"time"

	"github.com/headgate/headgate/internal/flow"
)

// A defaulter fills itself with defaults before a file's values are read over
// it. Elements of lists and maps are filled when they are met.
type defaulter interface{ setDefaults() }

// Default returns the configuration of an empty file: one listener on loopback,
// no pools.
func Default() *Config {
	c := &Config{}
	c.setDefaults()
	return c
}

func (c *Config) setDefaults() {
	var l Listener
	l.setDefaults()
	*c = Config{
		Gateway:   Gateway{ID: hostName()},
		Listeners: []Listener{l},
		Admin:     Admin{Address: "127.0.0.1:9901"},
		Journal: Journal{
			Driver:      DriverSQLite,
			DSN:         "headgate.db",
			Durability:  DurabilityKeyed,
			Retention:   Duration(72 * time.Hour),
			Idempotency: Idempotency{TTL: Duration(24 * time.Hour), MaxAnswer: 1 << 20},
		},
		DrainTimeout: Duration(30 * time.Second),
		Session:      Session{Header: "x-session-id", Field: SessionField},
	}
}

func (l *Listener) setDefaults() {
	*l = Listener{Name: "main", Address: "127.0.0.1:8080", MaxBody: 64 << 20, TrustHeaders: TrustAuto}
}

func (k *Key) setDefaults() { *k = Key{Models: []string{"*"}} }

func (u *PluginUse) setDefaults() { *u = PluginUse{Weight: 1} }

func (b *Backend) setDefaults() { *b = Backend{Weight: 1} }

func (p *Pool) setDefaults() {
	*p = Pool{
		Discovery: Discovery{DNS: DNS{
			Type:    DNSAddresses,
			Scheme:  "http",
			Refresh: Refresh{Min: Duration(time.Second), Max: Duration(30 * time.Second)},
		}},
		Health: Health{
			Interval:       Duration(5 * time.Second),
			Timeout:        Duration(2 * time.Second),
			Path:           "/health",
			GenerateEvery:  Duration(60 * time.Second),
			UnhealthyAfter: 2,
			HealthyAfter:   1,
			PanicThreshold: 0.5,
		},
		Guard:   GuardAuto,
		Lease:   Lease{TTL: Duration(10 * time.Second), Heartbeat: Duration(2 * time.Second)},
		Engine:  EngineAuto,
		Scrape:  Scrape{Interval: Duration(500 * time.Millisecond), Timeout: Duration(time.Second)},
		Routing: Routing{Profile: ProfileCost},
		Flow: Flow{
			Queue:      Queue{MaxRequests: 5000, MaxBytes: 1 << 30, TTL: Duration(60 * time.Second)},
			LocalQueue: LocalQueue{Prefill: Duration(250 * time.Millisecond), Requests: 2},
			RefuseAt:   flow.RefuseAtDefault,
			Order:      OrderArrival,
			ScaleFromZero: ScaleFromZero{
				Webhook: Webhook{Timeout: Duration(10 * time.Second)},
				Start:   Start{Idle: Duration(10 * time.Minute), StopTimeout: Duration(10 * time.Second)},
			},
		},
		CollectMax: 8 << 20,
		Timeouts: Timeouts{
			Connect:     Duration(2 * time.Second),
			FirstOutput: Duration(10 * time.Minute),
			Idle:        Duration(60 * time.Second),
			AfterFinish: Duration(5 * time.Second),
			Total:       Duration(30 * time.Minute),
		},
		Failover: Failover{
			BeforeFirstDelta: BeforeFirstDelta{
				Require:     []string{requireFenced, requireBudget},
				Action:      actionRetry,
				MaxAttempts: 2,
			},
			AfterFirstDelta: AfterFirstDelta{Action: actionTerminate, ClientError: clientError},
			UncertainSourceLiveness: UncertainSourceLiveness{
				Action:  actionFence,
				WaitFor: waitForAckOrExpiry,
				Then:    thenIfNoDelta,
			},
			RetryBudget:    RetryBudget{Ratio: 0.2, MinPerSecond: 3},
			RetryCostLimit: RetryCostLimit{PromptTokens: 32000, EstimatedPrefill: Duration(20 * time.Second)},
		},
	}
}

// hostName is this machine's name, or headgate where it has none that can
// serve as an identity.
func hostName() string {
	name, err := os.Hostname()
	if err != nil || !validID(name) {
		return "headgate"
	}
	return name
}
