#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Compares headgate with a direct connection, nginx, HAProxy and Go's
# ReverseProxy: make bench, or bench/run.sh --quick. Flags go to
# headgate bench compare.
#
# Every proxy has one worker or GOMAXPROCS=1. With PIN=1 the proxies are bound to
# the first core, and generator and engine to the second: steadier on an idle
# machine, worse on a busy one, where a bound process can't get out of the way.
. "${BASH_SOURCE[0]%/*}/../test/deps/lib.sh"
# shellcheck disable=SC2154 # lib.sh sets it
cd "$root"

# Debian starts what it installs; here nothing is to listen on port 80.
RUNLEVEL=1 apt_need nginx=nginx haproxy=haproxy taskset=util-linux
ulimit -n "$(ulimit -Hn)"

mkdir -p bench/out
nice go build -o bench/out/headgate ./cmd/headgate
nice go build -o bench/out/reverseproxy ./bench/reverseproxy

run=(bench/out/headgate bench compare --configs bench --reverseproxy bench/out/reverseproxy --out bench/out/proxy.json)
if [[ ${PIN-} ]]; then
  run=(taskset -c 1 "${run[@]}" --pin 0)
fi
exec "${run[@]}" "$@"
