# SPDX-License-Identifier: Apache-2.0
"""Flows whose grants stand are left alone, and heard of again at once when they cease to stand."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from seen import at
from slots import Setup, slot_start, start
from suppressed import MB, SLOT_MS, Room, granted, word

from flowslot.model.topology import Topology
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.grants import Granted
from flowslot.protocol.messages import Demand
from flowslot_shm.writer import FlowWriter
from flowslotd.observe.observer import RARE_SLOTS

from .conftest import ELSEWHERE, Job


def test_a_standing_grant_suppresses_the_record(room: Room) -> None:
    job, first = room.enlist("train", 7)
    job.flow(1, cookie=8, dst=ELSEWHERE)
    start(first)
    room.slot()
    assert word(job) == 0
    room.grant(at(1), granted(7, True))
    room.slot()
    assert word(job) == 0, "somebody waits for news of the other path"
    room.grant(at(61), granted(8, True))
    room.slot()
    assert word(job) == 1


def test_an_answer_within_the_pass_counts_in_the_same_pass(room: Room) -> None:
    room.desk.answer = lambda demands: [granted(7, True)]
    job, flow = room.enlist("train", 7)
    start(flow)
    room.slot()
    assert word(job) == 1
    assert [demand.flow for demand in room.said()] == [7]


def test_phases_are_no_news_and_another_volume_is(room: Room) -> None:
    job, flow = room.suppressed()
    for i in range(2, 20):
        flow.done(MB)
        room.events(at(100 * i), [job])
        start(flow, i)
        room.events(at(100 * i + 50), [job])
        assert room.table.rows["active"].tolist() == [True]
    assert room.said() == []
    volumes = []
    for i in range(20, 24):  # smoothed: 1.075, 1.131, 1.173 MB and so on
        flow.done(10**7)
        start(flow, i, 1_300_000)
        room.events(at(100 * i), [job])
        volumes.append([demand.next_bytes for demand in room.said()])
    assert volumes == [[], [], [1_131_250], []]
    assert word(job) == 1, "and it is left alone as before"


def test_suppressed_sources_are_looked_at_every_fourth_slot(room: Room) -> None:
    suppressed, (loud, flow) = room.suppressed()[0], room.enlist("loud", 8)
    start(flow)
    room.slot()
    loud.reader.looks, writes = 0, len(room.pacer.writes)
    looked = []
    for n in range(3 * RARE_SLOTS):
        before = suppressed.reader.looks
        room.slot()
        looked += [n] * (suppressed.reader.looks - before)
    assert np.diff(looked).tolist() == [RARE_SLOTS] * 2
    assert loud.reader.looks == 3 * RARE_SLOTS
    assert room.pacer.deadline == at(60 * (room.n + 2)), "but its entry is kept alive"
    assert len(room.pacer.writes) == writes, "and what stands is written once"


def test_idle_sources_are_looked_at_every_fourth_slot_or_when_they_ring(room: Room) -> None:
    job, flow = room.enlist("train", 7)
    start(flow)
    room.slot()
    flow.done(MB)
    room.slot()
    job.reader.looks = 0
    for _ in range(2 * RARE_SLOTS):
        room.slot()
    assert job.reader.looks == 2
    start(flow, 2)
    room.events(at(SLOT_MS * room.n + 1), [job])
    room.slot()
    assert job.reader.looks == 4, "and in each slot again"


def test_suppressed_sources_are_spread_over_the_slots(room: Room) -> None:
    jobs = [room.suppressed(f"j{i}", 10 + i)[0] for i in range(RARE_SLOTS)]
    due = [room.observer.due(room.n + n, jobs) for n in range(1, 1 + 2 * RARE_SLOTS)]
    assert {job.id for sources in due for job in sources} == {job.id for job in jobs}
    assert max(len(sources) for sources in due) <= 2


@pytest.mark.parametrize("odd", [0, 1])
def test_they_are_looked_at_in_passes_that_come_anyway(room: Room, odd: int) -> None:
    job = room.suppressed()[0]
    slots = [n for n in range(20) if room.observer.due(room.n + n, [job], small=n % 2 == odd)]
    assert [n % 2 for n in slots[1:]] == [odd] * len(slots[1:]), "at most the first comes alone"
    assert np.diff(slots[1:]).tolist() == [RARE_SLOTS] * len(slots[2:]) and len(slots) >= 4


@pytest.mark.parametrize("grant", [granted(7, False), Granted(7, math.nan, math.nan)])
def test_when_it_ceases_to_stand_the_present_state_is_reported_at_once(
    room: Room, grant: Granted
) -> None:
    job, flow = room.suppressed()
    flow.done(300_000)  # nobody looks
    room.grant(at(70), grant)
    assert [(d.flow, d.remaining, d.wait_ns) for d in room.said()] == [
        (7, 700_000, 70 * MILLISECOND)
    ]
    assert word(job) == 0
    flow.done(700_000)
    room.events(at(80), [job])
    assert [demand.remaining for demand in room.said()] == [0], "phases are news again"


def test_when_an_answer_within_a_pass_ends_it_the_present_state_is_reported(room: Room) -> None:
    """As the daemon's own arbiter does it: a newcomer's demand is answered before it returns."""
    job, flow = room.suppressed()
    newcomer, other = room.enlist("newcomer", 8)

    def answer(demands: Sequence[Demand]) -> list[Granted]:
        newcomers = [demand.flow for demand in demands] == [8]
        return [granted(8, False), granted(7, False)] if newcomers else []

    room.desk.answer = answer
    flow.done(300_000)
    start(other)
    room.events(at(70), [newcomer])
    assert {demand.flow: demand.remaining for demand in room.said()} == {8: MB, 7: 700_000}
    assert word(job) == 0


def test_an_unknown_socket_makes_the_next_slot_look_at_everything(room: Room) -> None:
    job, _ = room.suppressed()
    room.skip(job)
    room.observer.stir()
    job.flow(5, cookie=99, dst=ELSEWHERE)
    room.slot()
    assert [demand.flow for demand in room.said()] == [99]
    assert word(job) == 0, "the new flow has no grant yet"


def test_a_source_without_rows_is_never_suppressed(room: Room) -> None:
    job, flow = room.suppressed()
    empty = room.enlist("empty", 0)[0]  # without a cookie there is no row
    room.slot()
    assert word(empty) == 0
    other = room.suppressed("other", 8)[0]
    room.observer.closed(8)
    flow.close()
    room.events(at(SLOT_MS * room.n + 1), [])
    for _ in range(RARE_SLOTS):
        room.slot()
    assert word(job) == 0
    jobs = [job, empty, other]
    assert all(room.observer.due(n, jobs) == jobs for n in range(RARE_SLOTS))


def test_the_kernel_is_asked_for_nothing_while_it_is_suppressed(room: Room) -> None:
    room.pacer.sent[7] = 0
    job, flow = room.suppressed()
    assert room.pacer.watched == {7: MB}
    room.pacer.sent[7] = MB
    flow.done(MB)
    room.events(at(70), [job])
    start(flow, 2)
    room.events(at(80), [job])
    assert room.table.rows["active"].tolist() == [True]
    assert room.pacer.watched == {7: MB}
    assert room.observer.take_watches() == []
    room.grant(at(90), granted(7, False))
    assert room.pacer.watched == {7: 2 * MB}


@pytest.mark.parametrize("paces", [True, False])
def test_without_an_arbiter_everything_is_suppressed(
    topology: Topology, job: Job, flow: FlowWriter, paces: bool
) -> None:
    setup = Setup(topology, "static", paces=paces)
    setup.jobs.append(job)
    start(flow)
    setup.slot(0)
    assert word(job) == 1
    due = [setup.observer.due(n, [job]) for n in range(1, 1 + RARE_SLOTS)]
    assert sum(map(bool, due)) == 1
    setup.pacer.sent[7] = 0
    setup.events(at(1), [job])
    assert setup.pacer.watched == {}


def test_what_was_seen_a_moment_ago_is_not_looked_at_again_as_a_slot_begins(
    topology: Topology, job: Job, flow: FlowWriter
) -> None:
    setup = Setup(topology)
    setup.jobs.append(job)
    start(flow)

    def remaining() -> list[int]:
        left: list[int] = setup.table.rows["remaining"].tolist()
        return left

    setup.events(Nanos(slot_start(1) - 5 * MILLISECOND), [job])
    before = remaining()
    flow.done(MB // 2)
    setup.slot(1)
    assert remaining() == before
    setup.slot(1, [job])
    assert remaining() < before, "something had happened to it"
    before = remaining()
    flow.done(MB // 4)
    setup.loop.release()  # something went wrong: everything counts as long ago
    setup.slot(1)
    assert remaining() < before
