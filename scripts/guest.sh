#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a command (default: the kernel tests of the pacing back ends) in Debian's own kernel, and
# exits with its exit status:
#
#   [GUEST_KERNEL=PACKAGE] [GUEST_LIMIT=SECONDS] [GUEST_BACKENDS=NAMES] scripts/guest.sh [COMMAND...]
#
# The kernel is booted by virtme-ng in qemu without KVM, on this machine's own file system: the
# command sees the same packages and the same .venv. The repository is a copy on write; what the
# command writes is gone afterwards. Kernel, and what the last boot said: .guest/.
set -euo pipefail
cd "$(dirname "$0")/.."

KERNEL=${GUEST_KERNEL:-linux-image-amd64} # not the cloud flavour, which lacks 9p
TESTS=(
  tests/pacing/test_conformance_*.py
  tests/pacing/test_bpf_life.py
  tests/pacing/test_preflight.py::test_what_is_announced_for_a_device_is_what_is_done
)
LIMIT=${GUEST_LIMIT:-900} # s, for booting and the command
VIRTME=1.42               # exactly: how it boots is not the same in all versions
packages=(
  qemu-system-x86
  busybox-static file # virtme-ng makes an initramfs
  kmod                # depmod here, modprobe in the guest
)

fail() {
  echo "guest: $*" >&2
  exit 1
}

# This kernel has what every back end needs: nothing is skipped for want of it. Left out: what an
# emulated processor is too slow for, and what is about a file of the first network namespace.
[ $# -gt 0 ] || set -- env FLOWSLOT_BACKENDS="${GUEST_BACKENDS:-bpf edt htb socket}" \
  .venv/bin/python -m pytest --durations=10 -k "not fast_flow and not default_that" "${TESTS[@]}"
[ "$(id -u)" = 0 ] || fail "needs root, as what it runs does: run it as root or with sudo"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "boots x86-64 kernels only, and this machine is not one"
[ -x .venv/bin/python ] || fail ".venv is missing: run \`make setup\` first"

root=$PWD
cache=$root/.guest
run=$cache/run
mkdir -p "$cache"
exec 9>"$cache/lock"
flock -n 9 || fail "another guest is running in this repository"

# -- what it needs ---------------------------------------------------------------------------------

updated=
update() {
  [ -n "$updated" ] || apt-get update -qq || fail "apt-get update failed: is there a network?"
  updated=yes
}

install_packages() {
  local missing=() package
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  echo "guest: apt packages: ${missing[*]}"
  update
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
    >/dev/null || fail "could not install ${missing[*]}: is there a network?"
}

# Not an extra of pyproject.toml: that would compile the loops again, only to add a tool that
# belongs to this script as qemu does.
install_virtme() {
  .venv/bin/python -c "from importlib.metadata import version; assert version('virtme-ng') == '$VIRTME'" \
    2>/dev/null && return
  echo "guest: virtme-ng $VIRTME"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check "virtme-ng==$VIRTME" ||
    fail "could not install virtme-ng $VIRTME with pip: is there a network?"
}

# What the kernel's package depends on at this time. Sets image, and kernel, the folder for it.
find_kernel() {
  local file
  image=$(apt-cache depends "$KERNEL" 2>/dev/null | sed -n 's/.*Depends: \(linux-image-.*\)/\1/p' | head -1) || true
  [ -n "$image" ] || return 1
  file=$(apt-get download --print-uris "$image" 2>/dev/null | cut -d' ' -f2) || true
  [ -n "$file" ] || return 1
  kernel=$cache/${file%.deb}
}

# Unpacked, not installed: no bootloader's hooks run, and no initramfs is made.
unpack_kernel() {
  rm -rf "$cache"/linux-image-* "$cache/new" # other versions, and what was left half done
  mkdir "$cache/new" &&
    (cd "$cache/new" && apt-get download -qq -o APT::Sandbox::User=root "$image") &&
    dpkg -x "$cache"/new/*.deb "$cache/new/root" &&
    depmod -b "$cache/new/root" "${image#linux-image-}" &&
    mv "$cache/new/root" "$kernel" &&
    rm -rf "$cache/new"
}

fetch_kernel() {
  find_kernel || { update && find_kernel; } || fail "apt knows no $KERNEL: are Debian's own packages in its sources?"
  [ ! -d "$kernel" ] || return 0
  echo "guest: $image"
  # If it cannot be had, the package lists may be too old.
  unpack_kernel || { update && find_kernel && unpack_kernel; } ||
    fail "could not download and unpack $image: is there a network?"
}

# -- the guest -------------------------------------------------------------------------------------

# What the guest runs. virtme-ng's own root reads everything anew from here; a second view that
# keeps what it has read halves the time that a process takes to start.
write_script() {
  cat >"$run/script" <<END
export HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
set -e
modprobe -d '$kernel' overlay
mkdir /run/host /run/written
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=500000,cache=loose host /run/host
for folder in /etc /root /tmp /usr /var '$root'; do
  layers=\$(mktemp -d -p /run/written)
  mkdir "\$layers/new" "\$layers/work"
  mount -t overlay -o "lowerdir=/run/host\$folder,upperdir=\$layers/new,workdir=\$layers/work" overlay "\$folder"
done
mkdir -p /usr/lib/modules
mount -t tmpfs tmpfs /usr/lib/modules
ln -s '$kernel/lib/modules'/* /usr/lib/modules
# Two emulated processors can miss that a third party has patched the code that they run, and then
# trap for ever. What traffic control patches in is patched here, before there is any traffic.
tc qdisc add dev lo clsact
cd '$root'
dmesg -n err  # from here on, the console shows the command's output, and what is alarming
set +e
echo '$begin'
( $(printf '%q ' "$@") ) </dev/null 2>&1 | cat  # no terminal: no colours
status=\${PIPESTATUS[0]}
dmesg | sed -n '/cut here/,/end trace/p'  # what the kernel warned of
echo "\$status" >/run/guest/status
echo '$end'
END
}

boot() {
  local option options=(
    -q=-fsdev -q=local,id=host,path=/,security_model=none,multidevs=remap,readonly=on
    -q=-device -q=virtio-9p-pci,fsdev=host,mount_tag=host
  )
  # An oops ends the run. Emulation is slow enough without mitigations, and keeps the TSC in step.
  for option in oops=panic mitigations=off tsc=reliable; do
    options+=(--kopt "$option")
  done
  # timeout ends virtme-run and qemu: they are one process group.
  TMPDIR=$run exec timeout --kill-after=10 "$LIMIT" .venv/bin/virtme-run \
    --kimg "$kernel/boot/vmlinuz-${image#linux-image-}" --mods auto \
    --disable-kvm --force-9p --cpus 2 --memory 2G --user root \
    --rwdir "/run/guest=$run" --show-boot-console "${options[@]}" \
    --script-sh 'exec bash /run/guest/script' </dev/null
}

vm=
clean() {
  if [ -n "$vm" ]; then
    kill "$vm" || true
    wait "$vm" "$shown" || true
  fi
  rm -rf "$run"
}

install_packages
install_virtme
fetch_kernel

trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
rm -rf "$run"
mkdir "$run"
begin="guest: begin $RANDOM" end="guest: end $RANDOM"
write_script "$@"
mkfifo "$run/console"
log=$cache/console.log
tee "$log" <"$run/console" | sed -u "1,/^$begin/d; /^$end/,\$d; s/\r\$//" &
shown=$!
start=$SECONDS
boot >"$run/console" 2>&1 &
vm=$!
result=0
wait "$vm" || result=$?
wait "$shown" || true
vm=
if [ -s "$run/status" ]; then
  status=$(cat "$run/status")
  echo "guest: $(basename "$kernel"): exit status $status after $((SECONDS - start)) s"
  exit "$status"
fi
[ "$result" != 124 ] && [ "$result" != 137 ] || fail "stopped after $LIMIT s; all that the console showed is in .guest/console.log"
tail -n 40 "$log" >&2
fail "the kernel ended before the command did; its last messages are above, all of them in .guest/console.log"
