# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Gates: which transfers may send now, and which wait. A policy is one rule, `Gate.admits`.

A transfer is what a job has to send between two computations. It sends, or it waits: how fast those
that send are is the network's business. N transfers, one for each job; L links (or servers, where
these are the bottlenecks). Bytes, seconds per byte. Compiled (gate.pxd).
"""

import numpy as np

from flowslot.policy.base import Paths

COMPILED = not __file__.endswith(".py")


class Transfers:
    """What a gate sees. `paths`: int32[N, H], padded with L. Ties go to the lower row.

    `ready`, intp[N]: rows that have bytes to send; how many of its entries count is said with each
    question. `size`, float64[N]: bytes of the whole transfer. `left`: bytes of it that are still to
    be sent. `service`, int64[N]: the job's remaining computation, ns times GPUs. The gate writes
    `sends`, uint8[N], and `asked`, intp[N]: how many transfers have to wait after a look at what
    this one has left.
    """

    def __init__(self, paths: Paths, links: int) -> None:
        n = len(paths)
        self.paths = paths
        self.ready = np.zeros(n, np.intp)
        self.size, self.left = np.zeros(n), np.zeros(n)
        self.service = np.zeros(n, np.int64)
        self.sends = np.zeros(n, np.uint8)
        self.asked = np.zeros(n, np.intp)
        self.order = np.zeros(n, np.intp)
        self.count, self.holder = np.zeros(links + 1, np.intp), np.zeros(links + 1, np.intp)

    def clear(self) -> None:
        """Nobody sends."""
        for link in range(len(self.count)):
            self.count[link], self.holder[link] = 0, -1

    def occupy(self, i: int) -> None:
        """Transfer i sends: one more on each of its links. `holder`: who was the last to come."""
        for h in range(self.paths.shape[1]):
            link = self.paths[i, h]
            if link < len(self.count) - 1 and self.holder[link] != i:
                self.count[link] += 1
                self.holder[link] = i

    def most(self, i: int) -> int:
        """The largest number of transfers that send on one of the links of transfer i."""
        k = 0
        for h in range(self.paths.shape[1]):
            k = max(k, self.count[self.paths[i, h]])
        return k


class Gate:
    """Starts waiting transfers in the order of their jobs' remaining service (SRSF); what has begun
    is not interrupted."""

    def admits(self, transfers: Transfers, i: int, n: int) -> bool:
        """Transfer i, which waits, may begin. `n`: as many are ready."""
        raise NotImplementedError

    def decide(self, transfers: Transfers, n: int) -> None:
        """Set `sends` and `asked` of the first n of `ready`."""
        transfers.clear()
        waiting = 0
        for k in range(n):
            i = transfers.ready[k]
            transfers.asked[i] = 0
            if transfers.sends[i]:
                transfers.occupy(i)
            else:
                waiting = insert(transfers, waiting, i)
        for k in range(waiting):
            i = transfers.order[k]
            if self.admits(transfers, i, n):
                transfers.sends[i] = 1
                transfers.occupy(i)


def insert(transfers: Transfers, n: int, i: int) -> int:
    """Put row i into its place among the first n of `order`: by service, then by row."""
    k = n
    while k > 0 and after(transfers, transfers.order[k - 1], i):
        transfers.order[k] = transfers.order[k - 1]
        k -= 1
    transfers.order[k] = i
    return n + 1


def after(transfers: Transfers, i: int, j: int) -> bool:
    """Row i comes after row j."""
    later: bool = transfers.service[i] > transfers.service[j]
    return later or (i > j and transfers.service[i] == transfers.service[j])
