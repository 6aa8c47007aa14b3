SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS   += --no-print-directory
.PHONY: help run demo demo-real test test-long test-faults test-jitter tools check unit race fuzz integration formal sim sim-long bench microbench bench-routing bench-flow gen

# Tests ask testing.Short whether they are left to make test-long.
SHORT    ?= -short
# In runs, not seconds: at a deadline the fuzzer fails now and then by itself.
FUZZTIME ?= 15000x
BENCH    ?= .
packages  = $$(go list ./... | grep -v /test/)

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

run: ## serve examples/headgate.yaml
	go run ./cmd/headgate serve --config examples/headgate.yaml

demo: ## three simulated engines, one killed before a first delta and one after
	go run ./cmd/headgate demo

demo-real: ## the same with real engines and a small real model
	./test/real/demo.sh

test: ## install what the tests need and run all of them
	@for stage in tools check unit race fuzz integration; do \
		SECONDS=0; echo "== $$stage"; $(MAKE) $$stage; echo "== $$stage took $$SECONDS s"; \
	done

test-long: ## test with longer fuzzing, repeated race runs and slow parts
	@HEADGATE_LONG=1 $(MAKE) test FUZZTIME=500000x SHORT= COUNT=5

tools:
	@. test/deps/lib.sh; apt_need curl=curl git=git g++=g++ gcc=gcc spin=spin ip=iproute2 nft=nftables unshare=util-linux

check: ## formatting, go vet, linters and the rules of architecture_test.go
	@files=$$(gofmt -l .); [[ -z $$files ]] || { echo "not formatted by gofmt:" $$files; exit 1; }
	go vet ./...
	$$(test/deps/lint.sh) run
	go test .

unit: ## tests of the packages
	go test $(packages)
	go test -tags mutate ./internal/sim -run TestScenariosBite

race: ## the same under the race detector
	go test -race $(if $(COUNT),-count=$(COUNT)) $(packages)

fuzz: ## run every fuzz target for FUZZTIME
	@for dir in $$(grep -rl --include='*_test.go' '^func Fuzz' . | xargs -n1 dirname | sort -u); do \
		for target in $$(go test -list '^Fuzz' $$dir | grep '^Fuzz'); do \
			echo "$$dir $$target"; \
			out=$$(go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x $$dir) || { echo "$$out"; exit 1; }; \
		done; \
	done

integration: ## tests with real engines, clients and proxies
	go test -count=1 -timeout 20m $(SHORT) ./test/...

test-faults: ## kill, stop and cut off real processes, ROUNDS=n times at every point; SEED=n for the first
	@test/deps/net.sh; bin=$$(mktemp -d)/netfaults; go test -c -o $$bin ./test/netfaults; cd test/netfaults; \
		$$bin -test.timeout 0 -rounds=$(or $(ROUNDS),50) -seed=$(or $(SEED),1)

test-jitter: ## run tests with delays at locks, channels and sockets, ROUNDS=n times
	@dir=$$(mktemp -d); go run ./test/jitter $$dir; export GOFLAGS=-overlay=$$dir/overlay.json GOMAXPROCS=8; \
		go test -short -p 4 -timeout 30m -count=$(or $(ROUNDS),3) $(packages) ./test/contract ./test/faults ./test/keep

formal: ## check the formal models of leases, keys and takeovers, every run
	go test -count=1 -timeout 30m ./formal -whole

sim: ## simulate failures in virtual time: SEEDS=n plans, or SEED=n to replay one
	@bin=$$(mktemp -d)/sim; go test -c -o $$bin ./internal/sim; cd internal/sim; \
		$$bin -test.run '^TestSeeds$$' $(if $(SEED),-test.v -seed=$(SEED),-fresh=0 -seeds=$(or $(SEEDS),2000))

sim-long: ## an hour of fresh plans, and every mutation
	@bin=$$(mktemp -d)/sim; go test -c -o $$bin ./internal/sim; cd internal/sim; $$bin -test.run '^TestSeeds$$' -test.timeout 0 -for=1h
	go test -tags mutate -count=1 ./internal/sim -run 'TestMutations|TestScenariosBite'

bench: ## headgate beside nginx, HAProxy and ReverseProxy, about 6 minutes; bench/run.sh --quick for less
	bench/run.sh

microbench: ## Go benchmarks; BENCH=name picks some
	go test -run '^$$' -bench '$(BENCH)' -benchmem $(packages)

# The public traces are not part of the repository: docs/routing.md says where
# they are from. Without them generated ones take their place.
TRACES ?=

bench-routing: ## compare routing policies in the laboratory; TRACES=folder
	go run ./cmd/headgate lab --traces '$(TRACES)' --seed 9301,9302 --cell b2b/64/one,codegen/64/one \
		--out bench/out/routing.json --plots bench/out/routing --table bench/out/routing.md
	go run ./cmd/headgate lab --traces '$(TRACES)' --seed 9301 --engines 4,8 --model alternating \
		--out bench/out/routing-alternating.json --against bench/out/routing.json

bench-flow: ## give pools twice what they carry: flow control beside others'
	go run ./cmd/headgate lab overload --out bench/out/flow.json --plots bench/out/flow

gen: ## write docs/config.md from internal/config, and what protoc makes
	go test ./internal/config -update
	PATH=$$(test/deps/protobuf.sh):$$PATH; cd internal/guard/guardpb; protoc -I. --go_out=. --go_opt=paths=source_relative \
		--go-grpc_out=. --go-grpc_opt=paths=source_relative guard.proto
