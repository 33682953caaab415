# SPDX-License-Identifier: Apache-2.0
"""`python -m flowslot_lab.describe HOST:PORT`: a switch process's own account, as JSON.

A process of its own, because it must run in the switch's network namespace.
"""

from __future__ import annotations

import json
import sys

import grpc

from flowslot_proto import methods
from flowslot_proto.flowslot_pb2 import DescribeReply

_TIMEOUT_S = 5.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 50),
)


def describe(address: str) -> DescribeReply:
    """Ask, and wait until it listens. Raises grpc.RpcError."""
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        call = channel.unary_unary(methods.DESCRIBE, response_deserializer=DescribeReply.FromString)
        reply: DescribeReply = call(b"", timeout=_TIMEOUT_S, wait_for_ready=True)
        return reply


def main() -> int:
    """Prints {"pid", "counters", "sessions"}; exit status 1 when the switch does not answer."""
    try:
        reply = describe(sys.argv[1])
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    counters = {field.name: value for field, value in reply.counters.ListFields()}
    sessions = [session.daemon for session in reply.sessions]
    print(json.dumps({"pid": reply.pid, "counters": counters, "sessions": sessions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
