#!/usr/bin/env bash
# Shows the two promises of failover on real engines: llama.cpp's server with a
# small real model, killed with signal 9 before and after the first output.
# Exits with an error if a promise was broken.
set -euo pipefail

root=$(cd "${BASH_SOURCE[0]%/*}/../.." && pwd)
llama=$("$root/test/deps/llama.sh")
model=$("$root/test/deps/smollm2.sh")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$root"
go build -o "$scratch/headgate" ./cmd/headgate
go build -o "$scratch/demo" ./test/real/demo
"$scratch/demo" --headgate "$scratch/headgate" --llama "$llama" --model "$model" --dir "$scratch"
