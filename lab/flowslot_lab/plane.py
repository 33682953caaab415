# SPDX-License-Identifier: Apache-2.0
"""The control plane of one run: a real `flowslotd` per host and a real `flowslot-switch`."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from flowslot_lab.net import (
    SWITCH_CONTROL_IP,
    LabError,
    Network,
    control_ip,
    data_ip,
    run,
)
from flowslot_lab.procs import Process, start, stop, venv_program
from flowslot_lab.state import RunState
from flowslot_scenario.results import Evidence
from flowslot_scenario.scenario import SWITCH, Scenario, down, up

_READY_S = 20.0
_GRACE_S = 3.0
_DAEMON_PORT = 7401
_SWITCH_ADDRESS = f"{SWITCH_CONTROL_IP}:7400"


class ControlPlane:
    """Writes the configuration files, starts the processes, asks them what they did."""

    def __init__(
        self, scenario: Scenario, net: Network, state: RunState, policy: str, use_switch: bool
    ) -> None:
        self._scenario = scenario
        self._net = net
        self._state = state
        self._policy = policy
        self.use_switch = use_switch
        self.switch: Process | None = None
        self.daemons: dict[str, Process] = {}

    def register(self, host: str) -> str:
        """Registration socket of a host's daemon."""
        return str(self._state.folder / host / "register.sock")

    def start(self) -> None:
        """Start everything; returns when every daemon answers."""
        (self._state.folder / "topology.toml").write_text(
            topology_toml(self._scenario, self.use_switch)
        )
        if self.use_switch:
            self.start_switch()
        for host in self._net.hosts:
            self.start_daemon(host)
        for host in self._net.hosts:
            self._wait_ready(host)
        if self.use_switch and self._policy == "stagger":
            self._wait_sessions()

    def start_switch(self) -> None:
        """Start (again) the process that holds all links of the switch."""
        config = self._state.folder / "switch.toml"
        config.write_text(f'name = "{SWITCH}"\ntopology = "topology.toml"\n')
        command = [*venv_program("flowslot-switch", "flowslot_switch.main"), "--config"]
        self.switch = start(
            self._state, "switch", self._net.switch, [*command, str(config)], urgent=True
        )

    def start_daemon(self, host: str) -> None:
        """Start (again) the daemon of a host."""
        (self._state.folder / host).mkdir(exist_ok=True)
        config = self._state.folder / f"{host}.toml"
        config.write_text(self._daemon_toml(host))
        command = [*venv_program("flowslotd", "flowslotd.main"), "--config", str(config)]
        self.daemons[host] = start(
            self._state, f"daemon-{host}", self._net.hosts[host], command, urgent=True
        )

    def _daemon_toml(self, host: str) -> str:
        instance = f"{self._scenario.index(host) + 1}{self._state.id}"  # unique on this kernel
        lines = [
            f'host = "{host}"',
            f'instance = "{instance}"',
            f'mode = "{"observe" if self._policy == "fair" else "enforce"}"',
            f'policy = "{self._policy}"',
            'topology = "topology.toml"',
            f'runtime_dir = "{self._state.folder / host}"',
            f"use_switch = {str(self.use_switch).lower()}",
        ]
        if self._policy == "static":
            lines.append("[static.flows_on_link]")
            lines += [f'"{link}" = {n}' for link, n in self._scenario.flows_on_link().items()]
        return "\n".join(lines) + "\n"

    def _wait_ready(self, host: str) -> None:
        process = self.daemons[host]
        deadline = time.monotonic() + _READY_S
        while True:
            if process.popen.poll() is not None:
                raise LabError(f"{process.name} ended at its start: {process.tail()}")
            try:
                self.ask(host, "status")
                return
            except (OSError, ValueError) as error:
                if time.monotonic() > deadline:
                    raise LabError(f"{process.name} does not answer: {error}") from None
            time.sleep(0.02)

    def _wait_sessions(self) -> None:
        """Every daemon has an open stream to the switch."""
        deadline = time.monotonic() + _READY_S
        while len(self.describe_switch()["sessions"]) < len(self.daemons):
            if time.monotonic() > deadline:
                raise LabError("not every daemon reached the switch process")
            time.sleep(0.05)

    def ask(self, host: str, command: str) -> dict[str, Any]:
        """Answer of a daemon's control socket. Raises OSError or ValueError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(5.0)
            peer.connect(os.fspath(Path(self._state.folder / host / "control.sock")))
            peer.sendall(json.dumps({"cmd": command}).encode() + b"\n")
            with peer.makefile("rb") as stream:
                answer = json.loads(stream.readline())
        if not answer["ok"]:
            raise LabError(f"daemon of {host}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def describe_switch(self) -> dict[str, Any]:
        """The switch process's own account: pid, counters, sessions."""
        command = [sys.executable, "-m", "flowslot_lab.describe", _SWITCH_ADDRESS]
        answer: dict[str, Any] = json.loads(
            run(["nsenter", f"--net=/run/netns/{self._net.switch}", *command])
        )
        return answer

    def testify(self, evidence: Evidence) -> None:
        """Add what the processes say of themselves: reservations by the arbiter (the switch, or
        without one the daemons), all else by the daemons.
        """
        accounts = {host: self.ask(host, "status") for host in self.daemons}
        for host, account in accounts.items():
            evidence.rate_writes += account["rate_writes"]
            evidence.holds += account["holds"]
            evidence.grpc_connections += account["grpc_connections"]
            if account["last_error"]:
                evidence.errors.append(f"daemon of {host}: {account['last_error']}")
            self._same_pid(self.daemons[host], account["pid"])
        arbiters = [account["reservations"] for account in accounts.values()]
        if self.use_switch:
            assert self.switch is not None
            account = self.describe_switch()
            self._same_pid(self.switch, account["pid"])
            arbiters = [account["counters"]]
        for kind in ("granted", "refused", "preempted", "expired"):
            total = getattr(evidence, kind) + sum(counts.get(kind, 0) for counts in arbiters)
            setattr(evidence, kind, total)

    @staticmethod
    def _same_pid(process: Process, pid: int) -> None:
        if process.pid != pid:
            raise LabError(f"{process.name}: pid {pid} answered instead of {process.pid}")

    def processes(self) -> list[Process]:
        """Switch and daemons."""
        switch = [self.switch] if self.switch is not None else []
        return [*switch, *self.daemons.values()]

    def stop(self) -> None:
        """End them in order: daemons restore what they changed."""
        stop(self.processes(), grace_s=_GRACE_S)


def topology_toml(scenario: Scenario, use_switch: bool) -> str:
    """The topology file that all processes of a run read."""
    lines = []
    if use_switch:
        lines += ["[[switches]]", f'name = "{SWITCH}"', f'address = "{_SWITCH_ADDRESS}"']
    for i, host in enumerate(scenario.hosts):
        lines += [
            "[[hosts]]",
            f'name = "{host.name}"',
            f'daemon = "{control_ip(i)}:{_DAEMON_PORT}"',
            "[[hosts.nics]]",
            'name = "eth0"',
            f'addresses = ["{data_ip(i)}"]',
            f'up = "{up(host.name)}"',
            f'down = "{down(host.name)}"',
        ]
    for host in scenario.hosts:
        link = scenario.link_of(host.name)
        for name in (up(host.name), down(host.name)):
            lines += [
                "[[links]]",
                f'name = "{name}"',
                f"capacity_gbps = {link.rate_mbps / 1000}",
                f"buffer_kb = {link.buffer_bytes / 1000}",
            ]
            if use_switch:
                lines.append(f'switch = "{SWITCH}"')
    return "\n".join(lines) + "\n"
