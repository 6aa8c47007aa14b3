// SPDX-License-Identifier: Apache-2.0

package schedule

import (
	"time"

	"github.com/headgate/headgate/internal/fleet"
)

// seating is a pool's endpoints with their accounts, in order, and beside each
// what a decision asks of everybody: among a thousand, most are never looked at
// any closer. It is made when a pool is first seen and again when it changes.
type seating struct {
	pool     *fleet.Pool
	accounts []*account
	byLoad             // loads are requests of this gateway, ghosts, and what others have there
	odd      []bool    // there is more to say than the load, see account.plain
	odds     int       // how many are odd
	at       time.Time // when what changes by itself was last renewed

	everybody []int32 // 0, 1, 2, and so on

	serving map[string][]bool // by model, see Book.serving
	last    struct {          // of serving, that was asked for: mostly the next is too
		known bool
		model string
		may   []bool
	}
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
		accounts: make([]*account, n), byLoad: newByLoad(n), odd: make([]bool, n), everybody: make([]int32, n),
		serving: map[string][]bool{},
	}
	for i := range pool.Endpoints {
		a := b.member(pool.Endpoints[i].ID)
		a.at, s.accounts[i], s.everybody[i] = i, a, int32(i)
		b.touch(a)
	}
	s.pool = pool // last, because an account that is made voids the seating
	return s
}

// renewEvery is how old the part of the seating may get that changes by itself: what
// others are expected to have on an endpoint, and whether its guard is still heard.
const renewEvery = 50 * time.Millisecond

// renewed is the seating of the pool as it is now.
func (b *Book) renewed(now time.Time, pool *fleet.Pool) *seating {
	s := b.seats(pool)
	if age := now.Sub(s.at); age < 0 || age >= renewEvery {
		s.at = now
		for _, a := range s.accounts {
			b.touch(a)
		}
	}
	return s
}

// touch renews what the seating knows of an account that has changed.
func (b *Book) touch(a *account) {
	if s := &b.seated; s.has(a) {
		odd := !a.plain(s.at.Add(renewEvery))
		switch {
		case odd && !s.odd[a.at]:
			s.odds++
		case !odd && s.odd[a.at]:
			s.odds--
		}
		s.odd[a.at] = odd
		s.set(a.at, a.inflight+len(a.ghosts)+b.elsewhereWhole(s.at, a))
	}
}

// has reports whether an account is of the pool as it is now.
func (s *seating) has(a *account) bool { return a.at < len(s.accounts) && s.accounts[a.at] == a }

// serving tells of each endpoint whether it may be asked for a model. Nil: all
// may, and so it is where no endpoint of the pool is known to serve it: llama.cpp
// takes any name, and an adapter may be loaded without being listed yet.
func (b *Book) serving(model string) []bool {
	s := &b.seated
	if s.last.known && s.last.model == model {
		return s.last.may
	}
	may, known := s.serving[model]
	if !known {
		may = s.mayServe(model)
	}
	s.last.known, s.last.model, s.last.may = true, model, may
	return may
}

// mayServe is serving, found out.
func (s *seating) mayServe(model string) []bool {
	listed, all := false, true
	may := make([]bool, len(s.accounts))
	for i, a := range s.accounts {
		may[i] = a.models == nil || a.models[model]
		listed = listed || a.models[model]
		all = all && may[i]
	}
	if !listed || all {
		may = nil
	}
	if len(s.serving) >= servingMax {
		s.forgetModels()
	}
	s.serving[model] = may
	return may
}

// forgetModels has serving found out anew.
func (s *seating) forgetModels() {
	clear(s.serving)
	s.last.known = false
}
