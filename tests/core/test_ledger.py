# SPDX-License-Identifier: Apache-2.0
"""The ledger of flows: slots that stay, and which raises are made when not all fit."""

import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from flowslot.arbiter.batch import Batch
from flowslot.arbiter.ledger import FOREVER, Ledger
from flowslot.model.units import Nanos
from flowslot.protocol.messages import Demand

PATHS = ((0,), (1,), (0, 1), (2, 0, 1))
GOODPUT = np.array([100.0, 80.0, 60.0])


@pytest.mark.parametrize("seed", range(10))
def test_a_flow_keeps_its_slot_and_sums_are_those_of_the_flows_that_are_there(seed: int) -> None:
    rng, ledger = random.Random(seed), Ledger(GOODPUT)
    slots: dict[tuple[int, int], int] = {}
    placed: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
    grants: dict[tuple[int, int], float] = {}
    for _ in range(400):
        key = rng.randrange(3), rng.randrange(40)
        if key not in slots:
            slots[key] = ledger.add(*key, 1)
        elif rng.random() < 0.4:
            ledger.remove(*key)
            for known in (slots, placed, grants):
                known.pop(key, None)
        else:
            path = placed[key][1] if key in placed else rng.choice(PATHS)
            placed[key] = rng.choice("abc"), path
            ledger.place(slots[key], *placed[key])
            grants[key] = rng.uniform(0, 9)
            ledger.restate(Nanos(1), slots[key], 1, grants[key])
        assert ledger.slots == slots and len(set(slots.values())) == len(slots)
        assert ledger.n == max(slots.values(), default=-1) + 1
        for at, slot in slots.items():
            assert (ledger.rows["session"][slot], ledger.rows["flow"][slot]) == at
        sums = np.zeros(3)
        for at, rate in grants.items():
            sums[list(placed[at][1])] += rate
        np.testing.assert_allclose(ledger.commitments(), sums, atol=1e-9)
        batch = whole(ledger)
        state = batch.state(GOODPUT)
        crossing = Counter((job, link) for job, path in placed.values() for link in path)
        for at, (job, path) in placed.items():
            share = min(GOODPUT[link] / crossing[job, link] for link in path)
            assert ledger.shares(np.array([slots[at]])).tolist() == [share]
            (flow,) = np.flatnonzero(batch.slots == slots[at])
            assert state.job_names[state.job[flow]] == job
            number = state.aggregates.numbers[state.aggregate[flow]]
            assert ledger.aggregates.names[number] == (job, path)
            goodput = state.goodput[state.paths[flow, : len(path)]]
            assert goodput.tolist() == GOODPUT[list(path)].tolist()
    assert len(ledger.jobs.names) == 4 and len(ledger.aggregates.names) <= 1 + 3 * len(PATHS)


def whole(ledger: Ledger) -> Batch:
    """All its flows."""
    batch = Batch(ledger)
    batch.open(np.flatnonzero(ledger.rows["session"] >= 0), Nanos(2))
    return batch


def test_a_name_keeps_its_number_until_another_one_needs_it() -> None:
    ledger = Ledger(GOODPUT)
    for flow, job in enumerate("abcab"):
        ledger.place(ledger.add(1, flow, 1), job, (0,))
    assert ledger.rows["job"].tolist() == [1, 2, 3, 1, 2]
    ledger.remove(1, 0)
    ledger.place(ledger.add(1, 7, 1), "d", (0,))
    assert ledger.rows["job"].tolist() == [4, 2, 3, 1, 2], "a has another flow"
    ledger.remove(1, 2)
    ledger.place(ledger.add(1, 2, 1), "c", (0,))
    assert ledger.rows["job"][2] == 3
    ledger.remove(1, 2)
    ledger.place(ledger.add(1, 2, 1), "e", (0,))
    assert ledger.rows["job"][2] == 3 and ledger.jobs.names == ["", "a", "b", "e", "d"]
    assert ledger.jobs.turns.tolist() == [1, 1, 1, 3, 1]


def table(*rows: tuple[float, float, float]) -> Ledger:
    """Flows on one link of 100 bytes/s: (remaining, granted, goal)."""
    ledger = Ledger(np.array([100.0]))
    for i, row in enumerate(rows):
        slot = ledger.add(1, i, 1)
        ledger.place(slot, "job", (0,))
        for column, value in zip(("remaining", "grant", "goal"), row, strict=True):
            ledger.rows[column][slot] = value
    return ledger


def raised(ledger: Ledger, free: float) -> dict[int, float]:
    limit, mute = ledger.commitments() + free, np.zeros(ledger.n, np.bool_)
    slots, rates = whole(ledger).raises(mute, limit, np.zeros(ledger.n), pressing=False)
    return dict(zip(slots.tolist(), rates.tolist(), strict=True))


def test_who_has_nothing_comes_first() -> None:
    ledger = table((9, 40.0, 60.0), (9, 0.0, 0.4), (9, 0.0, 0.4))
    assert raised(ledger, 1.0) == {1: 0.4, 2: 0.4}, "0.2 more are not worth a message to the first"
    assert raised(ledger, 10.8) == pytest.approx({0: 50.0, 1: 0.4, 2: 0.4})
    assert raised(ledger, 30.0) == {0: 60.0, 1: 0.4, 2: 0.4}
    # One that is idle with nothing does not.
    assert raised(table((9, 40.0, 60.0), (0, 0.0, 20.0)), 20.0) == pytest.approx({0: 50.0, 1: 10.0})


def test_what_is_raised_always_fits() -> None:
    rates = raised(table((9, 0.0, 30.0), (9, 0.0, 10.0), (9, 10.0, 50.0)), 20.0)
    assert rates == pytest.approx({0: 15.0, 1: 5.0})


def _together(ledger: Ledger, slot: int, slots: Iterable[int]) -> set[int]:
    """Of these, those in the part that the slot is in, as `due` has numbered them last."""
    return {other for other in slots if ledger.part[other] == ledger.part[slot]}


@pytest.mark.parametrize("seed", range(10))
def test_a_part_is_due_when_a_flow_of_it_is(seed: int) -> None:
    """Also when parts grow together, fall apart, and are numbered anew. By flow, `times` says when
    it is to be looked at."""
    rng, ledger = random.Random(seed), Ledger(np.full(9, 1.0))
    times: dict[int, int] = {}
    seen = 0
    for now in range(1, 300):
        there = sorted(times)
        flow, kind = rng.randrange(30), rng.random()
        if (1, flow) not in ledger.slots:
            slot = ledger.add(1, flow, 1)
            links = rng.choice(((0,), (1,), (1, 2), (3,), (3, 4), (5,), (6,), (7, 8)))
            ledger.place(slot, str(links[0] // 3 if rng.random() < 0.1 else links[0]), links)
            times[slot] = 0
        elif kind < 0.4:
            slot = ledger.slots[1, flow]
            times |= dict.fromkeys(_together(ledger, slot, there), 0)
            ledger.remove(1, flow)
            del times[slot]
        elif kind < 0.6:
            ledger.acknowledge(Nanos(now), {ledger.slots[1, flow]: 1})
            times[ledger.slots[1, flow]] = 0
        due = ledger.due(Nanos(now)).tolist()
        parts = {frozenset(_together(ledger, slot, times)) for slot in times}
        wanted = [part for part in parts if min(times[slot] for slot in part) <= now]
        assert due == sorted(slot for part in wanted for slot in part)
        later = [min(times[slot] for slot in part) for part in parts if part not in wanted]
        assert ledger.next_due(Nanos(now)) == min(later, default=FOREVER)
        for part in wanted:
            time = now + rng.randint(1, 20)
            ledger.look_at[ledger.part[list(part)]] = time
            times |= dict.fromkeys(part, time)
        seen += bool(wanted) and len(wanted) < len(parts)
    assert seen > 50


def test_a_message_that_is_late_makes_no_phase_begin_later() -> None:
    """What is said is how long a flow has been ready: so a slow message makes it seem to have
    begun later. Within a phase (an incarnation) the quickest one is right."""
    ledger = Ledger(GOODPUT)
    slot = ledger.add(1, 7, 1)
    ledger.place(slot, "a", (0,))

    def begun(now: int, inc: int, wait: int, remaining: int = 1000) -> int:
        """When it began, after such a demand."""
        demand = Demand(7, inc, "a", (0,), remaining, wait_ns=wait, next_bytes=1000)
        ledger.report(Nanos(now), [slot], [demand])
        batch = Batch(ledger)
        batch.open(np.array([slot]), Nanos(now))
        return now - round(float(batch.state(GOODPUT).wait_ns[0]))

    assert begun(1000, 1, 10) == 990
    assert begun(1100, 1, 60) == 990, "late by 50"
    assert begun(1200, 1, 220) == 980
    assert begun(1300, 2, 100) == 1200, "the next phase, before all of the last one has arrived"
    begun(1400, 2, 0, remaining=0)
    assert begun(1500, 3, 5) == 1495
    ledger.restate(Nanos(1600), slot, 3, 0.0)
    assert begun(1700, 3, 100) == 1600, "a new stream says it anew, after a standing grant"
