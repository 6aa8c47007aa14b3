// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"github.com/headgate/headgate/internal/fleet"
)

// seating is a pool's endpoints with their accounts, in order, and beside each
// what a decision asks of everybody: among a thousand, most are never looked at
// any closer. It is made when a pool is first seen and again when it changes.
type seating struct {
	pool     *fleet.Pool
	accounts []*account
	loads    []int32
	odd      []bool // there is more to say than the load, see account.plain
	odds     int    // how many are odd

	everybody []int32 // 0, 1, 2, and so on

	serving map[string][]bool // by model, see Book.serving
}

// servingMax bounds the models that are kept; at the bound all are forgotten.
const servingMax = 256

// seats returns the seating of the pool.
func (b *Book) seats(pool *fleet.Pool) *seating {
	s := &b.seated
	if s.pool == pool && len(s.accounts) == len(pool.Endpoints) {
		return s
	}
	n := len(pool.Endpoints)
	*s = seating{
		pool: pool, accounts: make([]*account, n), loads: make([]int32, n), odd: make([]bool, n), everybody: make([]int32, n),
		serving: map[string][]bool{},
	}
	for i := range pool.Endpoints {
		a := b.account(pool.Endpoints[i].ID)
		a.at, s.accounts[i], s.everybody[i] = i, a, int32(i)
		b.touch(a)
	}
	return s
}

// touch renews what the seating knows of an account that has changed.
func (b *Book) touch(a *account) {
	if s := &b.seated; a.at < len(s.accounts) && s.accounts[a.at] == a {
		odd := !a.plain()
		switch {
		case odd && !s.odd[a.at]:
			s.odds++
		case !odd && s.odd[a.at]:
			s.odds--
		}
		s.loads[a.at], s.odd[a.at] = int32(a.inflight), odd
	}
}

// serving tells of each endpoint whether it may be asked for a model. Nil: all
// may, and so it is where no endpoint of the pool is known to serve it: llama.cpp
// takes any name, and an adapter may be loaded without being listed yet.
func (b *Book) serving(model string) []bool {
	s := &b.seated
	may, known := s.serving[model]
	if known {
		return may
	}
	listed, all := false, true
	may = make([]bool, len(s.accounts))
	for i, a := range s.accounts {
		may[i] = a.models == nil || a.models[model]
		listed = listed || a.models[model]
		all = all && may[i]
	}
	if !listed || all {
		may = nil
	}
	if len(s.serving) >= servingMax {
		clear(s.serving)
	}
	s.serving[model] = may
	return may
}
