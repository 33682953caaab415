# SPDX-License-Identifier: Apache-2.0
"""What the tests of back ends share: entries, a sender's namespace, flows, snapshots."""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowslot_shm.writer import cookie_of
from flowslotd.pace import guardian
from flowslotd.pace.pacer import PaceEntry, Pacer, PacingError, pack
from flowslotd.pace.select import TRAITS, make_pacer

from .traffic import Flow, Net, UdpFlow

Flows = Callable[..., Any]
"""The fixtures `flows` and `enlisted`."""


def speed() -> float:
    """At most 1, and less on processors that take few packets, as emulated ones do: what takes all
    of them is not paced but starved."""
    usual, best = 30_000, 0  # datagrams from socket to socket in a second
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as to,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock,
    ):
        to.bind(("127.0.0.1", 0))
        sock.connect(to.getsockname())
        for _ in range(8):  # other things go on
            end, n = time.monotonic() + 0.02, 0
            while time.monotonic() < end:
                sock.send(bytes(1400))
                to.recv(1400)
                n += 1
            best = max(best, 50 * n)
    return min(best / usual, 1.0)


SPEED = speed()
MB = 1_000_000
LONG = 3600 * 10**9
SLOT_S = 0.060 / max(SPEED, 0.25)
"""Over longer times where the processor is slow: it stands still for longer."""
MUST = os.environ.get("FLOWSLOT_BACKENDS", "").split()
"""Those that must work here: no other is tested, and nothing is skipped for want of them."""
BACKENDS = [name for name in ("bpf", "edt", "htb", "socket") if not MUST or name in MUST]
ON_DEVICES = pytest.mark.parametrize(
    "on", [name for name in BACKENDS if name in {"edt", "htb"}], indirect=True
)
"""Of tests for those that are set up on devices."""
PACED = [(name, protocol) for name in BACKENDS for protocol in TRAITS[name].protocols]
EACH_PROTOCOL = pytest.mark.parametrize(("on", "protocol"), PACED, indirect=["on"])
FREE = max(15 * SPEED, 4.0) * MB
"""Only a flow that nobody paces is faster..."""
MOST = max(25 * SPEED, 8.0) * MB
"""... and is this fast, no more: emulated processors have other things to do."""

OWN = {12: 4, 47: 600 * MB}
"""SO_PRIORITY and SO_MAX_PACING_RATE as the application has set them: what is to come back."""


class Bench:
    """A sender's namespace with this test's thread in it, and pacers and flows there."""

    def __init__(self, backend: str, net: Net) -> None:
        self.backend, self.net = backend, net
        self._pacers: list[Pacer] = []
        self.flows: list[Any] = []

    def pacer(self, **options: Any) -> Pacer:
        try:
            pacer = make_pacer(self.backend, f"conf{len(self._pacers)}", **options)
        except PacingError as error:
            if self.backend in MUST:
                raise
            pytest.skip(f"{self.backend}: {error}")
        self._pacers.append(pacer)
        return pacer

    def flow(self, pacer: Pacer, protocol: str = "tcp", **more: Any) -> Any:
        if protocol == "udp":
            flow = UdpFlow(self.net, MOST)
        else:
            flow = Flow(self.net, **({"most": MOST} | more))
            if pacer.congestion_control:
                flow.enlist(pacer.congestion_control)
        self.flows.append(flow)
        set_own(flow)
        pacer.attach(flow.cookie, os.getpid(), flow.sock.fileno())
        return flow

    def pair(self, *how: str, **more: Any) -> tuple[Pacer, Any]:
        """A pacer and a flow that is attached to it, not paced yet."""
        pacer = self.pacer()
        return pacer, self.flow(pacer, *how, **more)

    def paced(self) -> tuple[Pacer, Any]:
        """The same, paced at MB."""
        pacer, flow = self.pair()
        assert set_rate(pacer, {flow: MB}) == 1
        return pacer, flow

    def refuses(self, why: str, *names: str) -> None:
        """The back end refuses to set these devices up, and leaves the host as it is."""
        before = self.host()
        with pytest.raises(PacingError, match=why):
            make_pacer(self.backend, "named", devices=names)
        assert self.host() == before

    @contextlib.contextmanager
    def datagrams(self, pacer: Pacer, to: str, device: str = "") -> Iterator[PaceEntry]:
        """The entry of an attached UDP socket that sends nothing."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
            sock.connect((to, 9))
            cookie = cookie_of(sock)
            pacer.attach(cookie, os.getpid(), sock.fileno())
            yield PaceEntry(cookie, MB, MB, True, 0)

    def host(self) -> dict[str, Any]:
        """All that a back end may change here, flows' sockets aside."""
        qdiscs = tc("qdisc", "show")
        for qdisc in qdiscs:
            qdisc["options"].pop("direct_packets_stat", None)  # HTB counts there
        side = "filter", "show", "dev", "eth0"
        return {
            "qdiscs": qdiscs,
            "classes": tc("class", "show", "dev", "eth0"),
            "egress": tc(*side, "egress"),
            "ingress": tc(*side, "ingress"),
            "tcp_tso_rtt_log": Path(guardian.SYSCTL).read_text(),
        }

    def roots(self, device: str = "") -> list[dict[str, Any]]:
        """Root qdiscs, of one device or of all."""
        shown = [one for one in self.host()["qdiscs"] if one.get("root")]
        return [one for one in shown if device in ("", one["dev"])]

    def close(self) -> None:
        for pacer in self._pacers:
            pacer.close()
        for flow in self.flows:
            flow.stop()


def tc(*arguments: str) -> Any:
    """What `tc -j` prints; as it is where it knows no JSON (for classes of TBF)."""
    run = subprocess.run(["tc", "-j", *arguments], capture_output=True, text=True, check=True)
    with contextlib.suppress(ValueError):
        return json.loads(run.stdout)
    return run.stdout


def possible(program: str, line: str) -> bool:
    """A command of `ip` or `tc` that some kernels do not know: whether it was done."""
    command = f"{program} {line}".split()
    return not subprocess.run(command, check=False, capture_output=True).returncode


def set_own(flow: Any) -> None:
    """As an application might."""
    for option, value in OWN.items():
        flow.sock.setsockopt(socket.SOL_SOCKET, option, value)


def options(flow: Any) -> dict[str, bytes]:
    """Of a flow's socket, all that a back end may set."""
    numbers = {"priority": (12, 4), "max_pacing_rate": (47, 8), "mark": (36, 4), "sndbuf": (7, 4)}
    return {
        name: flow.sock.getsockopt(socket.SOL_SOCKET, *how)
        for name, how in numbers.items()
        if not (name == "sndbuf" and flow.sock.type == socket.SOCK_STREAM)  # TCP tunes it
    }


def entry(flow: Any, rate: float, *, guaranteed: bool = True, **more: Any) -> PaceEntry:
    given = {"ceiling": rate, "growth": 0.0, **more}
    return PaceEntry(flow.cookie, rate, guaranteed=guaranteed, **given)


def later(ns: int = LONG) -> int:
    return time.monotonic_ns() + ns


def apply(pacer: Pacer, *entries: PaceEntry, lasts: int = LONG) -> int:
    return pacer.apply(pack(entries), later(lasts))


def set_rate(pacer: Pacer, rates: dict[Any, float], lasts: int = LONG) -> int:
    return apply(pacer, *(entry(flow, rate) for flow, rate in rates.items()), lasts=lasts)


def stat(pacer: Any, flow: Any) -> np.void:
    """What the program for `bpf` tells of a flow."""
    slot = pacer._slot(flow.cookie)
    assert slot
    return pacer._stat[slot].copy()


def slots(flow: Any, count: int = 20) -> np.ndarray:
    """Bytes/s that arrived in each of so many slots."""
    at, seen = [time.monotonic()], [flow.received()]
    for k in range(1, count + 1):
        time.sleep(max(0.0, at[0] + k * SLOT_S - time.monotonic()))
        seen.append(flow.received())
        at.append(time.monotonic())
    return np.diff(seen) / np.diff(at)
