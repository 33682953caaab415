# SPDX-License-Identifier: Apache-2.0
"""Network devices of the caller's network namespace: their queueing disciplines, and whether
flowslot may take their place."""

import ctypes
import struct
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from errno import ENODEV, ENOENT
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from flowslot.model.settings import one_of
from flowslot.model.topology_file import normal_ip
from flowslotd.pace import guardian
from flowslotd.pace.pacer import PacingError
from flowslotd.pace.rtnetlink import Rtnetlink, attributes, each, qdisc

DEFAULT_QDISC = Path("/proc/sys/net/core/default_qdisc")
QUEUE_LENGTH = "txqueuelen: 0 becomes 1000"
"""The kernel makes this change where a root qdisc is added."""
_CLONE_NEWNET = 0x40000000
_UP, _LOOPBACK_FLAG = 1, 8
_UP_LOOPBACK = _UP | _LOOPBACK_FLAG
"""Flags of a device: IFF_UP, IFF_LOOPBACK."""
_GETLINK, _GETADDR, _GETQDISC = 18, 22, 38
_LINK = struct.Struct("=BxHiII")  # struct ifinfomsg
_NAME, _MTU, _TXQLEN, _LINKINFO, _INFO_KIND = 3, 4, 13, 18, 1
_PROPERTIES, _ALTNAME = 52, 53
_ADDR = struct.Struct("=BBBBi")  # struct ifaddrmsg
_ADDRESS, _LOCAL = 1, 2
_KIND = 1
_LOOPBACK = 1
"""The index of `lo` in every network namespace."""
_MASTERS = {"bond", "team", "bridge", "openvswitch", "vrf"}


@dataclass(frozen=True, slots=True)
class Device:
    """`root`: the kind of its root qdisc; `noqueue` where packets are not queued at all. `handle`:
    of that; 0: the kernel's default, which nobody has asked for. `leaves`: the kinds of qdiscs
    below a root `mq`."""

    index: int
    name: str
    kind: str
    mtu: int
    queue_length: int
    """txqueuelen, packets."""
    root: str
    handle: int
    leaves: frozenset[str]
    ingress: str
    """`clsact`, `ingress` or nothing."""


class Outline(NamedTuple):
    """Of a device: its name, then its alternative names; and whether anything leaves by it (not by
    `lo` or a dummy, which only hold addresses)."""

    names: tuple[str, ...]
    wired: bool


def every(index: int = 0) -> list[Device]:
    """All devices, or the one with this index. Raises OSError."""
    qdiscs = guardian.found(_GETQDISC)
    return [
        _device(at, fields, [one for one in qdiscs if one.device == at])
        for at, _, fields in _links()
        if index in {0, at}
    ]


def device(index: int) -> Device:
    """The device with this index. Raises OSError."""
    found = every(index)
    if not found:
        raise OSError(ENODEV, "it is gone")
    return found[0]


def named(name: str) -> Device:
    """The device of this name, or of this alternative name. Raises PacingError where there is none,
    and OSError."""
    known = outlines()
    for index, its in known.items():
        if name in its.names:
            return device(index)
    hint = one_of(name, (one for its in known.values() for one in its.names))
    raise PacingError(f"there is no network device {name}; {hint}")


def outlines() -> dict[int, Outline]:
    """All devices, by their indices. Raises OSError."""
    return {
        index: Outline(
            (
                _text(fields[_NAME]),
                *(
                    _text(one)
                    for kind, one in each(fields.get(_PROPERTIES, b""))
                    if kind == _ALTNAME
                ),
            ),
            not (flags & _LOOPBACK_FLAG or _kind(fields) == "dummy"),
        )
        for index, flags, fields in _links()
    }


def holders() -> dict[str, set[int]]:
    """All addresses of this machine, and the indices of the devices that have them. Raises
    OSError."""
    found: dict[str, set[int]] = {}
    for one in guardian.dump(_GETADDR, _ADDR.pack(0, 0, 0, 0, 0)):
        fields = attributes(one[_ADDR.size :])
        # On a point-to-point device, the other attribute is the peer's.
        address = ip_address(fields.get(_LOCAL) or fields[_ADDRESS])
        found.setdefault(normal_ip(str(address)), set()).add(int(_ADDR.unpack_from(one)[-1]))
    return found


def unaddressed(name: str) -> PacingError:
    """Why a device is left alone that flows leave by, though none of `indices`."""
    return PacingError(
        f"{name} has none of this host's addresses: if flows are to be paced there, name it in "
        "pacing.devices"
    )


def indices(addresses: Collection[str]) -> set[int]:
    """The indices of the devices that a host's flows leave by: those with one of these addresses.
    No addresses: all that are up. Nothing leaves by `lo`. Raises OSError."""
    if not addresses:
        return {index for index, flags, _ in _links() if flags & _UP_LOOPBACK == _UP}
    have, none = holders(), set[int]()
    return none.union(*(have.get(address, none) for address in addresses)) - {_LOOPBACK}


def _links() -> list[tuple[int, int, dict[int, bytes]]]:
    """Index, flags and attributes of each device."""
    found = []
    for one in guardian.dump(_GETLINK, _LINK.pack(0, 0, 0, 0, 0)):
        _, _, index, flags, _ = _LINK.unpack_from(one)
        found.append((index, flags, attributes(one[_LINK.size :])))
    return found


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="replace")


def _kind(fields: dict[int, bytes]) -> str:
    return _text(attributes(fields.get(_LINKINFO, b"")).get(_INFO_KIND, b""))


def _device(index: int, fields: dict[int, bytes], qdiscs: list[guardian.Found]) -> Device:
    root, handle, ingress, leaves = "noqueue", 0, "", set()
    for one in qdiscs:
        kind = _text(attributes(one.attributes)[_KIND])
        if one.parent == guardian.CLSACT_ROOT:
            ingress = kind
        elif one.parent == guardian.ROOT:
            root, handle = kind, one.handle
        else:
            leaves.add(kind)
    mtu, queue_length = (struct.unpack("=I", fields[field])[0] for field in (_MTU, _TXQLEN))
    return Device(
        index=index,
        name=_text(fields[_NAME]),
        kind=_kind(fields),
        mtu=mtu,
        queue_length=queue_length,
        root=root,
        handle=handle,
        leaves=frozenset(leaves),
        ingress=ingress,
    )


def root_changes(device: Device, handle: int, name: str) -> list[str]:
    """What a root qdisc of ours, with this handle, changes on a device, one sentence each. Raises
    PacingError with the reason where there can be none."""
    if device.kind in _MASTERS:
        raise PacingError(
            f"{device.name} is a {device.kind}, whose ports do the queueing: name them in "
            "pacing.devices"
        )
    if device.handle not in {0, handle}:
        owned = f"{device.root} {device.handle >> 16:x}:"
        raise PacingError(f"{device.name} has a root qdisc of its own, {owned}, which stays")
    if not device.handle and DEFAULT_QDISC.exists():
        # Only the first network namespace has this file. When our qdisc goes, the kernel puts its
        # default there.
        default = DEFAULT_QDISC.read_text().strip()
        for other in sorted(({device.root} | device.leaves) - {"mq", "noqueue", default}):
            raise PacingError(
                f"{device.name} has {other}, which would come back as {default}: "
                "net.core.default_qdisc has changed since"
            )
    changes = [f"root qdisc {name} in place of the kernel's default ({device.root})"]
    return changes if device.queue_length else [*changes, QUEUE_LENGTH]


def qdisc_trial(*kinds: str) -> str | None:
    """Why the kernel cannot put qdiscs of these kinds on a device, in one sentence. Empty: it can.
    None: not tried, for want of CAP_SYS_ADMIN. The trial takes place in a network namespace of its
    own, which ends with its thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_qdiscs, kinds).result()


def _try_qdiscs(kinds: tuple[str, ...]) -> str | None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        return None
    with closing(Rtnetlink()) as rtnetlink:
        for kind in kinds:
            if ENOENT in rtnetlink.put([qdisc(kind, _LOOPBACK)]).values():
                return f"this kernel has no sch_{kind}: modprobe it, or use a kernel with it"
    return ""
