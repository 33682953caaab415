# SPDX-License-Identifier: Apache-2.0
"""`python -m flowslot_lab.describe HOST:PORT`: a switch process's own account, as JSON.

A process of its own, because it must run in the switch's network namespace.
"""

from __future__ import annotations

import json
import sys

import grpc

from flowslot_proto.flowslot_pb2 import DescribeRequest
from flowslot_proto.flowslot_pb2_grpc import EmulatedSwitchStub

_TIMEOUT_S = 5.0


def main() -> int:
    """Prints {"pid", "counters", "sessions"}; exit status 1 when the switch does not answer."""
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = EmulatedSwitchStub(channel)  # type: ignore[no-untyped-call]
        try:
            reply = stub.Describe(DescribeRequest(), timeout=_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            print(error, file=sys.stderr)
            return 1
    counters = {field.name: value for field, value in reply.counters.ListFields()}
    sessions = [session.daemon for session in reply.sessions]
    print(json.dumps({"pid": reply.pid, "counters": counters, "sessions": sessions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
