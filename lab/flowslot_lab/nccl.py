# SPDX-License-Identifier: Apache-2.0
"""A rank of an NCCL job: a ring all-reduce by a network plugin, as NCCL would drive it.

`nccl_patch/harness/job.c` plays NCCL. Where the lab has daemons, the plugin is flowslot's; without,
it is the stand-in for NCCL's own socket transport, which is what a user has who has no flowslot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowslot_lab.content import CorruptionError
from flowslot_lab.jobspec import JobSpec
from flowslot_lab.library import BUILT, LibraryClock, NotBuilt
from flowslot_lab.wire import PeerGone

_FOLDER = "nccl"
_OUTSTANDING = 4
"""Messages on their way at once, in each direction of a channel: as NCCL's slices."""
_IDLE_US = 100
"""NCCL's progress threads never sleep. Here eight of them would share two processors."""
_LIMIT_S = 30


class Rank(LibraryClock):
    """This process's rank."""

    def __init__(self, spec: JobSpec) -> None:
        """Returns when it is connected to its neighbours; see `environment`. Raises NotBuilt, or
        OSError when they do not come in time."""
        super().__init__(f"{_FOLDER}/libnccl-job.so")
        self.lib.nccl_job_trace.restype = ctypes.c_size_t
        self.lib.nccl_job_verify.restype = ctypes.c_int64
        self.lib.nccl_job_error.restype = ctypes.c_char_p
        plugin = BUILT / _FOLDER / f"libnccl-net-{spec.library}.so"
        if not plugin.exists():
            raise NotBuilt(f"{plugin} is missing; `make setup` builds it")
        arguments = ["nccl-job", f"--plugin={plugin}", *_arguments(spec)]
        given = (ctypes.c_char_p * len(arguments))(*(text.encode() for text in arguments))
        status = self.lib.nccl_job_open(len(arguments), given)
        if status == 1:
            raise OSError(self.error())
        if status == 2:
            raise OSError(f"rank 0 at {spec.addresses[0]}:{spec.port}, or another, was not met")
        self._received = 0

    def error(self) -> str:
        """What failed first."""
        text: bytes = self.lib.nccl_job_error()
        return text.decode(errors="replace")

    def arrived(self) -> list[tuple[int, int]]:
        """Of the last all-reduce, once."""
        at: Any = ctypes.POINTER(ctypes.c_int64)()
        count = self.lib.nccl_job_trace(ctypes.byref(at))
        if not count:
            return []
        points = np.ctypeslib.as_array(at, (count, 2)) + np.array([0, self._received])
        self._received = int(points[-1, 1])
        return [(int(ns), int(received)) for ns, received in points]


class NcclWorker:
    """A worker of the ring. What it sums are bytes, modulo 256."""

    losses: Sequence[float] = ()

    def __init__(self, spec: JobSpec, rank: Rank) -> None:
        self._rank = rank
        self._calls = spec.iterations_by == "calls"
        self._each = spec.sent_bytes
        self.verified = 0

    def prepare(self, iteration: int) -> None:
        """This rank's contribution. A step begins here: the stand-in has nobody to tell."""
        if self._calls:
            self._rank.lib.nccl_job_tell(ctypes.c_uint64(iteration))
        self._rank.lib.nccl_job_fill(iteration)

    def communicate(self, iteration: int) -> None:
        """One all-reduce. Raises PeerGone."""
        if self._rank.lib.nccl_job_all_reduce() != 0:
            raise PeerGone(self._rank.error())
        self._rank.mark()

    def verify(self, iteration: int) -> None:
        """See Collective."""
        received = self._rank.lib.nccl_job_verify(iteration)
        expected = (iteration + 1) * self._each
        if received != expected:
            what = "wrong sums" if received < 0 else f"{received} of {expected} bytes came"
            raise CorruptionError(f"iteration {iteration}: {what}")
        self.verified = received


def _arguments(spec: JobSpec) -> list[str]:
    """For the harness."""
    slice_bytes = spec.sockets * spec.slice_bytes
    return [
        f"--rank={spec.rank}",
        f"--ranks={spec.workers}",
        f"--root={spec.addresses[0]}:{spec.port}",
        f"--channels={spec.channels}",
        f"--bytes={spec.workers * spec.channels * spec.slices * slice_bytes}",
        f"--slice={slice_bytes}",
        f"--outstanding={_OUTSTANDING}",
        f"--idle-us={_IDLE_US}",
        f"--limit={_LIMIT_S}",
    ]


def environment(spec: JobSpec) -> dict[str, str]:
    """What a user of NCCL would set, and of flowslot."""
    sockets = spec.sockets // max(spec.threads, 1)
    if (spec.library, spec.threads, spec.sockets) == ("standin", 0, 1):
        sockets = 0  # as in NCCL: the control socket carries all
    counted = {"FLOWSLOT_ITERATION_BYTES": str(spec.sent_bytes)}
    return {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_SOCKET_NTHREADS": str(spec.threads),
        "NCCL_NSOCKS_PERTHREAD": str(sockets),
        "NCCL_IB_DISABLE": "1",
        "FLOWSLOT_JOB": spec.job,
        "FLOWSLOT_SOCKET": spec.registration_socket,
        **(counted if spec.iterations_by == "bytes" else {}),
    }
