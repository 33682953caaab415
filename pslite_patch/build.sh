#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds ps-lite, as it is and with our patches:
#
#   pslite_patch/build.sh [--asan] [VARIANT...]
#
#   upstream        as it is
#   calm            its receive threads sleep when there is nothing (calm.patch)
#   flowslot        reports to flowslot (flowslot.patch)
#   flowslot-calm   both
#
# In all but the first data may come before a server is ready (start.patch).
#
# Result: build/pslite/VARIANT (--asan: build/pslite/VARIANT-asan): build/libps.a, include, and
# libpslite_job.so, with which the lab runs jobs; with flowslot.patch, tests/test_*, too. The source comes from the package registry, once, and its hash is verified; what is
# up to date is not built again.
set -euo pipefail
cd "$(dirname "$0")"
here=$PWD
cache=$(cd .. && pwd)/build/pslite
job=../lab/pslite_job/pslite_job.cc
python=../.venv/bin/python

fail() {
  echo "pslite: $*" >&2
  exit 1
}

asan= suffix=
if [ "${1:-}" = --asan ]; then
  asan=1 suffix=-asan
  shift
fi
[ $# -gt 0 ] || set -- upstream calm flowslot flowslot-calm

# pip verifies the hash before it looks into the package.
fetch() {
  cmp -s source.txt "$cache/source/.pin" && return 0
  rm -rf "$cache/fetched" "$cache/source"
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
    --require-hashes --dest "$cache/fetched" -r source.txt ||
    fail "could not download the source of ps-lite with pip: is there a network?"
  mkdir "$cache/fetched/whole"
  tar -xzf "$cache"/fetched/*.tar.gz -C "$cache/fetched/whole" --strip-components=1
  cp source.txt "$cache/fetched/whole/3rdparty/ps-lite/.pin"
  mv "$cache/fetched/whole/3rdparty/ps-lite" "$cache/source"
  rm -rf "$cache/fetched"
}

patches_of() {
  case $1 in
    upstream) ;;
    calm) echo calm.patch start.patch ;;
    flowslot) echo flowslot.patch start.patch ;;
    flowslot-calm) echo flowslot.patch calm.patch start.patch ;;
    *) fail "there is no variant $1: upstream, calm, flowslot or flowslot-calm" ;;
  esac
}

# In a folder beside, which takes the old one's place when all is built.
build() {
  local patches=$1 to=$2 want programs=
  [[ $patches != *flowslot* ]] || programs=test
  want=$(cat source.txt build.sh apply.py $patches flowslot_pslite*.h source.sha256 ../shm/flowslot_shm.h $job | sha256sum)
  [ "$(cat "$to/.stamp" 2>/dev/null)" != "$want" ] || return 0
  rm -rf "$to.new"
  cp -r "$cache/source" "$to.new"
  [ -z "$patches" ] || "$python" apply.py "$to.new" $patches
  cp flowslot_pslite*.h ../shm/flowslot_shm.h "$to.new/src/"
  # Debian's ZeroMQ is found without a path.
  {
    make --no-print-directory -C "$to.new" -j"$(nproc)" ps $programs DEPS_PATH=/usr \
      ${asan:+ASAN=1 ADD_CFLAGS=-O1} &&
      g++ -std=c++14 -O2 -g -fPIC -shared -Wall -Wextra -Werror ${asan:+-fsanitize=address} \
        -isystem "$to.new/include" "$job" "$to.new/build/libps.a" -lzmq -pthread \
        -o "$to.new/libpslite_job.so"
  } >"$to.new/build.log" 2>&1 || {
    grep -m 5 -B 1 -A 5 'error' "$to.new/build.log" >&2 || tail -n 20 "$to.new/build.log" >&2
    fail "ps-lite does not build; all that was said is in $to.new/build.log"
  }
  echo "$want" >"$to.new/.stamp"
  rm -rf "$to"
  mv "$to.new" "$to"
}

mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9 # two builds at a time would delete each other's folders
fetch
for variant in "$@"; do
  patches=$(patches_of "$variant") || exit 1
  build "$patches" "$cache/$variant$suffix"
done
