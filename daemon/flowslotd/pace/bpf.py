# SPDX-License-Identifier: Apache-2.0
"""Pacing by our own congestion control in the kernel (bpf/flowslot.bpf.c).

The rate table is shared memory: setting the rates of all flows takes no system call. Nothing is
pinned; the registration hangs on a link, so that the kernel removes the name when this process
dies, and the flows become ordinary TCP when their deadlines pass. Before Linux 6.4, which has no
such link, a guardian process removes the name.

The kernel's slots are not the rows of the daemon's flow table. The kernel gives a slot to a socket
as that selects the congestion control: before the daemon knows of it, and also when no record ever
does. And the daemon has rows of flows that no slot belongs to: those of other protocols, and those
of jobs that have not selected it yet. So a slot is found by its socket's cookie.
"""

import errno
import os
import re
import secrets
import sys
from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from flowslotd.flows.counters import FlowCounters
from flowslotd.flows.rows import Typed, as_structs
from flowslotd.pace import rate_table
from flowslotd.pace.layout import CTL, EVENT, KINDS, SLOTS, STAT
from flowslotd.pace.libbpf import F_LINK, Object, RingBuffer, read
from flowslotd.pace.pacer import Entries, KernelEvent, Pacer, PacingError, Traits
from flowslotd.pace.undo import Guardian

PLACEHOLDER = b"fs_placeholder_\0"
OBJECT = "flowslot.bpf.o"
Slots = NDArray[np.intp]


def unique_name(instance: str) -> str:
    """A name for this process's congestion control: at most 15 characters, as the kernel wants."""
    return f"fs_{re.sub(r'[^A-Za-z0-9-]', '-', instance)[:7]}_{secrets.token_hex(2)}"


class BpfPacer(Pacer):
    """See `Pacer`."""

    name = "bpf"
    lends = True
    traits = Traits(
        how="our own congestion control in BPF, which jobs select for their sockets",
        protocols=("tcp",),
        granularity="2 segments, with top-up while the path's queue is short",
        resume="one segment at the old rate",
        changes=(
            ("kernel", "a congestion control of our own (fs_...) is registered, with its maps"),
            (
                "sockets",
                "jobs that register select it (TCP_CONGESTION); it sets their pacing rate and "
                "window, and a shortest retransmission timeout of 20 ms",
            ),
        ),
    )

    def __init__(self, instance: str, slots: int = SLOTS) -> None:
        self.congestion_control = unique_name(instance)
        self._slots = -(-slots // 64) * 64  # whole pages
        self._held = ExitStack()
        self._forget()

    def _forget(self) -> None:
        self._ctl, self._stat = np.zeros(1, CTL), np.zeros(1, STAT)
        self._ctl_view, self._stat_view = Typed(rate_table.typed_ctl), Typed(rate_table.typed_stat)
        self._ring: RingBuffer | None = None
        # Who is where, as of the last scan: by slot (0: free), by cookie, and in that order.
        self._known = np.zeros(0, np.uint64)
        self._index: dict[int, int] = {}
        self._used: Slots = np.zeros(0, np.intp)
        self._live: NDArray[np.bool_] = np.zeros(self._slots, np.bool_)
        self._path: Slots = np.zeros(self._slots, np.intp)  # of each slot; numbers from _paths
        self._paths: dict[bytes, int] = {}
        self._watched: dict[int, int] = {}
        self._pending: list[bytes] = []
        self.noticed: list[KernelEvent] = []
        self._lenders: dict[int, int] = {}  # by borrower

    # -- life ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Load, register, map. Raises PacingError."""
        elf = read(OBJECT)
        if elf.count(PLACEHOLDER) != 1:
            raise PacingError(f"{OBJECT} is not the program that this version expects: rebuild it")
        elf = elf.replace(PLACEHOLDER, self.congestion_control.encode().ljust(16, b"\0"))
        try:
            try:
                self._load(elf, link=True)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.close()
                self._load(elf, link=False)
        except OSError as error:
            self.close()
            raise PacingError(f"the kernel refuses {OBJECT}: {error}") from error

    def _load(self, elf: bytes, *, link: bool) -> None:
        obj = Object(elf)
        self._held.callback(obj.close)
        ops = obj.map("fs_ops")
        if link:
            ops.set_flags(F_LINK)
        for name in ("fs_ctl", "fs_stat", "fs_free"):
            obj.map(name).set_max_entries(self._slots)
        obj.load()
        free = obj.map("fs_free")
        for slot in range(self._slots - 1, 0, -1):
            free.put(None, slot.to_bytes(4, sys.byteorder))
        self._ctl = obj.table("fs_ctl", CTL, self._slots)
        self._stat = obj.table("fs_stat", STAT, self._slots, writable=False)
        self._ring = RingBuffer(obj.map("fs_events").fd, self._pending.append)
        self._held.callback(self._ring.close)
        registration = ops.attach_struct_ops(link=link)
        if registration is None:
            self._held.callback(Guardian(struct_ops=ops.fd).close)
        else:
            self._held.callback(os.close, registration)

    def close(self) -> None:
        """Make all flows ordinary TCP and unregister."""
        self._ctl["deadline_ns"] = 0
        self._held.close()
        self._forget()

    # -- the table ----------------------------------------------------------------------------

    def apply(self, entries: Entries, deadline_ns: int) -> int:
        """See `Pacer`. No system call."""
        slots = self._slots_of(entries["cookie"])
        if not slots.all():
            entries, slots = entries[slots != 0], slots[slots != 0]
        if not len(entries):
            return 0
        if not rate_table.holds(self._ctl_view(self._ctl), slots, entries["cookie"]):
            strange = self._ctl["cookie"][slots] != entries["cookie"]
            self._claim(slots[strange], entries["cookie"][strange])
        changed = rate_table.write(self._ctl_view(self._ctl), slots, as_structs(entries))
        # Only now: an entry that has just been claimed is not in force before it is complete.
        self._ctl["deadline_ns"][slots] = deadline_ns
        self._live[slots] = True
        return changed

    def refresh(self, deadline_ns: int) -> bool:
        """See `Pacer`. Also tells flows of one path the smallest RTT that any of them has seen:
        one that began behind a standing queue takes that queue for the path's length."""
        live = np.flatnonzero(self._live)
        base = np.full(len(self._paths), 2**32 - 1, np.uint32)
        ctl, stat = self._ctl_view(self._ctl), self._stat_view(self._stat)
        if rate_table.refresh(ctl, stat, live, self._path, base, deadline_ns) < len(live):
            self._live[live[~self._owned(live)]] = False
        return True

    def release(self, cookie: int) -> None:
        """See `Pacer`."""
        slot = self._slot(cookie)
        if slot and self._ctl["cookie"][slot] == cookie:
            self._ctl["deadline_ns"][slot] = 0
            self._ctl["drain_at"][slot] = 0
            self._ctl["lender"][slot] = 0
            self._live[slot] = False
        self._watched.pop(cookie, None)
        self._disown(cookie)

    def refusal(self, cookie: int) -> str:
        """See `Pacer`: only what the congestion control has met has an entry that it reads. As of
        the last scan, which `counters` makes when slots have changed hands."""
        if int(self._stat["high"][0]) >= len(self._known):
            self._scan()
        slot = self._index.get(cookie, 0)
        if not slot or self._stat["cookie"][slot] != cookie:
            return f"its socket does not use {self.congestion_control}"
        met = self._ctl["cookie"][slot] == cookie
        return "" if met else f"{self.congestion_control} has only just met its socket"

    def _slots_of(self, cookies: NDArray[np.uint64]) -> Slots:
        """The flows' slots; 0: it has none."""
        wanted = cookies.tolist()
        for _ in range(2):
            slots = np.array([self._index.get(cookie, 0) for cookie in wanted], np.intp)
            if rate_table.lives(self._stat_view(self._stat), slots, cookies):
                return slots
            self._scan()
        return np.where(self._stat["cookie"][slots] == cookies, slots, 0)

    def _slot(self, cookie: int) -> int:
        """The flow's slot; 0: it has none."""
        return int(self._slots_of(np.array([cookie], np.uint64))[0])

    def _scan(self) -> None:
        """Find out who is where in the used part of the table."""
        cookies = self._stat["cookie"][: int(self._stat["high"][0]) + 1].copy()
        cookies[0] = 0
        if not np.array_equal(cookies, self._known):
            self._known = cookies
            used = np.flatnonzero(cookies)
            self._used = used[np.argsort(cookies[used])]
            self._index = dict(zip(cookies[used].tolist(), used.tolist(), strict=True))

    def _owned(self, slots: Slots) -> NDArray[np.bool_]:
        owned: NDArray[np.bool_] = self._ctl["cookie"][slots] == self._stat["cookie"][slots]
        return owned

    def _claim(self, slots: Slots, cookies: NDArray[np.uint64]) -> None:
        """Make entries of slots that another flow had before ours."""
        self._ctl["deadline_ns"][slots] = 0  # first: no longer in force
        self._ctl[slots] = np.zeros(1, CTL)
        self._ctl["cookie"][slots] = cookies
        for cookie in cookies.tolist() if self._lenders else ():
            self._disown(cookie)
        for slot in slots.tolist():
            ends = self._stat["src"][slot].tobytes() + self._stat["dst"][slot].tobytes()
            self._path[slot] = self._paths.setdefault(ends, len(self._paths))

    # -- what the kernel tells ------------------------------------------------------------------

    def counters(self) -> FlowCounters:
        """See `Pacer`. No system call."""
        if int(self._stat["high"][0]) >= len(self._known):
            self._scan()
        counters, used = np.empty((2, len(self._known)), np.int64), self._used
        if not rate_table.read(self._stat_view(self._stat), self._known, counters):
            self._scan()
            counters = np.empty((2, len(self._known)), np.int64)
            rate_table.read(self._stat_view(self._stat), self._known, counters)
            # A slot that has changed hands again counts as free this time.
            used = self._used[self._stat["cookie"][self._used] == self._known[self._used]]
        return FlowCounters(self._known[used], *counters[:, used])

    def event_fd(self) -> int | None:
        """See `Pacer`."""
        return self._ring.fd if self._ring is not None else None

    def events(self) -> list[KernelEvent]:
        """See `Pacer`."""
        if self._ring is None or not (self._ring.consume() or self.noticed):
            return []
        raw, self._pending[:] = b"".join(self._pending), []
        out, self.noticed = self.noticed, []
        rows = np.frombuffer(raw, EVENT)
        columns = (rows[name].tolist() for name in ("kind", "cookie", "sent"))
        for kind, cookie, sent in zip(*columns, strict=True):
            event = KernelEvent(KINDS[kind], cookie, sent)
            if event.kind == "drained" and self._watched.pop(cookie, None) is None:
                continue  # was reported already, or is not wanted any more
            if event.kind == "closed":
                self._watched.pop(cookie, None)
            out.append(event)
        return out

    def lend(self, lenders: Mapping[int, int]) -> None:
        """See `Pacer`. No system call."""
        if lenders == self._lenders:
            return
        pairs = np.array(list(lenders.items()), np.uint64).reshape(-1, 2)
        slots = self._slots_of(pairs.ravel())
        owned = ((slots != 0) & self._owned(slots)).reshape(-1, 2).all(axis=1)
        kept = dict(pairs[owned].tolist())
        gone = [one for one, lender in self._lenders.items() if kept.get(one) != lender]
        self._ctl["lender"][self._slots_of(np.array(gone, np.uint64))] = 0
        borrowing, lending = slots.reshape(-1, 2)[owned].T
        self._ctl["lender_cookie"][borrowing] = pairs[owned, 1] & np.uint64(0xFFFF_FFFF)
        self._ctl["lender"][borrowing] = lending
        self._lenders = kept

    def _disown(self, cookie: int) -> None:
        """An entry is not, or no longer, this flow's: it neither lends nor borrows."""
        for borrower in [one for one, lender in self._lenders.items() if cookie in (one, lender)]:
            del self._lenders[borrower]
            slot = self._slot(borrower)
            if slot and self._ctl["cookie"][slot] == borrower:
                # The lender may be paced again in the same slot, and then lend to another one.
                self._ctl["lender"][slot] = 0

    def watch(self, cookie: int, target: int) -> None:
        """See `Pacer`."""
        slot = self._slot(cookie)
        if not slot:
            return
        if self._ctl["cookie"][slot] != cookie:
            self._claim(np.array([slot], np.intp), np.array([cookie], np.uint64))
        self._ctl["drain_at"][slot] = target
        self._watched[cookie] = target
        sent = int(self._stat["sent"][slot])
        if sent >= target:  # before the kernel knew of it
            del self._watched[cookie]
            self.noticed.append(KernelEvent("drained", cookie, sent))
