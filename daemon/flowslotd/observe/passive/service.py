# SPDX-License-Identifier: Apache-2.0
"""What the daemon has of all this: shadow records as sources, beside processes that register."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from flowslot_shm.layout import Message
from flowslotd.flows.flow_info import Source
from flowslotd.observe.passive.shadow import ShadowRecord
from flowslotd.observe.passive.watcher import Event, Watcher

AGAIN_S = 10.0
"""After an error of ours we begin anew so much later."""
JOIN_S = 0.5
CHECK_S = 1.0
"""Between looks at whether the watcher's threads get on."""
MAX_STUCK = 8
"""Watchers that were stopped, with threads that may come back or not. With so many there is no
further one."""


class PassiveSources:
    """Runs on the event loop that calls `use`. `records`: the shadow records by id, which is
    negative."""

    def __init__(
        self,
        joined: Callable[[ShadowRecord], object],
        rang: Callable[[ShadowRecord, int, Message], object],
        left: Callable[[ShadowRecord], object],
        registered: Mapping[int, Source],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        """The first three as RegistrationServer's, whose records `registered` are."""
        self.records: dict[int, ShadowRecord] = {}
        self._joined, self._rang, self._left = joined, rang, left
        self._registered, self._on_bug = registered, on_bug
        self._watcher: Watcher | None = None
        self._addresses: frozenset[str] = frozenset()
        self._congestion_control = ""
        self._again: asyncio.TimerHandle | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._stopped: list[Watcher] = []

    @property
    def watching(self) -> bool:
        """It is switched on and works."""
        return self._watcher is not None

    def sources(self) -> Mapping[int, Source]:
        """Who reports, by id: processes that have registered, and shadow records for others."""
        return {**self._registered, **self.records} if self.records else self._registered

    def use(self, pslite: bool, addresses: Collection[str], congestion_control: str) -> None:
        """Watch unpatched ps-lite, or do not; as from now. `addresses`: this host's.
        `congestion_control`: for the sockets; "" leaves them alone."""
        self._loop = asyncio.get_running_loop()
        self._congestion_control = congestion_control
        mine = frozenset(addresses)
        if not pslite or mine != self._addresses:
            self._end()
        self._addresses = mine
        if self._watcher is not None:
            self._watcher.congestion_control = congestion_control
        elif pslite:
            self._begin()

    def give_way(self, pid: int) -> None:
        """This process speaks for itself now."""
        for source in [s for s in self.records.values() if s.pid == pid]:
            self._drop(source)
            if self._watcher is not None:
                self._watcher.bar(pid)

    def close(self) -> None:
        """Stop watching, and forget all; waits a moment for the threads. Harmless when there is
        nothing to stop."""
        watcher = self._watcher
        self._end()
        if watcher is not None:
            watcher.join(JOIN_S)

    def _end(self) -> None:
        self._cancel()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()
            self._stopped.append(watcher)  # it may be held up, whoever stops it
        for source in list(self.records.values()):
            try:
                self._drop(source)
            except Exception as error:  # the others are to go all the same
                self._on_bug("unpatched", error)

    def _cancel(self) -> None:
        for timer in (self._again, self._checking):
            if timer is not None:
                timer.cancel()
        self._again = self._checking = None

    def _begin(self) -> None:
        self._cancel()
        self._stopped = [watcher for watcher in self._stopped if not watcher.ended]
        if len(self._stopped) >= MAX_STUCK:
            self._again = self._loop.call_later(AGAIN_S, self._begin)
            return
        try:
            watcher = Watcher(self._addresses, self._congestion_control, self._hear, self._fail)
            self._watcher = watcher
            watcher.start()
        except Exception as error:  # no more threads, say
            self._failed(self._watcher, error)
        else:
            self._checking = self._loop.call_later(CHECK_S, self._check)

    # -- on the watcher's threads ---------------------------------------------------------------

    def _hear(self, watcher: Watcher, events: Sequence[Event]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, watcher, events)

    def _fail(self, watcher: Watcher, error: Exception) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._failed, watcher, error)

    # -- on the event loop ------------------------------------------------------------------------

    def _take(self, watcher: Watcher, events: Sequence[Event]) -> None:
        try:
            self._sort(watcher, events)
        except Exception as error:
            self._failed(watcher, error)

    def _sort(self, watcher: Watcher, events: Sequence[Event]) -> None:
        for kind, source, slot, message in events:
            known = source.id in self.records
            if kind == "joined" and watcher is self._watcher:
                if source.pid in {record.pid for record in self._registered.values()}:
                    watcher.bar(source.pid)
                else:
                    self.records[source.id] = source
                    self._joined(source)
            elif kind == "rang" and known:
                self._rang(source, slot, message)
            elif kind == "left" and known:
                self._drop(source)

    def _check(self) -> None:
        """A process can hold up a thread for hours. What it has said last would stand for as long:
        flows that are active, with all that they were to send."""
        watcher = self._watcher
        if watcher is None:
            return
        self._checking = self._loop.call_later(CHECK_S, self._check)
        stuck = watcher.stuck()
        if stuck:
            self._failed(watcher, TimeoutError(f"{stuck} is held up by some process"))

    def _failed(self, watcher: Watcher | None, error: Exception) -> None:
        """Training does not mind: nobody is spoken for, for a while."""
        if watcher is self._watcher:
            self._on_bug("unpatched", error)
            self._end()
            self._again = self._loop.call_later(AGAIN_S, self._begin)

    def _drop(self, source: ShadowRecord) -> None:
        del self.records[source.id]
        source.reader.close()
        self._left(source)
