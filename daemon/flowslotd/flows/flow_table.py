# SPDX-License-Identifier: Apache-2.0
"""All flows that the jobs of this host report: one row per socket."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flowslot.model.top_up import LONGEST_QUEUE_US
from flowslot.model.topology import Topology
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import View
from flowslot.policy.mlcc.peers import Group, LocalFlow
from flowslot.policy.mlcc.peers import Role as Part
from flowslot_shm.layout import Role
from flowslotd.flows.flow_info import NO_FLOW, FlowInfo
from flowslotd.flows.rows import FREE, Records, Rows, Typed, bytes_of, typed

ROLES: dict[Role, Part] = {Role.RING: "ring", Role.PUSH: "push", Role.PULL: "pull"}


class FlowTable:
    """Rows of flows; see `ROW`. `infos[i]` belongs to `rows[i]`.

    A row belongs to one flow from its discovery to its end, and never moves. Then the row is `FREE`
    (its cookie is 0), and goes to a later flow. What others keep of a flow is a column, too, so
    that it ends with the flow. `rows` ends with the last row in use.
    """

    def __init__(self, topology: Topology, host: str) -> None:
        self.topology = topology
        self.host = host
        self._room: Records = np.repeat(FREE, 16)
        self.rows: Records = self._room[:0]
        self._typed = Typed(typed)
        self.infos: list[FlowInfo] = []
        self.jobs: list[str] = []
        self.links: list[tuple[int, ...]] = [()]  # by path index; 0: not mapped
        self._index: dict[int, int] = {}
        self._new: list[FlowInfo] = []
        self._gone: list[FlowInfo] = []
        self._measure()

    def __len__(self) -> int:
        """Flows, not rows."""
        return len(self._index)

    def __contains__(self, cookie: int) -> bool:
        return cookie in self._index

    def find(self, cookie: int) -> int | None:
        """Row of a flow."""
        return self._index.get(cookie)

    def used(self) -> Rows:
        """The rows that are not free, ascending."""
        return np.flatnonzero(self.rows["cookie"])

    # -- in ---------------------------------------------------------------------------------

    def add(self, now: Nanos, new: Collection[FlowInfo]) -> None:
        """Give rows to these flows, of which none has one: the first that are free."""
        if not new:
            return
        free = np.flatnonzero(self.rows["cookie"] == 0)[: len(new)].tolist()
        n = len(self.rows)
        at = [*free, *range(n, n + len(new) - len(free))]
        self._bound(max(n, at[-1] + 1))
        for info, row in zip(new, at, strict=True):
            info.row = self._index[info.cookie] = row
            self.infos[row] = info
        self.rows["cookie"][at] = [info.cookie for info in new]
        # A socket that is reported again after it was gone needs a higher incarnation; no job
        # has 1000 iterations a second.
        self.rows["inc"][at] = now // MILLISECOND
        self._new += new
        self._measure()

    def remove(self, cookies: Iterable[int]) -> list[FlowInfo]:
        """These flows have gone, and nobody borrows from them any more. Returns those that had
        rows, which are free now."""
        at = sorted(self._index.pop(cookie) for cookie in cookies if cookie in self._index)
        if not at:
            return []
        gone = [self.infos[row] for row in at]
        unheard = {info.cookie for info in self._new}
        self._new = [info for info in self._new if info.cookie in self._index]
        self._gone += [info for info in gone if info.cookie not in unheard]
        self.rows["lender"][np.isin(self.rows["lender"], at)] = -1
        self.rows[at] = FREE
        for row in at:
            self.infos[row] = NO_FLOW
        used = self.used()
        self._bound(int(used[-1]) + 1 if used.size else 0)
        self._measure()
        return gone

    def remap(self, topology: Topology, host: str) -> None:
        """A new topology. There are no flows any more: they have to be found again."""
        self.topology, self.host = topology, host
        self.remove(list(self._index))
        self._measure()

    # -- out --------------------------------------------------------------------------------

    def view(self, slot: int, horizon: int, guaranteed: Sequence[bool], at: Rows) -> View:
        """What a policy sees of the rows `at`. `guaranteed[p]`: a live arbiter holds path `p`."""
        rows = self.rows[at]
        path = rows["path"]
        left, sent = np.empty((2, len(at)))
        bytes_of(self._typed(self.rows), at, left, sent)
        return View(
            slot=slot,
            horizon=horizon,
            capacity=self.topology.capacity(),
            flow=rows["cookie"],
            paths=self._paths[path],
            job=rows["job"].astype(np.int64),
            job_names=self.jobs,
            remaining=left,
            guaranteed=np.asarray(guaranteed, dtype=np.bool_)[path],
            sent=sent,
            grants=rows["rate"],
            ceilings=rows["ceiling"],
        )

    def transfers(self, rates: Mapping[int, float]) -> list[LocalFlow]:
        """Flows to other hosts that others may wait for, or that may wait for others: as far as
        their ranks and channels are known (not negative). `rates` in force, payload bytes/s, by
        cookie."""
        columns = self.rows[["iteration", "target", "remaining", "ready"]].tolist()
        return [
            LocalFlow(
                flow=info.cookie,
                host=host,
                group=Group(info.job, role, info.rank, info.peer, info.channel),
                iteration=iteration,
                total=target,
                ready=ready,
                sent=target - remaining,
                rate=rates.get(info.cookie, 0.0),
            )
            for info, (iteration, target, remaining, ready) in zip(self.infos, columns, strict=True)
            if (role := ROLES.get(info.role)) is not None
            and min(info.rank, info.peer, info.channel) >= 0
            and target > 0
            and (host := self.topology.host_of(info.dst)) is not None
        ]

    def has_news(self) -> bool:
        """Flows have come or gone, although no record was looked at."""
        return bool(self._new or self._gone)

    def take_new(self) -> list[FlowInfo]:
        """Flows that have got rows since the last call, and still have them."""
        new, self._new = self._new, []
        return new

    def take_gone(self) -> list[FlowInfo]:
        """Flows that have gone since the last call. Their rows may be those of new ones."""
        gone, self._gone = self._gone, []
        return gone

    # -- inside -----------------------------------------------------------------------------

    def _bound(self, n: int) -> None:
        """There are `n` rows from now on; what is beyond is free."""
        if n > len(self._room):
            more = np.repeat(FREE, max(n, 2 * len(self._room)) - len(self._room))
            self._room = np.concatenate((self._room, more))
        self.rows = self._room[:n]
        del self.infos[n:]
        self.infos += [NO_FLOW] * (n - len(self.infos))

    def _measure(self) -> None:
        """Flows came or went: number jobs and paths anew (names of the past must not pile up), and
        fill in the columns that depend on them."""
        at = self.used()
        infos = [self.infos[row] for row in at.tolist()]
        jobs = {job: i for i, job in enumerate(dict.fromkeys(info.job for info in infos))}
        paths = {p: i for i, p in enumerate(dict.fromkeys(((), *(info.path for info in infos))))}
        self.jobs, self.links, self._paths = list(jobs), list(paths), self._pad(paths)
        job = np.array([jobs[info.job] for info in infos], np.int64)
        path = np.array([paths[info.path] for info in infos], np.intp)
        links, goodput = self.topology.links, self.topology.capacity()
        tightest = [min(path, key=goodput.__getitem__, default=-1) for path in self.links]
        bottleneck = np.array(tightest, np.int64)[path]
        _, group, count = np.unique(
            job * (len(links) + 1) + bottleneck, return_inverse=True, return_counts=True
        )
        lasts = [min((links[i].queue_us for i in path), default=0) for path in self.links]
        queue = [int(min(least, LONGEST_QUEUE_US)) for least in lasts]
        self.rows["job"][at], self.rows["path"][at] = job, path
        self.rows["own_share"][at] = (
            np.where(bottleneck < 0, 0.0, goodput[bottleneck]) / count[group]
        )
        self.rows["queue_us"][at] = np.array(queue, np.int64)[path]
        mine = self.topology.host_links(self.host)
        first = [path[0] if path and path[0] in mine else -1 for path in self.links]
        numbers = [mine.index(link) + 1 if link >= 0 else 0 for link in first]
        self.rows["line"][at] = np.append(goodput, 0.0)[first][path]
        self.rows["uplink"][at] = np.array(numbers, np.int64)[path]

    def _pad(self, paths: Collection[tuple[int, ...]]) -> NDArray[np.int32]:
        """int32[P, H], padded with the number of links."""
        longest = max((len(path) for path in paths), default=0)
        padded = np.full((len(paths), max(longest, 1)), len(self.topology.links), np.int32)
        for i, path in enumerate(paths):
            padded[i, : len(path)] = path
        return padded
