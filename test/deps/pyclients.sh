#!/usr/bin/env bash
# Installs the Python client SDK of test/clients and prints the directory to put
# into PYTHONPATH.
. "${BASH_SOURCE[0]%/*}/lib.sh"

requirements=$root/test/clients/requirements.txt
# Every package is pinned with its digest, so the file is the version.
version=$(sha256sum "$requirements")
version=${version:0:12}

build() {
  apt_need pip3=python3-pip
  pip3 install --quiet --no-deps --require-hashes --only-binary :all: --target "$1" --requirement "$requirements"
}

cached pyclients "$version"
echo "$dir"
