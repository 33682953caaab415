# SPDX-License-Identifier: Apache-2.0
"""Waiting for what comes about elsewhere, and an event loop on a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any


def settle(check: Callable[[], Any], seconds: float = 30.0, what: str = "it") -> Any:
    """What `check` returns, once it is true. `what`: that is waited for."""
    end = time.monotonic() + seconds
    while not (result := check()):
        assert time.monotonic() < end, f"never came about: {what}"
        time.sleep(0.005)
    return result


async def until(
    check: Callable[[], object],
    what: str = "",
    *,
    seconds: float = 20.0,
    again: Callable[[], object] = bool,
) -> None:
    """The same on an event loop, which goes on meanwhile. `what`: for who reads the test. `again`
    is called until then, too."""
    async with asyncio.timeout(seconds):
        while not check():
            again()
            await asyncio.sleep(0.001)


class Background:
    """An event loop on a thread of its own, until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What it returns when it is called there; awaited, if that is to be awaited."""

        async def run() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def close(self) -> None:
        """Harmless a second time."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
