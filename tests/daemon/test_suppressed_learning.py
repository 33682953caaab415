# SPDX-License-Identifier: Apache-2.0
"""What is learnt of flows that nobody looks at in time; hostile records included."""

from typing import Any

import pytest
from seen import MS, at
from slots import start
from suppressed import MB, SLOT_MS, Room, granted

from flowslot_shm.layout import NOT_KNOWN


class Timeline:
    """A flow's iterations: nobody looks when they begin or end, but the slots go on.

    Each sends half of its bytes at once, and the other half `pause_ms` later.
    """

    def __init__(self, room: Room, clock: Any, flow: Any) -> None:
        self.room, self.clock, self.flow = room, clock, flow
        self.iteration, self.begun_ms = 1, 0
        self.half = False
        flow.done(MB)

    def run(self, period_ms: int, slots: int, pause_ms: int = 1, total: int = MB) -> None:
        for _ in range(slots):
            end_ms = SLOT_MS * (self.room.n + 1)
            while (due_ms := self.begun_ms + (pause_ms if self.half else period_ms)) < end_ms:
                if not self.half:
                    self.begun_ms, self.iteration = due_ms, self.iteration + 1
                    self.clock.ns = at(due_ms)
                    self.flow.begin(self.iteration, total)
                self.flow.ready(MB // 2)
                self.flow.done(MB // 2)
                self.half = not self.half
            self.room.slot()


def column(room: Room, name: str) -> Any:
    return room.table.rows[name].tolist()


@pytest.mark.parametrize("period_ms", [50, 70, 200, 700])
def test_periods_are_learnt_although_phases_come_and_go(
    room: Room, clock: Any, period_ms: int
) -> None:
    timeline = Timeline(room, clock, room.suppressed()[1])
    timeline.run(period_ms, 60)
    assert column(room, "active") == [False]
    assert column(room, "period") == [pytest.approx(period_ms * MS, abs=1000)]
    assert (column(room, "onset")[0] - at(0)) % (period_ms * MS) == 0, "exactly when it began"
    assert room.said() == []


def test_short_periods_are_learnt_too(room: Room, clock: Any) -> None:
    timeline = Timeline(room, clock, room.suppressed()[1])
    timeline.run(100, 40)
    timeline.run(20, 40)
    assert column(room, "period") == [pytest.approx(20 * MS, abs=MS)]


def test_a_job_that_is_listened_to_is_believed_less_than_the_clock(room: Room, clock: Any) -> None:
    job, flow = room.enlist("train", 7)
    start(flow)
    room.slot()
    flow.done(MB)
    clock.ns = at(150)  # says the job
    start(flow, 2)
    room.events(at(200), [job])
    assert column(room, "onset") == [at(200)]
    assert column(room, "period") == [200 * MS]


def test_a_phase_begins_with_the_first_bytes(room: Room, clock: Any) -> None:
    job, flow = room.suppressed()
    flow.done(MB)
    clock.ns = at(200)
    flow.begin(2, MB)
    room.events(at(240), [job])
    assert (column(room, "onset"), column(room, "period")) == ([at(0)], [0]), "it computes"
    flow.ready(MB)
    room.events(at(300), [job])
    assert (column(room, "onset"), column(room, "period")) == ([at(200)], [200 * MS])


@pytest.mark.parametrize(
    "says",
    [0, 1, at(-1), at(0), at(240) + 1, at(10**6), 2**62, 2**63 - 1, 2**63, 2**64 - 1],
    ids=["0", "1", "before", "the same", "1 ns ahead", "far ahead", "2^62", "max", "sign", "all"],
)
def test_a_beginning_that_cannot_be_true_is_not_believed(room: Room, clock: Any, says: int) -> None:
    job, flow = room.suppressed()
    flow.done(MB)
    clock.ns = says
    start(flow, 2)
    room.events(at(240), [job])
    assert column(room, "onset") == [at(240)]
    assert column(room, "period") == [240 * MS]
    clock.ns = at(400)  # and the truth is taken again
    start(flow, 3)
    room.events(at(480), [job])
    assert column(room, "onset") == [at(400)]
    assert column(room, "period") == [240 * MS - 20 * MS]
    room.grant(at(490), granted(7, False))
    (demand,) = room.said()
    assert (demand.wait_ns, demand.period_ns) == (90 * MS, 220 * MS)


def test_nothing_that_a_suppressed_job_says_breaks_anything(room: Room, clock: Any) -> None:
    job, flow = room.suppressed()
    wild = [0, 1, 2**31, 2**62, 2**63, 2**64 - 1, at(100), at(10_000)]
    for i in range(200):
        room.pacer.sent[7] = wild[i % 5] % 2**62
        clock.ns = wild[i % 7]
        flow.begin(wild[(3 * i + 1) % 8], wild[(5 * i + 2) % 8])
        flow.ready(wild[(7 * i + 3) % 4])
        flow.done(wild[i % 3])
        room.events(at(100 + i), [job])
        room.grant(at(100 + i), granted(7, i % 4 > 0))
        assert 0 <= column(room, "period")[0] <= at(300)
        assert 0 < column(room, "onset")[0] <= at(100 + i)
    for demand in room.said():
        assert 0 <= demand.wait_ns <= 300 * MS
        assert 0 <= demand.next_in_ns <= 2 * at(300)
        assert 0 <= demand.remaining < 2**63 and 0 <= demand.next_bytes < 2**63


def test_what_remains_is_right_although_iterations_were_missed(room: Room, clock: Any) -> None:
    room.pacer.sent[7] = 0
    job, flow = room.suppressed()
    flow.done(MB)
    room.pacer.sent[7] = MB
    room.events(at(70), [job])
    for i in (2, 3):  # nobody looks
        start(flow, i)
        flow.done(MB)
    start(flow, 4)
    flow.done(300_000)
    room.pacer.sent[7] = 3 * MB + 300_000
    room.grant(at(200), granted(7, False))
    assert [demand.remaining for demand in room.said()] == [700_000]


def test_volumes_are_not_learnt_from_half_an_iteration(room: Room, clock: Any) -> None:
    """Libraries that know no totals, and send in two bursts with computing between."""
    timeline = Timeline(room, clock, room.suppressed()[1])
    timeline.run(200, 60, pause_ms=100, total=0)
    assert column(room, "expected") == [pytest.approx(MB, rel=0.1)]
    assert room.said() == []


def test_a_period_that_a_record_has_holds(room: Room, clock: Any) -> None:
    job, flow = room.suppressed()
    flow.done(MB)
    for n, (told, known) in enumerate([(70 * MS, 70), (NOT_KNOWN, 0), (0, 200), (300 * MS, 300)]):
        clock.ns = at(200 * (n + 1))
        flow.begin(n + 2, MB, period_ns=told)
        flow.done(MB)
        room.events(at(200 * (n + 1) + 90), [job])
        assert column(room, "period") == [known * MS]
