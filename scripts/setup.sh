#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Brings a fresh Debian 12 machine to where `make demo` and `make test` run:
# packages by apt, a virtual environment in .venv with the loops compiled, the BPF objects in bpf/,
# ps-lite in build/pslite, the NCCL plugins and what the lab needs beside them in build/nccl, the
# lab's relay in build/lab.
# Quick when nothing changed: a stamp holds the checksum of all its inputs.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(
  python3 python3-venv          # 3.11 in Debian 12
  python3-dev                   # compiles the loops over flows
  gcc g++ make libc6-dev        # the same, and tests of the C header
  clang llvm bpftool            # the BPF programs (CO-RE)
  libbpf1 libbpf-dev libelf1    # their loader
  libatomic1                    # fences for the progress record
  libzmq3-dev                   # ps-lite
  iproute2 ethtool procps       # the lab's networks
  systemd                       # systemd-analyze verify
)

stamp=.venv/.setup-stamp
sources=$(ls bpf/*.c bpf/*.h | grep -v vmlinux.h) # that one is made from the running kernel
typed=$(find */flowslot*/ -name '*.pxd' | sort) # of all rooms: scripts/rooms.py
loops=$(ls scripts/{hatch_build,rooms}.py $typed ${typed//.pxd/.py})
pslite=$(ls pslite_patch/*.{sh,py,patch,h,txt} shm/flowslot_shm.h lab/pslite_job/*.cc)
nccl=$(ls nccl_patch/*.h nccl_patch/{plugin,profiler,harness}/{*.[ch],Makefile})
relay="lab/relay/relay.c lab/relay/Makefile"
want=$({ ls -d */flowslot*/; cat pyproject.toml scripts/setup.sh $pslite $nccl $relay $loops $sources bpf/Makefile /proc/version; } | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] &&
  ls bpf/*.bpf.o build/pslite/{upstream,calm,flowslot,flowslot-calm}/libpslite_job.so \
    build/nccl/libnccl-{job,net-flowslot,net-standin,profiler-flowslot}.so build/lab/relay >/dev/null 2>&1; then
  exit 0
fi

if [ "$(id -u)" != 0 ]; then
  echo "make setup: needs root (it installs Debian packages and the lab makes network namespaces): run it as root or with sudo" >&2
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "setup: apt packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# Any Python 3.11 to 3.13 that can make a virtual environment serves; Debian's always can.
python=/usr/bin/python3
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
  python=$(command -v python3.13 || command -v python3.12 || command -v python3.11) || {
    echo "make setup: needs Python 3.11, 3.12 or 3.13; none was found" >&2
    exit 1
  }
fi
if ! .venv/bin/python -c '' 2>/dev/null; then
  echo "setup: virtual environment in .venv ($("$python" --version))"
  rm -rf .venv
  "$python" -m venv .venv
fi
echo "setup: Python packages"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[lab,dev]'

echo "setup: BPF programs"
make --no-print-directory -s -C bpf

echo "setup: ps-lite"
pslite_patch/build.sh

echo "setup: NCCL plugin"
make --no-print-directory -s -C nccl_patch/plugin
make --no-print-directory -s -C nccl_patch/profiler
make --no-print-directory -s -C nccl_patch/harness

echo "setup: the lab's relay"
make --no-print-directory -s -C lab/relay

echo "$want" >"$stamp"
echo "setup: done"
