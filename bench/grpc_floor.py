# SPDX-License-Identifier: Apache-2.0
"""What gRPC alone takes on this machine: the floor under any negotiation over it.

As many processes as there are daemons, each with one long-lived stream to one server, say
something at the same moment (within 2 ms, as the ranks of a job do after a barrier), and are
answered at once: bytes of a demand's and a grant's size that nobody builds, reads or decides on.
One round is a negotiation in which nobody has to give way; two are one in which somebody does.
"""

import argparse
import asyncio
import json
import random
import socket
import subprocess
import sys
import time
from typing import Any

import grpc
import numpy as np
import uvloop

METHOD = "/bench.Floor/Echo"
PERIOD_S, SPREAD_S = 0.05, 0.002
BYTES = 1000  # about 25 demands, or 25 grants


class _Echo(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return grpc.stream_stream_rpc_method_handler(self._echo)

    async def _echo(self, _: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while isinstance(message := await context.read(), bytes):
            await context.write(message)


async def serve(port: int) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Echo(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def talk(port: int, seconds: float) -> None:
    """Print the times of one and of two rounds, ns."""
    times: list[tuple[int, int]] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(METHOD)(wait_for_ready=True)
        await call.write(bytes(BYTES))
        await call.read()
        end = time.time() + seconds
        while time.time() < end:
            until_next = PERIOD_S - time.time() % PERIOD_S
            await asyncio.sleep(until_next + random.uniform(0, SPREAD_S))
            marks = [time.monotonic_ns()]
            for _ in range(2):
                await call.write(bytes(BYTES))
                await call.read()
                marks.append(time.monotonic_ns())
            times.append((marks[1] - marks[0], marks[2] - marks[0]))
        call.cancel()
    json.dump(times, sys.stdout)


def measure(seconds: float = 4.0, daemons: int = 5) -> dict[str, float]:
    """Percentiles over all streams, ms."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "bench.grpc_floor", "--port", str(port)]
    server = subprocess.Popen([*command, "--serve"])
    talkers = [
        subprocess.Popen([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE)
        for _ in range(daemons)
    ]
    try:
        outputs = [json.loads(p.communicate(timeout=seconds + 30)[0]) for p in talkers]
    finally:
        for p in (*talkers, server):
            p.kill()
            p.wait()
    one, two = np.concatenate([np.array(output) for output in outputs]).T / 1e6
    return {
        f"floor_{name}_{p}_ms": round(float(np.percentile(values, int(p[1:]))), 2)
        for name, values in (("one_round", one), ("two_rounds", two))
        for p in ("p50", "p90")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--daemons", type=int, default=5)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(serve(args.port))
    elif args.port:
        uvloop.run(talk(args.port, args.seconds))
    else:
        for name, value in measure(args.seconds, args.daemons).items():
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
