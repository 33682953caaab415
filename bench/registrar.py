# SPDX-License-Identifier: Apache-2.0
"""A registration server beside a benchmark: jobs report to it, and nothing is done about it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flowslot_shm.layout import Quiet
from flowslotd.observe.registration import Record, RegistrationServer


@contextmanager
def registration_server(
    path: Path, quiet: Quiet, tell: Callable[[int], object] = bool
) -> Iterator[None]:
    """Takes records at `path`, on a thread of its own. `quiet`: what it asks jobs not to say; a
    daemon asks for `Quiet.ALL` where nobody else is on the network. `tell` gets each one's id."""
    loop = asyncio.new_event_loop()

    def registered(record: Record) -> None:
        record.reader.set_quiet(quiet)
        tell(record.id)

    server = RegistrationServer(str(path), "", registered, lambda *_: None, lambda *_: None)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
