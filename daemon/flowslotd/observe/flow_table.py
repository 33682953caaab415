# SPDX-License-Identifier: Apache-2.0
"""All flows that the jobs of this host report, packed: one row per socket.

Rows join a job's progress record with the kernel's counters by socket cookie. Nothing in a record
is trusted: a flow that is not ours, or that another process holds, gets no row and a note.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flowslot.model.topology import Topology
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import View
from flowslot.policy.mlcc.peers import Group, LocalFlow
from flowslot.policy.mlcc.peers import Role as Part
from flowslot_shm.layout import SLOT, Quiet, Role, State
from flowslotd.observe import learning
from flowslotd.observe.flow_info import (
    NO_FLOW,
    PROTOCOLS,
    Binding,
    Ended,
    FlowInfo,
    Owns,
    Rows,
    Source,
    describe,
    place,
)
from flowslotd.observe.progress import FREE, Counters, Records

MAX_FLOWS = 16384
ROLES: dict[Role, Part] = {Role.RING: "ring", Role.PUSH: "push", Role.PULL: "pull"}
NO_COUNTERS = np.zeros(0, np.uint64), np.zeros(0, np.int64)
FRESH_NS = 20 * MILLISECOND
"""What was seen so recently is not looked at again only because a slot begins."""
QUIET_SLOTS = 4
"""Processes of which nobody waits for news, and those that are idle and ring when they begin, are
looked at so many times less often: to learn, and in case that a doorbell was lost."""


class FlowTable:
    """Rows of flows; see `ROW`. `infos[i]` belongs to `rows[i]`.

    A row belongs to one flow from its discovery to its end, and never moves. Then it is `FREE` (its
    cookie is 0) and goes to a later flow: whatever is kept of flows by row is a column here, so
    that nothing else has to be told. `rows` ends with the last row in use.
    """

    def __init__(
        self,
        topology: Topology,
        host: str,
        owns: Owns,
    ) -> None:
        self._topology = topology
        self._host = host
        self._owns = owns
        self._room: Records = np.repeat(FREE, 16)
        self.rows: Records = self._room[:0]
        self.infos: list[FlowInfo] = []
        self.jobs: list[str] = []
        self.links: list[tuple[int, ...]] = [()]  # by path index; 0: not mapped
        self._bindings: dict[int, Binding] = {}
        self.negotiated = True
        """An arbiter wants to know what flows do."""
        self.protocols: tuple[str, ...] = tuple(PROTOCOLS.values())
        """What can be paced."""
        self._closed: set[int] = set()
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

    def refused(self) -> list[FlowInfo]:
        """Flows in records that get no row; `note` says why."""
        return [info for binding in self._bindings.values() for info in binding.refused]

    # -- in ---------------------------------------------------------------------------------

    def observe(self, now: Nanos, sources: Iterable[Source], counters: Counters | None) -> bool:
        """Take in the records of `sources` (all of them, or those that rang) and the counters.

        False: flows have gone on sending, and nothing else.
        """
        sources = list(sources)
        for source in sources:
            source.reader.look()
            self._bind(now, source)
        known = (counters.cookie, counters.acked) if counters is not None else NO_COUNTERS
        rows, negotiated = learning.table(self.rows), self.negotiated
        moved = 0
        for source in sources:
            binding, words = self._bindings[source.id], source.reader.good.view(np.int64)
            moved += learning.advance(
                now, rows, binding.rows, words, binding.slots, *known, not negotiated
            )
            binding.seen = now
        return moved > 0

    def forget(self, source: int) -> None:
        """The process has left: all its flows are gone."""
        binding = self._bindings.pop(source, None)
        if binding is not None:
            self._remove({int(c) for c in self.rows["cookie"][binding.rows]})
            self._closed -= {int(c) for c in binding.cookies}

    def closed(self, cookie: int) -> None:
        """The kernel has closed the socket, whatever the record says."""
        if cookie in self._index:
            self._closed.add(cookie)
            self._remove({cookie})

    def drained(self, cookies: Iterable[int]) -> Ended:
        """The kernel has seen all bytes of these flows' iterations acknowledged."""
        at = [row for cookie in cookies if (row := self._index.get(cookie)) is not None]
        if not at:
            return Ended.FLOWS
        ended = np.array(at, np.intp)
        at_work = np.zeros((len(self.jobs), len(self.links)), np.int64)
        learning.drain(learning.table(self.rows), ended, at_work)
        job, path = self.rows["job"][ended], self.rows["path"][ended]
        if not at_work[job].any(axis=1).all():
            return Ended.JOB
        # Without an announcement only a look tells whether that was all.
        known = self.rows["announced"][ended].all()
        return Ended.FLOWS if known and at_work[job, path].all() else Ended.PATH

    def hush(self, sources: Iterable[Source], ends_are_told: bool) -> None:
        """Tell jobs which of their doorbells anybody listens to.

        `ends_are_told`: the kernel reports the end of a watched flow's phase by itself.
        """
        rows = learning.table(self.rows)
        for source in sources:
            binding = self._bindings.get(source.id)
            if binding is None:
                continue
            signs = 0
            if binding.rows.size:
                signs = learning.signs(rows, binding.rows, not self.negotiated, ends_are_told)
            binding.quiet = bool(signs & learning.QUIET)
            idle = bool(signs & learning.IDLE) and not source.reader.is_torn
            binding.calm = binding.quiet or idle
            ends = Quiet.ENDS if signs & learning.SEEN else Quiet.NONE
            source.reader.set_quiet(Quiet.ALL if binding.quiet else ends)

    def stir(self) -> None:
        """A socket that no row is known of has come up: look at all records in the next slot."""
        for binding in self._bindings.values():
            binding.quiet = binding.calm = False
            binding.seen = 0

    def due(self, slot: int, sources: Iterable[Source]) -> list[Source]:
        """Those to look at in this slot: quiet ones change nothing, and idle ones ring first."""
        return [source for source in sources if self._is_due(slot, source)]

    def is_fresh(self, now: Nanos, source: Source) -> bool:
        """What was seen a moment ago has hardly changed."""
        binding = self._bindings.get(source.id)
        return binding is not None and now - binding.seen < FRESH_NS

    def _is_due(self, slot: int, source: Source) -> bool:
        binding = self._bindings.get(source.id)
        if binding is None:
            return True
        loud = not (binding.calm and binding.rows.size)
        due = loud or slot - binding.looked >= QUIET_SLOTS
        if due:  # not all of the others in the same slot
            binding.looked = slot - source.id % QUIET_SLOTS if loud else slot
        return due

    def has_news(self) -> bool:
        """Flows have come or gone, although no record was looked at."""
        return bool(self._new or self._gone)

    def remap(self, topology: Topology, host: str) -> None:
        """A new topology: look at every flow again."""
        self._topology, self._host = topology, host
        self._remove(set(self._index))
        self._bindings.clear()
        self._measure()

    # -- out --------------------------------------------------------------------------------

    def view(self, slot: int, horizon: int, guaranteed: Sequence[bool], at: Rows) -> View:
        """What a policy sees of the rows `at`. `guaranteed[p]`: a live arbiter holds path `p`."""
        rows = self.rows[at]
        path = rows["path"]
        return View(
            slot=slot,
            horizon=horizon,
            capacity=self._topology.capacity(),
            flow=rows["cookie"],
            paths=self._paths[path],
            job=rows["job"].astype(np.int64),
            job_names=self.jobs,
            remaining=rows["remaining"] * learning.gross(rows["target"], rows["unreported"]),
            cap=np.full(len(rows), math.inf),
            guaranteed=np.asarray(guaranteed, dtype=np.bool_)[path],
            acked=np.where(rows["kernel"], rows["counter"].astype(np.float64), np.nan),
            grants=rows["rate"],
            ceilings=rows["ceiling"],
        )

    def transfers(self, rates: Mapping[int, float]) -> list[LocalFlow]:
        """Flows to other hosts that others may wait for, or that may wait for others: as far as
        their ranks are known (not negative). `rates` in force, payload bytes/s, by cookie."""
        columns = (
            self.rows[name].tolist() for name in ("iteration", "target", "remaining", "ready")
        )
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
            for info, iteration, target, remaining, ready in zip(self.infos, *columns, strict=True)
            if (role := ROLES.get(info.role)) is not None
            and info.rank >= 0
            and target > 0
            and (host := self._topology.host_of(info.dst)) is not None
        ]

    def take_new(self) -> list[FlowInfo]:
        """Flows that have got rows since the last call, and still have them."""
        new, self._new = self._new, []
        return new

    def take_gone(self) -> list[FlowInfo]:
        """Flows that have gone since the last call. Their rows may be those of new ones."""
        gone, self._gone = self._gone, []
        return gone

    def take_watches(self) -> list[tuple[int, int]]:
        """(cookie, counter) for flows whose end of phase the kernel should report, if new."""
        at, rows = np.empty(len(self.rows), np.intp), self.rows
        due = at[: learning.watch(learning.table(rows), not self.negotiated, at)]
        if not due.size:
            return []
        return list(zip(rows["cookie"][due].tolist(), rows["watched"][due].tolist(), strict=True))

    # -- inside -----------------------------------------------------------------------------

    def _bind(self, now: Nanos, source: Source) -> None:
        """Give rows to the flows that are new in a record; take them from those that left."""
        binding = self._bindings.setdefault(source.id, Binding())
        if binding.opened == source.reader.opened:
            return
        binding.opened = source.reader.opened
        snap = source.reader.good.view(SLOT)[:, 0]
        cookies = np.where(snap["state"] == State.FREE, 0, snap["sock_cookie"])
        present = set(cookies.tolist())
        self._closed -= set(binding.cookies.tolist()) - present
        self._remove(set(self.rows["cookie"][binding.rows].tolist()) - present)
        binding.cookies, binding.refused = cookies, []
        mine: dict[int, int] = {}
        new: list[FlowInfo] = []
        for slot in np.flatnonzero(snap["state"] != State.FREE).tolist():
            info = describe(snap[slot], source)
            held = self._index.get(info.cookie)
            if held is not None and self.infos[held].source == source.id:
                mine.setdefault(info.cookie, slot)
                continue
            if info.cookie in mine:
                info.note = "reported twice by the same process"
            else:
                self._admit(info)
            if info.note:
                binding.refused.append(info)
            else:
                mine[info.cookie] = slot
                new.append(info)
        if new:
            self._add(now, new)
        binding.slots = np.fromiter(mine.values(), np.intp, len(mine))
        binding.rows = np.array([self._index[cookie] for cookie in mine], dtype=np.intp)

    def _admit(self, info: FlowInfo) -> None:
        """Fill in the flow's path and owner, or a note why it gets no row."""
        if not (info.note or info.cookie):
            info.note = "no socket cookie was reported"
        if not info.note and info.protocol not in self.protocols:
            info.note = f"{info.protocol.upper()}, which this back end does not pace"
        if info.note:
            return
        place(info, self._topology, self._host)
        held = self._index.get(info.cookie)
        info.owned = self._owns(info.pid, info.fd, info.cookie)
        if info.cookie in self._closed:
            info.note = "its socket is closed"
        elif info.owned is False:
            info.note = "the socket belongs to another process"
        elif held is not None and (self.infos[held].owned or not info.owned):
            info.note = f"process {self.infos[held].pid} reported this socket before"
        elif held is not None:
            self._remove({info.cookie})
        elif len(self) >= MAX_FLOWS:
            info.note = f"this host has more than {MAX_FLOWS} flows"

    def _add(self, now: Nanos, new: list[FlowInfo]) -> None:
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

    def _remove(self, cookies: set[int]) -> None:
        at = sorted(self._index.pop(cookie) for cookie in cookies if cookie in self._index)
        if not at:
            return
        gone = [self.infos[row] for row in at]
        unheard = {info.cookie for info in self._new}
        self._new = [info for info in self._new if info.cookie in self._index]
        self._gone += [info for info in gone if info.cookie not in unheard]
        for source in {info.source for info in gone} & self._bindings.keys():
            binding = self._bindings[source]
            stays = ~np.isin(binding.rows, at)
            binding.slots, binding.rows = binding.slots[stays], binding.rows[stays]
        self.rows["lender"][np.isin(self.rows["lender"], at)] = -1
        self.rows[at] = FREE
        for row in at:
            self.infos[row] = NO_FLOW
        used = self.used()
        self._bound(int(used[-1]) + 1 if used.size else 0)
        self._measure()

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
        links, goodput = self._topology.links, self._topology.capacity()
        tightest = [min(path, key=goodput.__getitem__, default=-1) for path in self.links]
        bottleneck = np.array(tightest, np.int64)[path]
        _, group, count = np.unique(
            job * (len(links) + 1) + bottleneck, return_inverse=True, return_counts=True
        )
        lasts = [link.buffer_bytes * 8e6 / link.capacity_bps for link in links]
        queue = [int(min((lasts[i] for i in path), default=0)) for path in self.links]
        self.rows["job"][at], self.rows["path"][at] = job, path
        self.rows["own_share"][at] = (
            np.where(bottleneck < 0, 0.0, goodput[bottleneck]) / count[group]
        )
        self.rows["queue_us"][at] = np.array(queue, np.int64)[path]

    def _pad(self, paths: Collection[tuple[int, ...]]) -> NDArray[np.int32]:
        """int32[P, H], padded with the number of links."""
        longest = max((len(path) for path in paths), default=0)
        padded = np.full((len(paths), max(longest, 1)), len(self._topology.links), np.int32)
        for i, path in enumerate(paths):
            padded[i, : len(path)] = path
        return padded
