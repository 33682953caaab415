# SPDX-License-Identifier: Apache-2.0
"""Sees to it that flows are counted on the NICs that the kernel sends them by, and says so where
the topology has it otherwise.

In a thread of its own: the slot loop never waits for the routing table.
"""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from flowslotd.machine import Detour, Machine, detours
from flowslotd.observe.observer import Observer

LOOK_S = 2.0
MOST = 0.01
"""Of a processor's time, at most: with many flows, looks are further apart."""
SWITCH_S = 0.0005
"""So long the slot loop waits at most for the thread that looks; 5 ms, which is usual, would be
late."""

_log = logging.getLogger(__name__)


class Uplinks:
    """`doubts`: why this may not be the configured host. `detours`: flows that leave by another
    device than the topology says, by cookie."""

    def __init__(
        self,
        file: Path,
        observer: Observer,
        on_moved: Callable[[Collection[int]], None],
        on_bug: Callable[[str, Exception], None],
    ) -> None:
        """`file`: of the configuration, for messages. `on_moved`: these sources have flows that are
        to be found again, on other links."""
        self.doubts: list[str] = []
        self.detours: dict[int, Detour] = {}
        self._file, self._observer = str(file), observer
        self._on_moved, self._on_bug = on_moved, on_bug
        self._said: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look now and then, from now on."""
        sys.setswitchinterval(SWITCH_S)
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Look no more. Harmless when not started."""
        if self._task is not None:
            self._task.cancel()

    def describe(self) -> list[str]:
        """For `flowslot status`: one sentence for each thing that is not as the topology says."""
        count = Counter(map(str, self.detours.values()))
        return self.doubts + [f"{text} ({n} now)" for text, n in count.items()]

    async def _run(self) -> None:
        while True:
            took = 0.0
            try:
                took = await self._look()
            except Exception as error:
                self._on_bug("uplinks", error)
            await asyncio.sleep(max(LOOK_S, took / MOST))

    async def _look(self) -> float:
        """Look once; returns the processor's time that it took, s."""
        table = self._observer.table
        topology, host, file = table.topology, table.host, self._file
        flows = [info for info in table.infos if info.cookie]
        nics = {nic.name for nic in topology.hosts[host].nics}
        before = {
            flow: one
            for flow, one in self.detours.items()
            if one.instead is None or one.instead.name in nics
        }

        def look() -> tuple[list[str], dict[int, Detour], float]:
            begun = time.thread_time()
            machine = Machine(topology, host)
            found = detours(machine, flows, before)
            return machine.doubts(file), found, time.thread_time() - begun

        doubts, found, took = await asyncio.get_running_loop().run_in_executor(None, look)
        if table.topology is topology:  # no reload meanwhile
            self._take(doubts, found)
        return took

    def _take(self, doubts: list[str], found: dict[int, Detour]) -> None:
        self.doubts, self.detours = doubts, found
        for text in dict.fromkeys([*doubts, *map(str, found.values())]):
            if text not in self._said:
                self._said.add(text)
                _log.warning("%s", text)
        instead = {flow: one.instead.name for flow, one in found.items() if one.instead}
        if moved := self._observer.reroute(instead):
            self._on_moved(moved)
