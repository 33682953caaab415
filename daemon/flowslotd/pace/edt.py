# SPDX-License-Identifier: Apache-2.0
"""Pacing by earliest departure times (bpf/edt.bpf.c): a program at clsact's egress says when each
packet of a flow may leave, and fq lets it go then.

For TCP and UDP. Setting rates for the program takes no system call. Each TCP socket's own pacing is
set a little higher, so that TCP hands down little at once (SmallBursts). At a flow's deadline the
program stops pacing it. When the daemon dies, a guardian process removes the program from devices.
"""

import sys
from collections.abc import Sequence
from functools import partial
from socket import socket

import numpy as np

from flowslotd.pace import guardian
from flowslotd.pace.attached import GUARDED
from flowslotd.pace.devices import Device, root_changes
from flowslotd.pace.egress import Change
from flowslotd.pace.libbpf import TCX_EGRESS, Object, attached, read
from flowslotd.pace.pacer import PacingError, Traits
from flowslotd.pace.rtnetlink import clsact, egress_filter, root_fq
from flowslotd.pace.sockopt import SocketPacer
from flowslotd.sockets import is_tcp

OBJECT = "edt.bpf.o"
SLOTS = 4096
CTL = np.dtype([("rate", "u8"), ("deadline_ns", "u8")])
STAT = np.dtype([("next_ns", "u8"), ("last_ns", "u8"), ("rate", "u8"), ("bytes", "u8")])
"""As in bpf/edt.h."""
ABOVE = 1.25
"""The sockets' own pacing, as a multiple of the rate."""
PREFERENCE = 1
"""Of our filter, plus the daemon's number. A filter with a lower one may decide before ours."""


class EdtPacer(SocketPacer):
    """See `Pacer`."""

    name = "edt"
    traits = Traits(
        how="departure times by a BPF program at clsact's egress, kept by fq",
        protocols=("tcp", "udp"),
        granularity="1 ms of the rate, at least two packets (UDP: a packet or super-packet)",
        resume="what one burst takes at the old rate (UDP: what its send buffer holds)",
        changes=(
            ("device", "qdisc clsact and a BPF filter at its egress where flows leave"),
            ("device", "root qdisc fq f520: for the kernel's default there, unless it is fq"),
            ("sockets", "SO_MAX_PACING_RATE of the flows' sockets, from outside"),
            ("sysctl", "net.ipv4.tcp_tso_rtt_log = 0, unless pacing.sysctls is off"),
            GUARDED,
        ),
    )

    qdiscs = "fq", "clsact"

    def __init__(self, devices: Sequence[str] = (), sysctls: bool = True) -> None:
        super().__init__(devices, sysctls, Change(guardian.FILTER, changes_to, self._add))
        self._object: Object | None = None
        self._ctl = np.zeros(SLOTS, CTL)
        self._stat = np.zeros(SLOTS, STAT)
        self._slots: dict[int, int] = {}
        self._free = list(range(SLOTS - 1, -1, -1))
        self._udp: set[int] = set()

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Load the program and set named devices up. Raises PacingError."""
        elf = read(OBJECT)
        try:
            self._object = Object(elf)
            self._object.load()
        except OSError as error:
            raise PacingError(f"the kernel refuses {OBJECT}: {error}") from error
        self._ctl = self._object.table("edt_ctl", CTL, SLOTS)
        self._stat = self._object.table("edt_stat", STAT, SLOTS)
        super().open()

    def close(self) -> None:
        """See `AttachedPacer`."""
        self._ctl["deadline_ns"] = 0
        super().close()
        if self._object is not None:
            self._object.close()
            self._object = None

    # -- devices ------------------------------------------------------------------------------

    def _add(self, device: Device) -> None:
        assert self._egress is not None and self._object is not None
        index, number = device.index, self._egress.instance.number
        filters = guardian.filters(index, guardian.EGRESS)
        ours = any(guardian.OWN.encode() in one.attributes for one in filters)
        own = guardian.OWN if ours or not device.ingress else ""
        name = f"{guardian.FILTER_NAME}{number:x}{own}"
        program = self._object.program("flowslot_edt")
        added, rtnetlink = False, self._egress.rtnetlink
        try:
            if not _has_fq(device):
                rtnetlink.make(root_fq(index))
            if not device.ingress:
                rtnetlink.make(clsact(index))
                added = True
            rtnetlink.make(egress_filter(index, program, name, PREFERENCE + number))
        except OSError:  # leave nothing half done
            guardian.remove_filter(index, number)
            if added:
                guardian.remove_clsact(index)
            raise

    # -- rates --------------------------------------------------------------------------------

    def _set(self, wanted: list[tuple[int, int]], deadline_ns: int) -> int:
        written = 0
        for cookie, rate in wanted:
            slot = self._slots.get(cookie)
            if slot is None:
                slot = self._touch(cookie, partial(self._take, cookie))
            if slot is None or self._ctl["rate"][slot] == rate:
                continue
            # UDP is paced by the program alone: the sockets keep their own rate.
            if cookie in self._udp or self._pace(cookie, round(rate * ABOVE)):
                self._ctl[slot] = rate, deadline_ns
                written += 1
        return written

    def _extend(self, deadline_ns: int) -> None:
        super()._extend(deadline_ns)
        self._ctl["deadline_ns"][list(self._slots.values())] = deadline_ns

    def _take(self, cookie: int, sock: socket) -> int:
        """A slot for a flow that has none. Raises PacingError and OSError."""
        assert self._egress is not None and self._object is not None
        if not self._free:
            raise PacingError(f"{SLOTS} flows are paced already")
        self._egress.devices_of(sock)
        if not is_tcp(sock):
            self._udp.add(cookie)
        slot = self._free[-1]
        self._ctl[slot] = 0, 0
        self._stat[slot] = 0, 0, 0, 0
        self._object.map("edt_slots").put(_bytes(cookie, 8), _bytes(slot, 4))
        self._slots[cookie] = self._free.pop()
        return slot

    def _gone(self, cookie: int, *, undone: bool = False) -> None:
        self._udp.discard(cookie)
        slot = self._slots.pop(cookie, None)
        if slot is not None:
            self._ctl[slot] = 0, 0
            self._free.append(slot)
            if self._object is not None:
                self._object.map("edt_slots").remove(_bytes(cookie, 8))
        super()._gone(cookie, undone=undone)

    def _udp_sent(self) -> dict[int, int]:
        return {cookie: int(self._stat["bytes"][slot]) for cookie, slot in self._slots.items()}


def changes_to(device: Device, number: int) -> list[str]:
    """What pacing by the daemon with this number changes on a device, one sentence each. Raises
    PacingError with the reason where it cannot be, and OSError."""
    if device.ingress == "ingress":
        raise PacingError(
            f"{device.name} has an ingress qdisc, which stays, and clsact takes its place"
        )
    if programs := attached(device.index, TCX_EGRESS):
        listed = ", ".join(map(str, programs))
        raise PacingError(
            f"{device.name} has BPF programs at tcx/egress (by id: {listed}), which stay, and may "
            "decide before ours"
        )
    first = min(
        (
            one.info >> 16
            for one in guardian.filters(device.index, guardian.EGRESS)
            if one.handle and guardian.FILTER_NAME.encode() not in one.attributes
        ),
        default=2**16,
    )
    if first <= PREFERENCE + number:
        raise PacingError(
            f"{device.name} has a filter at its egress with preference {first}, which stays, "
            "and may decide before ours"
        )
    changes = []
    if not _has_fq(device):
        changes += root_changes(device, guardian.FQ, "fq f520:")
    if not device.ingress:
        changes.append("qdisc clsact")
    return [*changes, "a BPF filter at the egress of clsact"]


def _has_fq(device: Device) -> bool:
    """Whether fq, which keeps packets until their departure times, is there already."""
    return device.root == "fq" or (device.root == "mq" and device.leaves == {"fq"})


def _bytes(number: int, size: int) -> bytes:
    return number.to_bytes(size, sys.byteorder)
