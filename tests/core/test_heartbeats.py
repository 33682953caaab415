# SPDX-License-Identifier: Apache-2.0
"""How often a daemon sends heartbeats, and what their echoes tell of clocks."""

import pytest
from arbiters import at

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.heartbeats import Heartbeats
from flowslot.protocol.messages import HeartbeatEcho


def test_the_clock_offset_is_that_of_the_quickest_answer() -> None:
    hearts = Heartbeats(Nanos(30))
    assert hearts.offset_us is None
    for now, round_trip, skew in ((0, 9000, 4000), (10_000, 1000, 0), (20_000, 5000, 2000)):
        beat = hearts.beat(Nanos(now), 10**6 + now)
        # The arbiter is 7 us ahead; `skew` is how unevenly the two ways took.
        echo = HeartbeatEcho(beat.n, beat.wall_ns + round_trip // 2 + skew + 7000)
        assert hearts.echoed(Nanos(now + round_trip), echo) == round_trip
        assert hearts.echoed(Nanos(now + round_trip), echo) is None, "repeated, it tells nothing"
    assert hearts.offset_us == pytest.approx(7.0)


def test_heartbeats_come_in_every_slot_while_answers_or_they_themselves_are_late() -> None:
    hearts = Heartbeats(at(40))

    def next_due_ms(ms: float) -> float:
        hearts.beat(at(ms), 0)
        assert hearts.due is not None
        return hearts.due / MILLISECOND - ms

    assert hearts.due is None and not hearts.overdue(at(10**6)) and not hearts.rested(at(10**6))
    assert next_due_ms(1000) == 90
    hearts.echoed(at(1020), HeartbeatEcho(1, 0))
    assert next_due_ms(1040) == 90, "half a slot is not late"
    hearts.echoed(at(1061), HeartbeatEcho(2, 0))
    assert next_due_ms(1080) == 50
    assert not hearts.rested(at(1100)) and hearts.rested(Nanos(at(1100) + 1))
    assert next_due_ms(3050) == 50
    assert next_due_ms(3111) == 50, "this one was late by itself"
    assert next_due_ms(5112) == 50
    assert next_due_ms(7113) == 50
    assert hearts.overdue(at(7163)) and not hearts.overdue(Nanos(at(7163) - 1))
    hearts.rest()
    assert hearts.due is None and not hearts.rested(at(10**6))
    assert next_due_ms(9200) == 90, "a stream that has just begun is not late"
