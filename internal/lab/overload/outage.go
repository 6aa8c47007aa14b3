// SPDX-License-Identifier: Apache-2.0

package overload

// Outage is what happens while no engine can be asked for its metrics, beside the
// same time of the same run without an outage.
type Outage struct {
	Name    string  `json:"name"`
	Sent    float64 `json:"sent"` // requests a second to engines
	Normal  float64 `json:"sent_without"`
	Inside  int     `json:"waiting_inside"` // most requests that waited inside one engine
	Usual   int     `json:"waiting_inside_without"`
	Good    float64 `json:"good"` // share within targets
	Without float64 `json:"good_without"`
}

const (
	outageAt  = 20.0
	outageFor = 20.0
	outageEnd = 50.0
)

// Outage plays one at a load.
func (p Pool) Outage(shape Shape, a Admission, seed uint64, rate float64) (Outage, error) {
	o := Outage{Name: a.Name}
	play := func(c *Chaos) (sent float64, inside int, good float64, err error) {
		w, err := newWorld(&Run{Pool: p, Demand: shape.Make(seed, []Phase{{outageEnd, rate}}), Admission: a, Chaos: c, Seed: seed})
		if err != nil {
			return 0, 0, 0, err
		}
		w.check.watchers = append(w.check.watchers, func(now float64) {
			if now >= outageAt && now < outageAt+outageFor {
				for _, e := range w.engines {
					n := 0
					for _, j := range e.jobs {
						if !j.admitted {
							n++
						}
					}
					inside = max(inside, n)
				}
			}
		})
		r, err := w.run()
		if err != nil {
			return 0, 0, 0, err
		}
		for i := range r.Finished {
			f := &r.Finished[i]
			if at := f.Asked.At + f.Waited; f.Waited >= 0 && at >= outageAt && at < outageAt+outageFor {
				sent++
			}
		}
		return sent / outageFor, inside, r.Part(outageAt, outageAt+outageFor).Good, nil
	}
	var err error
	if o.Normal, o.Usual, o.Without, err = play(nil); err != nil {
		return o, err
	}
	o.Sent, o.Inside, o.Good, err = play(&Chaos{Strikes: []Strike{{At: outageAt, What: NoMetrics, For: outageFor}}})
	return o, err
}
