# SPDX-License-Identifier: Apache-2.0
"""`python -m flowslot_lab.describe HOST:PORT SWITCH FOLDER CALLER`: a switch process's own account,
as JSON. FOLDER holds `ca.pem`, and certificate and key of CALLER, a host.

A process of its own, because it must run in the switch's network namespace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flowslot_proto import methods
from flowslot_proto.flowslot_pb2 import DescribeReply
from flowslot_proto.grpcio import grpc

_TIMEOUT_S = 5.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 50),
)


def describe(address: str, switch: str, folder: Path, caller: str) -> DescribeReply:
    """Ask, and wait until it listens. Raises grpc.RpcError."""
    names = "ca.pem", f"{caller}.key", f"{caller}.pem"
    credentials = grpc.ssl_channel_credentials(*((folder / name).read_bytes() for name in names))
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", switch))
    with grpc.secure_channel(address, credentials, options=options) as channel:
        return ask(channel)


def ask(channel: grpc.Channel) -> DescribeReply:
    """The same through a channel."""
    call = channel.unary_unary(methods.DESCRIBE, response_deserializer=DescribeReply.FromString)
    reply: DescribeReply = call(b"", timeout=_TIMEOUT_S, wait_for_ready=True)
    return reply


def main() -> int:
    """Prints {"pid", "counters", "sessions"}; exit status 1 when the switch does not answer."""
    try:
        address, switch, folder, caller = sys.argv[1:]
        reply = describe(address, switch, Path(folder), caller)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    counters = {field.name: value for field, value in reply.counters.ListFields()}
    sessions = [session.daemon for session in reply.sessions]
    print(json.dumps({"pid": reply.pid, "counters": counters, "sessions": sessions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
