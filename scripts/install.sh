#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what `make setup` has built: programs in $PREFIX/bin, everything else in
# $PREFIX/lib/flowslot, the systemd units in $PREFIX/lib/systemd/system. Existing configuration is
# not touched. If anything fails, what was installed before is still there, or is there again.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$(realpath -m "${PREFIX:-/usr}")
home=$prefix/lib/flowslot
python=$(readlink -f .venv/bin/python)
case $prefix in *[!A-Za-z0-9/._+-]*)
  echo "PREFIX: must hold letters, digits and /._+- only, for systemd and scripts, got $prefix" >&2
  exit 2 ;;
esac

fetched=$(mktemp -d)
finish() {
  rm -rf "$fetched"
  if [ -d "$home.old" ]; then rm -rf "$home"; mv "$home.old" "$home"; fi
}
trap finish EXIT
"$python" -m venv "$fetched/venv"
"$fetched/venv/bin/python" -m pip wheel --quiet --disable-pip-version-check -w "$fetched/wheels" .
for unit in systemd/*.service; do
  sed "s#/usr/bin/flowslot#$prefix/bin/flowslot#" "$unit" > "$fetched/${unit##*/}"
done

mkdir -p "$prefix/lib/systemd/system" "$prefix/bin"
if [ -d "$home" ]; then mv -T "$home" "$home.old"; fi
mkdir "$home"
"$python" -m venv "$home/venv"
"$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  --no-index --find-links "$fetched/wheels" flowslot
pace=$("$home/venv/bin/python" -c 'import flowslotd.pace as p; print(p.__path__[0])')
install -m 644 bpf/flowslot.bpf.o bpf/edt.bpf.o bpf/mltcp.bpf.o "$pace"
install -m 755 build/nccl/libnccl-{net,profiler}-flowslot.so "$home"
for program in flowslot flowslotd flowslot-switch; do
  ln -sfn "$home/venv/bin/$program" "$prefix/bin/$program"
done
install -m 644 "$fetched"/*.service "$prefix/lib/systemd/system"
rm -rf "$home.old"
echo "installed: $prefix/bin/flowslot, flowslotd, flowslot-switch; units in $prefix/lib/systemd/system"
