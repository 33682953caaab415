# SPDX-License-Identifier: Apache-2.0
"""What the daemon has of all this: shadow records as sources, beside processes that register."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from flowslot.model.errors import ConfigError
from flowslot_shm.layout import Message
from flowslotd.flows.flow_info import Source
from flowslotd.observe.passive import watcher
from flowslotd.observe.passive.shadow import ShadowRecord
from flowslotd.observe.passive.targets import MAX_TARGETS, Target
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
        self._pslite = False
        self._targets: tuple[Target, ...] = ()
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

    @property
    def enlisted(self) -> list[Target]:
        """What was enlisted, and is still there."""
        return [target for target in self._targets if target.alive()]

    def enlist(self, target: Target) -> None:
        """From now on its processes' sockets are watched, and used as those of a job that reports.
        Raises ConfigError: there are too many."""
        others = [one for one in self.enlisted if one.what != target.what]
        if len(others) >= MAX_TARGETS:
            raise ConfigError("enlist", target.kind, f"{MAX_TARGETS} are enlisted, the most")
        self._aim((*others, target))

    def release(self, what: tuple[str, str] | None) -> list[Target]:
        """The opposite, of (kind, name) or of all. Returns what was released. Raises ConfigError:
        nothing of that name is enlisted."""
        there = self.enlisted
        gone = [target for target in there if what is None or target.what == what]
        if what is not None and not gone:
            raise ConfigError("release", what[0], f"{what[1]} is not enlisted")
        self._aim(tuple(target for target in there if target not in gone))
        return gone

    def _aim(self, targets: tuple[Target, ...]) -> None:
        self._targets = targets
        if self._watcher is not None:
            self._watcher.enlist(targets)
        elif targets and self._timer is None:
            self._begin()
        if not (targets or self._pslite):
            self._end()

    def use(self, pslite: bool, addresses: Collection[str], congestion_control: str) -> None:
        """Look for unpatched ps-lite, or do not; as from now. `addresses`: this host's.
        `congestion_control`: for the sockets; "" leaves them alone."""
        self._loop = asyncio.get_running_loop()
        self._congestion_control = congestion_control
        mine = frozenset(addresses)
        if not (pslite or self._targets) or mine != self._addresses:
            self._end()
        self._addresses, self._pslite = mine, pslite
        if self._watcher is not None:
            self._watcher.congestion_control = congestion_control
            self._watcher.pslite = pslite
        elif pslite or self._targets:
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
                self._addresses,
                self._congestion_control,
                self._registered,
                self._tell,
                pslite=self._pslite,
                targets=self._targets,
            )
            self._watcher.start()
        except Exception as error:  # no more threads, say
            self._failed(error)
        else:
            self._later(watcher.CHECK_S, self._check)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
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
            there = tuple(self.enlisted)
            if there != self._targets:
                self._aim(there)

    def _failed(self, error: Exception) -> None:
        """Training does not mind: nobody is spoken for, for a while."""
        self._on_bug("unpatched", error)
        self._end()
        self._later(AGAIN_S, self._begin)

    def _drop(self, source: ShadowRecord) -> None:
        del self.records[source.id]
        source.reader.close()
        self._left(source)
