# SPDX-License-Identifier: Apache-2.0
"""Network devices: their queueing disciplines, and whether flowslot may take their place.

pyroute2 is imported only where it is needed. It runs in a thread of its own, because its event loop
and the daemon's do not go together.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from errno import ENODEV, ENOENT
from pathlib import Path
from typing import Any, TypeVar

from flowslotd.pace import guardian
from flowslotd.pace.pacer import PacingError
from flowslotd.pace.rtnetlink import add_root

DEFAULT_QDISC = Path("/proc/sys/net/core/default_qdisc")
QUEUE_LENGTH = "txqueuelen: 0 becomes 1000"
"""The kernel makes this change where a root qdisc is added."""
T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_IFF_UP, _IFF_LOOPBACK = 1, 8
_TIMEOUT_S = 1.0
"""The daemon's loop waits no longer."""
_LOOPBACK = 1
"""The index of `lo` in every network namespace."""
_MASTERS = {"bond", "team", "bridge", "openvswitch", "vrf"}


@dataclass(frozen=True, slots=True)
class Qdisc:
    """`handle` 0: the kernel's default, which nobody has asked for."""

    kind: str
    handle: int


@dataclass(frozen=True, slots=True)
class Device:
    """`root`: None where packets are not queued at all. `leaves`: the kinds of qdiscs below a root
    `mq`."""

    index: int
    name: str
    kind: str
    mtu: int
    queue_length: int
    """txqueuelen, packets."""
    root: Qdisc | None
    leaves: frozenset[str]
    ingress: str
    """`clsact`, `ingress` or nothing."""


class Devices:
    """The devices of one network namespace: that of the thread that makes this object."""

    def __init__(self) -> None:
        """Raises PacingError without pyroute2."""
        try:
            from pyroute2 import IPRoute  # noqa: PLC0415
        except ImportError as error:
            raise PacingError(
                "pacing by queueing disciplines needs pyroute2: pip install pyroute2"
            ) from error
        self._thread = ThreadPoolExecutor(1, "rtnetlink")
        try:
            self._route: Any = self._thread.submit(IPRoute).result()
        except Exception:
            self._thread.shutdown()
            raise

    def close(self) -> None:
        """To be called once."""
        with suppress(TimeoutError):
            self._thread.submit(self._route.close).result(_TIMEOUT_S)
        self._thread.shutdown(wait=False)

    def do(self, what: Callable[[Any], T]) -> T:
        """Call `what` with pyroute2's IPRoute. Raises OSError."""
        try:
            return self._thread.submit(what, self._route).result(_TIMEOUT_S)
        except Exception as error:
            code = getattr(error, "code", None)
            if isinstance(code, int):  # pyroute2's NetlinkError is no OSError
                raise OSError(code, str(error)) from error
            raise

    def all(self) -> list[Device]:
        """All devices, by index. Raises OSError."""
        return self.do(_all)

    def device(self, index: int) -> Device:
        """The device with this index. Raises OSError."""
        found = self.do(lambda route: _all(route, index))
        if not found:
            raise OSError(ENODEV, "it is gone")
        return found[0]

    def likely(self, addresses: Collection[str]) -> list[Device]:
        """The devices that a host's flows leave by: those with one of these addresses. Where there
        are none, all that are up, but for `lo`. Raises OSError."""
        indices = self.indices(addresses)
        return [device for device in self.all() if device.index in indices]

    def indices(self, addresses: Collection[str]) -> set[int]:
        """The indices of the same devices. Raises OSError."""
        return self.do(lambda route: _with(route, set(addresses)))

    def named(self, name: str) -> Device:
        """The device of this name. Raises PacingError where there is none, and OSError."""
        found = [device for device in self.all() if device.name == name]
        if not found:
            raise PacingError(f"there is no network device {name}")
        return found[0]


def _with(route: Any, addresses: set[str]) -> set[int]:
    have = {
        int(one["index"])
        for one in (route.get_addr() if addresses else ())
        if {one.get("IFA_LOCAL"), one.get("IFA_ADDRESS")} & addresses
    }
    return have or {
        int(link["index"])
        for link in route.get_links()
        if link["flags"] & _IFF_UP and not link["flags"] & _IFF_LOOPBACK
    }


def _all(route: Any, *index: int) -> list[Device]:
    qdiscs = list(route.get_qdiscs())  # the kernel can only list those of all devices
    return [
        _device(link, [qdisc for qdisc in qdiscs if qdisc["index"] == link["index"]])
        for link in route.get_links(*index)
    ]


def _device(link: Any, qdiscs: Iterable[Any]) -> Device:
    info = link.get("linkinfo")
    root, ingress, leaves = None, "", set()
    for qdisc in qdiscs:
        kind = str(qdisc.get("kind"))
        if qdisc["parent"] == guardian.CLSACT_ROOT:
            ingress = kind
        elif qdisc["parent"] == guardian.ROOT:
            root = None if kind == "noqueue" else Qdisc(kind, qdisc["handle"])
        else:
            leaves.add(kind)
    return Device(
        index=link["index"],
        name=str(link.get("ifname")),
        kind=str((info.get("kind") if info else "") or ""),
        mtu=int(link.get("mtu") or 0),
        queue_length=int(link.get("txqlen") or 0),
        root=root,
        leaves=frozenset(leaves),
        ingress=ingress,
    )


def refusal(device: Device, ours: int) -> str:
    """Why flowslot cannot put its root qdisc on a device, in one sentence. Empty: it can. `ours`:
    the handle of flowslot's own."""
    if device.kind in _MASTERS:
        return (
            f"{device.name} is a {device.kind}, whose ports do the queueing: name them in "
            "pacing.devices"
        )
    root = device.root
    if root is None or root.handle == ours:
        return ""
    if root.handle:
        handle = f"{root.handle >> 16:x}:"
        return f"{device.name} has a root qdisc of its own, {root.kind} {handle}, which stays"
    try:
        default = DEFAULT_QDISC.read_text().strip()
    except OSError:  # only the first network namespace has this file
        return ""
    others = sorted(({root.kind} | device.leaves) - {"mq", "noqueue", default})
    if others:  # when our qdisc goes, the kernel puts its default there
        return (
            f"{device.name} has {others[0]}, which would come back as {default}: "
            "net.core.default_qdisc has changed since"
        )
    return ""


def root_changes(device: Device, handle: int, name: str) -> list[str]:
    """What a root qdisc of ours changes, one sentence each. Raises PacingError with the reason
    where there can be none."""
    why = refusal(device, handle)
    if why:
        raise PacingError(why)
    default = device.root.kind if device.root is not None else "noqueue"
    changes = [f"root qdisc {name} in place of the kernel's default ({default})"]
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
    for kind in kinds:
        if add_root(_LOOPBACK, 0, kind) == ENOENT:
            return f"this kernel has no sch_{kind}: modprobe it, or use a kernel with it"
    return ""
