# SPDX-License-Identifier: Apache-2.0
"""From progress records and the kernel's counters to the rows of the flow table.

A record is joined with the counters by socket cookie. Nothing in a record is trusted: a flow that
is not ours, or that another process holds, gets no row and a note.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum

import numpy as np

from flowslot.model.topology import Topology
from flowslot.model.units import MILLISECOND, Nanos
from flowslot_shm.layout import SLOT, Quiet, State
from flowslotd.flows.counters import FlowCounters
from flowslotd.flows.flow_info import PROTOCOLS, FlowInfo, Source
from flowslotd.flows.flow_table import FlowTable
from flowslotd.flows.rows import Typed
from flowslotd.observe import learning
from flowslotd.observe.binding import Binding, Owns, describe, place

MAX_FLOWS = 16384
FRESH_NS = 20 * MILLISECOND
"""What was seen so recently is not looked at again only because a slot begins."""
RARE_SLOTS = 4
"""Processes of which nobody waits for news, and idle ones, are looked at once in so many slots. The
former are looked at to learn. The latter ring when they begin, but a doorbell may be lost."""


class Ended(IntEnum):
    """What ends as the kernel sends the last bytes of flows."""

    FLOWS = 0
    """These alone: others of their jobs go on beside them."""
    PATH = 1
    """All that a job sends on a path."""
    JOB = 2
    """All that a job sends from here."""


class Observer:
    """Fills the flow table, and says which records to look at."""

    def __init__(self, table: FlowTable, owns: Owns) -> None:
        self.table = table
        self._owns = owns
        self._view = Typed(learning.typed)
        self._bindings: dict[int, Binding] = {}
        self._closed: set[int] = set()
        self._uplinks: dict[int, str] = {}
        self.negotiated = True
        """Somebody wants to know what flows do."""
        self.protocols: tuple[str, ...] = tuple(PROTOCOLS.values())
        """What can be paced."""

    def refused(self) -> list[FlowInfo]:
        """Flows in records that get no row; `note` says why."""
        return [info for binding in self._bindings.values() for info in binding.refused]

    # -- in ---------------------------------------------------------------------------------

    def observe(self, now: Nanos, sources: Iterable[Source], counters: FlowCounters | None) -> bool:
        """Take in the records of `sources` (all of them, or those that rang) and the counters.

        False: flows have gone on sending, and nothing else.
        """
        sources = list(sources)
        for source in sources:
            source.reader.look()
            self._bind(now, source)
        known = counters or FlowCounters.none()
        told = np.stack((known.sent, known.acked))
        rows = self._view(self.table.rows)
        moved = 0
        for source in sources:
            binding, words = self._bindings[source.id], source.reader.good.view(np.int64)
            at, slots = binding.rows, binding.slots
            late = not self.negotiated or source.id < 0  # a shadow record's
            moved += learning.advance(now, rows, at, words, slots, known.cookie, told, late)
            binding.seen = now
        return moved > 0

    def forget(self, source: int) -> None:
        """The process has left: all its flows are gone."""
        binding = self._bindings.pop(source, None)
        if binding is not None:
            self._remove({int(c) for c in self.table.rows["cookie"][binding.rows]})
            self._closed -= {int(c) for c in binding.cookies}

    def closed(self, cookie: int) -> None:
        """The kernel has closed the socket, whatever the record says."""
        if cookie in self.table:
            self._closed.add(cookie)
            self._remove({cookie})

    def drained(self, cookies: Iterable[int]) -> Ended:
        """The kernel has sent all bytes of these flows' iterations."""
        at = [row for cookie in cookies if (row := self.table.find(cookie)) is not None]
        if not at:
            return Ended.FLOWS
        ended = np.array(at, np.intp)
        at_work = np.zeros((len(self.table.jobs), len(self.table.links)), np.int64)
        learning.drain(self._view(self.table.rows), ended, at_work)
        job, path = self.table.rows["job"][ended], self.table.rows["path"][ended]
        if not at_work[job].any(axis=1).all():
            return Ended.JOB
        # Without an announcement only a look tells whether that was all.
        known = self.table.rows["announced"][ended].all()
        return Ended.FLOWS if known and at_work[job, path].all() else Ended.PATH

    def all_send(self, source: Source) -> bool:
        """Every flow of a record sends, all in the same iteration. False: or that is not known."""
        binding = self._bindings.get(source.id)
        if binding is None or not binding.slots.size:
            return False
        source.reader.look()
        slots = source.reader.good.view(SLOT)[binding.slots, 0]
        first = slots["iteration"][0]
        return bool(np.all((slots["state"] == State.ACTIVE) & (slots["iteration"] == first)))

    def suppress(self, sources: Iterable[Source], ends_are_reported: bool) -> None:
        """Let jobs know which of their doorbells are of use.

        `ends_are_reported`: the kernel reports the end of a watched flow's phase by itself.
        """
        rows = self._view(self.table.rows)
        for source in sources:
            binding = self._bindings.get(source.id)
            if binding is None:
                continue
            signs = 0
            if binding.rows.size:
                signs = learning.signs(rows, binding.rows, not self.negotiated, ends_are_reported)
            suppressed = bool(signs & learning.SUPPRESSED)
            idle = bool(signs & learning.IDLE) and not source.reader.torn.size
            binding.rarely = suppressed or idle
            ends = Quiet.ENDS if signs & learning.SEEN else Quiet.NONE
            source.reader.set_quiet(Quiet.ALL if suppressed else ends)

    def stir(self) -> None:
        """A socket has come up that has no row: look at all records in the next slot."""
        for binding in self._bindings.values():
            binding.rarely = False
            binding.seen = 0

    def due(self, slot: int, sources: Iterable[Source], *, small: bool = False) -> list[Source]:
        """Those to look at in this slot. Suppressed ones change nothing; idle ones ring first.
        With `small` news, which are told anyway, both are looked at a slot early, or in time."""
        return [source for source in sources if self._is_due(slot + small, source)]

    def is_fresh(self, now: Nanos, source: Source) -> bool:
        """What was seen a moment ago has hardly changed."""
        binding = self._bindings.get(source.id)
        return binding is not None and now - binding.seen < FRESH_NS

    def _is_due(self, slot: int, source: Source) -> bool:
        binding = self._bindings.get(source.id)
        if binding is None:
            return True
        often = not (binding.rarely and binding.rows.size)
        due = often or slot - binding.looked >= RARE_SLOTS
        if due:  # not all of the others in the same slot
            binding.looked = slot - source.id % RARE_SLOTS if often else slot
        return due

    def remap(self, topology: Topology, host: str) -> None:
        """A new topology: look at every flow again."""
        self.table.remap(topology, host)
        self._bindings.clear()
        names = {nic.name for nic in topology.hosts[host].nics}
        self._uplinks = {flow: nic for flow, nic in self._uplinks.items() if nic in names}

    def reroute(self, uplinks: Mapping[int, str]) -> set[int]:
        """From now on, these flows leave by these NICs, and all others by those of their addresses.
        Returns the sources to look at: their flows that have moved are found again there."""
        before, self._uplinks = self._uplinks, dict(uplinks)
        at_either = before.keys() | uplinks.keys()
        moved = {one for one in at_either if before.get(one) != uplinks.get(one)}
        gone = self._remove(moved)
        for source in gone:
            self._bindings[source].opened = -1
        return gone

    def take_watches(self) -> list[tuple[int, int]]:
        """(cookie, counter) for flows whose end of phase the kernel should report, if new."""
        at, rows = np.empty(len(self.table.rows), np.intp), self.table.rows
        due = at[: learning.watch(self._view(rows), not self.negotiated, at)]
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
        self._remove(set(self.table.rows["cookie"][binding.rows].tolist()) - present)
        binding.cookies, binding.refused = cookies, []
        mine: dict[int, int] = {}
        new: list[FlowInfo] = []
        for slot in np.flatnonzero(snap["state"] != State.FREE).tolist():
            info = describe(snap[slot], source)
            held = self.table.find(info.cookie)
            if held is not None and self.table.infos[held].source == source.id:
                if mine.setdefault(info.cookie, slot) == slot:
                    self.table.infos[held].correct(info)
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
        self.table.add(now, new)
        binding.slots = np.fromiter(mine.values(), np.intp, len(mine))
        binding.rows = np.array([self.table.find(cookie) for cookie in mine], dtype=np.intp)

    def _admit(self, info: FlowInfo) -> None:
        """Fill in the flow's path and owner, or a note why it gets no row."""
        if not (info.note or info.cookie):
            info.note = "no socket cookie was reported"
        if not info.note and info.protocol not in self.protocols:
            info.note = f"{info.protocol.upper()}, which this back end does not pace"
        if info.note:
            return
        uplink = self._uplinks.get(info.cookie, "")
        place(info, self.table.topology, self.table.host, uplink)
        held = self.table.find(info.cookie)
        info.owned = self._owns(info.pid, info.fd, info.cookie)
        if info.cookie in self._closed:
            info.note = "its socket is closed"
        elif info.owned is False:
            info.note = "the socket belongs to another process"
        elif held is not None and (self.table.infos[held].owned or not info.owned):
            info.note = f"process {self.table.infos[held].pid} reported this socket before"
        elif held is not None:
            self._remove({info.cookie})
        elif len(self.table) >= MAX_FLOWS:
            info.note = f"this host has more than {MAX_FLOWS} flows"

    def _remove(self, cookies: set[int]) -> set[int]:
        """Flows have gone: their slots, in whatever record, are no rows any more. Returns whose
        they were."""
        gone = self.table.remove(cookies)
        at = [info.row for info in gone]
        sources = {info.source for info in gone} & self._bindings.keys()
        for source in sources:
            binding = self._bindings[source]
            stays = ~np.isin(binding.rows, at)
            binding.slots, binding.rows = binding.slots[stays], binding.rows[stays]
        return sources
