# SPDX-License-Identifier: Apache-2.0
"""What gRPC alone takes on this machine: the floor under any negotiation over it.

As many processes as there are daemons, each with a long-lived stream to each server, say something
to all at the same moment (within 2 ms, as the ranks of a job do after a barrier), and are answered
at once: bytes of a demand's and a grant's size that nobody builds, reads or decides on. One round
is a negotiation in which nobody has to give way; two are one in which somebody does.

By two transports, in turns: `grpc`, and `tcp`, the same bytes over asyncio's plain streams, to see
what of it is gRPC.
"""

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import uvloop

from flowslot_lab.processors import awake
from flowslot_proto.grpcio import grpc

METHOD = "/bench.Floor/Echo"
PERIOD_S, SPREAD_S = 0.05, 0.002
BYTES = 1000  # about 25 demands, or 25 grants
OPTIONS = (("grpc.http2.bdp_probe", 0),)


class Call(Protocol):
    """One end of a stream."""

    async def write(self, message: bytes, /) -> None: ...

    async def read(self) -> object: ...


class Grpc:
    async def serve(self, port: int) -> None:
        class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, _: Any) -> Any:
                return grpc.stream_stream_rpc_method_handler(self._echo)

            async def _echo(self, requests: Any, context: Any) -> None:
                while isinstance(message := await context.read(), bytes):
                    await context.write(message)

        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((Echo(),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    async def connect(self, port: int, stack: contextlib.AsyncExitStack) -> Call:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        await stack.enter_async_context(channel)
        call: Any = channel.stream_stream(METHOD)(wait_for_ready=True)
        stack.callback(call.cancel)
        return call  # type: ignore[no-any-return]


class Tcp:
    async def serve(self, port: int) -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    writer.write(await reader.readexactly(BYTES))

        server = await asyncio.start_server(echo, "127.0.0.1", port)
        await server.serve_forever()

    async def connect(self, port: int, stack: contextlib.AsyncExitStack) -> Call:
        await _listening(port)
        return _TcpCall(*await asyncio.open_connection("127.0.0.1", port))


class _TcpCall:
    """All messages are as long."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def write(self, message: bytes) -> None:
        self._writer.write(message)

    async def read(self) -> object:
        return await self._reader.readexactly(BYTES)


TRANSPORTS: dict[str, type[Grpc | Tcp]] = {"grpc": Grpc, "tcp": Tcp}


async def _listening(port: int) -> None:
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)


async def talk(transport: str, ports: Sequence[int], seconds: float) -> None:
    """Print the times of one and of two rounds with all servers, ns."""
    times: list[tuple[int, int]] = []
    async with contextlib.AsyncExitStack() as stack:
        kind = TRANSPORTS[transport]()
        calls = [await kind.connect(port, stack) for port in ports]
        await _round(calls)
        end = time.time() + seconds
        while time.time() < end:
            until_next = PERIOD_S - time.time() % PERIOD_S
            await asyncio.sleep(until_next + random.uniform(0, SPREAD_S))
            marks = [time.monotonic_ns()]
            for _ in range(2):
                await _round(calls)
                marks.append(time.monotonic_ns())
            times.append((marks[1] - marks[0], marks[2] - marks[0]))
    json.dump(times, sys.stdout)


async def _round(calls: Sequence[Call]) -> None:
    for call in calls:
        await call.write(bytes(BYTES))
    for call in calls:
        await call.read()


def free_ports(n: int) -> list[int]:
    """Of this machine, no two the same."""
    with contextlib.ExitStack() as stack:  # open all at once
        probes = [stack.enter_context(socket.socket()) for _ in range(n)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def measure(
    transport: str = "grpc", *, seconds: float = 4.0, daemons: int = 5, servers: int = 1
) -> dict[str, float]:
    """Percentiles over all talkers, ms."""
    ports = [str(port) for port in free_ports(servers)]
    command = [sys.executable, "-m", "bench.grpc_floor", "--transport", transport, "--ports"]
    started = [subprocess.Popen([*command, port, "--serve"]) for port in ports]
    talkers = [
        subprocess.Popen([*command, *ports, "--seconds", str(seconds)], stdout=subprocess.PIPE)
        for _ in range(daemons)
    ]
    try:
        outputs = [json.loads(p.communicate(timeout=seconds + 30)[0]) for p in talkers]
    finally:
        for p in (*talkers, *started):
            p.kill()
            p.wait()
    one, two = np.concatenate([np.array(output) for output in outputs]).T / 1e6
    return {
        f"{name}_{p}_ms": round(float(np.percentile(values, int(p[1:]))), 2)
        for name, values in (("one_round", one), ("two_rounds", two))
        for p in ("p50", "p90")
    }


def compare(repeats: int, **load: Any) -> None:
    """Print a table of all transports, measured in turns: mean (least to most), ms."""
    with awake():
        turns = [{name: measure(name, **load) for name in TRANSPORTS} for _ in range(repeats)]
    for name in TRANSPORTS:
        cells = []
        for figure in turns[0][name]:
            values = [turn[name][figure] for turn in turns]
            spread = f"{min(values):.2f} to {max(values):.2f}"
            cells.append(f"{figure} {np.mean(values):.2f} ({spread})")
        print(f"{name:8}", *cells, sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--daemons", type=int, default=5)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--transport", choices=TRANSPORTS, help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(TRANSPORTS[args.transport]().serve(*args.ports))
    elif args.ports:
        uvloop.run(talk(args.transport, args.ports, args.seconds))
    else:
        compare(args.repeat, seconds=args.seconds, daemons=args.daemons, servers=args.servers)


if __name__ == "__main__":
    main()
