# SPDX-License-Identifier: Apache-2.0
"""CASSINI at an arbiter: who is held, until when, and who is forgotten."""

from states import MS, NOW, state

from flowslot.policy.cassini.allocator import GONE_NS, MOST_JOBS, CassiniAllocator
from flowslot.policy.job_classes import ClassedAllocator, JobClass

PERIOD, SENDS = 1000, 400
"""ms. On a link of 100 bytes/s: 40 bytes."""


class Twins:
    """Two jobs that begin at the same moment, alone on a link, as the allocator lets them."""

    def __init__(self, allocator):
        self.allocator, self.now = allocator, NOW
        self.left = {"a": 0.0, "b": 0.0}
        self.ready = dict.fromkeys(self.left, NOW)
        self.began, self.overlap = {"a": [], "b": []}, 0
        self.beside = []  # other jobs

    def run(self, ms, step=4):
        for _ in range(0, ms, step):
            self.now += step * 10**6
            for job, due in self.ready.items():
                if self.left[job] <= 0 and self.now >= due:
                    self.left[job], self.ready[job] = 40.0, self.now
                    self.began[job].append(self.now)
            flows = [
                {
                    "job": job,
                    "left": left,
                    "wait": (self.now - self.ready[job]) / MS if left > 0 else 0.0,
                    "next": 40.0,
                    "period": PERIOD,
                }
                for job, left in self.left.items()
            ]
            seen = state(*flows, *self.beside)
            rates = self.allocator.allocate(seen, self.now)[:2]
            hold = self.allocator.terms().hold
            self.overlap += step * bool((rates > 0).all())
            for k, job in enumerate(self.left):
                if hold is not None and hold[k]:
                    assert rates[k] == 0 and self.now < hold[k] <= self.now + PERIOD * MS
                if self.left[job] > 0:
                    self.left[job] -= rates[k] * step / 1000
                    if self.left[job] <= 1e-9:
                        self.left[job] = 0.0
                        self.ready[job] = self.now + (PERIOD - SENDS) * 10**6


def test_two_jobs_that_meet_are_shifted_once_and_stay_apart():
    twins = Twins(CassiniAllocator())
    twins.run(3 * PERIOD)
    assert twins.overlap > 300, "first they are measured"
    twins.run(3 * PERIOD)
    before = twins.overlap
    twins.run(10 * PERIOD)
    assert twins.overlap - before < 40
    assert all(len(began) >= 15 for began in twins.began.values()), "nobody waits again and again"


def test_beside_other_arbiters_nobody_is_held():
    twins = Twins(CassiniAllocator(partial=True))
    twins.run(8 * PERIOD)
    assert twins.overlap > 3000


def test_jobs_that_are_not_there_any_more_are_forgotten():
    allocator = CassiniAllocator()
    allocator.allocate(state({"job": "a", "next": 40.0}, {"job": "b", "next": 40.0}), NOW)
    elsewhere = state({"job": "c", "links": (1,), "next": 40.0}, capacity=(1.0, 100.0))
    allocator.allocate(elsewhere, NOW)
    assert set(allocator._jobs) == {"a", "b", "c"}
    allocator.allocate(state({"job": "b", "next": 40.0}), NOW)
    assert set(allocator._jobs) == {"b", "c"}


def test_jobs_that_had_their_links_for_themselves_are_forgotten_after_a_while():
    allocator, many = CassiniAllocator(), 2 * MOST_JOBS
    capacity = [100.0] * (many + 1)
    for k in range(many):
        alone = state({"job": f"j{k}", "links": (k,), "next": 40.0}, capacity=capacity)
        allocator.allocate(alone, NOW + k * GONE_NS // 8)
    assert len(allocator._jobs) < MOST_JOBS
    twins = Twins(allocator)
    twins.now = NOW + many * GONE_NS // 8
    twins.ready = dict.fromkeys(twins.left, twins.now)
    twins.run(6 * PERIOD)
    before = twins.overlap
    twins.run(4 * PERIOD)
    assert twins.overlap - before < 40, "others are held again"


def test_planned_is_with_what_links_carry_whatever_a_class_leaves():
    allocator = ClassedAllocator(CassiniAllocator(), (JobClass(jobs="vip", protected=True),))
    allocator.allocate(state({"job": "vip"}, {"job": "a", "next": 40.0}), NOW)
    assert allocator._inner._capacity == {0: 100.0}


def test_with_too_many_jobs_nobody_is_held_and_with_fewer_again():
    allocator = CassiniAllocator()
    many = [{"job": f"j{k}", "next": 40.0, "left": 0.0} for k in range(MOST_JOBS)]
    twins = Twins(allocator)
    twins.beside = many
    twins.run(6 * PERIOD, step=20)
    before = twins.overlap
    twins.run(4 * PERIOD, step=20)
    assert twins.overlap - before > 1000, "they meet in every iteration"
    twins.beside = []
    twins.run(6 * PERIOD)
    before = twins.overlap
    twins.run(10 * PERIOD)
    assert twins.overlap - before < 40


class Ranks:
    """A job of two flows on links of their own, which the allocator sees at times in ms."""

    def __init__(self):
        self.allocator = CassiniAllocator()

    def at(self, ms, *left, since=0):
        one, other = (
            {"job": "a", "links": (k,), "left": size, "next": 40.0, "period": PERIOD}
            | {"wait": float(ms - since) if size > 0 else 0.0}
            for k, size in enumerate(left)
        )
        seen = state(one, other, capacity=(100.0, 100.0))
        return self.allocator.allocate(seen, NOW + ms * 10**6).tolist(), seen


def test_a_rank_that_is_early_waits_for_those_that_it_began_with():
    ranks = Ranks()
    assert ranks.at(0, 40.0, 40.0)[0] == [100.0, 100.0]
    ranks.at(400, 0.0, 0.0)
    given, seen = ranks.at(1000, 40.0, 0.0, since=1000)
    assert given == [0.0, 0.0] and ranks.allocator.terms().hold is None, "it may top up"
    assert ranks.allocator.next_change(seen)[0] == 100 * MS
    assert ranks.at(1030, 40.0, 40.0, since=1000)[0] == [100.0, 100.0]
    assert ranks.at(1300, 20.0, 0.0, since=1000)[0] == [100.0, 0.0], "it goes on"
    ranks.at(1400, 0.0, 0.0)
    # It does not come: it is waited for once.
    assert ranks.at(2000, 40.0, 0.0, since=2000)[0] == [0.0, 0.0]
    assert ranks.at(2100, 40.0, 0.0, since=2000)[0] == [100.0, 0.0]
    assert ranks.at(2150, 40.0, 40.0, since=2000)[0] == [100.0, 100.0]
    ranks.at(2500, 0.0, 0.0)
    assert ranks.at(3000, 40.0, 0.0, since=3000)[0] == [100.0, 0.0]
