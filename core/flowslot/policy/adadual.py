# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""AdaDUAL: a transfer begins beside another one only if that makes their mean end earlier.

k transfers on a link send a byte in `k b + (k - 1) eta` seconds each: together they are slower than
one after the other. Alone, a transfer begins. Beside one that runs, it begins if it is short
enough: M_new / M_left < b / (2 (b + eta)). Beside more it waits.

Source: Q. Wang et al., Communication Contention Aware Scheduling of Multiple Deep Learning Training
Jobs, Algorithm 2, Theorems 1 and 2. `ways` > 1 is ours: on one link the best start is now, or when
one of those that run ends, because in between the sum of all ends is concave in the start. So all
of these are tried. Compiled (adadual.pxd).
"""

import math

import numpy as np

from flowslot.policy.base import Floats
from flowslot.policy.gate import Gate, Transfers

COMPILED = not __file__.endswith(".py")

_inf = math.inf  # as a C variable: adadual.pxd declares it


class AdaDual(Gate):
    """`b`, `eta`: seconds per byte. `ways`: beside at most so many a transfer may begin.

    `every`: of several that run on different links, all have to be long enough; Algorithm 2 looks
    at the one that it finds first. `on_equal`: at equality it begins. ValueError: out of range.
    """

    def __init__(
        self, b: float, eta: float, ways: int = 1, *, every: bool = False, on_equal: bool = False
    ) -> None:
        if not b > 0 or not eta >= 0 or ways < 1:
            raise ValueError("b: more than 0; eta: at least 0; ways: at least 1")
        self.b, self.eta, self.ways = b, eta, ways
        self.every, self.on_equal = every, on_equal
        self.running = np.zeros(ways)

    def admits(self, transfers: Transfers, i: int, n: int) -> bool:
        """See Gate."""
        most = transfers.most(i)
        if most == 0:
            return True
        if most > self.ways:
            return False
        for h in range(transfers.paths.shape[1]):
            link = transfers.paths[i, h]
            if transfers.count[link] == most:
                if most == 1:
                    begins = self.shorter(transfers, i, transfers.holder[link])
                else:
                    begins = self.best_now(transfers, i, link, n)
                if not begins:
                    return False
                if not self.every:
                    return True
        return True

    def shorter(self, transfers: Transfers, i: int, old: int) -> bool:
        """Theorem 2: transfer i should begin beside `old`."""
        new, left = 2 * (self.b + self.eta) * transfers.size[i], self.b * transfers.left[old]
        begins: bool = new <= left if self.on_equal else new < left
        if not begins:
            transfers.asked[old] += 1
        return begins

    def best_now(self, transfers: Transfers, i: int, link: int, n: int) -> bool:
        """Transfer i should not wait for any of those that run on the link."""
        m = 0
        for k in range(n):
            j = transfers.ready[k]
            if transfers.sends[j] and uses(transfers, j, link):
                at = m
                while at > 0 and self.running[at - 1] > transfers.left[j]:
                    self.running[at] = self.running[at - 1]
                    at -= 1
                self.running[at] = transfers.left[j]
                m += 1
        return best_start(self.b, self.eta, self.running[:m], transfers.size[i]) == 0


def uses(transfers: Transfers, i: int, link: int) -> bool:
    """Transfer i crosses the link."""
    for h in range(transfers.paths.shape[1]):  # noqa: SIM110 (a generator is not compiled to a loop)
        if transfers.paths[i, h] == link:
            return True
    return False


def best_start(b: float, eta: float, left: Floats, size: float) -> int:
    """For how many of those that run on a link, `left` bytes each, ascending, a transfer of so many
    bytes should wait, so that the sum of all ends is least; the fewest of equals."""
    best = 0
    least = total_ends(b, eta, left, size, 0)
    for k in range(1, len(left) + 1):
        cost = total_ends(b, eta, left, size, k)
        if cost < least:
            least, best = cost, k
    return best


def total_ends(b: float, eta: float, left: Floats, size: float, after: int) -> float:
    """Sum of the ends of all, s, if the new one begins when `after` of those that run have ended.

    Those that send at a time have all sent the same since they do: `sent` counts what a transfer
    that is there from the beginning has sent.
    """
    m, k = len(left), 0
    now, total, sent = 0.0, 0.0, 0.0
    goal = size if after == 0 else _inf  # `sent` when the new one ends; inf: it does not send
    for _ in range(m + 1):
        active = m - k + 1 if goal < _inf else m - k
        each = active * b + (active - 1) * eta
        if k < m and left[k] <= goal:
            now += (left[k] - sent) * each
            sent = left[k]
            k += 1
            if k == after:
                goal = sent + size
        else:
            now += (goal - sent) * each
            sent, goal = goal, _inf
        total += now
    return total
