# SPDX-License-Identifier: Apache-2.0
"""The library is set up as grpcio.py says."""

import subprocess
import sys

THREADS = """
import asyncio
from pathlib import Path
from flowslot_proto.grpcio import grpc

async def echo(request, _):
    return request

async def main():
    server = grpc.aio.server()
    methods = {"echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/x/echo")
        for _ in range(50):
            assert await call(b"x") == b"x"
    pool = [t for t in Path("/proc/self/task").iterdir() if "event_engine" in read(t, "comm")]
    assert pool
    print(sum(int(read(t, "schedstat").split()[2]) for t in pool))
    await server.stop(None)

def read(task, name):
    return (task / name).read_text()

asyncio.run(main())
"""


def test_messages_do_not_wake_a_pool_of_threads() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60, check=True
    )
    assert "experiment" not in ran.stderr.lower(), "grpcio does not know the setting any more"
    assert int(ran.stdout) < 100
