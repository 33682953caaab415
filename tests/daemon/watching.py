# SPDX-License-Identifier: Apache-2.0
"""The component that watches processes which report nothing, on an event loop of its own."""

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from outsiders import HERE, Outsider, settle

from flowslot_shm.layout import Message, State
from flowslotd import sockets
from flowslotd.flows.flow_info import Source
from flowslotd.observe.passive import watcher
from flowslotd.observe.passive.finder import Finder
from flowslotd.observe.passive.service import Outside

SIZE = 300_000


class Watching:
    """The component, on an event loop of its own."""

    def __init__(self, congestion_control: str = "") -> None:
        self.joined: list[Source] = []
        self.rung: list[tuple[int, int, Message]] = []
        self.left: list[Source] = []
        self.bugs: list[BaseException] = []
        self.registered: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.outside = Outside(
            self.joined.append,
            lambda source, slot, message: self.rung.append((source.id, slot, message)),
            self.left.append,
            self.registered,
            lambda _, error: self.bugs.append(error),
        )
        self.use(congestion_control)

    def use(self, congestion_control: str = "", *, pslite: bool = True) -> None:
        self.call(self.outside.use, pslite, [HERE], congestion_control)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            return function(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def slots(self) -> list[Any]:
        """Of all stand-ins, those in use."""

        def read() -> list[Any]:
            snapshots = [source.reader.snapshot() for source in self.outside.records.values()]
            return [slot for snap in snapshots for slot in snap if slot["state"] != State.FREE]

        found: list[Any] = self.call(read)
        return found

    def close(self) -> None:
        self.call(self.outside.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def until_found(watching: Watching, *outsiders: Outsider, connections: int) -> list[Any]:
    def look() -> list[Any] | None:
        for outsider in outsiders:
            outsider.do(f"send {SIZE}")
        slots = watching.slots()
        return slots if len(slots) == connections else None

    found: list[Any] = settle(look)
    return found


def congestion_controls(pid: int, slots: list[Any]) -> set[bytes]:
    pidfd = os.pidfd_open(pid)
    try:
        found = set()
        for slot in slots:
            with sockets.borrow(pidfd, int(slot["fd"]), int(slot["sock_cookie"])) as sock:
                found.add(sock.getsockopt(6, 13, 16).split(b"\0")[0])
        return found
    finally:
        os.close(pidfd)


class Looks:
    """Counts looks at processes, which come more often meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        look = Finder.look

        def counted(finder: Finder) -> Any:
            found = look(finder)
            self._count += 1
            return found

        monkeypatch.setattr(Finder, "look", counted)
        monkeypatch.setattr(watcher, "LOOK_S", 0.05)

    def more(self, watching: Watching, *outsiders: Outsider, connections: int) -> None:
        """While these go on, several looks find these connections and no further ones."""
        end = self._count + 8

        def over() -> bool:
            for outsider in outsiders:
                outsider.do(f"send {SIZE}")
            assert len(watching.slots()) == connections
            return self._count >= end

        settle(over)
