#!/usr/bin/env bash
# Prints the events of a counterexample: of a mutation, a limit or a witness.
#
#   trail.sh NAME    NAME is a stanza of mutations.txt or runs.txt
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}"
go test . -count=1 -v -run '^TestTrail$' -trail "${1:?name of a mutation or run}" |
  sed -e '/^=== RUN/d' -e '/^--- PASS/d' -e '/^PASS$/d' -e '/^ok  *\t/d'
