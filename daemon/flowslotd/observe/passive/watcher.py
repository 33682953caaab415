# SPDX-License-Identifier: Apache-2.0
"""The threads that look: one at processes, about once a second, one at sockets, often.

Neither thread ever holds up the daemon's event loop. The second one does not wait for a process
that the first one cannot read. A process can hold up either thread: if the process closes a socket
while a copy is borrowed, that copy is the last one, and closing it waits for as long as SO_LINGER
says. `Watcher.stuck` tells; such a watcher can only be left to itself.
"""

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from flowslot.model.units import MILLISECOND, SECOND
from flowslotd import sockets
from flowslotd.clock import monotonic
from flowslotd.flows.flow_info import Source
from flowslotd.observe.passive.finder import Finder
from flowslotd.observe.passive.shadow import Found, ShadowRecord, warnings
from flowslotd.observe.passive.targets import Target

LOOK_S, LONGEST_REST_S = 1.0, 10.0
"""Between looks at processes."""
NEAR_S = 0.1
"""Between looks at those that are enlisted: connections are to be found before many iterations."""
CHECK_S = 1.0
"""Between calls of `stuck`; the thread that looks at sockets never rests longer."""
COALESCE_NS = MILLISECOND
"""Sockets that are due so soon are looked at at once."""
SHARE = 10
"""A thread that has looked rests so many times as long: many sockets are looked at less often."""
LATE = {"passive-find": 30, "passive-watch": 5}
"""Calls of `stuck` between which a thread gets nowhere. Counted, not timed: when the whole process
was stopped, no thread is late."""
_NUMBERS = itertools.count(-1, -1)
"""Registrations count upwards from 1."""

Tell = Callable[..., object]
"""("joined", shadow record), ("rang", shadow record, slot, message), ("left", shadow record) or
("failed", exception)."""


class Watcher:
    """Watches from `start` to `stop`; after an error it is of no use any more.

    `congestion_control` and `pslite` (whether nodes of ps-lite are looked for) may be set at any
    time.
    """

    def __init__(
        self,
        addresses: Collection[str],
        congestion_control: str,
        registered: Mapping[int, Source],
        tell: Tell,
        *,
        pslite: bool = True,
        targets: tuple[Target, ...] = (),
    ) -> None:
        """`addresses`: this host's. `congestion_control`: for the sockets; "" leaves them alone.
        `registered`: processes that speak for themselves. `tell` is called on the threads, with
        this watcher first. `targets`: what is enlisted."""
        self.congestion_control = congestion_control
        self.pslite, self._targets = pslite, targets
        self._registered, self._tell = registered, partial(tell, self)
        self._stop, self._wake = threading.Event(), threading.Event()
        self._patience = dict(LATE)
        self._finder = Finder(addresses, self._alive)
        self._found: SimpleQueue[list[Found] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=name, daemon=True)
            for name, work in zip(LATE, (self._find, self._watch), strict=True)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def enlist(self, targets: tuple[Target, ...]) -> None:
        """From now on, what is enlisted is this."""
        self._targets = targets
        self._wake.set()

    def stop(self) -> None:
        """Let go; returns at once. What it says from now on does not count."""
        self._stop.set()
        self._wake.set()
        self._found.put(None)  # wakes it up

    def stuck(self) -> str:
        """The threads that have got nowhere for some time; "": none. Call it every CHECK_S."""
        for name in LATE:
            self._patience[name] -= 1
        return " and ".join(name for name, left in self._patience.items() if left <= 0)

    def join(self, timeout_s: float) -> None:
        """After `stop`: wait for its threads, but not for long."""
        for thread in self._threads:
            thread.join(timeout_s)

    # -- on the threads -----------------------------------------------------------------------

    def _alive(self) -> None:
        """The calling thread gets on."""
        name = threading.current_thread().name
        self._patience[name] = LATE.get(name, 0)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.stop()
            self._tell("failed", error)

    def _find(self) -> None:
        search_ns = 0  # when ps-lite is looked for again
        try:
            while not self._stop.is_set():
                self._wake.clear()
                began, targets = monotonic(), self._targets
                search = self.pslite and began >= search_ns
                if search:
                    search_ns = began + round(LOOK_S * SECOND)
                self._found.put(self._finder.look(targets, pslite=search))
                self._alive()
                rest_s = SHARE * (monotonic() - began) / SECOND
                self._wake.wait(max(NEAR_S if targets else LOOK_S, min(rest_s, LONGEST_REST_S)))
        finally:
            self._finder.close()

    def _watch(self) -> None:
        records = ShadowRecords(self._tell, self._alive)
        found: list[Found] | None = None
        try:
            while not self._stop.is_set():
                began = monotonic()
                self._alive()
                if found is not None:
                    speaking = {source.pid for source in list(self._registered.values())}
                    records.update(found, began, speaking)
                due = records.look(began + COALESCE_NS, self.congestion_control)
                now = monotonic()
                rest_s = CHECK_S if due is None else max(due - now, SHARE * (now - began)) / SECOND
                found = None
                with suppress(Empty):
                    found = self._found.get(timeout=min(rest_s, CHECK_S))
                    while found is not None:  # the newest look counts
                        found = self._found.get_nowait()
        finally:
            records.close()


def threads() -> list[threading.Thread]:
    """Of all watchers, also of those that were stopped and have not ended."""
    return [thread for thread in threading.enumerate() if thread.name in LATE]


class ShadowRecords:
    """All shadow records, of one thread."""

    def __init__(self, tell: Tell, alive: Callable[[], object] = lambda: None) -> None:
        """`tell` hears who joins, rings and leaves. `alive` is called now and then."""
        self._tell, self._alive = tell, alive
        self._by_pid: dict[int, ShadowRecord] = {}
        self._warn = warnings()

    def update(self, found: Iterable[Found], now: int, speaking: Collection[int] = ()) -> None:
        """What was found just now, all of it. `speaking`: processes that speak for themselves."""
        by_pid = {one.pid: one for one in found if one.pid not in speaking}
        for pid in self._by_pid.keys() - by_pid.keys():
            self._drop(pid, restore=pid not in speaking)
        for pid, one in by_pid.items():
            self._alive()
            source = self._by_pid.get(pid)
            if source is not None and (source.job, source.role) != (one.job, one.role):
                self._drop(pid)  # another process by now
                source = None
            if source is not None:
                source.have(one, now)
            else:
                self._make(one, now)

    def look(self, now: int, congestion_control: str) -> int | None:
        """Look at all sockets whose time has come. When the next one's does; None: there is
        none."""
        for pid, source in list(self._by_pid.items()):
            self._alive()
            source.look(now, congestion_control)
            if not source.flows:
                self._drop(pid)
        return min((source.next_ns for source in self._by_pid.values()), default=None)

    def close(self) -> None:
        """Drop them all."""
        for pid in list(self._by_pid):
            self._drop(pid)

    def _make(self, found: Found, now: int) -> None:
        try:
            source = ShadowRecord(next(_NUMBERS), found, partial(self._tell, "rang"), self._warn)
        except OSError as error:  # in a second it is found again
            if error.errno not in sockets.GONE:  # no memory, too many open files
                self._warn(f"a process cannot be spoken for now: {error}")
            return
        source.have(found, now)
        if not source.flows:  # nothing that it could speak of, and nobody has heard of it
            source.close()
            source.reader.close()
            return
        self._by_pid[found.pid] = source
        self._tell("joined", source)

    def _drop(self, pid: int, restore: bool = True) -> None:
        source = self._by_pid.pop(pid)
        source.close(restore=restore)
        self._tell("left", source)
