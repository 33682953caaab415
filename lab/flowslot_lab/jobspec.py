# SPDX-License-Identifier: Apache-2.0
"""What the lab tells a job process, and what the process answers.

The lab writes a `JobSpec` as JSON and passes its path. The process prints one JSON object per
line: {"event": "ready"} once connected, {"event": "iteration", "n": ..} after each iteration,
and a `Report` with {"event": "done"} after the last measured one. The lab writes one line back,
the CLOCK_MONOTONIC nanosecond at which all jobs start together. After its report a process keeps
iterating, so that slower jobs still meet it on the network, until the lab kills it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from flowslot_scenario.results import Floats


@dataclass(frozen=True, slots=True)
class JobSpec:
    """One process of a job.

    `addresses`: data address of every rank: workers, then servers, then ps-lite's scheduler.
    `slices`: per socket and chunk (ring) or per socket (ps: one of each key). `iterations` includes
    warm-up. `register`: the daemon's registration socket, empty when there is no daemon. `library`:
    of ps-lite; of an NCCL job: its network plugin, "flowslot" or "standin". `tos`: of its packets.
    `log`: see `flowslot_lab.wire.Loop`. Of a job that trains, by rank: `host_rates`, bits/s of its
    host's link; `racks`, "" where there are none.
    """

    job: str
    kind: str
    rank: int
    workers: int
    servers: int
    addresses: tuple[str, ...]
    port: int
    sockets: int
    slices: int
    slice_bytes: int
    barrier: bool
    compute_s: float
    jitter: float
    seed: int
    iterations: int
    start_s: float
    register: str
    library: str
    tos: int = 0
    log: str = ""
    channels: int = 1
    threads: int = 0
    iterations_by: str = ""
    sent_bytes: int = 0
    tensor_bytes: int = 0
    model: str = ""
    program: str = ""
    fusion_kb: int = 1024
    host_rates: tuple[float, ...] = ()
    racks: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        """Read what `write` wrote."""
        data = json.loads(path.read_text())
        for key in ("addresses", "host_rates", "racks"):
            data[key] = tuple(data[key])
        return cls(**data)

    @property
    def registration_socket(self) -> str:
        """For a library, which without a daemon must not find that of this machine."""
        return self.register or "/nonexistent/register.sock"

    @property
    def is_worker(self) -> bool:
        """Whether this process computes, pushes and pulls."""
        return self.rank < self.workers

    @property
    def is_server(self) -> bool:
        """Whether this process is a parameter server."""
        return 0 <= self.rank - self.workers < self.servers


def environment_of_torch(_: JobSpec) -> dict[str, str]:
    """What a user of torch would set in this network."""
    return {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}


@dataclass(slots=True)
class Report:
    """Result of one process. Times are CLOCK_MONOTONIC nanoseconds.

    `started`: begin of the first iteration; `ends`: end of each (empty for a server);
    `verified_bytes`: payload received in those iterations, every byte compared with what it
    must be; `cpu_s`: processor time from the start line to the report; `trace`: (time, bytes
    received); `losses`: of those iterations, of a worker that trains.
    """

    started: int = 0
    ends: list[int] = field(default_factory=list)
    verified_bytes: int = 0
    cpu_s: float = 0.0
    trace: list[tuple[int, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def iteration_times(reports: list[Report], warmup: int) -> Floats:
    """Iteration times (s) of a job after `warmup` iterations.

    An iteration of the job ends when its last worker has ended it; the first one begins at the
    start line. `reports`: of the job's workers (a server, which has no ends, is passed over).
    """
    ends = np.array([r.ends for r in reports if r.ends], dtype=np.int64).max(axis=0)
    boundaries = np.concatenate(([reports[0].started], ends))
    return np.asarray(np.diff(boundaries)[warmup:] / 1e9, dtype=np.float64)
