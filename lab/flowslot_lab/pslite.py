# SPDX-License-Identifier: Apache-2.0
"""A node of a ps-lite job: ps-lite itself does the communication, patched or not.

The library is `lab/pslite_job/pslite_job.cc`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np

from flowslot_lab.content import Content, Word, Words
from flowslot_lab.jobspec import JobSpec
from flowslot_lab.library import LibraryClock
from flowslot_scenario.job import WORD_BYTES

_POINTS = 4096


class Node(LibraryClock):
    """This process's node. ps-lite has threads of its own."""

    def __init__(self, spec: JobSpec) -> None:
        """Returns when all nodes of the job are there; see `environment`. Raises NotBuilt."""
        super().__init__(f"pslite/{spec.library}/libpslite_job.so")
        self.lib.pslite_trace.restype = ctypes.c_int64
        self._first = 0
        self.rank: int = self.lib.pslite_start()

    def barrier(self) -> None:
        """All workers and servers are ready to receive."""
        self.lib.pslite_barrier()

    def arrived(self) -> list[tuple[int, int]]:
        """See LibraryClock."""
        found: list[tuple[int, int]] = []
        points = np.empty((2, _POINTS), np.int64)
        at, received = (row.ctypes.data_as(ctypes.c_void_p) for row in points)
        while n := self.lib.pslite_trace(
            ctypes.c_int64(self._first), ctypes.c_int64(_POINTS), at, received
        ):
            found += zip(points[0, :n].tolist(), points[1, :n].tolist(), strict=True)
            self._first += n
        return found


class PsLiteWorker:
    """Pushes its keys, pulls their sums. Array layout: [key, word]."""

    losses: Sequence[float] = ()

    def __init__(self, spec: JobSpec, node: Node) -> None:
        self._rank, self._workers, self._node = spec.rank, spec.workers, node
        shape = (spec.slices, spec.slice_bytes // WORD_BYTES)
        self._content = Content(spec.seed, spec.job, int(np.prod(shape)), spec.workers)
        self._gradient: Words = np.empty(shape, Word)
        self._weights: Words = np.empty(shape, Word)
        self.verified = 0
        node.lib.pslite_worker(
            spec.slices,
            ctypes.c_int64(spec.slice_bytes),
            ctypes.c_void_p(self._gradient.ctypes.data),
            ctypes.c_void_p(self._weights.ctypes.data),
        )
        node.barrier()

    def prepare(self, iteration: int) -> None:
        """This worker's gradient."""
        self._content.fill(self._gradient.reshape(-1), self._rank, iteration)

    def communicate(self, iteration: int) -> None:
        """Push all keys, pull all sums."""
        self._weights[:] = 0  # whatever is not pulled is found out
        self._node.lib.pslite_exchange()
        self._node.mark()

    def verify(self, iteration: int) -> None:
        """See Collective."""
        constant = self._content.constant(range(self._workers), iteration)
        self._content.check(self._weights.reshape(-1), 0, self._workers, constant)
        self.verified += self._weights.nbytes


class PsLiteServer:
    """Looks at the sums that this server has sent. Array layout: [generation, key, word]; of S
    servers, number s holds keys s, s + S, ..."""

    def __init__(self, spec: JobSpec, node: Node) -> None:
        self._workers, self._node, self._measured = spec.workers, node, spec.iterations
        self._keys = range(node.rank, spec.slices, spec.servers)
        words = spec.slice_bytes // WORD_BYTES
        self._content = Content(spec.seed, spec.job, spec.slices * words, spec.workers)
        self._sums: Words = np.zeros((2, len(self._keys), words), Word)
        self._served = 0
        self.verified = 0
        node.lib.pslite_server(
            len(self._keys),
            ctypes.c_int64(spec.slice_bytes),
            ctypes.c_void_p(self._sums.ctypes.data),
        )
        node.barrier()

    def serve(self, iterations: int) -> None:
        """Returns when that many iterations (from the first) have been sent back."""
        while self._served < iterations:
            self._served += 1
            self._node.lib.pslite_serve(ctypes.c_int64(self._served))
            self._verify(self._served - 1)
            self._node.lib.pslite_release(ctypes.c_int64(self._served))
            self._node.mark()

    def _verify(self, iteration: int) -> None:
        sums = self._sums[iteration % 2]
        constant = self._content.constant(range(self._workers), iteration)
        for key, words in zip(self._keys, sums, strict=True):
            self._content.check(words, key * words.size, self._workers, constant)
        if iteration < self._measured:
            self.verified += self._workers * sums.nbytes


class PsLiteScheduler:
    """Only there for the others to find each other."""

    verified = 0

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations

    def serve(self, iterations: int) -> None:
        """Returns at once, but never after the iterations that are measured."""
        while iterations > self._iterations:
            time.sleep(3600)


def environment(spec: JobSpec) -> dict[str, str]:
    """What ps-lite and its patch want to know. It has to be there when the process begins: that is
    how a daemon finds out what an unpatched one is."""
    role = "worker" if spec.is_worker else "server" if spec.is_server else "scheduler"
    return {
        "DMLC_ROLE": role,
        "DMLC_NUM_WORKER": str(spec.workers),
        "DMLC_NUM_SERVER": str(spec.servers),
        "DMLC_PS_ROOT_URI": spec.addresses[-1],
        "DMLC_PS_ROOT_PORT": str(spec.port),
        "DMLC_NODE_HOST": spec.addresses[spec.rank],
        "FLOWSLOT_JOB": spec.job,
        "FLOWSLOT_SOCKET": spec.registration_socket,
    }
