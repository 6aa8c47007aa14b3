// SPDX-License-Identifier: Apache-2.0

// Package netfaults breaks real processes and real links, and judges what
// clients got.
//
// Gateway, engines and guards are processes of the headgate program, each
// endpoint in a network namespace of its own behind a veth link. They are
// killed, stopped and woken, restarted; links are cut with nftables, in one
// direction or both, or taken down; a relay holds bytes back. That happens at
// every point of an answer where the decision changes: TestRounds plays each
// fault at each point, TestScenarios the stories of the seed document by name,
// TestLlama some of them with llama.cpp's own server, and
// TestMassDeathIsNoStorm the death of six engines of eight.
//
// The judge is internal/sim/check: what clients received and engines logged, by
// code that shares nothing with the gateway. Beside it stand the journal's
// record, what a guard let through, and the gateway's trace, which the state
// machines must decide again as it was.
//
// All of it runs inside a user, network, mount and process namespace that the
// test makes and enters: nothing outside is touched, no privilege is needed, and
// when the test ends, however it ends, the kernel takes everything down.
//
// A seed fixes what is asked and when things happen relative to each other, not
// how the kernel interleaves them: a rare failure may need several tries. Each
// failure prints its command and keeps its folder, with configuration, requests,
// answers, logs and trace:
//
//	go test ./test/netfaults -run 'TestRounds/seed=7/kill/computed/bare' -seed=7
//
// -rounds is how many rounds are played, with seeds counting up from -seed.
// Nothing waits for time to pass: tests wait for lines of logs, for bytes and for
// what the kernel says of processes and sockets, with deadlines that only a
// failure reaches.
package netfaults
