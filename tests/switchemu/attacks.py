# SPDX-License-Identifier: Apache-2.0
"""Clients that mean harm, as processes at addresses of their own, and one that does not.

`python attacks.py NAME PORT [FOLDER]` attacks until its standard input ends, then prints as JSON
how often it has done what the attack consists of. With the certificates of a folder it speaks TLS.
"""

import itertools
import json
import os
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Self

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from rawhttp2 import (
    END_HEADERS,
    HEADERS,
    PREFACE,
    RST,
    RawClient,
    fields,
    frame,
    message,
)
from switchproc import DEADLINE_S, EmulatedSwitchStub, Peer, Switch
from waiting import settle

from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods

SOURCE = "127.0.0.66"
Counts = Counter[str]


@cache
def tls() -> ssl.SSLContext | None:
    """With the certificate of host h2, where there is one."""
    if len(sys.argv) < 4:
        return None
    folder = Path(sys.argv[3])
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "h2.pem", folder / "h2.key")
    context.set_alpn_protocols(["h2"])
    return context


def connect(port: int) -> RawClient:
    return RawClient(port, SOURCE, tls())


def ended() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def nothing(port: int, done: Counts) -> None:
    """For comparison."""
    sys.stdin.read()


def rapid_reset(port: int, done: Counts) -> None:
    """Streams that are reset as soon as they are begun, on connections that come again."""
    begin, burst = fields(methods.DESCRIBE), 500
    while not ended():
        try:
            with connect(port) as raw:
                done["connections"] += 1
                for first in range(1, 200_000, 2 * burst):
                    raw.sock.sendall(
                        b"".join(
                            frame(HEADERS, END_HEADERS, n, begin) + frame(RST, 0, n, b"\0\0\0\x08")
                            for n in range(first, first + 2 * burst, 2)
                        )
                    )
                    done["resets"] += burst
                    if ended() or not raw.hear() or 0 in raw.ended:
                        break
        except OSError:
            done["refused"] += 1


def crowd(
    port: int,
    done: Counts,
    most: int,
    begin: Callable[[RawClient], None],
    go_on: Callable[[RawClient], None],
) -> None:
    """Connections, each of which goes on until the server has ended it; then another is begun."""
    opened: list[RawClient] = []
    while not ended():
        try:
            if len(opened) < most:
                opened.append(connect(port))
                done["connections"] += 1
                begin(opened[-1])
        except OSError:
            done["refused"] += 1
        for raw in list(opened):
            try:
                go_on(raw)
                if not raw.hear() or 0 in raw.ended:
                    raise ConnectionError
            except OSError:
                done["refused"] += 1
                raw.sock.close()
                opened.remove(raw)


def call_flood(port: int, done: Counts) -> None:
    """As many whole unary calls as the server takes, on some connections."""

    def call(raw: RawClient) -> None:
        for _ in range(8):
            if len(raw.pending()) < 30:
                raw.send(raw.begin(methods.DESCRIBE), message(b""), end=True)
                done["calls"] += 1

    crowd(port, done, 8, call, call)


def unfinished(port: int, done: Counts) -> None:
    """Messages that are almost there, as many and as large as the windows allow."""

    def begin(raw: RawClient) -> None:
        for _ in range(32):
            raw.send(raw.begin(methods.NEGOTIATE), message(b"", announced=(1 << 19) - 1))

    def fill(raw: RawClient) -> None:
        for stream in raw.pending():
            done["bytes"] += raw.fill(stream, 1 << 19)

    crowd(port, done, 100, begin, fill)


def sessions(port: int, done: Counts) -> None:
    """Daemons without number say Hello, and hold their streams."""
    numbers = itertools.count(10_000)

    def begin(raw: RawClient) -> None:
        for _ in range(30):
            n = next(numbers)
            hello = pb.Hello(daemon=f"d{n}", host="h2", lease_ns=10**8)
            said = pb.DaemonMessage(session=n, hello=hello).SerializeToString()
            raw.send(raw.begin(methods.NEGOTIATE), message(said))
            done["hellos"] += 1

    crowd(port, done, 10_000, begin, begin_anew)


def trickle(port: int, done: Counts) -> None:
    """A byte now and then on as many streams as there may be: never silent, never done."""

    def begin(raw: RawClient) -> None:
        paths = itertools.cycle((methods.NEGOTIATE, methods.DESCRIBE))
        for path in itertools.islice(paths, 30):
            raw.send(raw.begin(path), message(b"", announced=100_000))

    def say(raw: RawClient) -> None:
        begin_anew(raw)
        for stream in raw.pending():
            raw.send(stream, b"x")
            done["bytes"] += 1

    crowd(port, done, 200, begin, say)


def begin_anew(raw: RawClient) -> None:
    """On another connection, when all calls of this one are over."""
    if not raw.pending():
        raise ConnectionError


def handshakes(port: int, done: Counts) -> None:
    """Connections that say nothing, or begin a handshake and do not end it."""
    opened: list[socket.socket] = []
    for said in itertools.cycle((b"", PREFACE[:7], PREFACE, b"\x16\x03\x01\x02\x00\x01")):
        if ended():
            return
        try:
            sock = socket.create_connection(("127.0.0.1", port), 1.0, (SOURCE, 0))
            opened.append(sock)
            sock.sendall(said)
            done["connections"] += 1
        except OSError:
            done["refused"] += 1
        if len(opened) > 900:
            opened.pop(0).close()


def strangers(port: int, done: Counts) -> None:
    """Whole handshakes of TLS, as fast as they go, without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    while not ended():
        try:
            with (
                socket.create_connection(("127.0.0.1", port), 1.0, (SOURCE, 0)) as sock,
                context.wrap_socket(sock, server_hostname="s1"),
            ):
                done["connections"] += 1
        except OSError:
            done["refused"] += 1


ATTACKS: dict[str, Callable[[int, Counts], None]] = {
    "rapid_reset": rapid_reset,
    "call_flood": call_flood,
    "unfinished": unfinished,
    "sessions": sessions,
    "handshakes": handshakes,
    "strangers": strangers,
    "trickle": trickle,
}


class Attack:
    """A process that attacks a switch, and has begun to; "none": nothing happens."""

    def __init__(self, switch: Switch, name: str, tls: Path | None = None) -> None:
        self._command = [sys.executable, __file__, name, str(switch.port)]
        self._command += [str(tls)] if tls else []

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout.readline() == "alive\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> Counts:
        """What it has achieved since it was alive."""
        return Counter(json.loads(self._process.communicate(timeout=DEADLINE_S)[0]))


@dataclass
class Result:
    """`times`: of heartbeats on the stream and of unary calls, s. `lost`: what ended the stream."""

    times: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    lost: str = ""
    errors: list[str] = field(default_factory=list)
    most_rss: int = 0


class Victim:
    """An honest daemon, whose flow has a grant. `result`: what it has noticed so far; another one
    may take its place."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._stopping = threading.Event()
        self.result = Result()

    def __enter__(self) -> Self:
        self._channels = [self._switch.channel(), self._switch.channel()]
        self.peer = Peer(self._channels[0], 1, timeout_s=None)
        self.peer.hello("victim", host="h1", links=["h1->s1"])
        self.peer.demand(7, [0])
        self.peer.read_until(lambda: self.peer.rate(7) > 0)
        stub, process = EmulatedSwitchStub(self._channels[1]), psutil.Process(self._switch.pid)

        def call() -> None:
            rss = process.memory_info().rss
            self.result.most_rss = max(self.result.most_rss, rss)
            stub.FetchFeedback(pb.FetchFeedbackRequest(links=["h1->s1"]), timeout=5)

        work = ((0, 0.01, self.peer.fence), (1, 0.02, call))
        self._threads = [threading.Thread(target=self._repeat, args=args) for args in work]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.peer.close()
        for channel in self._channels:
            channel.close()

    def stop(self) -> None:
        """Notice no more."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, times: int, period_s: float, work: Callable[[], object]) -> None:
        while not (self._stopping.wait(period_s) or self.result.lost):
            began = time.monotonic()
            try:
                work()
            except Exception as error:
                self.result.errors.append(repr(error)[:300])
                if times == 0:
                    self.result.lost = str(self.peer.status())
            else:
                self.result.times[times].append(time.monotonic() - began)


def main() -> None:
    done: Counts = Counter()

    def tell() -> None:
        settle(lambda: sys.argv[1] == "none" or done.total() > 0, what="it attacks")
        done.clear()
        print("alive", flush=True)

    threading.Thread(target=tell).start()
    ATTACKS.get(sys.argv[1], nothing)(int(sys.argv[2]), done)
    print(json.dumps(done), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
