# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Transfers take turns alone, the one with the fewest bytes left first; what has begun gives way.

All-reduces go chunk by chunk, and a job with less left goes in between: the limit of small chunks
is a transfer that can be paused at any time. In no paper of ours. Compiled (srsf_chunked.pxd).
"""

from flowslot.policy.gate import Gate, Transfers

COMPILED = not __file__.endswith(".py")


class ChunkedSrsf(Gate):
    """See the module."""

    def admits(self, transfers: Transfers, i: int, n: int) -> bool:
        """See Gate: no link of it is taken by a transfer with less left."""
        return transfers.most(i) == 0

    def decide(self, transfers: Transfers, n: int) -> None:
        """See Gate. Those that send are asked anew."""
        transfers.clear()
        for k in range(n):  # by bytes left, then by row
            i, at = transfers.ready[k], k
            while at > 0 and more(transfers, transfers.order[at - 1], i):
                transfers.order[at] = transfers.order[at - 1]
                at -= 1
            transfers.order[at] = i
        for k in range(n):
            i = transfers.order[k]
            transfers.asked[i] = 0
            transfers.sends[i] = self.admits(transfers, i, n)
            if transfers.sends[i]:
                transfers.occupy(i)


def more(transfers: Transfers, i: int, j: int) -> bool:
    """Row i has more left than row j."""
    later: bool = transfers.left[i] > transfers.left[j]
    return later or (i > j and transfers.left[i] == transfers.left[j])
