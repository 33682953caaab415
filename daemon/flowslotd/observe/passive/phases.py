# SPDX-License-Identifier: Apache-2.0
"""Iterations of a flow, written to its slot, from counters alone. No clock.

As in MLTCP, an iteration begins after a pause that is longer than a learnt threshold; where several
parts belong to one (`rhythm`), only once its bytes have gone. What repeats is announced: bytes, and
the period. Until something has, the period is said not to be known: nobody is to take parts of
iterations for whole ones.

Times are ns, of any clock that never runs backwards; amounts are bytes.
"""

from collections import deque

from flowslot.model.rhythm import FIRST_NS, FLOOR_NS, TOLERANCE, Burst, Rhythm, learn
from flowslot_shm.layout import NOT_KNOWN
from flowslot_shm.writer import FlowWriter

KEEP = 64
"""Bursts that are remembered."""
SMALL = 4096
"""Bytes since the last look that are no sign of a phase: requests, acknowledgements, heartbeats.
And no sign that one goes on while they wait to be acknowledged: receivers delay that by 40 ms."""
OVERDUE = 2
"""An iteration that has taken so many times as long as the longest that agreed (and the threshold)
does not bring what was announced: something else goes on. But not while"""
BACKLOG = 64 * 1024
"""so many bytes wait to be acknowledged: then it is the network that is slow."""
LARGEST = 1 << 40
"""An iteration of more bytes is none: a flow that never pauses. A record can hold 2^50."""


class Phases:
    """Of one flow, which are written to its slot. `iteration`: the present one's number, from 1.
    `rhythm`: what is known. `busy`: it was sending when last looked at."""

    def __init__(self, now: int, posted: int, acked: int, writer: FlowWriter) -> None:
        """`posted` and `acked`: what the flow's counters are. The first iteration may have begun
        before, and is not learnt from."""
        self.iteration = 1
        self.rhythm = Rhythm(FIRST_NS)
        self._posted = self._acked = max(posted, 0)
        self.busy = acked < posted
        self._last = self._looked = now  # when it was last busy; the last look
        self._origin = max(acked, 0)  # of this iteration
        self._reported = self._reported_done = 0  # of it: posted, done
        self._total = self._begun = 0  # as announced; 0: it is not known
        self._overdue = 0  # when what was announced is not believed any more
        self._bursts: deque[Burst] = deque(maxlen=KEEP)
        self.write_to(writer)

    def write_to(self, writer: FlowWriter) -> None:
        """From now on, another slot is this flow's."""
        self._writer = writer
        self._announce()
        writer.advance(posted=self._reported, done=self._reported_done)

    @property
    def sent(self) -> int:
        """By all that the counters count."""
        return self._posted

    def idle_ns(self, now: int) -> int:
        """How long it has been seen to send nothing."""
        return 0 if self.busy else now - self._last

    def look(
        self, now: int, posted: int, acked: int, busy_ns: int = 0, quiet_ns: int | None = None
    ) -> bool:
        """What the counters are now; since the last look it was sending for `busy_ns`, the last
        time `quiet_ns` ago (None: that is not known, and may be now). True: the iteration has ended
        with fewer bytes than were announced, or has gone on for so long that it must have."""
        since, self._looked = self._looked, now
        if not self.busy and posted == self._posted:
            return self._rest(now)
        late = self._acked < self._posted  # a last acknowledgement, which hides when it starts
        # Retransmissions can have counters promise too much, until all is acknowledged.
        posted = posted if acked >= posted else max(posted, self._posted)
        acked = max(min(acked, posted), min(self._acked, posted))
        more = posted - self._posted
        self._posted, self._acked = posted, acked
        settled = posted - acked <= SMALL
        until = max(now - quiet_ns, since) if settled and quiet_ns is not None else now
        if not self.busy:
            if more <= SMALL:
                self._origin += more  # belongs to no iteration
                return self._rest(now)
            start = (since + until) // 2 if late else max(until - busy_ns, since)
            return self._start(now, start, until, more)
        busy = more > 0 or not settled
        if self._bursts:
            self._bursts[-1].size += more
        self.busy = busy
        if not busy:
            if quiet_ns is not None:
                self._last = max(self._last, now - quiet_ns)
            return self._rest(now)
        self._last = until
        if self._bursts:
            self._bursts[-1].busy = self._last - self._bursts[-1].start
        if posted - self._origin > LARGEST:
            self.rhythm = Rhythm(self.rhythm.threshold)
            return self._begin(now, now, more)
        return self._go_on(now)

    def _start(self, now: int, start: int, until: int, more: int) -> bool:
        """It has sent again, from `start` to `until`, after a pause."""
        pause = start - self._last
        self._bursts.append(Burst(start, pause))
        begins = pause > self.rhythm.threshold and self._complete(more)
        # No threshold is shorter than the floor, and learning takes some time.
        if begins or (pause > FLOOR_NS and not self.rhythm.total):
            self.rhythm = learn(self._bursts)
            begins = pause > self.rhythm.threshold
        self._bursts[-1].size, self._bursts[-1].busy = more, until - start
        self.busy, self._last = True, until
        return self._begin(now, start, more) if begins else self._go_on(now)

    def _complete(self, more: int) -> bool:
        """Another boundary is the next iteration's. `more`: bytes that have come after it."""
        sent = self._posted - more - self._origin
        return self.rhythm.parts == 1 or sent >= self._total * (1 - TOLERANCE)

    def _begin(self, now: int, start: int, more: int) -> bool:
        rhythm = self.rhythm
        self.iteration += 1
        self._origin = self._posted - more
        self._reported = self._reported_done = 0
        self._total = rhythm.total
        self._overdue = now + OVERDUE * rhythm.longest + rhythm.threshold
        self._begun = start
        self._announce()
        return self._go_on(now)

    def _announce(self) -> None:
        period = self.rhythm.period or NOT_KNOWN
        self._writer.begin(self.iteration, self._total, self._begun, period)

    def _go_on(self, now: int) -> bool:
        posted = max(self._posted - self._origin, self._reported)
        done = max(min(self._acked - self._origin, posted), self._reported_done)
        self._report(posted, done)
        return self._correct(now > self._overdue and self._posted - self._acked <= BACKLOG)

    def _rest(self, now: int) -> bool:
        """It sends nothing: then all was acknowledged."""
        self._report(self._reported, self._reported)
        over = self.rhythm.parts == 1 and now - self._last > self.rhythm.threshold
        return self._correct(over or now > self._overdue)

    def _report(self, posted: int, done: int) -> None:
        """So many bytes of this iteration."""
        self._writer.advance(posted=posted - self._reported, done=done - self._reported_done)
        self._reported, self._reported_done = posted, done

    def _correct(self, over: bool) -> bool:
        """What was announced and will not come is taken back, once, and what repeats is looked for
        again."""
        if not over or self._reported >= self._total:
            return False
        self._total = self._reported
        self.rhythm = Rhythm(self.rhythm.threshold)
        self._writer.begin(self.iteration, self._total)
        return True
