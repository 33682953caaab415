# SPDX-License-Identifier: Apache-2.0
"""How exactly and how soon a paced flow follows the rates that it is given.

Two hosts and a switch as network namespaces; the switch's port to the receiver is the link: HTB at
its rate with a small burst, over a shallow FIFO. The receiver samples the kernel's count of
received bytes every quarter of a millisecond; slots are compared on CLOCK_MONOTONIC, which all
namespaces share, so delays in queues and transitions between rates count as errors.

    python -m bench.rate_accuracy [--backend bpf,htb,socket] [--pauses 100] [--runs 3] [-o json]

Several back ends take turns.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flowslotd.pace.pacer import PaceEntry, Pacer, pack
from flowslotd.pace.select import make_pacer

LINK_BPS = 400e6
BUFFER = 64_000
GOODPUT = LINK_BPS / 8 * 1448 / 1514
QUEUE_US = round(BUFFER / (LINK_BPS / 8) * 1e6)
SLOT_S = 0.060
FLOOR = 0.02
SAMPLE_S = 0.00025
TCP_INFO_BYTES_RECEIVED = 128
CLONE_NEWNET = 0x40000000
Samples = NDArray[np.int64]


# -- the network --------------------------------------------------------------------------------


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def join(switch: str, host: str, index: int, *, link_bps: float, buffer: int) -> None:
    """Plug a host into the switch; its port's egress is shaped."""
    port = f"p{index}"
    ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
    ip("-n", switch, "link", "set", port, "master", "br0", "up")
    ip("-n", host, "addr", "add", f"10.79.0.{index}/24", "dev", "eth0")
    ip("-n", host, "link", "set", "eth0", "up")
    for name, device in ((host, "eth0"), (switch, port)):
        features = ["tso", "off", "gso", "off", "gro", "off"]
        subprocess.run(
            ["ip", "netns", "exec", name, "ethtool", "-K", device, *features],
            check=True,
            capture_output=True,
        )
    rate = f"{link_bps:.0f}bit"
    for command in (
        f"qdisc add dev {port} root handle 1: htb default 1",
        f"class add dev {port} parent 1: classid 1:1 htb rate {rate} burst 16kb cburst 16kb",
        f"qdisc add dev {port} parent 1:1 handle 2: bfifo limit {buffer}",
    ):
        subprocess.run(["tc", "-n", switch, *command.split()], check=True, capture_output=True)


@contextlib.contextmanager
def network(
    hosts: int = 2, *, prefix: str = "", link_bps: float = LINK_BPS, buffer: int = BUFFER
) -> Iterator[list[str]]:
    """Namespaces: the switch, then the hosts; host i has the address 10.79.0.i."""
    prefix = prefix or f"fsbench{os.getpid()}"
    names = [f"{prefix}-{i}" for i in range(hosts + 1)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "br0", "type", "bridge")
        ip("-n", names[0], "link", "set", "br0", "up")
        for i, host in enumerate(names[1:], start=1):
            join(names[0], host, i, link_bps=link_bps, buffer=buffer)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread in a namespace: back ends look at the devices there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{name}") as away:
        if libc.setns(away.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        try:
            yield
        finally:
            libc.setns(home.fileno(), CLONE_NEWNET)


# -- the two ends -------------------------------------------------------------------------------


def received(sock: socket.socket) -> int:
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES_RECEIVED + 8)
    return int.from_bytes(info[TCP_INFO_BYTES_RECEIVED:], sys.byteorder)


def receive() -> None:
    """Print a port; then, once standard input ends, the samples (time ns, bytes) as int64."""
    server = socket.create_server(("", 0))
    print(server.getsockname()[1], flush=True)
    sock, _ = server.accept()
    sock.setblocking(False)
    os.set_blocking(0, False)
    samples: list[int] = []
    for turn in range(1 << 62):
        samples += (time.monotonic_ns(), received(sock))
        with contextlib.suppress(BlockingIOError):
            sock.recv(1 << 24, socket.MSG_TRUNC)  # thrown away in the kernel
        if turn % 64 == 0:
            with contextlib.suppress(BlockingIOError):
                if os.read(0, 1) == b"":
                    break
        time.sleep(SAMPLE_S)
    sys.stdout.buffer.write(np.array(samples, np.int64).tobytes())


def send(address: str, port: int, congestion_control: str) -> None:
    """Print cookie, pid and descriptor of a socket; keep it busy until standard input ends."""
    sock = socket.socket()
    # From the start: the flow must never have seen bbr, which turns pacing on and leaves it on.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    sock.connect((address, port))
    cookie = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, 57, 8), sys.byteorder)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
    print(cookie, os.getpid(), sock.fileno(), flush=True)
    data = bytes(1 << 18)
    sock.settimeout(0.2)
    os.set_blocking(0, False)
    while True:
        with contextlib.suppress(TimeoutError):
            sock.send(data)
        with contextlib.suppress(BlockingIOError):
            if os.read(0, 1) == b"":
                return


def spawn(namespace: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{namespace}", sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


class Flow:
    """A busy flow from host 1 to host 2."""

    def __init__(self, names: Sequence[str], pacer: Pacer) -> None:
        self._receiver = spawn(names[2], "receive")
        port = self._line(self._receiver)[0]
        cc = pacer.congestion_control or "cubic"
        self._sender = spawn(names[1], "send", "10.79.0.2", str(port), cc)
        self.cookie, pid, fd = self._line(self._sender)
        pacer.attach(self.cookie, pid, fd)

    @staticmethod
    def _line(process: subprocess.Popen[bytes]) -> list[int]:
        assert process.stdout is not None
        return [int(word) for word in process.stdout.readline().split()]

    def stop(self) -> Samples:
        """End both; samples: columns time (monotonic ns) and bytes received."""
        self._sender.communicate(timeout=10)
        raw, _ = self._receiver.communicate(timeout=10)
        return np.frombuffer(raw, np.int64).reshape(-1, 2)


# -- what is measured ---------------------------------------------------------------------------


def until(moment_ns: int) -> None:
    """Sleep, the last bit in a loop."""
    while (left := moment_ns - time.monotonic_ns()) > 0:
        if left > 200_000:
            time.sleep((left - 150_000) / 1e9)


def pace(pacer: Pacer, cookie: int, rate: float) -> int:
    """Set a fixed rate; returns when it was written."""
    entry = PaceEntry(cookie, rate, GOODPUT, guaranteed=True, growth=0, queue_us=QUEUE_US)
    pacer.apply(pack([entry]), time.monotonic_ns() + 10**10)
    return time.monotonic_ns()


def bytes_at(samples: Samples, moments: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Bytes received at moments (ns), interpolated between samples."""
    base = int(samples[0, 0])
    at = np.asarray(moments, np.int64) - base
    return np.interp(at, samples[:, 0] - base, samples[:, 1])


def measure_accuracy(
    pacer: Pacer, names: Sequence[str], *, slots: int = 50, seed: int = 1
) -> dict[str, float]:
    """Slots of 60 ms stepping between 10 and 90 % of the link at random.

    Errors are |received - asked| / asked per slot, in percent.
    """
    rng = random.Random(seed)
    rates = [GOODPUT * rng.uniform(0.1, 0.9) for _ in range(slots)]
    flow = Flow(names, pacer)
    pace(pacer, flow.cookie, rates[0])
    time.sleep(0.3)
    start = time.monotonic_ns()
    # A slot lasts from writing to writing: how late this process is, is not the kernel's error.
    bounds, late = [], []
    for i, rate in enumerate(rates):
        moment = start + round(i * SLOT_S * 1e9)
        until(moment)
        bounds.append(pace(pacer, flow.cookie, rate))
        late.append(bounds[-1] - moment)
    bounds.append(start + round(slots * SLOT_S * 1e9))
    until(bounds[-1])
    time.sleep(0.02)
    got = np.diff(bytes_at(flow.stop(), bounds))
    asked = np.array(rates) * np.diff(bounds) / 1e9
    error = np.abs(got - asked) / asked * 100
    return {
        "mean_pct": float(error.mean()),
        "p50_pct": float(np.percentile(error, 50)),
        "p90_pct": float(np.percentile(error, 90)),
        "max_pct": float(error.max()),
        "bias_pct": float((got - asked).sum() / asked.sum() * 100),
        "written_late_ms": float(max(late) / 1e6),
    }


def resumed_after(samples: Samples, written: int, rate: float, window_ns: int = 5_000_000) -> float:
    """ms from `written` until the start of the first 5 ms that carry 90 % of `rate`."""
    starts = written + np.arange(0, 500_000_000, 100_000)
    carried = bytes_at(samples, starts + window_ns) - bytes_at(samples, starts)
    good = np.flatnonzero(carried >= 0.9 * rate * window_ns / 1e9)
    return float(starts[good[0]] - written) / 1e6 if good.size else float("inf")


def measure_resume(
    pacer: Pacer, names: Sequence[str], *, pauses: int = 100, pause_s: float = 1.0, seed: int = 1
) -> dict[str, float]:
    """Pauses of a second at 2 % of the link, each followed by 50 to 90 % of it; in ms."""
    rng = random.Random(seed)
    flow = Flow(names, pacer)
    written: list[tuple[int, float]] = []
    for _ in range(pauses):
        pace(pacer, flow.cookie, GOODPUT * FLOOR)
        time.sleep(pause_s + rng.uniform(0, 0.01))
        rate = GOODPUT * rng.uniform(0.5, 0.9)
        written.append((pace(pacer, flow.cookie, rate), rate))
        time.sleep(0.15)
    samples = flow.stop()
    waits = np.array([resumed_after(samples, at, rate) for at, rate in written])
    # Some that was measured, not a value in between: a flow that never resumed counts as inf.
    p50, p99 = np.percentile(waits, (50, 99), method="inverted_cdf")
    return {
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "max_ms": float(waits.max()),
        "pauses": float(pauses),
    }


def measure(
    backend: str = "bpf", *, runs: int = 1, pauses: int = 100, seed: int = 1
) -> dict[str, float]:
    """All of it, on a network of its own. Percent and milliseconds; means over `runs`."""
    with network() as names, inside(names[1]):
        pacer = make_pacer(backend, "bench")
        try:
            rows = [measure_accuracy(pacer, names, seed=seed + i) for i in range(runs)]
            resume = measure_resume(pacer, names, pauses=pauses, seed=seed)
        finally:
            pacer.close()
    accuracy = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    return {f"accuracy_{key}": value for key, value in accuracy.items()} | {
        f"resume_{key}": value for key, value in resume.items()
    }


def take_turns(
    backends: Sequence[str], *, runs: int, pauses: int, seed: int
) -> dict[str, dict[str, list[float]]]:
    """`measure` of each in turn; by back end and key, one value per run."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in backends}
    for run in range(runs):
        for name in backends:
            each = max(1, pauses // runs)
            for key, value in measure(name, pauses=each, seed=seed + run).items():
                found[name].setdefault(key, []).append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--backend", default="bpf", help="with commas; of bpf, edt, htb, socket")
    parser.add_argument("--runs", type=int, default=3, help="of 50 slots")
    parser.add_argument("--pauses", type=int, default=100, help="in all runs together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    options = parser.parse_args()
    backends = options.backend.split(",")
    found = take_turns(backends, runs=options.runs, pauses=options.pauses, seed=options.seed)
    if options.output == "json":
        # JSON has no infinity: null where a flow never resumed.
        plain = {
            name: {
                key: [value if math.isfinite(value) else None for value in values]
                for key, values in rows.items()
            }
            for name, rows in found.items()
        }
        print(json.dumps(plain, indent=2))
        return
    print(f"{'mean (lowest to highest run)':26}" + "".join(f"{name:>26}" for name in backends))
    for key in next(iter(found.values())):
        cells = [found[name][key] for name in backends]
        shown = [f"{np.mean(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in cells]
        print(f"{key:26}" + "".join(f"{text:>26}" for text in shown))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["receive"]:
            receive()
        case ["send", address, port, congestion_control]:
            send(address, int(port), congestion_control)
        case _:
            main()
