# SPDX-License-Identifier: Apache-2.0
"""The control plane of one run: a real `flowslotd` per host, and real `flowslot-switch`es."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from flowslot.policy.registry import DEFAULT, get
from flowslot_lab.net import (
    SWITCH_CONTROL_IP,
    Network,
    control_ip,
    data_ip,
    rack_control_ip,
)
from flowslot_lab.procs import Process, start, stop, venv_program
from flowslot_lab.state import RunState
from flowslot_lab.tools import LabError, run
from flowslot_scenario.results import Evidence
from flowslot_scenario.scenario import SWITCH, Scenario, rack_down, rack_up

_READY_S = 20.0
_GRACE_S = 3.0
_DAEMON_PORT = 7401
_SWITCH_PORT = 7400


class SwitchProcesses:
    """Which process holds which link, and where it listens: one for all links, or one per rack.

    A rack's holds the links that begin or end at its switch. `addresses`: by name, in order.
    """

    def __init__(self, scenario: Scenario, use_switch: bool = True, per_rack: bool = False) -> None:
        """`per_rack`: of a scenario with racks."""
        racks = scenario.racks
        self.addresses: dict[str, str] = {}
        self.holder: dict[str, str] = {}
        """The process that holds each directed link."""
        self.hosts: dict[str, list[str]] = {}
        """The hosts whose links each process holds."""
        if not use_switch:
            return
        if per_rack:
            assert racks, "the caller has seen to it"
            self.addresses = {
                rack: f"{rack_control_ip(k)}:{_SWITCH_PORT}" for k, rack in enumerate(racks)
            }
        else:
            self.addresses = {SWITCH: f"{SWITCH_CONTROL_IP}:{_SWITCH_PORT}"}
        self.hosts = {name: [] for name in self.addresses}
        self.holder = scenario.held_by(per_rack)
        for host in scenario.hosts:
            self.hosts[self.holder[host.up]].append(host.name)


class ControlPlane:
    """Writes the configuration files, starts the processes, asks them what they did."""

    def __init__(
        self,
        scenario: Scenario,
        net: Network,
        state: RunState,
        policy: str,
        use_switch: bool,
        *,
        per_rack: bool = False,
        backend: str = "auto",
        traced: bool = False,
    ) -> None:
        """`per_rack`: a switch process for every rack instead of one for all links; `backend`: how
        daemons pace; `traced`: they write `trace_of`."""
        self._traced = traced
        self._scenario = scenario
        self._net = net
        self._state = state
        self._policy = policy
        self._backend = backend
        self._names = SwitchProcesses(scenario, use_switch, per_rack)
        self._flows_on_link = scenario.flows_on_link()
        self.use_switch = use_switch
        self.switches: dict[str, Process] = {}
        self.daemons: dict[str, Process] = {}

    def register(self, host: str) -> str:
        """Registration socket of a host's daemon."""
        return str(self._state.folder / host / "register.sock")

    def control_of(self, name: str) -> Path:
        """Where the control socket of a switch process is."""
        return self._state.folder / f"{name}.control"

    def trace_of(self, host: str) -> Path:
        """Where a host's daemon writes when demands, grants and rates came."""
        return self._state.folder / f"{host}.trace"

    def start(self) -> None:
        """Start everything; returns when every daemon answers."""
        (self._state.folder / "topology.toml").write_text(
            topology_toml(self._scenario, self._names)
        )
        if self._names.addresses:
            topology = str(self._state.folder / "topology.toml")
            make = ["certs", "init", str(self._state.folder), "--topology", topology]
            run([*venv_program("flowslot", "flowslot_cli.main"), *make])
        for name in self._names.addresses:
            self.start_switch(name)
        for host in self._net.hosts:
            self.start_daemon(host)
        for host in self._net.hosts:
            self._wait_ready(host)
        if get(self._policy).needs_arbiter:
            for name in self._names.addresses:
                self._wait_sessions(name)

    def start_switch(self, name: str = SWITCH) -> None:
        """Start (again) a switch process."""
        process = "switch" if name == SWITCH else f"switch-{name}"
        config = self._state.folder / f"{name}.switch.toml"  # no host's name has a dot
        # A daemon that plans itself has no policy for an arbiter; the switch process keeps its own.
        policy = self._policy if get(self._policy).needs_arbiter else DEFAULT
        lines = [
            f'name = "{name}"',
            'topology = "topology.toml"',
            f'policy = "{policy}"',
            f'runtime_dir = "{self.control_of(name)}"',
        ]
        config.write_text("\n".join(lines) + "\n" + _tls(name) + classes_toml(self._scenario))
        command = [*venv_program("flowslot-switch", "flowslot_switch.main"), "--config"]
        self.switches[name] = start(
            self._state, process, self._net.control, [*command, str(config)], urgent=True
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

    def _instance(self, host: str) -> str:
        """Unique on this kernel."""
        return f"{self._scenario.index(host) + 1}{self._state.id}"

    def _daemon_toml(self, host: str) -> str:
        lines = [
            f'host = "{host}"',
            f'instance = "{self._instance(host)}"',
            f'mode = "{"observe" if self._policy == "fair" else "enforce"}"',
            f'policy = "{self._policy}"',
            'topology = "topology.toml"',
            f'runtime_dir = "{self._state.folder / host}"',
            f"use_switch = {str(self.use_switch).lower()}",
            *([f'trace_file = "{self.trace_of(host).name}"'] if self._traced else []),
            f'[pacing]\nbackend = "{self._backend}"',
        ]
        if not all(job.reports for job in self._scenario.jobs):
            lines.append("[unpatched]\npslite = true")
        if self._policy == "static":
            lines.append("[static.flows_on_link]")
            lines += [f'"{link}" = {n}' for link, n in self._flows_on_link.items()]
        text = "\n".join(lines) + "\n" + classes_toml(self._scenario)
        return text + _tls(host) if self._names.addresses else text

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

    def _wait_sessions(self, name: str) -> None:
        """Every daemon whose links a switch process holds has an open stream to it."""
        deadline = time.monotonic() + _READY_S
        while missing := self._without_session(name):
            if time.monotonic() > deadline:
                hosts = ", ".join(missing)
                raise LabError(f"daemons of {hosts} did not reach {self.switches[name].name}")
            time.sleep(0.05)

    def _without_session(self, name: str) -> list[str]:
        """Hosts of a switch process that it does not know; daemons call themselves by instance."""
        known = {daemon.split("-")[0] for daemon in self.describe_switch(name)["sessions"]}
        return [host for host in self._names.hosts[name] if self._instance(host) not in known]

    def ask(self, host: str, command: str) -> dict[str, Any]:
        """Answer of a daemon's control socket. Raises OSError or ValueError."""
        return self._ask(self._state.folder / host, f"daemon of {host}", cmd=command)

    def set_policy(self, policy: str, host: str | None = None) -> dict[str, Any]:
        """What `flowslot policy set` does: of a host's daemon, or of the switch process."""
        folder = self.control_of(SWITCH) if host is None else self._state.folder / host
        who = "switch process" if host is None else f"daemon of {host}"
        return self._ask(folder, who, cmd="set-policy", name=policy)

    @staticmethod
    def _ask(folder: Path, who: str, **request: str) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(5.0)
            peer.connect(os.fspath(folder / "control.sock"))
            peer.sendall(json.dumps(request).encode() + b"\n")
            with peer.makefile("rb") as stream:
                answer = json.loads(stream.readline())
        if not answer["ok"]:
            raise LabError(f"{who}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def describe_switch(self, name: str = SWITCH) -> dict[str, Any]:
        """A switch process's own account: pid, counters, sessions."""
        folder, caller = str(self._state.folder), next(iter(self._net.hosts))
        asked = [self._names.addresses[name], name, folder, caller]
        command = [sys.executable, "-m", "flowslot_lab.describe", *asked]
        answer: dict[str, Any] = json.loads(
            run(["nsenter", f"--net=/run/netns/{self._net.control}", *command])
        )
        return answer

    def testify(self, evidence: Evidence) -> None:
        """Add what the processes say of themselves: reservations by the arbiters (the switches, or
        without any the daemons), all else by the daemons.
        """
        accounts = {host: self.ask(host, "status") for host in self.daemons}
        for host, account in accounts.items():
            evidence.rate_writes += account["rate_writes"]
            evidence.grpc_connections += account["grpc_connections"]
            if account["last_error"]:
                evidence.errors.append(f"daemon of {host}: {account['last_error']}")
            feedback = account["feedback"]
            if feedback and (feedback["livelocks"] or feedback["starvations"]):
                evidence.errors.append(
                    f"daemon of {host}: {feedback['livelocks']} livelocks, "
                    f"{feedback['starvations']} starvations"
                )
            self._same_pid(self.daemons[host], account["pid"])
        arbiters = [account["reservations"] for account in accounts.values()]
        if self.use_switch:
            switches = {name: self.describe_switch(name) for name in self.switches}
            for name, account in switches.items():
                self._same_pid(self.switches[name], account["pid"])
            arbiters = [account["counters"] for account in switches.values()]
        for kind in ("granted", "scheduled", "refused", "preempted", "expired"):
            total = getattr(evidence, kind) + sum(counts.get(kind, 0) for counts in arbiters)
            setattr(evidence, kind, total)

    @staticmethod
    def _same_pid(process: Process, pid: int) -> None:
        if process.pid != pid:
            raise LabError(f"{process.name}: pid {pid} answered instead of {process.pid}")

    def processes(self) -> list[Process]:
        """Switches and daemons."""
        return [*self.switches.values(), *self.daemons.values()]

    def stop(self) -> None:
        """End them in order: daemons restore what they changed."""
        stop(self.processes(), grace_s=_GRACE_S)


def _tls(name: str) -> str:
    """The certificate of a host or a switch process, as `flowslot certs init` has made it."""
    return f'[tls]\nca = "ca.pem"\ncertificate = "{name}.pem"\nkey = "{name}.key"\n'


def classes_toml(scenario: Scenario) -> str:
    """The classes of jobs that a scenario's jobs are of."""
    lines = []
    for job in scenario.jobs:
        if job.job_class is not None:
            given = job.job_class.model_dump(mode="json", exclude_none=True)
            lines.append("[[classes]]")  # TOML has such values as JSON has them
            lines += [f"{key} = {json.dumps(value)}" for key, value in given.items()]
    return "".join(f"{line}\n" for line in lines)


def topology_toml(scenario: Scenario, switches: SwitchProcesses) -> str:
    """The topology file that all processes of a run read."""
    lines = []
    for name, address in switches.addresses.items():
        lines += ["[[switches]]", f'name = "{name}"', f'address = "{address}"']
    for i, host in enumerate(scenario.hosts):
        lines += [
            "[[hosts]]",
            f'name = "{host.name}"',
            f'daemon = "{control_ip(i)}:{_DAEMON_PORT}"',
            "[[hosts.nics]]",
            'name = "eth0"',
            f'addresses = ["{data_ip(i)}"]',
            f'up = "{host.up}"',
            f'down = "{host.down}"',
        ]
        if host.rack is not None:
            lines.append(f'rack = "{host.rack}"')
    for name, link in scenario.directed_links().items():
        lines += [
            "[[links]]",
            f'name = "{name}"',
            f"capacity_gbps = {link.rate_mbps / 1000}",
            f"buffer_kb = {link.buffer_bytes / 1000}",
        ]
        if name in switches.holder:
            lines.append(f'switch = "{switches.holder[name]}"')
    for src, dst in itertools.permutations(scenario.racks, 2):
        lines += [
            "[[routes]]",
            f'from_rack = "{src}"',
            f'to_rack = "{dst}"',
            f'links = ["{rack_up(src)}", "{rack_down(dst)}"]',
        ]
    return "\n".join(lines) + "\n"
