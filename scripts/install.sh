#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what `make setup` has built: programs in $PREFIX/bin, everything else in
# $PREFIX/lib/flowslot, the systemd units in $PREFIX/lib/systemd/system. Existing configuration is
# not touched. Default prefix: /usr, where the units look.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${PREFIX:-/usr}
home=$prefix/lib/flowslot

rm -rf "$home"
mkdir -p "$home" "$prefix/bin" "$prefix/lib/systemd/system"
"$(readlink -f .venv/bin/python)" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check .
pacing=$("$home/venv/bin/python" -c 'import flowslotd.pacing as p; print(p.__path__[0])')
install -m 644 bpf/flowslot.bpf.o "$pacing"
for program in flowslot flowslotd flowslot-switch; do
  ln -sfn "$home/venv/bin/$program" "$prefix/bin/$program"
done
install -m 644 systemd/*.service "$prefix/lib/systemd/system"
echo "installed: $prefix/bin/flowslot, flowslotd, flowslot-switch; units in $prefix/lib/systemd/system"
