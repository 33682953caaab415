#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what `make setup` has built: programs in $PREFIX/bin, everything else in
# $PREFIX/lib/flowslot, the systemd units in $PREFIX/lib/systemd/system. Existing configuration is
# not touched. What was installed before is replaced only once all that replaces it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$(realpath -m "${PREFIX:-/usr}")
home=$prefix/lib/flowslot
python=$(readlink -f .venv/bin/python)

fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
"$python" -m venv "$fetched/venv"
"$fetched/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check -w "$fetched/wheels" .

rm -rf "$home"
mkdir -p "$home" "$prefix/bin" "$prefix/lib/systemd/system"
"$python" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --no-index --find-links "$fetched/wheels" flowslot
pacing=$("$home/venv/bin/python" -c 'import flowslotd.pacing as p; print(p.__path__[0])')
install -m 644 bpf/flowslot.bpf.o "$pacing"
for program in flowslot flowslotd flowslot-switch; do
  ln -sfn "$home/venv/bin/$program" "$prefix/bin/$program"
done
for unit in systemd/*.service; do
  sed "s#/usr/bin/flowslot#$prefix/bin/flowslot#" "$unit" > "$prefix/lib/systemd/system/${unit##*/}"
done
echo "installed: $prefix/bin/flowslot, flowslotd, flowslot-switch; units in $prefix/lib/systemd/system"
