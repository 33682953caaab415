# SPDX-License-Identifier: Apache-2.0
"""Pacing by a class of HTB for each flow, on the devices that flows leave by.

For TCP and UDP, on any kernel. A socket's packets find their class by SO_PRIORITY, which is set
through pidfd_getfd. So no filter is needed, and all other packets pass by HTB's direct queue. Below
each class a TBF cuts super-packets (see `cutter`). When the daemon dies, a guardian process removes
all of it.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from socket import SO_PRIORITY, SOL_SOCKET, socket

from flowslotd.pace import guardian
from flowslotd.pace.attached import GUARDED, AttachedPacer
from flowslotd.pace.devices import Device, root_changes
from flowslotd.pace.egress import Change
from flowslotd.pace.pacer import PacingError, Traits
from flowslotd.pace.rtnetlink import Request, class_counts, cutter, htb_class, packed, root_htb
from flowslotd.sockets import TIMESTAMPS, is_tcp, look

MOST_CLASSES = guardian.KEEPER - 1
"""Of one daemon: minors have 16 bits, four of them are the daemon's number."""
BURST_S = 0.002
"""How much a class may catch up: its timer may fire so late without loss of rate."""
PACKET = 9_100
"""Bytes. Packets up to this size, headers included, are never cut: TBF drops a packet that is
larger than its burst, and a device's MTU can be raised while a flow lives."""
SUPER_PACKET = 70_000
"""Bytes. No super-packet is larger, headers included."""
WHOLE_S = 0.001
"""Super-packets are cut for flows that need longer than this to send one."""
WAITING = 1 << 24
"""Bytes that may wait below a class. Sockets bound what they have in queues themselves."""
UNLIMITED = 125 * 10**9
"""Bytes/s."""
ENOUGH = 4
"""From so many packets between two looks, the size of a flow's packets is learnt."""
DRAIN_S = 0.1
"""So long, packets that still wait may leave before all is removed."""

_Counts = Mapping[tuple[int, int], tuple[int, int, int]]
"""See `class_counts`."""


@dataclass(slots=True)
class _Flow:
    minor: int
    devices: tuple[int, ...]
    mtu: int
    """The largest of the devices'."""
    headers: int
    """Bytes of each packet."""
    payload: float
    """Bytes of each packet: known for TCP, learnt for UDP."""
    udp: bool
    rate: int = 0
    """Payload bytes/s; 0: not paced yet."""
    seen: tuple[int, int] = (0, 0)
    """For UDP: bytes and packets (modulo 2^32) that the class had sent at the last look."""
    sent: int = 0
    """Payload bytes sent by that look."""


class HtbPacer(AttachedPacer):
    """See `Pacer`."""

    name = "htb"
    traits = Traits(
        how="a class of HTB for each flow, found by the socket's priority",
        protocols=("tcp", "udp"),
        granularity="2 ms of the rate, at least 9 kB",
        resume="what 9 kB take at the old rate",
        changes=(
            ("device", "root qdisc htb f510: for the kernel's default where flows leave"),
            ("device", "below it a class and a TBF for each flow"),
            ("sockets", "SO_PRIORITY of the flows' sockets, from outside"),
            GUARDED,
        ),
    )

    qdiscs = "htb", "tbf"

    def __init__(self, devices: Sequence[str] = ()) -> None:
        super().__init__(devices, Change(guardian.CLASSES, changes_to, self._add))
        self._flows: dict[int, _Flow] = {}
        self._free = _minors()

    # -- life ---------------------------------------------------------------------------------

    def close(self) -> None:
        """See `AttachedPacer`."""
        devices = {index for flow in self._flows.values() for index in flow.devices}
        for cookie in list(self._flows):
            self.release(cookie)
        end = time.monotonic() + DRAIN_S
        with suppress(OSError):
            while time.monotonic() < end and self._waits(devices):
                time.sleep(0.002)
        super().close()

    def _waits(self, devices: set[int]) -> bool:
        """Whether there are packets in our classes. Raises OSError."""
        return any(
            waiting and handle >> 12 == self._handle(0) >> 12
            for (_, handle), (_, _, waiting) in class_counts(devices).items()
        )

    def _add(self, device: Device) -> None:
        assert self._egress is not None
        if device.handle != guardian.HTB:
            self._egress.rtnetlink.make(root_htb(device.index))
        keeper = self._handle(guardian.KEEPER)
        self._egress.rtnetlink.make(htb_class(device.index, keeper, UNLIMITED, SUPER_PACKET))

    # -- rates --------------------------------------------------------------------------------

    def _set(self, wanted: list[tuple[int, int]], deadline_ns: int) -> int:
        """One system call for 64 changes."""
        changed = []
        for cookie, rate in wanted:
            flow = self._flows.get(cookie) or self._take(cookie)
            if flow is not None and flow.rate != rate:
                changed.append((cookie, rate))
        self._write(changed)
        return sum(cookie in self._flows for cookie, _ in changed)

    def _take(self, cookie: int) -> _Flow | None:
        """A class for a flow that has none. None: the flow cannot be paced."""
        flow = self._touch(cookie, partial(self._classified, cookie))
        if flow is not None:
            self._flows[cookie] = flow
        return flow

    def _classified(self, cookie: int, sock: socket) -> _Flow:
        """Raises PacingError and OSError."""
        assert self._egress is not None
        if not any(self._free):
            raise PacingError(f"{MOST_CLASSES} flows have classes already")
        devices = self._egress.devices_of(sock)
        priority = sock.getsockopt(SOL_SOCKET, SO_PRIORITY) & 0xFFFFFFFF
        if priority >> 16 == guardian.HTB >> 16:  # left behind: the application's own is lost
            priority = 0
        free = self._free[priority & 15] or next(filter(None, self._free))
        flow = _described(sock, free[-1], devices)
        if flow.udp:  # the class may have served another flow before
            flow.seen = self._counts(flow, class_counts(flow.devices))
        self._list(cookie, SO_PRIORITY, 4, priority)
        free.pop()
        return flow

    def _write(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Set rates (payload bytes/s) of flows that have classes. Those that cannot be paced are
        let go."""
        if not wanted or self._egress is None:
            return
        new = [cookie for cookie, _ in wanted if not self._flows[cookie].rate]
        messages = [
            (cookie, message)
            for cookie, rate in wanted
            for message in self._messages(self._flows[cookie], rate)
        ]
        try:
            refused = self._egress.rtnetlink.put([message for _, message in messages])
            failed = {messages[k][0] for k in refused}
        except OSError:  # no answer: any of them may have failed
            failed = {cookie for cookie, _ in wanted}
        # Their devices were changed: all flows there are let go until they are applied again.
        anew = {index for cookie in failed for index in self._flows[cookie].devices}
        for cookie in [c for c, flow in self._flows.items() if anew & set(flow.devices)]:
            self._let_go(cookie)
        if anew:
            self._egress.forget(anew)
        for cookie in new:
            if cookie in self._flows and not self._touch(cookie, partial(self._direct, cookie)):
                self._let_go(cookie)

    def _let_go(self, cookie: int) -> None:
        """Let a flow go until it is applied again."""
        self._gone(cookie)
        self._in_force = False

    def _messages(self, flow: _Flow, rate: int) -> list[Request]:
        cut = not flow.rate or _cuts(flow.rate) != _cuts(rate)
        flow.rate = rate
        wire = round(rate * (1 + flow.headers / flow.payload))
        handle = self._handle(flow.minor)
        burst = max(2 * (round(flow.payload) + flow.headers), round(wire * BURST_S))
        whole = max(PACKET, flow.mtu + 100)
        most = whole if _cuts(rate) else max(whole, SUPER_PACKET)
        messages = []
        for index in flow.devices:
            messages.append(htb_class(index, handle, wire, burst))
            if cut:
                messages.append(cutter(index, handle, most, WAITING))
        return messages

    def _direct(self, cookie: int, sock: socket) -> bool:
        """Direct the packets of a flow's socket into its class. Raises OSError."""
        guardian.set_option(sock, SO_PRIORITY, 4, self._handle(self._flows[cookie].minor))
        return True

    def _gone(self, cookie: int, *, undone: bool = False) -> None:
        """The flow's class sends what it still has, and may serve another flow."""
        flow = self._flows.pop(cookie, None)
        if flow is not None:
            self._free[flow.minor & 15].append(flow.minor)
            if flow.rate and not undone and self._egress is not None:
                handle = self._handle(flow.minor)
                free = [htb_class(index, handle, UNLIMITED, SUPER_PACKET) for index in flow.devices]
                with suppress(OSError):
                    self._egress.rtnetlink.put(free)
        # Only then: what the socket sends from now on passes by the class.
        super()._gone(cookie, undone=undone)

    def _handle(self, minor: int) -> int:
        assert self._egress is not None
        return guardian.HTB | self._egress.instance.number << 12 | minor

    # -- what the kernel tells ------------------------------------------------------------------

    def _udp_sent(self) -> dict[int, int]:
        """Payload bytes of UDP flows. Also learns how large their packets are."""
        flows = {cookie: flow for cookie, flow in self._flows.items() if flow.udp}
        try:
            counts = class_counts({index for flow in flows.values() for index in flow.devices})
        except OSError:
            return {}
        sent, wanted = {}, []
        for cookie, flow in flows.items():
            now, before = self._counts(flow, counts), flow.seen
            packets = (now[1] - before[1]) % 2**32
            payload = now[0] - before[0] - packets * flow.headers
            flow.seen, flow.sent = now, flow.sent + payload
            sent[cookie] = flow.sent
            if packets >= ENOUGH and flow.rate:
                was, flow.payload = flow.payload, max(payload / packets, 1.0)
                if abs(flow.payload / was - 1) > 0.02:
                    wanted.append((cookie, flow.rate))
        self._write(wanted)
        return sent

    def _counts(self, flow: _Flow, counts: _Counts) -> tuple[int, int]:
        classes = ((index, self._handle(flow.minor)) for index in flow.devices)
        known = [counts[one] for one in classes if one in counts]
        return sum(count[0] for count in known), sum(count[1] for count in known)


def _minors() -> list[list[int]]:
    """Free minors by their last four bits. Devices below may take these bits for a priority, so a
    flow gets a minor with the bits of its socket's own priority, as long as there are such."""
    return [[n for n in range(MOST_CLASSES, 0, -1) if n & 15 == low] for low in range(16)]


def _cuts(rate: int) -> bool:
    return rate * WHOLE_S < SUPER_PACKET


def _described(sock: socket, minor: int, devices: tuple[Device, ...]) -> _Flow:
    """A flow from its socket. Raises OSError, and PacingError for a socket without a peer."""
    try:
        peer = packed(sock.getpeername()[0])
    except OSError as error:
        raise PacingError("it is not connected") from error
    where = tuple(device.index for device in devices), max(device.mtu for device in devices)
    headers = 14 + (20 if len(peer) == 4 else 40)
    if not is_tcp(sock):
        return _Flow(minor, *where, headers + 8, 1500 - headers - 8 + 14, udp=True)
    info = look(sock)
    options = 12 if info.options & TIMESTAMPS else 0
    return _Flow(minor, *where, headers + 20 + options, max(info.mss, 1), udp=False)


def changes_to(device: Device, number: int) -> list[str]:
    """What pacing changes on a device, whatever the daemon's number, one sentence each. Raises
    PacingError with the reason where it cannot be."""
    each = "below it a class and a TBF for each flow"
    if device.handle == guardian.HTB:
        return ["the root qdisc htb f510: is flowslot's already", each]
    return [*root_changes(device, guardian.HTB, "htb f510:"), each]
