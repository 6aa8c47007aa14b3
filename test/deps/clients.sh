#!/usr/bin/env bash
# Installs the JavaScript client SDKs of test/clients and prints the path of
# their node_modules. CommonJS finds them there through NODE_PATH:
#
#   NODE_PATH=$(test/deps/clients.sh) node script.cjs
#
# ES modules do not read NODE_PATH; they need createRequire from node:module.
. "${BASH_SOURCE[0]%/*}/lib.sh"

clients=$root/test/clients
# The lock file pins every package with its digest, so it is the version.
version=$(sha256sum "$clients/package-lock.json")
version=${version:0:12}

build() {
  apt_need node=nodejs npm=npm
  cp "$clients"/{package.json,package-lock.json,.npmrc} "$1"
  # No package of the set needs its install scripts.
  npm ci --prefix "$1" --ignore-scripts --no-audit --no-fund
}

cached clients "$version"
echo "$dir/node_modules"
