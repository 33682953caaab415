# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""How fast transfers are that send at the same time. Compiled (sharing.pxd).

A transfer is all that a job sends between two computations. Its flows move in step, as a ring's or
a pipeline's do: `rate` is that of each of them. N transfers, L links or servers. `paths`, int32[N,
H], padded with L: links that they cross, each once; `flows`, int32[N, H]: how many cross each link.
Bytes/s.
"""

import math

import numpy as np

from flowslot.policy.base import Floats, Paths

COMPILED = not __file__.endswith(".py")
_inf, _eps = math.inf, 1e-9


class Sharing:
    """Which transfers send: `live[:n]`. After `share`, those in `touched` have a new `rate`."""

    def __init__(self, paths: Paths, flows: Paths, links: int) -> None:
        self.paths, self.flows, self.links = paths, flows, links
        rows = len(paths)
        self.live, self.place = np.zeros(rows, np.intp), np.full(rows, -1, np.intp)
        self.touched, self.rate = np.zeros(rows, np.intp), np.zeros(rows)
        self.n = 0

    def enter(self, i: int) -> None:
        """Transfer i begins, or goes on."""
        self.live[self.n], self.place[i] = i, self.n
        self.n += 1

    def leave(self, i: int) -> None:
        """It ends, or pauses."""
        self.n -= 1
        last = self.live[self.n]
        self.live[self.place[i]], self.place[last] = last, self.place[i]
        self.place[i] = -1

    def share(self) -> int:
        """Find the rates anew. Returns how many are touched."""
        raise NotImplementedError


class Contended(Sharing):
    """k transfers at a server send a byte in `k b + (k - 1) eta` seconds each; a transfer is as
    slow as at the fullest of its servers (Wang et al., Communication Contention Aware Scheduling,
    eq. 5). `b`, `eta`: seconds per byte."""

    def __init__(self, paths: Paths, flows: Paths, links: int, b: float, eta: float) -> None:
        super().__init__(paths, flows, links)
        self.b, self.eta = b, eta
        self.count = np.zeros(links + 1, np.intp)

    def enter(self, i: int) -> None:
        """See Sharing."""
        Sharing.enter(self, i)
        for h in range(self.paths.shape[1]):
            self.count[self.paths[i, h]] += 1

    def leave(self, i: int) -> None:
        """See Sharing."""
        Sharing.leave(self, i)
        for h in range(self.paths.shape[1]):
            self.count[self.paths[i, h]] -= 1

    def share(self) -> int:
        """See Sharing: all that send are touched."""
        for at in range(self.n):
            i, k = self.live[at], 1
            for h in range(self.paths.shape[1]):
                if self.paths[i, h] < self.links:
                    k = max(k, self.count[self.paths[i, h]])
            self.touched[at] = i
            self.rate[i] = 1 / (k * self.b + (k - 1) * self.eta)
        return self.n


class MaxMin(Sharing):
    """Max-min fair rates of flows over links, above what is reserved for them (`base`). They are
    found anew only where something has changed.

    In a max-min fair allocation each transfer has a witness: a full link on which none has more,
    and no other allocation has that (Bertsekas and Gallager, Data Networks, 6.5.2). Where a
    transfer comes or goes, those whose witness is one of its links are shared anew beside the
    others, which keep their rates. Where that leaves a witness lost or missing, all transfers on
    that link are shared anew too, and so on. `roughly`: that waits until `refresh`; until then a
    rate may be too low or too high, but none exceeds what its links have left.
    """

    def __init__(
        self, paths: Paths, flows: Paths, capacity: Floats, *, roughly: bool = False
    ) -> None:
        """`capacity`: float64[L + 1], the last one inf."""
        links, rows = len(capacity) - 1, len(paths)
        super().__init__(paths, flows, links)
        self.shift = max(paths.shape[1] - 1, 0).bit_length()
        self.mask = (1 << self.shift) - 1
        entries = rows << self.shift
        self.capacity, self.roughly = capacity, roughly
        self.base, self.extra = np.zeros(rows), np.zeros(rows)
        # Who crosses a link: a list of entries of `paths`, as row << shift | place.
        self.head = np.full(links + 1, -1, np.intp)
        self.after, self.before = np.full(entries, -1, np.intp), np.full(entries, -1, np.intp)
        self.suspects, self.crossed = np.zeros(links + 1, np.intp), np.zeros(links + 1, np.intp)
        self.touches = np.zeros(links + 1, np.intp)
        self.suspect_count = self.touch_count = 0
        self.crossed_count = self.anew = self.heap_count = 0
        self.is_suspect, self.seen = np.zeros(links + 1, np.uint8), np.zeros(links + 1, np.uint8)
        self.is_touched = np.zeros(links + 1, np.uint8)
        self.among, self.settled = np.zeros(rows, np.uint8), np.zeros(rows, np.uint8)
        self.witness, self.only = np.full(rows, -1, np.intp), np.full(rows, -1, np.intp)
        self.room, self.users = np.zeros(links + 1), np.zeros(links + 1)
        self.heap, self.key = np.zeros(links + 1, np.intp), np.zeros(links + 1)

    def enter(self, i: int) -> None:
        """See Sharing."""
        Sharing.enter(self, i)
        self.base[i], self.extra[i], self.witness[i] = 0.0, 0.0, -1
        for h in range(self.paths.shape[1]):
            link = self.paths[i, h]
            if link >= self.links:
                break
            e = i << self.shift | h
            first = self.head[link]
            self.before[e], self.after[e] = -1, first
            if first >= 0:
                self.before[first] = e
            self.head[link] = e
            self.touch(link)

    def leave(self, i: int) -> None:
        """See Sharing."""
        Sharing.leave(self, i)
        for h in range(self.paths.shape[1]):
            link = self.paths[i, h]
            if link >= self.links:
                break
            e = i << self.shift | h
            if self.before[e] >= 0:
                self.after[self.before[e]] = self.after[e]
            else:
                self.head[link] = self.after[e]
            if self.after[e] >= 0:
                self.before[self.after[e]] = self.before[e]
            self.touch(link)

    def reserve(self, i: int, rate: float) -> None:
        """So much is transfer i's own, which sends. The sum on each link must fit."""
        if self.base[i] != rate:
            self.base[i] = rate
            for h in range(self.paths.shape[1]):
                if self.paths[i, h] < self.links:
                    self.suspect(self.paths[i, h])

    def refresh(self) -> None:
        """All rates are to be found anew."""
        for at in range(self.n):
            for h in range(self.paths.shape[1]):
                if self.paths[self.live[at], h] < self.links:
                    self.suspect(self.paths[self.live[at], h])

    def touch(self, link: int) -> None:
        """Somebody comes or goes on the link."""
        if not self.is_touched[link]:
            self.is_touched[link] = True
            self.touches[self.touch_count] = link
            self.touch_count += 1

    def suspect(self, link: int) -> None:
        """All transfers on the link have to be shared anew."""
        if not self.is_suspect[link]:
            self.is_suspect[link] = True
            self.suspects[self.suspect_count] = link
            self.suspect_count += 1

    def share(self) -> int:
        """See Sharing."""
        self.anew = self.crossed_count = 0
        for at in range(self.touch_count):
            self.collect(self.touches[at], False)
            self.is_touched[self.touches[at]] = False
        self.touch_count = 0
        done = -1
        while done < self.suspect_count:
            for at in range(max(done, 0), self.suspect_count):
                self.collect(self.suspects[at], True)
            done = self.suspect_count
            self.solve()
            if self.roughly:
                break
            for at in range(self.crossed_count):
                if not self.is_suspect[self.crossed[at]]:
                    self.check(self.crossed[at])
        for at in range(self.suspect_count):
            self.is_suspect[self.suspects[at]] = False
        for at in range(self.crossed_count):
            self.seen[self.crossed[at]] = False
        for at in range(self.anew):
            i = self.touched[at]
            self.among[i] = False
            self.rate[i] = self.base[i] + self.extra[i]
        self.suspect_count = 0
        return self.anew

    def collect(self, link: int, every: bool) -> None:
        """The transfers on the link, or those of them whose witness it is, or that are new, join
        those that are shared anew."""
        e = self.head[link]
        while e >= 0:
            i = e >> self.shift
            if not self.among[i] and (every or self.witness[i] == link or self.witness[i] < 0):
                self.among[i] = True
                self.touched[self.anew] = i
                self.anew += 1
                for h in range(self.paths.shape[1]):
                    crossed = self.paths[i, h]
                    if crossed >= self.links:
                        break
                    if not self.seen[crossed]:
                        self.seen[crossed] = True
                        self.crossed[self.crossed_count] = crossed
                        self.crossed_count += 1
            e = self.after[e]

    # --- those that are shared anew, in what the others leave

    def solve(self) -> None:
        """Progressive filling: again and again the link with the least for each flow is full."""
        self.heap_count = 0
        for at in range(self.anew):
            self.settled[self.touched[at]], self.only[self.touched[at]] = False, -1
        for at in range(self.crossed_count):
            self.open(self.crossed[at])
        for at in range(self.anew):
            if self.only[self.touched[at]] >= 0:
                self.push(self.only[self.touched[at]])
        while self.heap_count > 0:
            link = self.heap[0]
            share = self.per_flow(link)
            if share > self.key[link]:  # others on it were settled at less since then
                self.key[link] = share
                self.sift(0)
            else:
                self.heap_count -= 1
                self.heap[0] = self.heap[self.heap_count]
                self.sift(0)
                if self.users[link] > 0.5:
                    self.fill(link, share)

    def open(self, link: int) -> None:
        """What is left of the link, for how many flows; it joins the heap. Of the links that only
        one transfer is shared anew on, its tightest one does."""
        room, users, rows, mine = self.capacity[link], 0.0, 0, -1
        e = self.head[link]
        while e >= 0:
            i = e >> self.shift
            flows = self.flows[i, e & self.mask]
            room -= flows * self.base[i]
            if self.among[i]:
                users += flows
                rows, mine = rows + 1, i
            else:
                room -= flows * self.extra[i]
            e = self.after[e]
        self.room[link], self.users[link] = max(room, 0.0), users
        self.key[link] = self.per_flow(link)
        if rows > 1:
            self.push(link)
        elif self.only[mine] < 0 or self.key[link] < self.key[self.only[mine]]:
            self.only[mine] = link

    def push(self, link: int) -> None:
        """The link joins the heap."""
        at = self.heap_count
        self.heap_count += 1
        while at > 0 and self.key[self.heap[(at - 1) // 2]] > self.key[link]:
            self.heap[at] = self.heap[(at - 1) // 2]
            at = (at - 1) // 2
        self.heap[at] = link

    def per_flow(self, link: int) -> float:
        """What the link has left for each flow that is not settled."""
        return self.room[link] / self.users[link] if self.users[link] > 0.5 else _inf

    def sift(self, at: int) -> None:
        """Down to where it belongs."""
        if at >= self.heap_count:
            return
        link = self.heap[at]
        while 2 * at + 1 < self.heap_count:
            child = 2 * at + 1
            right = min(child + 1, self.heap_count - 1)
            if self.key[self.heap[right]] < self.key[self.heap[child]]:
                child = right
            if self.key[self.heap[child]] >= self.key[link]:
                break
            self.heap[at] = self.heap[child]
            at = child
        self.heap[at] = link

    def fill(self, link: int, share: float) -> None:
        """The link is full when all of its flows that are not settled have so much."""
        e = self.head[link]
        while e >= 0:
            i = e >> self.shift
            if self.among[i] and not self.settled[i]:
                self.settled[i], self.extra[i], self.witness[i] = True, share, link
                for h in range(self.paths.shape[1]):
                    other = self.paths[i, h]
                    if other >= self.links:
                        break
                    flows = self.flows[i, h]
                    self.room[other] = max(self.room[other] - flows * share, 0.0)
                    self.users[other] -= flows
            e = self.after[e]

    # --- beside the others

    def check(self, link: int) -> None:
        """The link is suspect if it is a witness for a transfer no more, though it should be."""
        load, mine, theirs = 0.0, 0.0, 0.0  # the most of those shared anew, and of the others
        my_least, their_least = _inf, _inf  # of those whose witness it is
        e = self.head[link]
        while e >= 0:
            i = e >> self.shift
            extra = self.extra[i]
            load += self.flows[i, e & self.mask] * (self.base[i] + extra)
            if self.among[i]:
                mine = max(mine, extra)
                if self.witness[i] == link:
                    my_least = min(my_least, extra)
            else:
                theirs = max(theirs, extra)
                if self.witness[i] == link:
                    their_least = min(their_least, extra)
            e = self.after[e]
        much = 1 + _eps
        lost = their_least < _inf and (
            load * much < self.capacity[link] or mine > their_least * much
        )
        if lost or (my_least < _inf and theirs > my_least * much):
            self.suspect(link)
