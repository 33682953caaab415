# SPDX-License-Identifier: Apache-2.0
"""What flowslotd costs with 100 flows: CPU, memory, decision time.

Real traffic: 8 job processes of 12 or 13 sockets each send 100 kB per socket and iteration to
another network namespace over a 400 Mbit/s link (TBF), paced by the real daemon and the real BPF
program under policy `stagger`, with a real switch process as arbiter, or without one. An iteration
starts every 0.45 s. The processes are the ranks of two jobs (four each, starting together as after
a barrier), or, as the hard case, eight jobs that know nothing of each other. Needs root.

The emulated network works in interrupts and timers, which the kernel counts as time of whatever
program they hold up. So, as in the lab and as on hosts whose network cards have processors of their
own, traffic and daemon are kept apart; `shared` lets all run everywhere, and counts both.
"""

import argparse
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from flowslot_lab.processors import of_the_network, of_the_programs
from flowslot_shm.client import JobClient
from flowslot_shm.layout import Role

PROGRAMS = Path(sys.executable).parent
PORT = 7778
NICE = ("nice", "-n", "-10")  # as the systemd units have it
FLOWS, PROCESSES = 100, 8
BYTES = 100_000
PERIOD_S = 0.45
TOPOLOGY = """
[[switches]]
name = "s1"
address = "127.0.0.1:7400"
"""
for _i in (1, 2):
    TOPOLOGY += f"""
[[hosts]]
name = "h{_i}"
  [[hosts.nics]]
  name = "eth0"
  addresses = ["10.78.0.{_i}"]
  up = "h{_i}->s1"
  down = "s1->h{_i}"
[[links]]
name = "h{_i}->s1"
capacity_gbps = 0.4
switch = "s1"
[[links]]
name = "s1->h{_i}"
capacity_gbps = 0.4
switch = "s1"
"""


def run_once(
    flows: int = FLOWS,
    seconds: float = 12.0,
    switch: bool = True,
    jobs: int = 2,
    shared: bool = False,
    *,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Run it; returns the numbers. CPU in percent of one core, times in ms, memory in MB.

    `keep`: write how long each pass took into this file, see bench.recorded_daemon.
    """
    traffic = () if shared else ("taskset", "-c", _list(of_the_network()))
    ours = NICE if shared else ("taskset", "-c", _list(of_the_programs()), *NICE)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = _namespaces(stack)
        (directory / "topology.toml").write_text(TOPOLOGY)
        config = directory / "flowslotd.toml"
        config.write_text(
            f'host = "h1"\nmode = "enforce"\nuse_switch = {str(switch).lower()}\n'
            f'runtime_dir = "{directory}/run"\n'
        )
        if switch:
            files = ("--topology", directory / "topology.toml")
            arbiter = _start(
                stack, hosts[0], *ours, PROGRAMS / "flowslot-switch", "--name", "s1", *files
            )
        program = (*ours, PROGRAMS / "flowslotd")
        if keep is not None:
            program = (*ours, sys.executable, "-m", "bench.recorded_daemon", keep)
        daemon = _start(stack, hosts[0], *program, "--config", config)
        me = (*traffic, sys.executable, "-m", "bench.daemon_cost")
        _start(stack, hosts[1], *me, "--receive")
        _wait_for(lambda: _listens(hosts[1]))
        _wait_for((directory / "run" / "control.sock").exists)
        for i in range(PROCESSES):
            sockets = flows // PROCESSES + (i < flows % PROCESSES)
            offset = PERIOD_S * (i % jobs) / jobs
            _start(stack, hosts[0], *me, "--send", directory / "run", i % jobs, sockets, offset)
        _wait_for(lambda: _status(directory)["flows"]["paced"] >= 0.9 * flows)
        time.sleep(2.0)
        (cpu, user), started = _cpu(daemon), time.monotonic()
        switch_cpu = _cpu(arbiter)[0] if switch else 0.0
        time.sleep(seconds)
        wall = time.monotonic() - started
        status = _status(directory)
        assert status["flows"]["total"] == flows, status["flows"]
        assert status["errors"] == {}, status["errors"]
        return {
            "flows": flows,
            "jobs": jobs,
            "switch": switch,
            "shared": shared,
            "cpu_percent": 100 * (_cpu(daemon)[0] - cpu) / wall,
            "cpu_user_percent": 100 * (_cpu(daemon)[1] - user) / wall,
            "switch_cpu_percent": 100 * (_cpu(arbiter)[0] - switch_cpu) / wall if switch else 0.0,
            "rss_mb": psutil.Process(daemon.pid).memory_info().rss / 1e6,
            "decision_p50_ms": status["decision"]["p50_us"] / 1e3,
            "decision_p90_ms": status["decision"]["p90_us"] / 1e3,
            "replan_p90_ms": status["replan"]["p90_us"] / 1e3,
            "replans_per_s": status["replan"]["count"] / status["uptime_s"],
            "negotiation_p90_ms": status["negotiation"]["p90_us"] / 1e3,
            "lateness_p90_ms": status["slot"]["lateness"]["p90_us"] / 1e3,
            "messages_per_s": status["domain"].get("messages_out", 0) / status["uptime_s"],
            "grants_per_s": status["reservations"]["granted"] / status["uptime_s"],
            "rate_writes_per_s": status["rate_writes"] / status["uptime_s"],
            "period_s": float(np.median([job["period_s"] for job in _ask(directory, "jobs")])),
        }


def measure() -> dict[str, Any]:
    """For bench.run: traffic and daemon kept apart, and sharing all processors (`shared_...`)."""
    shared = run_once(shared=True)
    return {**run_once(), **{f"shared_{name}": value for name, value in shared.items()}}


def _list(processors: list[int]) -> str:
    return ",".join(map(str, processors))


def _namespaces(stack: contextlib.ExitStack) -> list[str]:
    names = [f"fsb{os.getpid()}-h{i}" for i in (1, 2)]
    for name in names:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        _ip("-n", name, "link", "set", "lo", "up")
    peer = ("peer", "name", "eth0", "netns", names[1])
    _ip("-n", names[0], "link", "add", "eth0", "type", "veth", *peer)
    for i, name in enumerate(names, 1):
        _ip("-n", name, "addr", "add", f"10.78.0.{i}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        shape = "dev eth0 root tbf rate 400mbit burst 16k limit 128k"
        subprocess.run(["tc", "-n", name, "qdisc", "add", *shape.split()], check=True)
    return names


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _start(stack: contextlib.ExitStack, host: str, *command: object) -> subprocess.Popen[bytes]:
    enter = ["nsenter", f"--net=/run/netns/{host}"]
    process = subprocess.Popen([*enter, *map(str, command)], stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _wait_for(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the daemon never saw all flows")
        time.sleep(0.1)


def _listens(host: str) -> bool:
    command = ["ip", "netns", "exec", host, "ss", "-Hltn", f"sport = :{PORT}"]
    return bool(subprocess.run(command, check=True, capture_output=True).stdout)


def _ask(directory: Path, command: str) -> Any:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(directory / "run" / "control.sock"))
        peer.sendall(json.dumps({"cmd": command}).encode() + b"\n")
        answer = json.loads(peer.makefile().readline())
    return answer["result"].get(command, answer["result"])


def _status(directory: Path) -> Any:
    return _ask(directory, "status")


def _cpu(process: subprocess.Popen[bytes]) -> tuple[float, float]:
    """Seconds so far: all, and in user mode (interrupts of other traffic count as the kernel's)."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system, times.user


def _receive() -> None:
    listener = socket.create_server(("", PORT), backlog=256)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif not key.fileobj.recv(1 << 18):  # type: ignore[union-attr]
                    selector.unregister(key.fileobj)


def _send(runtime_dir: Path, name: str, flows: int, offset_s: float) -> None:
    socks = [_connect() for _ in range(flows)]
    job = JobClient(str(runtime_dir / "register.sock"), f"job{name}", rank=0)
    writers = {sock: job.flow(sock, 1, i, Role.PUSH) for i, sock in enumerate(socks)}
    data = memoryview(bytes(BYTES))
    iteration = 0
    while True:
        iteration += 1
        time.sleep(PERIOD_S - (time.time() - offset_s) % PERIOD_S)
        left = {sock: BYTES for sock in socks}
        with selectors.DefaultSelector() as selector:
            for sock, writer in writers.items():
                writer.begin(iteration, BYTES)
                writer.ready(BYTES)
                selector.register(sock, selectors.EVENT_WRITE)
            while left:
                for key, _ in selector.select():
                    free = key.fileobj
                    assert isinstance(free, socket.socket)
                    sent = free.send(data[: left[free]])
                    writers[free].done(sent)
                    left[free] -= sent
                    if not left[free]:
                        del left[free]
                        selector.unregister(free)


def _connect() -> socket.socket:
    sock = socket.create_connection(("10.78.0.2", PORT))
    sock.setblocking(False)
    # Little is buffered, so that progress shows how bytes really leave.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    return sock


def main() -> None:
    """Print the numbers: with a switch process, without, of eight jobs, and all shared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--flows", type=int, default=FLOWS)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        _receive()
    if options.send:
        directory, name, flows, offset_s = options.send
        _send(Path(directory), name, int(flows), float(offset_s))
    cases = ((True, 2, False), (False, 2, False), (True, 8, False), (True, 2, True))
    results = [run_once(options.flows, options.seconds, *case) for case in cases]
    if options.output == "json":
        print(json.dumps(results, indent=2))
        return
    for name in results[0]:
        values = (result[name] for result in results)
        shown = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in values)
        print(f"{name:20}", *(f"{text:>10}" for text in shown))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
