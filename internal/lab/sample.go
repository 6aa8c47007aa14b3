// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"strings"
	"testing/fstest"
)

// Sample is a folder of small traces in the formats of the real ones, made from a
// seed. They are for trying the laboratory and for its tests; nothing about
// them is measured.
func Sample(seed int64) fstest.MapFS {
	dir := fstest.MapFS{}
	put := func(name, text string) { dir[name] = &fstest.MapFile{Data: []byte(text)} }
	for i, name := range []string{"conversation", "synthetic"} {
		r := newRand(seed, uint64(20+i))
		var b strings.Builder
		next := 1
		var sessions [][]int
		for at := 0.0; at < 3600; at += r.ExpFloat64() * 1.5 {
			var blocks []int
			if len(sessions) > 0 && r.Float64() < 0.5 {
				blocks = sessions[r.IntN(len(sessions))]
			} else {
				blocks = []int{0}
			}
			blocks = append([]int(nil), blocks...)
			for range 1 + r.IntN(12) {
				blocks = append(blocks, next)
				next++
			}
			if sessions = append(sessions, blocks); len(sessions) > 60 {
				sessions = sessions[1:]
			}
			ids := strings.Join(strings.Fields(fmt.Sprint(blocks)), ", ")
			fmt.Fprintf(&b, `{"timestamp": %d, "input_length": %d, "output_length": %d, "hash_ids": %s}`+"\n",
				int(at*1000), len(blocks)*blockLarge+r.IntN(400), int(logNormal(r, 180, 0.9, 1, 2000)), ids)
		}
		put("mooncake_"+name+"_trace.jsonl", b.String())
	}
	for i, name := range []string{"conv", "code"} {
		r := newRand(seed, uint64(30+i))
		var b strings.Builder
		b.WriteString("TIMESTAMP,ContextTokens,GeneratedTokens\n")
		for at := 0.0; at < 3500; at += r.ExpFloat64() * 0.4 {
			fmt.Fprintf(&b, "2023-11-16 18:%02d:%010.7f,%d,%d\n", int(at)/60, at-float64(int(at)/60*60),
				int(logNormal(r, 1000, 0.9, 3, 8000)), int(logNormal(r, 100, 1, 1, 1500)))
		}
		put("azure2023_"+name+".csv", b.String())
	}
	for chunk, windows := range map[int][]float64{12: {970200, 960000}, 10: {529200, 530400}, 2: {256200, 306000}, 0: {338400}, 3: {822000}} {
		r := newRand(seed, uint64(40+chunk))
		var rows, sets strings.Builder
		for _, at := range windows {
			fmt.Fprintf(&rows, "%v,%v,1.0,Gamma,%v,0.01\n", at, 5+20*r.Float64(), 0.5+r.Float64())
			if sets.Len() > 0 {
				sets.WriteString(",")
			}
			dict := func(median float64) string {
				var pairs []string
				for i := range 20 {
					pairs = append(pairs, fmt.Sprintf("%d: 0.05", int(logNormal(r, median, 0.8, 1, 4000))+i))
				}
				return "{" + strings.Join(pairs, ", ") + "}"
			}
			fmt.Fprintf(&sets, `"%d": {"input_tokens": %q, "output_tokens": %q}`, int(at), dict(600), dict(90))
		}
		base := fmt.Sprintf("servegen_m-small/chunk-%d-", chunk)
		put(base+"trace.csv", rows.String())
		put(base+"dataset.json", "{"+sets.String()+"}")
	}
	return dir
}
