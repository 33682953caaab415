# SPDX-License-Identifier: Apache-2.0
"""What the back ends have in common that pace sockets of other processes.

Jobs have reported the sockets. Each is reached through pidfd_getfd, for a moment: no descriptor is
kept.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from socket import socket
from typing import TypeVar

import numpy as np

from flowslot_shm.writer import cookie_of
from flowslotd.clock import monotonic
from flowslotd.flows.counters import FlowCounters
from flowslotd.pace import guardian
from flowslotd.pace.devices import qdisc_trial
from flowslotd.pace.egress import Change, Egress
from flowslotd.pace.pacer import Entries, KernelEvent, Pacer, PacingError, Where
from flowslotd.pace.undo import UndoTable
from flowslotd.sockets import GONE, is_tcp, look

GUARDED: tuple[Where, str] = ("kernel", "a guardian process, which undoes the rest")
"""A change to the host that all of them make."""
T = TypeVar("T")


@dataclass(slots=True)
class _Socket:
    pid: int
    fd: int
    target: int | None = None


class AttachedPacer(Pacer, ABC):
    """See `Pacer`. There are no kernel events and no top-up: `closed` and `drained` are noticed
    when a socket is looked at. When the daemon dies, the kernel keeps what was set, and a guardian
    process undoes it (guardian.py)."""

    qdiscs: tuple[str, ...] = ()
    """Kinds that this back end puts on devices."""

    def __init__(self, devices: Sequence[str] = (), change: Change | None = None) -> None:
        """`devices`: see `make_pacer`. `change`: what is done to them, if anything."""
        self._names, self._change = devices, change
        self._egress: Egress | None = None  # of back ends that set devices up
        self._undo = UndoTable()
        self._sockets: dict[int, _Socket] = {}  # by cookie
        self.noticed: list[KernelEvent] = []
        self._why: dict[int, str] = {}  # reasons why flows are not paced
        self._in_force = True

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Check what the kernel has, start the guardian, and set named devices up. Raises
        PacingError."""
        try:
            with socket() as own, guardian.borrow(os.getpid(), own.fileno(), cookie_of(own)):
                pass
        except OSError as error:
            raise PacingError(f"pidfd_getfd does not work here: {error}") from error
        if self._change is not None:
            if lacking := qdisc_trial(*self.qdiscs):
                raise PacingError(lacking)
            self._egress = Egress(self._names, self._undo, self._change)
        self._undo.open(self._keep())
        if self._egress is not None:
            self._egress.ensure_named()

    def _keep(self) -> tuple[int, ...]:
        """Descriptors for the guardian."""
        return () if self._egress is None else (self._egress.instance.held.fileno(),)

    def close(self) -> None:
        """Let all flows go, and remove what is ours from the devices."""
        for cookie in list(self._sockets):
            self.release(cookie)
        self._sockets.clear()
        self._undo.close()
        if self._egress is not None:
            self._egress.close()
            self._egress = None

    def leave_by(self, addresses: Collection[str]) -> None:
        """See `Pacer`."""
        if self._egress is not None:
            self._egress.leave_by(addresses)

    # -- rates --------------------------------------------------------------------------------

    def attach(self, cookie: int, pid: int, fd: int) -> None:
        """See `Pacer`. Each access to the socket checks that it still is this one."""
        at = self._sockets.get(cookie)
        if at is None or (at.pid, at.fd) != (pid, fd):
            self.release(cookie)
            self._sockets[cookie] = _Socket(pid, fd)

    def apply(self, entries: Entries, deadline_ns: int) -> int:
        """See `Pacer`. All flows have one deadline."""
        self._extend(deadline_ns)
        rates = np.minimum(entries["reserved"], entries["ceiling"])
        rates = np.maximum(rates, entries["least"])
        wanted = zip(entries["cookie"].tolist(), rates.tolist(), strict=True)
        known = [(name, max(round(rate), 1)) for name, rate in wanted if name in self._sockets]
        try:
            return self._set(known, deadline_ns)
        finally:
            if monotonic() >= deadline_ns:  # the guardian may have looked too early
                self._undo.look_again()

    @abstractmethod
    def _set(self, wanted: list[tuple[int, int]], deadline_ns: int) -> int:
        """Rates (payload bytes/s) of attached flows, by cookie. Returns how many changed."""

    def refresh(self, deadline_ns: int) -> bool:
        """See `Pacer`."""
        self._extend(deadline_ns)
        in_force, self._in_force = self._in_force, True
        return in_force and not (self._egress is not None and self._egress.retry_due())

    def _extend(self, deadline_ns: int) -> None:
        if self._undo.refresh(deadline_ns):  # the daemon was late: all flows were let go
            self._in_force = False
            for cookie in self._sockets:
                self._gone(cookie, undone=True)

    def _touch(self, cookie: int, do: Callable[[socket], T]) -> T | None:
        """What `do` returns for this flow's socket. None: that was not possible, and `refusal` says
        why. `do` may raise PacingError."""
        at = self._sockets[cookie]
        try:
            with guardian.borrow(at.pid, at.fd, cookie) as sock:
                done = do(sock)
        except PacingError as error:
            self._why[cookie] = str(error)
            return None
        except OSError as error:
            self._lost(cookie, error)
            return None
        self._why.pop(cookie, None)
        return done

    def _lost(self, cookie: int, error: OSError) -> None:
        """A socket could not be reached. If it is closed, or another one by now, it is forgotten.
        Any other error may pass (too many open files, say): then it stays attached."""
        if error.errno in GONE:
            self._gone(cookie)
            del self._sockets[cookie]
            self._why.pop(cookie, None)
            self.noticed.append(KernelEvent("closed", cookie))
            return
        hidden = self._sockets[cookie].pid == 0
        why = "its process is in another pid namespace" if hidden else str(error)
        self._why[cookie] = f"its socket cannot be had: {why}"
        self._in_force = False  # it may work the next time

    def _list(self, cookie: int, option: int, size: int, value: int) -> None:
        """Before a socket's option is changed: this value comes back. Raises PacingError."""
        at = self._sockets[cookie]
        self._undo.list(guardian.Row(guardian.SOCKET, at.pid, value, cookie, at.fd, option, size))

    def release(self, cookie: int) -> None:
        """See `Pacer`. The flow stays attached."""
        at = self._sockets.get(cookie)
        if at is not None:
            at.target = None
        self._why.pop(cookie, None)
        self._gone(cookie)

    def _gone(self, cookie: int, *, undone: bool = False) -> None:
        """A flow is let go, or its socket is closed. `undone`: by the guardian, on devices."""
        self._undo.undo(guardian.SOCKET, cookie)

    def refusal(self, cookie: int) -> str:
        """See `Pacer`."""
        return self._why.get(cookie, "")

    # -- what the kernel tells ------------------------------------------------------------------

    def counters(self) -> FlowCounters:
        """See `Pacer`; sent is what was acknowledged. Eight system calls for a flow."""
        udp = self._udp_sent()
        read = sorted(
            (cookie, acked)
            for cookie in list(self._sockets)
            if (acked := self._read(cookie, udp)) is not None
        )
        cookies = np.array([cookie for cookie, _ in read], np.uint64)
        counted = np.array([acked for _, acked in read], np.int64)
        return FlowCounters(cookies, counted, counted)

    def _read(self, cookie: int, udp: Mapping[int, int]) -> int | None:
        at = self._sockets[cookie]
        try:
            with guardian.borrow(at.pid, at.fd, cookie) as sock:
                acked = look(sock).acked if is_tcp(sock) else udp.get(cookie)
        except OSError as error:
            if error.errno in GONE:
                self._lost(cookie, error)
            return None
        if acked is not None and at.target is not None and acked >= at.target:
            at.target = None
            self.noticed.append(KernelEvent("drained", cookie, acked))
        return acked

    @abstractmethod
    def _udp_sent(self) -> Mapping[int, int]:
        """Payload bytes of UDP flows, by cookie."""

    def events(self) -> list[KernelEvent]:
        """`closed` and `drained`, as noticed by `counters()` and `apply()`; no addresses."""
        happened, self.noticed = self.noticed, []
        return happened

    def watch(self, cookie: int, target: int) -> None:
        """See `Pacer`; noticed by `counters()`."""
        if cookie in self._sockets:
            self._sockets[cookie].target = target
