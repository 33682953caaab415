# SPDX-License-Identifier: Apache-2.0
"""Starts real `flowslot-switch` processes, and talks to them as a plain client."""

import queue
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from google.protobuf.message_factory import GetMessageClass

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from waiting import settle

from flowslot.arbiter import LEASE_SLOTS
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.grpcio import grpc

PROGRAM = Path(sys.executable).with_name("flowslot-switch")
DEADLINE_S = 30.0
GBPS = 0.4
LINKS = ("h1->s1", "s1->h1", "h2->s1", "s1->h2")
LEASE_NS = 100_000_000


def topology(port: int, switch: str | None = "s1", strict: bool = False) -> str:
    """Two hosts, whose flows may cross all links; `strict`: only those between the two."""
    text = f'[[switches]]\nname = "s1"\naddress = "127.0.0.1:{port}"\n'
    for i in (1, 2):
        text += (
            f'[[hosts]]\nname = "h{i}"\n[[hosts.nics]]\nname = "eth0"\n'
            f'addresses = ["10.78.0.{i}"]\nup = "h{i}->s1"\ndown = "s1->h{i}"\n'
        )
    for link in LINKS:
        text += f'[[links]]\nname = "{link}"\ncapacity_gbps = {GBPS}\n'
        text += f'switch = "{switch}"\n' if switch else ""
    for i in () if strict else (1, 2):
        text += f'[[paths]]\nsrc = "10.78.0.{i}"\ndst = "10.78.9.9"\nlinks = {list(LINKS)}\n'
    return text


_given: set[int] = set()


def free_port() -> int:
    """Each time another one, and none that the kernel gives to who asks for any: until somebody
    listens there, it would be taken by the next connection of another test."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


class EmulatedSwitchStub:
    """The service's methods by the reference implementation of gRPC, which is not ours."""

    FetchFeedback: Any
    UpdateSchedule: Any
    Describe: Any
    Negotiate: Any

    def __init__(self, channel: grpc.Channel) -> None:
        for method in pb.DESCRIPTOR.services_by_name["EmulatedSwitch"].methods:
            kind = channel.stream_stream if method.client_streaming else channel.unary_unary
            asks, answers = map(GetMessageClass, (method.input_type, method.output_type))
            call = kind(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=asks.SerializeToString,
                response_deserializer=answers.FromString,
            )
            setattr(self, method.name, call)


class Switch:
    """A switch process on a port of its own, its files in `folder`; ended with the context."""

    def __init__(
        self,
        folder: Path,
        slot_ms: float = 60.0,
        lease_slots: int = LEASE_SLOTS,
        name: str = "s1",
    ) -> None:
        self.name = name
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.config = folder / ("switch.toml" if name == "s1" else f"{name}.toml")
        self.topology = folder / "topology.toml"
        self.log = self.config.with_suffix(".log")
        self.topology.write_text(topology(self.port))
        self.configure(f"[arbiter]\nslot_ms = {slot_ms}\nlease_slots = {lease_slots}\n")
        self.process: subprocess.Popen[bytes] | None = None

    def configure(self, text: str) -> None:
        self.config.write_text(f'name = "{self.name}"\n{text}')

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, *arguments: str | Path, env: dict[str, str] | None = None) -> Self:
        command = [PROGRAM, *(arguments or ("--config", self.config))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=env)
        self.describe()
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def logged(self, text: str) -> str:
        return settle(lambda: text in self.log.read_text() and self.log.read_text(), what=text)

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.min_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 100),
                ("grpc.max_send_message_length", -1),
            ],
        )

    def describe(self) -> pb.DescribeReply:
        with self.channel() as channel:
            stub = EmulatedSwitchStub(channel)
            return stub.Describe(pb.DescribeRequest(), wait_for_ready=True, timeout=DEADLINE_S)

    def load(self, link: str) -> float:
        """What is reserved on a link in the present slot."""
        return next(row.load[0] for row in self.describe().links if row.link == link)

    def wait_recovered(self) -> None:
        settle(lambda: not self.describe().recovering)


def one_demand(flow: int, path: list[int]) -> pb.DemandBatch:
    """Of a job of its own."""
    zero = ("job", "path", "wait_ns", "period_ns", "next_in_ns", "next_bytes")
    return pb.DemandBatch(
        jobs=[f"job{flow}"],
        path_hops=[len(path)],
        path_links=path,
        flow=[flow],
        inc=[1],
        remaining=[10**8],
        cap=[float("inf")],
        **{field: [0] for field in zero},
    )


class Peer:
    """A daemon's end of a stream, by hand."""

    def __init__(
        self, channel: grpc.Channel, session: int, timeout_s: float | None = DEADLINE_S
    ) -> None:
        self.session = session
        self.grants: dict[int, tuple[float, int, bool]] = {}
        self._out: queue.SimpleQueue[pb.DaemonMessage | None] = queue.SimpleQueue()
        stub = EmulatedSwitchStub(channel)
        messages: Iterator[pb.DaemonMessage] = iter(self._out.get, None)
        self.call = stub.Negotiate(messages, wait_for_ready=True, timeout=timeout_s)
        self._n = 0

    def say(self, **parts: object) -> None:
        self._out.put(pb.DaemonMessage(session=self.session, **parts))

    def hello(self, daemon: str = "h1", **more: Any) -> Self:
        said = {"daemon": daemon, "links": LINKS, "lease_ns": LEASE_NS} | more
        self.say(hello=pb.Hello(**said))
        return self

    def demand(self, flow: int, path: list[int]) -> None:
        self.say(demands=one_demand(flow, path))

    def read(self) -> pb.ArbiterMessage:
        message = next(self.call)
        assert message.session == self.session
        batch = message.grants
        for flow, seq, rate, must_ack in zip(
            batch.flow, batch.seq, batch.rate, batch.must_ack, strict=True
        ):
            self.grants[flow] = (rate, seq, must_ack)
        return message

    def rate(self, flow: int) -> float:
        return self.grants[flow][0] if flow in self.grants else 0.0

    def read_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.read()

    def fence(self) -> Self:
        """Everything said so far has been decided upon, and what it brought us is read."""
        self._n += 1
        self.say(heartbeat=pb.Heartbeat(n=self._n, wall_ns=1))
        while self.read().echo.n != self._n:
            pass
        return self

    def status(self) -> tuple[grpc.StatusCode, str]:
        """What the stream is closed with."""
        try:
            while True:
                self.read()
        except StopIteration:
            return grpc.StatusCode.OK, ""
        except grpc.RpcError:
            return self.call.code(), self.call.details()

    def close(self) -> None:
        self._out.put(None)
        self.call.cancel()
