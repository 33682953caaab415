# SPDX-License-Identifier: Apache-2.0
"""What the daemon has of all this: shadow records as sources, beside processes that register."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from flowslot_shm.layout import Message
from flowslotd.flows.flow_info import Source
from flowslotd.observe.passive import watcher
from flowslotd.observe.passive.shadow import ShadowRecord
from flowslotd.observe.passive.watcher import Watcher

AGAIN_S = 10.0
"""After an error of ours we begin anew so much later."""
JOIN_S = 0.5
MAX_STUCK = 8
"""Threads that were stopped, and may come back or not. With so many no further watcher begins."""


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
        self._timer: asyncio.TimerHandle | None = None
        """While a watcher watches: its next check. Else: the next beginning."""

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

    def close(self) -> None:
        """Stop watching, and forget all; waits a moment for the threads. Harmless when there is
        nothing to stop."""
        watcher = self._watcher
        self._end()
        if watcher is not None:
            watcher.join(JOIN_S)

    def _begin(self) -> None:
        if len(watcher.threads()) >= MAX_STUCK:
            self._later(AGAIN_S, self._begin)
            return
        try:
            self._watcher = Watcher(
                self._addresses, self._congestion_control, self._registered, self._tell
            )
            self._watcher.start()
        except Exception as error:  # no more threads, say
            self._failed(error)
        else:
            self._later(watcher.CHECK_S, self._check)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.stop()
        self._watcher = None
        for source in list(self.records.values()):
            try:
                self._drop(source)
            except Exception as error:  # the others are to go all the same
                self._on_bug("unpatched", error)

    def _later(self, wait_s: float, work: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, work)

    def _tell(self, watcher: Watcher, what: str, *about: Any) -> None:
        """On the watcher's threads."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._hear, watcher, what, *about)

    def _hear(self, watcher: Watcher, what: str, *all_of_it: Any) -> None:
        about, *bell = all_of_it
        current = watcher is self._watcher
        try:
            if what == "failed":
                raise about
            if what == "joined":
                speaks = about.pid in {record.pid for record in self._registered.values()}
                if current and not speaks:
                    self.records[about.id] = about
                    self._joined(about)
                else:
                    about.reader.close()
            elif about.id in self.records and what == "rang":
                self._rang(about, *bell)
            elif about.id in self.records:
                self._drop(about)
        except Exception as error:
            if current:
                self._failed(error)

    def _check(self) -> None:
        """A process can hold up a thread for hours. What it has said last would stand for as long:
        flows that are active, with all that they were to send."""
        stuck = self._watcher.stuck() if self._watcher is not None else ""
        if stuck:
            self._failed(TimeoutError(f"{stuck} is held up by some process"))
        else:
            self._later(watcher.CHECK_S, self._check)

    def _failed(self, error: Exception) -> None:
        """Training does not mind: nobody is spoken for, for a while."""
        self._on_bug("unpatched", error)
        self._end()
        self._later(AGAIN_S, self._begin)

    def _drop(self, source: ShadowRecord) -> None:
        del self.records[source.id]
        source.reader.close()
        self._left(source)
