#!/usr/bin/env bash
# Builds golangci-lint and prints the path of the binary.
. "${BASH_SOURCE[0]%/*}/lib.sh"

version=2.15.0

build() {
  # The module proxy's checksum database pins the sources.
  GOBIN=$1 nice go install "github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v$version"
  "$1/golangci-lint" version
}

cached golangci-lint "$version"
echo "$dir/golangci-lint"
