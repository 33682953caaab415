# SPDX-License-Identifier: Apache-2.0
"""The progress record that the daemon keeps for a process that keeps none."""

import logging
import os
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from typing import NamedTuple

from flowslot.model.units import MICROSECOND, MILLISECOND, SECOND
from flowslot_shm.layout import Message, Quiet, Role, offset
from flowslot_shm.reader import RecordError, RecordReader
from flowslot_shm.writer import FlowWriter, Record, describe
from flowslotd import sockets
from flowslotd.observe.passive.phases import Phases

DATA_BYTES = 64 * 1024
"""Having sent so much, an undecided connection carries data, and is reported."""
MAX_SOCKETS = 256
"""Of one process; further ones are left alone."""
UNKNOWN = -1
"""Rank and peer: the numbers that ps-lite gives its nodes are not to be seen from outside."""
STEP_NS = 2500 * MICROSECOND
"""Looks are at multiples of this, so that many sockets are looked at together."""
NEAR_STEPS = 4
"""From one look at a connection to the next, while it sends or has stopped only just now. There is
one in every step as long as it is not known what repeats, as a few iterations are to tell, and
where its period is not"""
LOOKS = 20
"""times as long."""
IDLE_STEPS = 8
"""The same while it is idle, in turn with the process's other ones: when one of them begins all are
looked at. With fewer connections, fewer steps."""
RECENT_NS = 50 * MILLISECOND
"""So long ago is just now."""
AGAIN_NS = 10 * SECOND
"""After a congestion control was refused, until it is tried again."""
_FD = offset("fd") - 4  # in what `describe` returns

Ring = Callable[["ShadowRecord", int, Message], object]
Warn = Callable[[str], object]
_log = logging.getLogger(__name__)


def warnings() -> Warn:
    """Logs each text once."""
    return cache(lambda text: _log.warning("jobs that report nothing: %s", text))


class Found(NamedTuple):
    """A process and its data connections."""

    pid: int
    job: bytes
    role: Role
    sockets: tuple[tuple[int, int], ...]
    """Descriptor and cookie of each."""
    undecided: tuple[tuple[int, int], ...] = ()
    """The same of connections that may yet carry data."""


class ShadowRecord:
    """Speaks for one process, as a `Source` that has not registered itself.

    Not thread-safe, but for the reader, which is the event loop's.
    """

    def __init__(self, number: int, found: Found, ring: Ring, warn: Warn) -> None:
        """`number` tells it from others and from registrations. `warn` hears what could not be done
        with its sockets, and why. Raises OSError when the process has ended, or the kernel refuses
        memory or a descriptor."""
        self.id, self.pid = number, found.pid
        self.job, self.role = found.job, found.role
        self._ring, self._warn = ring, warn
        with ExitStack() as undo:
            self._record = Record(MAX_SOCKETS)
            undo.callback(self._record.close)
            try:
                self.reader = RecordReader(self._record.fd)
            except RecordError as error:  # it is sound, so it could not be mapped
                raise OSError(str(error)) from error
            undo.callback(self.reader.close)
            # If its number is another process's by now: no socket has the cookie that it should.
            self._pidfd = os.pidfd_open(found.pid)
            undo.pop_all()
        self._free = list(range(MAX_SOCKETS - 1, -1, -1))
        self._flows: dict[int, Watched] = {}  # by cookie
        self._before: dict[int, sockets.Tuning] = {}  # what enlisted sockets had, by cookie

    @property
    def flows(self) -> int:
        """Connections it looks at."""
        return len(self._flows)

    def have(self, found: Found, now: int) -> None:
        """From now on its connections are these."""
        data = {cookie for _, cookie in found.sockets}
        known = dict((cookie, fd) for fd, cookie in (*found.sockets, *found.undecided))
        for cookie in self._flows.keys() - known.keys():
            self._drop(cookie)
        for cookie, fd in known.items():
            if cookie not in self._flows:
                self._take(cookie, fd, now)
            if cookie in self._flows:
                self._show(self._flows[cookie], cookie in data)

    def look(self, now: int, congestion_control: str) -> None:
        """Look at the sockets whose time has come: at all of them, if one has begun to send."""
        due = {flow for flow in self._flows.values() if flow.next_ns <= now}
        if any([self._look_at(flow, now, congestion_control) for flow in due]):
            for flow in [flow for flow in self._flows.values() if flow not in due]:
                self._look_at(flow, now, congestion_control)

    @property
    def next_ns(self) -> int:
        """When the next look is due, as long as there are flows."""
        return min(flow.next_ns for flow in self._flows.values())

    def close(self, *, restore: bool = True) -> None:
        """It speaks for nobody any more, and its sockets are as they were, unless the process
        itself has enlisted them meanwhile. The reader is the caller's to close."""
        if not restore:
            self._before.clear()
        for cookie in list(self._flows):
            self._drop(cookie)
        self._record.close()
        os.close(self._pidfd)

    # -- as FlowWriter's owner ----------------------------------------------------------------

    def poll(self) -> bool:
        """The daemon is here."""
        return True

    def ring(self, kind: Message, slot: int) -> None:
        """As a job's doorbell: not when nobody listens."""
        quiet = self._record.quiet
        if quiet == Quiet.NONE or (quiet == Quiet.ENDS and kind != Message.END):
            self._ring(self, slot, kind)

    def release(self, slot: int) -> None:
        """A slot is free again."""
        self._free.append(slot)

    # -- inside -------------------------------------------------------------------------------

    def _take(self, cookie: int, fd: int, now: int) -> None:
        try:
            with sockets.borrow(self._pidfd, fd, cookie) as sock:
                info = sockets.look(sock)
                if info.state not in sockets.SENDING:  # closed at this end, and kept open
                    return
                ends = (UNKNOWN, 0)
                content = bytearray(describe(sock, self.job, UNKNOWN, ends, self.role))
        except OSError as error:
            if error.errno not in sockets.GONE:  # an ordinary end
                self._warn(f"sockets cannot be had: {error}")
            return
        struct.pack_into("=i", content, _FD, fd)
        flow = self._flows[cookie] = Watched(cookie, fd, FlowWriter(None, 0, self), now, info)
        flow.content = bytes(content)

    def _show(self, flow: "Watched", data: bool) -> None:
        """From the moment that it is known to carry data, it is reported."""
        if not flow.content or not (data or flow.phases.sent > DATA_BYTES) or not self._free:
            return
        slot = self._free.pop()
        flow.writer = FlowWriter(self._record.slot(slot), slot, self)
        flow.writer.open(flow.content)
        flow.content = b""
        flow.phases.write_to(flow.writer)
        # It is not active yet, so nothing would call for a look at it.
        self._ring(self, slot, Message.BEGIN)

    def _look_at(self, flow: "Watched", now: int, congestion_control: str) -> bool:
        """Whether it has begun to send."""
        try:
            info = sockets.peek(self._pidfd, flow.fd, flow.cookie)
            if not flow.content:
                self._enlist(flow, congestion_control, now)
        except OSError as error:
            if error.errno in sockets.GONE:
                self._drop(flow.cookie)
            else:  # at this moment: too many open files, say
                self._warn(f"sockets cannot be had: {error}")
                flow.next_ns = now + SECOND
            return False
        if info.state not in sockets.SENDING:
            self._drop(flow.cookie)
            return False
        was_busy = flow.phases.busy
        if flow.see(now, info):
            self.ring(Message.END, flow.writer.index)
        self._show(flow, data=False)
        flow.rest(now, len(self._flows))
        return flow.phases.busy and not was_busy

    def _enlist(self, flow: "Watched", name: str, now: int) -> None:
        """Let the socket select a congestion control, once; "": whatever it does. Raises OSError
        when the socket is not to be had. Refused: it stays as it is, and another attempt is made
        later."""
        if name != flow.congestion_control:
            if not name:
                self._restore(flow)
            flow.congestion_control, flow.enlist_ns = name, now if name else None
        if flow.enlist_ns is None or now < flow.enlist_ns:
            return
        with sockets.borrow(self._pidfd, flow.fd, flow.cookie) as sock:
            try:
                before = sockets.tuning(sock)
                sockets.enlist(sock, name)
            except OSError as error:
                flow.enlist_ns = now + AGAIN_NS
                self._warn(f"sockets cannot select {name}: {error.strerror}")
            else:
                flow.enlist_ns = None
                # By cookie: a socket may be found again, by another descriptor.
                self._before.setdefault(flow.cookie, before)
                if len(self._before) > 2 * MAX_SOCKETS:
                    del self._before[next(iter(self._before))]

    def _restore(self, flow: "Watched") -> None:
        """The socket is as it was before it was enlisted, if it is still there, and still uses what
        it was to select."""
        if flow.cookie in self._before:
            with suppress(OSError), sockets.borrow(self._pidfd, flow.fd, flow.cookie) as sock:
                before = self._before.pop(flow.cookie)
                if sockets.tuning(sock).congestion_control == flow.congestion_control.encode():
                    sockets.tune(sock, before)

    def _drop(self, cookie: int) -> None:
        flow = self._flows.pop(cookie)
        self._restore(flow)
        flow.writer.close()


class Watched:
    """One connection. `next_ns`: when to look at it again. `congestion_control`: what it should
    select; `enlist_ns`: when that is tried (None: it has been done). `content`: of its slot, until
    it has one."""

    content = b""

    def __init__(
        self, cookie: int, fd: int, writer: FlowWriter, now: int, info: sockets.Info
    ) -> None:
        self.cookie, self.fd, self.writer = cookie, fd, writer
        self.congestion_control = ""
        self.enlist_ns: int | None = None
        self.next_ns = now
        self.busy_us = info.busy_us
        self.odometer = sockets.Odometer()
        self.phases = Phases(now, *self.odometer.read(info), writer)

    def see(self, now: int, info: sockets.Info) -> bool:
        """What the kernel tells of it now. True: see Phases.look."""
        busy_us, self.busy_us = info.busy_us - self.busy_us, info.busy_us
        busy_ns, quiet_ns = busy_us * MICROSECOND, info.quiet_ms * MILLISECOND
        return self.phases.look(now, *self.odometer.read(info), busy_ns, quiet_ns)

    def rest(self, now: int, siblings: int) -> None:
        """Until the next look, as one of so many connections of its process."""
        step, idle_ns = now // STEP_NS + 1, self.phases.idle_ns(now)
        if idle_ns < RECENT_NS:
            long = self.phases.rhythm.period >= LOOKS * NEAR_STEPS * STEP_NS
            step += NEAR_STEPS - 1 if long else 0
        else:  # after a second 15 ms more do not matter
            turns = IDLE_STEPS if idle_ns > SECOND else min(2 * siblings, IDLE_STEPS)
            step += (self.writer.index - step) % turns
        self.next_ns = step * STEP_NS
