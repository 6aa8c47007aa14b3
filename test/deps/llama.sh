#!/usr/bin/env bash
# Builds llama.cpp's own llama-server and prints the path of the binary.
#
# No registry ships the binary itself. The npm package node-llama-cpp carries
# llama.cpp's source, and its platform package the shared libraries built from
# exactly that source. Compiling the server and the multimodal library, and
# linking them to those libraries, gives a genuine llama-server in a tenth of
# the time of a full build.
. "${BASH_SOURCE[0]%/*}/lib.sh"

version=3.21.1 # node-llama-cpp; its llama.cpp is release v0.4.0
source_sha256=7a231d6bafa14142a1cbed9893d4ec5bc6041b2a5f5939a623accaab4203c11f
libs_sha256=4b5b65a8b2611d8af94349b02d815c0f424a30a0a19aef2be5db25ecfef6730f

build() {
  local out=$1
  apt_need npm=npm git=git g++=g++ make=make

  npm pack --silent "node-llama-cpp@$version" "@node-llama-cpp/linux-x64@$version"
  local source=node-llama-cpp-$version.tgz libs=node-llama-cpp-linux-x64-$version.tgz
  check_sha256 "$source" "$source_sha256"
  check_sha256 "$libs" "$libs_sha256"

  tar xzf "$source" package/llama/gitRelease.bundle
  git -c advice.detachedHead=false clone --quiet package/llama/gitRelease.bundle src
  tar xzf "$libs" --strip-components=3 -C "$out" package/bins/linux-x64
  rm "$out"/*.node "$out"/*.json

  # llama-ui-embed without assets writes the stub for a server without web UI.
  g++ -std=c++17 -o embed src/tools/ui/embed.cpp
  ./embed src/tools/server/ui.cpp src/tools/server/ui.h

  nice make --silent -j"$(nproc)" -f "$deps/llama.mk" SRC=src OUT="$out"
  "$out/llama-server" --version
}

cached llama-server "$version"
echo "$dir/llama-server"
