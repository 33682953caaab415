# SPDX-License-Identifier: Apache-2.0
"""Is a process a node of a ps-lite job? Its environment says so. Pure.

Any user can start a process with any environment, so nothing in it is trusted: what is not
plausible is no node.
"""

import re
from collections.abc import Mapping, Set
from ipaddress import ip_address
from typing import NamedTuple

from flowslot.model.topology import Topology
from flowslot.model.topology_file import normal_ip
from flowslot_shm.layout import JOB_BYTES, Role, plain_text

MAX_ENVIRONMENT = 1 << 20
"""Bytes that are looked at; what begins behind them does not count."""
_AFTER = re.compile("pslite-(.+)-([0-9]+)")
_ROLES = {b"worker": Role.PUSH, b"server": Role.PULL, b"joint": Role.UNKNOWN}
"""`joint`: worker and server in one process, whose connections may be either's."""


class Node(NamedTuple):
    """A worker, a server, or both."""

    job: bytes
    """The job's name, as far as the environment tells."""
    role: Role
    scheduler_port: int
    spelled: bool = False
    """The job is named after a scheduler whose address the environment does not tell."""

    def named(self, peers: Set[str]) -> bytes:
        """The job's name, as the patch has it. `peers`: the addresses at the scheduler's port that
        the process is connected to. A host's name may be spelled in several ways, and be that of
        several hosts; an address may not."""
        if not self.spelled or len(peers) != 1:
            return self.job
        (scheduler,) = peers
        return _after(scheduler, self.scheduler_port)


def variables_of(environment: bytes) -> dict[bytes, bytes]:
    """Of an environment (NAME=VALUE, each ended by a NUL)."""
    variables: dict[bytes, bytes] = {}
    for line in environment[:MAX_ENVIRONMENT].split(b"\0"):
        name, _, value = line.partition(b"=")
        variables.setdefault(name, value)  # the first one counts, as for getenv()
    return variables


def own_name(variables: Mapping[bytes, bytes]) -> bytes:
    """What a process calls its job; b"": nothing."""
    job = variables.get(b"FLOWSLOT_JOB")
    return plain_text(job, JOB_BYTES) if job else b""


def node_of(environment: bytes) -> Node | None:
    """The node whose environment this is (NAME=VALUE, each ended by a NUL); None: there is none."""
    if b"DMLC_ROLE=" not in environment:
        return None  # nearly all processes
    variables = variables_of(environment)
    role = _ROLES.get(variables.get(b"DMLC_ROLE", b""))
    uri, port = (variables.get(b"DMLC_PS_ROOT_" + name, b"") for name in (b"URI", b"PORT"))
    number = int(port) if port.isdigit() and len(port) <= 5 else 0
    if role is None or not 1 <= number <= 65535:
        return None
    if job := own_name(variables):
        return Node(job, role, number)
    scheduler, spelled = uri.decode("utf-8", "surrogateescape"), False
    try:
        scheduler = normal_ip(scheduler)
    except ValueError:
        spelled = True
    return Node(_after(scheduler, number), role, number, spelled)


def _after(scheduler: str, port: int) -> bytes:
    """The name of a job that has none of its own."""
    return plain_text(f"pslite-{scheduler}-{port}", JOB_BYTES)


def at_home(job: str, topology: Topology, host: str) -> str:
    """The one name of a ps-lite job that is named after its scheduler's address: a host may have
    several addresses, and calls itself by others than other hosts do."""
    found = _AFTER.fullmatch(job)
    try:
        ip = ip_address(found[1] if found else "")
    except ValueError:
        return job
    itself = ip.is_loopback or ip.is_unspecified
    where = host if itself else topology.host_of(str(ip))
    return job if where is None or found is None else _after(where, int(found[2])).decode()
