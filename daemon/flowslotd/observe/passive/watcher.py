# SPDX-License-Identifier: Apache-2.0
"""The threads that look: one at processes, about once a second, one at sockets, often.

Neither ever holds up the daemon's event loop, which hears of what they see; and the second one not
the first one's wait for a process that cannot be read. A process can hold up either: if it closes a
socket while a copy is borrowed, that copy is the last one, and closing it waits for as long as
SO_LINGER says. `Watcher.stuck` tells; such a watcher can only be left to itself.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from flowslot.model.units import MILLISECOND, SECOND, Nanos
from flowslot_shm.layout import Message
from flowslotd import sockets
from flowslotd.clock import monotonic
from flowslotd.observe.passive.finder import Finder
from flowslotd.observe.passive.shadow import Found, ShadowRecord

_log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between looks at processes."""
COALESCE_NS = MILLISECOND
"""Sockets that are due so soon are looked at at once."""
SHARE = 10
"""Who has looked rests so many times as long, at least: many are looked at less often."""
FIND_LATE, WATCH_LATE = 30, 5
"""Calls of `stuck`, one a second, between which a thread gets nowhere."""
_NUMBERS = itertools.count(-1, -1)
"""Registrations count upwards from 1."""


class Event(NamedTuple):
    """What the event loop has to hear."""

    kind: Literal["joined", "rang", "left"]
    source: ShadowRecord
    slot: int = 0
    message: Message = Message.BEGIN


Hear = Callable[["Watcher", Sequence[Event]], None]
Fail = Callable[["Watcher", Exception], None]


class Pulse:
    """Whether a thread gets on with its looks. Counted, not timed: when the whole process was
    stopped, no thread is late."""

    def __init__(self, late: int) -> None:
        """`late`: so many checks in a row without a beat are too many."""
        self._late = late
        self._looking, self._beats = False, 0  # the thread's
        self._seen, self._missed = 0, 0  # who checks

    def beat(self) -> None:
        """It looks, and gets on."""
        self._looking = True
        self._beats += 1

    def rest(self) -> None:
        """It has finished a look, and waits."""
        self._looking = False

    def stopped(self) -> bool:
        """For another thread, which calls it regularly."""
        beats = self._beats
        alive = not self._looking or beats != self._seen
        self._seen, self._missed = beats, 0 if alive else self._missed + 1
        return self._missed >= self._late


class Watcher:
    """Watches from `start` to `stop`; after an error it is of no use any more.

    `hear` and `fail` are called on its threads. `congestion_control` may be set at any time.
    """

    def __init__(
        self, addresses: Collection[str], congestion_control: str, hear: Hear, fail: Fail
    ) -> None:
        """`addresses`: this host's. `congestion_control`: for the sockets; "" leaves them alone."""
        self.congestion_control = congestion_control
        self._hear, self._fail = hear, fail
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._pulses = {"passive-find": Pulse(FIND_LATE), "passive-watch": Pulse(WATCH_LATE)}
        self._finder = Finder(addresses, self._pulses["passive-find"].beat)
        self._found: list[Found] | None = None
        self._to_bar: deque[int] = deque()
        self._threads = [
            threading.Thread(target=self._guard, args=(work, pulse), name=name, daemon=True)
            for work, (name, pulse) in zip(
                (self._find, self._watch), self._pulses.items(), strict=True
            )
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def bar(self, pid: int) -> None:
        """This process speaks for itself."""
        self._to_bar.append(pid)
        self._woken.set()

    def stop(self) -> None:
        """Let go; returns at once. What it says from now on does not count."""
        self._stop.set()
        self._woken.set()

    def stuck(self) -> str:
        """The thread that has got nowhere for some time; "": none. Call it once a second."""
        stopped = [name for name, pulse in self._pulses.items() if pulse.stopped()]
        return " and ".join(stopped)

    @property
    def ended(self) -> bool:
        """None of its threads lives."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> None:
        """After `stop`: wait for its threads, but not for long."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _guard(self, work: Callable[[Pulse], None], pulse: Pulse) -> None:
        try:
            work(pulse)
        except Exception as error:
            self.stop()
            self._fail(self, error)

    def _find(self, pulse: Pulse) -> None:
        try:
            while not self._stop.is_set():
                began = monotonic()
                pulse.beat()
                self._found = self._finder.look()
                pulse.rest()
                self._woken.set()
                self._stop.wait(max(LOOK_S, SHARE * (monotonic() - began) / SECOND))
        finally:
            self._finder.close()

    def _watch(self, pulse: Pulse) -> None:
        sources = ShadowRecords(pulse.beat)
        try:
            while True:
                self._woken.clear()  # before the test, or a `stop` in between is not heard
                if self._stop.is_set():
                    break
                began = monotonic()
                pulse.beat()
                found, self._found = self._found, None
                if found is not None:
                    sources.update(found, began)
                while self._to_bar:
                    sources.bar(self._to_bar.popleft())
                events = sources.look(Nanos(began + COALESCE_NS), self.congestion_control)
                if events:
                    self._hear(self, events)
                pulse.rest()
                self._rest(began, sources.next_ns())
        finally:
            sources.close()

    def _rest(self, began: int, due: int | None) -> None:
        now = monotonic()
        if due is None:
            self._woken.wait()
        else:
            self._woken.wait(max(due - now, SHARE * (now - began), 0) / 1e9)


class ShadowRecords:
    """All shadow records, of one thread."""

    def __init__(self, alive: Callable[[], object] = lambda: None) -> None:
        """`alive` is called now and then."""
        self._alive = alive
        self._by_pid: dict[int, ShadowRecord] = {}
        self._barred: set[int] = set()
        self._events: list[Event] = []
        self._said: set[str] = set()

    def update(self, found: Iterable[Found], now: int) -> None:
        """What was found just now, all of it."""
        by_pid = {one.pid: one for one in found}
        self._barred.intersection_update(by_pid)
        for pid in self._by_pid.keys() - by_pid.keys():
            self._drop(pid)
        for pid, one in by_pid.items():
            self._alive()
            if pid in self._barred:
                continue
            source = self._by_pid.get(pid)
            if source is not None and (source.job, source.role) != (one.job, one.role):
                self._drop(pid)  # another process by now
                source = None
            if source is not None:
                source.have(one.sockets, now)
            else:
                self._make(one, now)

    def bar(self, pid: int) -> None:
        """This process speaks for itself, for as long as it is found."""
        self._barred.add(pid)
        if pid in self._by_pid:
            self._drop(pid)

    def look(self, now: int, congestion_control: str) -> list[Event]:
        """Look at all sockets whose time has come, and say what has happened meanwhile."""
        for pid, source in list(self._by_pid.items()):
            self._alive()
            source.look(now, congestion_control)
            self._say(source.refused)
            if not source.flows:
                self._drop(pid)
        events, self._events = self._events, []
        return events

    def next_ns(self) -> int | None:
        """When the next look is due; None: there is nothing to look at."""
        due = (source.next_ns() for source in self._by_pid.values())
        return min((at for at in due if at is not None), default=None)

    def close(self) -> None:
        """Drop them all."""
        for pid in list(self._by_pid):
            self._drop(pid)

    def _make(self, found: Found, now: int) -> None:
        try:
            source = ShadowRecord(next(_NUMBERS), found, self._rang)
        except OSError as error:  # in a second it is found again
            if error.errno not in sockets.GONE:  # no memory, too many open files
                self._say({f"a process cannot be spoken for now: {error}"})
            return
        source.have(found.sockets, now)
        self._say(source.refused)
        if not source.flows:  # nothing that it could speak of
            source.close()
            source.reader.close()
            return
        self._by_pid[found.pid] = source
        self._events.append(Event("joined", source))

    def _say(self, texts: Iterable[str]) -> None:
        """Each once."""
        for text in set(texts) - self._said:
            self._said.add(text)
            _log.warning("unpatched ps-lite: %s", text)

    def _rang(self, source: ShadowRecord, slot: int, message: Message) -> None:
        self._events.append(Event("rang", source, slot, message))

    def _drop(self, pid: int) -> None:
        source = self._by_pid.pop(pid)
        source.close()
        self._events.append(Event("left", source))
