# SPDX-License-Identifier: Apache-2.0
"""`python -m flowslot_lab.describe HOST:PORT`: a switch process's own account, as JSON.

A process of its own, because it must run in the switch's network namespace.
"""

from __future__ import annotations

import asyncio
import json
import sys

from flowslot.model.errors import ProtocolError
from flowslot_proto import methods
from flowslot_proto.checks import parse
from flowslot_proto.flowslot_pb2 import DescribeReply
from flowslot_rpc.client import Channel
from flowslot_rpc.status import RpcError, Status

_TIMEOUT_S, _RETRY_S = 5.0, 0.05


async def describe(address: str) -> DescribeReply:
    """Ask, until it listens. Raises RpcError, ProtocolError."""
    channel = Channel(address)
    loop = asyncio.get_running_loop()
    end = loop.time() + _TIMEOUT_S
    try:
        while True:
            try:
                raw = await channel.unary(methods.DESCRIBE, b"", end - loop.time())
                return parse(DescribeReply, raw)
            except RpcError as error:  # it may be about to listen
                if error.status != Status.UNAVAILABLE or loop.time() > end:
                    raise
                await asyncio.sleep(_RETRY_S)
    finally:
        channel.close()


def main() -> int:
    """Prints {"pid", "counters", "sessions"}; exit status 1 when the switch does not answer."""
    try:
        reply = asyncio.run(describe(sys.argv[1]))
    except (RpcError, ProtocolError) as error:
        print(error, file=sys.stderr)
        return 1
    counters = {field.name: value for field, value in reply.counters.ListFields()}
    sessions = [session.daemon for session in reply.sessions]
    print(json.dumps({"pid": reply.pid, "counters": counters, "sessions": sessions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
