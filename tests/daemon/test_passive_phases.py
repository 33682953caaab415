# SPDX-License-Identifier: Apache-2.0
"""What is learnt of a flow that says nothing, from counters alone: synthetic traces, no clock."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowslot.model.rhythm import FIRST_NS
from flowslot.model.units import MILLISECOND
from flowslot_shm.writer import FlowWriter
from flowslotd.observe.passive import phases
from flowslotd.observe.passive.phases import LARGEST, SMALL, Phases
from flowslotd.sockets import Info, Odometer

LOOK = 10 * MILLISECOND


class Slot(FlowWriter):
    """Adds up what is told of each iteration: posted, done, last total."""

    def __init__(self) -> None:
        self.iterations: list[list[int]] = []

    def begin(
        self, iteration: int, total: int = 0, start_ns: int | None = None, period_ns: int = 0
    ) -> None:
        if iteration > len(self.iterations):
            self.iterations.append([0, 0, 0])
        assert iteration == len(self.iterations) and total >= 0
        self.iterations[-1][2] = total

    def advance(self, *, ready: int = 0, posted: int = 0, done: int = 0) -> None:
        assert ready == 0 <= posted and done >= 0
        self.iterations[-1][0] += posted
        self.iterations[-1][1] += done
        assert self.iterations[-1][1] <= self.iterations[-1][0]


class Flow:
    """An application that posts bytes at times, seen every 10 ms; what was sent is acknowledged by
    the next look."""

    def __init__(self, acked: int = 0) -> None:
        self.now = 0
        self.posted = acked
        slot = Slot()
        self.phases = Phases(0, acked, acked, slot)
        self.iterations = slot.iterations

    def look(self, more: int = 0, *, wait: int = LOOK, pending: int = 0) -> None:
        self.now += wait
        self.posted += more
        self.phases.look(self.now, self.posted, self.posted - pending)

    def pause(self, ms: float) -> None:
        for _ in range(round(ms * MILLISECOND / LOOK)):
            self.look()

    def iteration(self, sizes: Iterable[int], between_ms: float, compute_ms: float) -> None:
        for n, size in enumerate(sizes):
            if n:
                self.pause(between_ms)
            self.look(size)
        self.pause(compute_ms)

    @property
    def totals(self) -> list[int]:
        return [total for _, _, total in self.iterations]


def learnt(looks: int = 1) -> Flow:
    """After iterations of 1 MB that took so many looks."""
    flow = Flow()
    for _ in range(8):
        flow.iteration([1_000_000 // looks] * looks, 0, 150)
    return flow


@pytest.mark.parametrize("counter", [0, 2**63])
def test_equal_iterations_are_announced_when_a_few_were_seen(counter: int) -> None:
    flow = Flow(counter)
    for _ in range(12):
        flow.iteration([600_000, 400_000], between_ms=20, compute_ms=150)
    assert flow.totals[-4:] == [1_000_000] * 4
    assert [posted for posted, _, _ in flow.iterations[-7:-1]] == [1_000_000] * 6
    assert all(done == posted for posted, done, _ in flow.iterations)
    assert 20 * MILLISECOND < flow.phases.rhythm.threshold < 150 * MILLISECOND


def test_pauses_and_sizes_may_vary() -> None:
    chance = random.Random(7)
    flow = Flow()
    for _ in range(40):
        size = 1_000_000 + chance.randrange(20_000)  # headers: 2 %
        parts = [size // 5] * 4 + [size - size // 5 * 4]
        flow.iteration(parts, chance.choice([0, 10, 20]), chance.uniform(100, 300))
    known = flow.totals[10:]
    assert sum(1_000_000 <= total < 1_020_000 for total in known) >= 0.9 * len(known)
    # A total that is too big would hold a reservation that nobody needs.
    over = [t - posted for posted, _, t in flow.iterations[10:-1] if t > posted]
    assert not over


def test_changed_sizes_are_not_announced_until_they_agree_again() -> None:
    flow = learnt()
    changed = len(flow.iterations)
    for _ in range(12):
        flow.iteration([2_000_000], 0, 100)
    assert flow.totals[changed - 1] == 1_000_000
    assert set(flow.totals[changed + 1 :]) <= {0, 1_000_000, 2_000_000}
    assert flow.totals[-1] == 2_000_000


def test_an_iteration_that_ends_early_is_corrected() -> None:
    flow = learnt()
    flow.look(300_000)
    assert flow.totals[-1] == 1_000_000
    flow.pause(100)
    assert flow.iterations[-1] == [300_000, 300_000, 300_000]
    flow.iteration([1_000_000], 0, 100)  # one exception is no change
    assert flow.totals[-1] == 1_000_000


@pytest.mark.parametrize("every_ms", [10, 20])
def test_what_was_announced_is_taken_back_while_small_things_move(every_ms: int) -> None:
    """Too big for an acknowledgement, too often for a pause."""
    flow = learnt(20)
    before = len(flow.iterations)
    flow.look(10_000)
    assert flow.totals[-1] == 1_000_000
    began, small = flow.now, SMALL + 1000
    while flow.totals[-1] == 1_000_000:
        flow.look(small)
        for _ in range(every_ms // 10 - 1):
            flow.look()
        assert flow.now - began < 3 * 200 * MILLISECOND
    assert len(flow.iterations) == before + 1
    assert flow.now - began > 2 * 190 * MILLISECOND  # not before it might have come
    corrected = flow.totals[-1]
    assert corrected == flow.iterations[-1][0] < 300_000
    for _ in range(100):  # once is enough
        flow.look(small)
    assert flow.totals[-1] == corrected


def test_nothing_is_learnt_where_a_pause_is_too_short_to_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = learnt()
    flow.look(2 * SMALL)

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(phases, "learn", fail)
    for _ in range(50):
        flow.look(wait=LOOK // 2)
        flow.look(2 * SMALL, wait=LOOK // 2)
    with pytest.raises(AssertionError):
        flow.iteration([2 * SMALL] * 2, 50, 0)


def test_parts_that_are_posted_at_once_belong_to_one_iteration() -> None:
    """A boundary is the next iteration's once all has come before it; what comes after it does not
    count."""
    flow = Flow()
    for _ in range(20):
        flow.iteration([3_000_000, 1_000_000], between_ms=90, compute_ms=90)
    assert flow.phases.rhythm.parts == 2
    assert flow.iterations[-5:-1] == [[4_000_000] * 3] * 4


def test_what_never_agrees_is_never_announced() -> None:
    chance = random.Random(3)
    flow = Flow()
    for _ in range(60):
        flow.iteration([chance.randrange(10_000, 5_000_000)], 0, 100)
    assert set(flow.totals) == {0}
    assert len(flow.iterations) >= 59  # iterations they are, all the same


def test_where_pauses_do_not_stand_out_there_is_no_total() -> None:
    flow = Flow()
    for _ in range(200):
        flow.look(100_000, wait=LOOK // 2)
        flow.look(wait=LOOK // 2)
    assert len(flow.iterations) == 1
    assert flow.totals == [0]
    assert flow.phases.rhythm.threshold == FIRST_NS


@pytest.mark.parametrize("irregular", [True, False])
def test_longer_pauses_now_and_then_do_not_make_iterations_of_many(irregular: bool) -> None:
    chance = random.Random(5)
    flow = Flow()
    for step in range(200):
        longer = chance.random() < 0.1 if irregular else step % 40 == 0
        flow.iteration([1_000_000], 0, 3000 if longer else 100)
    assert flow.totals[-1] == 1_000_000
    assert flow.phases.rhythm.threshold < 100 * MILLISECOND


def test_stray_pauses_do_not_hide_where_iterations_begin() -> None:
    chance = random.Random(11)
    flow = Flow()
    for step in range(100):
        # One in five is shortened: by a worker that comes late, say.
        flow.iteration([1_000_000], 0, chance.uniform(20, 100) if step % 5 == 0 else 110)
    known = flow.totals[20:]
    assert known.count(1_000_000) >= 0.6 * len(known)


def test_a_flow_that_never_pauses_stays_within_what_a_record_holds() -> None:
    flow = Flow()
    for _ in range(40):
        flow.look(LARGEST // 10)
    assert 4 <= len(flow.iterations) <= 6
    assert all(posted <= LARGEST + LARGEST // 5 for posted, _, _ in flow.iterations)
    assert set(flow.totals) == {0}


def test_a_clock_that_stands_still_begins_nothing() -> None:
    flow = Flow()
    for _ in range(50):
        flow.look(100_000, wait=0)
        flow.look(wait=0)
        flow.look(wait=0)
    assert len(flow.iterations) == 1
    assert flow.iterations[0][0] == 50 * 100_000


def test_small_messages_while_computing_begin_nothing_and_count_nowhere() -> None:
    flow = Flow()
    for _ in range(12):
        flow.look(1_000_000)
        for _ in range(12):
            flow.look(SMALL // 40)
            flow.look()
    # Right after the bytes they still belong to the iteration: the pause is not seen before them.
    assert flow.totals[-1] == 1_000_000 + SMALL // 40
    assert {posted for posted, _, _ in flow.iterations} == {1_000_000 + SMALL // 40}


def test_a_queue_that_is_stuck_is_no_pause() -> None:
    flow = learnt()
    before = len(flow.iterations)
    flow.look(500_000, pending=500_000)
    for _ in range(500):  # five seconds without an acknowledgement: the network is slow
        flow.look(pending=500_000)
    assert len(flow.iterations) == before + 1
    assert flow.totals[-1] == 1_000_000
    flow.look(500_000)
    assert len(flow.iterations) == before + 1
    assert flow.iterations[-1] == [1_000_000, 1_000_000, 1_000_000]


COUNTERS = st.integers(-(2**63), 2**63)


@given(st.lists(st.tuples(st.integers(0, 2 * 10**9), COUNTERS, COUNTERS), max_size=60))
def test_no_counters_are_strange_enough(looks: list[tuple[int, int, int]]) -> None:
    phases, now = Phases(0, 0, 0, Slot()), 0  # which checks what is told
    for wait, posted, acked in looks:
        now += wait
        phases.look(now, posted, acked)


def info(acked: int, sent: int, resent: int = 0, unsent: int = 0, in_flight: int = 0) -> Info:
    return Info(1, 0, 1448, in_flight, 0, acked, unsent, 0, sent, resent)


def test_what_is_sent_again_is_posted_once() -> None:
    odometer = Odometer()
    assert odometer.read(info(acked=1, sent=0)) == (1, 1)  # the SYN
    assert odometer.read(info(acked=1, sent=3000, unsent=7000, in_flight=2)) == (10_001, 1)
    lost = info(acked=1001, sent=5000, resent=2000, unsent=7000, in_flight=2)
    assert odometer.read(lost) == (10_001, 1001)
    assert odometer.read(info(acked=10_001, sent=12_000, resent=2000)) == (10_001, 10_001)


def test_counters_that_drift_apart_meet_when_all_is_acknowledged() -> None:
    odometer = Odometer()
    odometer.read(info(acked=0, sent=0))
    # A retransmission was counted, but the kernel had no memory to send it.
    odometer.read(info(acked=10_000, sent=10_000, resent=1448))
    more = info(acked=10_000, sent=15_000, resent=1448, in_flight=4)
    assert odometer.read(more) == (15_000, 10_000)


def test_bytes_that_were_promised_too_many_are_taken_back_when_all_is_acknowledged() -> None:
    """As after retransmissions: else it would seem to send on, through the next pause."""
    flow = Flow()
    flow.iteration([100_000], 0, 100)
    for _ in range(4):
        flow.look(150_000, pending=10_000)
        flow.posted -= 50_000  # what the next look says
        flow.look()
        flow.pause(100)
    assert [posted for posted, _, _ in flow.iterations[1:]] == [150_000] * 4
    flow.look(100_000)
    assert flow.iterations[-1][2] == 100_000  # announced


def test_a_pause_is_as_long_as_the_kernels_clock_says() -> None:
    """32 ms; between looks that saw it send, 30."""
    flow = Flow()

    def look(posted: int, pending: int, busy_ms: int) -> None:
        flow.now += LOOK
        flow.posted += posted
        busy = busy_ms * MILLISECOND
        flow.phases.look(flow.now, flow.posted, flow.posted - pending, busy)

    for _ in range(4):
        look(100_000, 50_000, 4)
        look(0, 0, 2)
        look(0, 0, 0)
        look(0, 0, 0)
    assert len(flow.iterations) == 4
    assert FIRST_NS == 30 * MILLISECOND
