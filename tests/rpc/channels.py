# SPDX-License-Identifier: Apache-2.0
"""Our client, for tests of both ends."""

import contextlib
from collections.abc import AsyncIterator

from flowslot_rpc.client import Channel

DEADLINE_S = 30.0


@contextlib.asynccontextmanager
async def channel(address: str) -> AsyncIterator[Channel]:
    """Connected."""
    one = Channel(address)
    await one.connect(DEADLINE_S)
    try:
        yield one
    finally:
        one.close()
