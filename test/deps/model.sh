#!/usr/bin/env bash
# Writes a model for llama-server with tinygguf and prints the path of the file.
#
#   model.sh [fast|slow]    fast is the default
#
# fast starts and answers as quickly as an engine can; slow generates some
# hundred tokens a second, so that a long answer can be interrupted.
. "${BASH_SOURCE[0]%/*}/lib.sh"

case ${1:-fast} in
  fast) flags=(-name tiny-fast) ;;
  slow) flags=(-name tiny-slow -dim 384 -layers 6 -ff 1024 -heads 6) ;;
  *)
    echo "usage: model.sh [fast|slow]" >&2
    exit 2
    ;;
esac

# The program and its flags decide what is written, so they are the version.
version=$(cat "$deps"/tinygguf/{*.go,corpus.txt} - <<<"${flags[*]}" | sha256sum)
version=${version:0:12}

build() {
  (cd "$root" && go run ./test/deps/tinygguf "${flags[@]}" -o "$1/model.gguf")
}

cached "model-${1:-fast}" "$version"
echo "$dir/model.gguf"
