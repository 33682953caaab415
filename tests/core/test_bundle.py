# SPDX-License-Identifier: Apache-2.0
"""When an arbiter is told of a bundle, and what. More of it in the daemon's test_bundles."""

import math

from flowslot.bundle import NEVER, RESEND_SHARE, SAME_PHASE_NS, SMALL_SHARE, Bundle
from flowslot.units import MILLISECOND, SECOND, Nanos

MB = 1_000_000


def at(ms: float) -> Nanos:
    return Nanos(SECOND + int(ms * MILLISECOND))


def active() -> Bundle:
    return Bundle(
        1, "job", (0,), 5, True, 10.0 * MB, 10.0 * MB, 10.0 * MB, at(0), period=100 * MILLISECOND
    )


def test_what_is_told_of_a_phase_and_of_the_time_between() -> None:
    bundle = active()
    assert bundle.has_news(at(2), small=False), "nothing was told yet"
    said = bundle.demand(at(2))
    assert (said.flow, said.inc, said.remaining) == (1, 5, 10 * MB)
    assert (said.wait_ns, said.next_in_ns) == (2 * MILLISECOND, 0)
    assert not bundle.has_news(at(2), small=True)
    bundle.active, bundle.due = False, at(100)
    assert bundle.has_news(at(60), small=False)
    said = bundle.demand(at(60))
    assert (said.inc, said.remaining, said.next_in_ns) == (5, 0, 40 * MILLISECOND)
    assert (said.next_bytes, said.period_ns) == (10 * MB, 100 * MILLISECOND)
    bundle.due = NEVER
    assert bundle.demand(at(61)).next_in_ns == 0
    bundle.active, bundle.onset = True, at(101)
    assert bundle.demand(at(101)).inc == 6, "another phase"
    bundle.onset += SAME_PHASE_NS
    assert bundle.demand(at(112)).inc == 6
    bundle.onset += SAME_PHASE_NS + 1
    assert bundle.has_news(at(130), small=False) and bundle.demand(at(130)).inc == 7


def test_who_has_nothing_to_send_asks_for_nothing_until_it_has() -> None:
    bundle = active()
    assert bundle.demand(at(0)).cap == math.inf
    bundle.stalled = True
    assert not bundle.has_news(at(60), small=False), "the arbiter can do without for a while"
    assert bundle.has_news(at(60), small=True)
    said = bundle.demand(at(60))
    assert (said.cap, said.remaining, said.inc) == (0.0, 10 * MB, 5), "the phase goes on"
    assert not bundle.has_news(at(60), small=True)
    bundle.stalled = False
    assert bundle.has_news(at(61), small=False), "this cannot wait"
    assert bundle.demand(at(61)).cap == math.inf
    bundle.stalled = bundle.standing = True
    assert not bundle.has_news(at(62), small=True) and bundle.demand(at(62)).cap == math.inf


def test_what_the_arbiter_can_work_out_is_no_news() -> None:
    bundle = active()
    bundle.demand(at(0))
    bundle.rate = 100.0 * MB
    bundle.remaining = 5.0 * MB  # what 50 ms at this rate have left
    assert not bundle.has_news(at(50), small=True)
    bundle.remaining += 1.01 * SMALL_SHARE * 10 * MB
    assert bundle.has_news(at(50), small=True) and not bundle.has_news(at(50), small=False)
    bundle.remaining = (5 + 1.01 * RESEND_SHARE * 10) * MB
    assert bundle.has_news(at(50), small=False)
    bundle.standing = True
    assert not bundle.has_news(at(50), small=True), "it holds, whatever is left"
    bundle.expected *= 1.2
    assert bundle.has_news(at(50), small=False)


def test_an_arbiter_that_granted_more_than_another_let_through_is_put_right() -> None:
    bundle = active()
    bundle.demand(at(0))
    bundle.rate, bundle.remaining = 20.0 * MB, 9.0 * MB
    assert not bundle.has_news(at(50), small=False)
    bundle.most = 80.0 * MB  # it believes that 6 MB remain
    assert bundle.has_news(at(50), small=False)
