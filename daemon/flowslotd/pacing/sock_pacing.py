# SPDX-License-Identifier: Apache-2.0
"""Pacing by SO_MAX_PACING_RATE, set from outside on the jobs' sockets (pidfd_getfd).

For kernels where our congestion control does not load. The rate is a ceiling over whatever
congestion control the job uses, without top-up, and there are no kernel events: `closed` and
`drained` are noticed when counters are read. The kernel keeps a socket's rate when the daemon
dies, so a guardian process undoes it (guardian.py).
"""

import mmap
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from socket import IPPROTO_TCP, TCP_INFO, socket

import numpy as np

from flowslotd.pacing import guardian
from flowslotd.pacing.base import Entries, FlowCounters, KernelEvent, PacingError
from flowslotd.pacing.guard import Guard

MIN_RATE = 256_000
"""As in bpf/consts.h: a held flow must notice a raised rate soon."""
ROWS = 4096
_INFO = struct.Struct("=120xQ")  # tcpi_bytes_acked


@dataclass(slots=True)
class _Flow:
    pid: int
    fd: int
    row: int
    rate: int = guardian.UNLIMITED
    target: int | None = None


class SocketPacer:
    """See `Pacer`."""

    name = "socket"
    lends = False
    congestion_control = ""

    def __init__(self, instance: str) -> None:
        self._flows: dict[int, _Flow] = {}
        self._free = list(range(ROWS - 1, -1, -1))
        self._happened: list[KernelEvent] = []
        self._guard: Guard | None = None
        self._memory = -1
        self._table: mmap.mmap | None = None
        self._freed = 0

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Try the system call, start the guardian. Raises PacingError."""
        try:
            with socket() as probe:
                cookie = int.from_bytes(probe.getsockopt(1, 57, 8), sys.byteorder)
                with guardian.borrow(os.getpid(), probe.fileno(), cookie):
                    pass
        except OSError as error:
            raise PacingError(f"pidfd_getfd does not work here: {error}") from error
        self._memory = os.memfd_create("flowslot-guardian", os.MFD_CLOEXEC)
        os.truncate(self._memory, guardian.HEADER.size + ROWS * guardian.ROW.size)
        self._table = mmap.mmap(self._memory, 0)
        self._guard = Guard(table=self._memory)

    def close(self) -> None:
        """Unpace all flows."""
        for cookie in list(self._flows):
            self._drop(cookie)
        if self._guard is not None:
            self._guard.close()
            self._guard = None
        if self._table is not None:
            self._table.close()
            self._table = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1
        self._freed = 0

    # -- rates --------------------------------------------------------------------------------

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """See `Pacer`. Whether it is so is checked each time the socket is touched."""
        flow = self._flows.get(cookie)
        if flow is not None and (flow.pid, flow.fd) != (pid, fd):
            self._drop(cookie)
            flow = None
        if flow is None and self._free:
            self._flows[cookie] = _Flow(pid, fd, self._free.pop())

    def apply(self, entries: Entries, deadline_ns: int) -> int:
        """See `Pacer`. Some five system calls per changed flow; the deadline is one for all."""
        self.refresh(deadline_ns)
        written = 0
        rates = np.minimum(entries["reserved"], entries["ceiling"])
        for cookie, wanted in zip(entries["cookie"].tolist(), rates.tolist(), strict=True):
            flow = self._flows.get(cookie)
            rate = max(round(wanted), MIN_RATE)
            if flow is not None and flow.rate != rate:
                written += self._pace(cookie, flow, rate)
        return written

    def refresh(self, deadline_ns: int) -> None:
        """See `Pacer`."""
        if self._table is None:
            return
        if self._guard is not None and not self._guard.alive():
            self._guard.close()
            self._guard = Guard(table=self._memory)
        struct.pack_into("=Q", self._table, 0, deadline_ns)
        freed = guardian.HEADER.unpack_from(self._table)[1]
        if freed != self._freed:  # we were late, and all sockets are unpaced
            self._freed = freed
            for flow in self._flows.values():
                flow.rate = guardian.UNLIMITED

    def release(self, cookie: int) -> None:
        """See `Pacer`. The flow stays attached."""
        flow = self._flows.get(cookie)
        if flow is not None:
            flow.target = None
            if flow.rate != guardian.UNLIMITED:
                self._pace(cookie, flow, guardian.UNLIMITED)

    def _pace(self, cookie: int, flow: _Flow, rate: int) -> bool:
        # The guardian must know before there is something to undo.
        self._list(flow, cookie)
        try:
            with guardian.borrow(flow.pid, flow.fd, cookie) as sock:
                guardian.set_rate(sock, rate)
        except OSError:
            self._lost(cookie)
            return False
        flow.rate = rate
        if rate == guardian.UNLIMITED:
            self._list(flow, 0)
        return True

    def _list(self, flow: _Flow, cookie: int) -> None:
        assert self._table is not None
        offset = guardian.HEADER.size + flow.row * guardian.ROW.size
        guardian.ROW.pack_into(self._table, offset, cookie, flow.pid, flow.fd)

    def _drop(self, cookie: int) -> None:
        self.release(cookie)
        self._forget(cookie)

    def _forget(self, cookie: int) -> None:
        flow = self._flows.pop(cookie, None)
        if flow is not None:
            self._list(flow, 0)
            self._free.append(flow.row)

    def _lost(self, cookie: int) -> None:
        self._forget(cookie)
        self._happened.append(KernelEvent("closed", cookie))

    # -- what the kernel tells ------------------------------------------------------------------

    def counters(self) -> FlowCounters:
        """See `Pacer`. Some five system calls per flow."""
        read = sorted(self._read())
        cookies = np.array([cookie for cookie, _ in read], np.uint64)
        return FlowCounters(cookies, np.array([acked for _, acked in read], np.int64))

    def _read(self) -> Iterator[tuple[int, int]]:
        for cookie, flow in list(self._flows.items()):
            try:
                with guardian.borrow(flow.pid, flow.fd, cookie) as sock:
                    info = sock.getsockopt(IPPROTO_TCP, TCP_INFO, _INFO.size)
            except OSError:
                self._lost(cookie)
                continue
            (acked,) = _INFO.unpack(info)
            yield cookie, acked
            if flow.target is not None and acked >= flow.target:
                flow.target = None
                self._happened.append(KernelEvent("drained", cookie, acked))

    def event_fd(self) -> int | None:
        """There is none: poll."""
        return None

    def events(self) -> list[KernelEvent]:
        """`closed` and `drained`, as noticed by `counters()` and `apply()`; no addresses."""
        happened, self._happened = self._happened, []
        return happened

    def lend(self, donors: Mapping[int, int]) -> None:
        """See `Pacer`: flows are told of a change by the daemon alone."""

    def watch(self, cookie: int, acked_target: int) -> None:
        """See `Pacer`; noticed by `counters()`."""
        if cookie in self._flows:
            self._flows[cookie].target = acked_target
