# SPDX-License-Identifier: Apache-2.0
"""When heartbeats are due, and what their echoes tell."""

import pytest
from flowslot.protocol.heart import Heart

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.messages import HeartbeatEcho


def at(ms: float) -> Nanos:
    return Nanos(int(ms * MILLISECOND))


def test_the_clock_offset_is_that_of_the_quickest_answer() -> None:
    heart = Heart(Nanos(30))
    assert heart.offset_us is None
    for now, round_trip, skew in ((0, 9000, 4000), (10_000, 1000, 0), (20_000, 5000, 2000)):
        beat = heart.beat(Nanos(now), 10**6 + now)
        # The arbiter is 7 us ahead; `skew` is how unevenly the two ways took.
        echo = HeartbeatEcho(beat.n, beat.wall_ns + round_trip // 2 + skew + 7000)
        assert heart.echoed(Nanos(now + round_trip), echo) == round_trip
        assert heart.echoed(Nanos(now + round_trip), echo) is None, "repeated, it tells nothing"
    assert heart.offset_us == pytest.approx(7.0)


def test_a_heartbeat_comes_with_a_slot_or_with_a_message_or_by_itself() -> None:
    heart = Heart(at(20))
    assert not heart.rested(Nanos(10**12)), "nothing is due before the stream begins"
    assert heart.due is None and not heart.overdue(Nanos(10**12))
    heart.beat(at(0), 0)
    assert not heart.rested(at(30)), "every other slot"
    assert heart.rested(Nanos(at(30) + 1))
    assert heart.due == at(45)
    assert not heart.overdue(Nanos(at(45) - 1)) and heart.overdue(at(45))
    heart.beat(at(60), 0)
    heart.rest()
    assert heart.due is None and not heart.rested(Nanos(10**12))


def test_heartbeats_come_in_every_slot_while_answers_or_they_themselves_are_late() -> None:
    heart = Heart(at(40))

    def next_due_ms(ms: float) -> float:
        heart.beat(at(ms), 0)
        assert heart.due is not None
        return heart.due / MILLISECOND - ms

    assert next_due_ms(1000) == 90
    heart.echoed(at(1010), HeartbeatEcho(1, 0))
    assert next_due_ms(1040) == 90, "a quarter of a slot is not late"
    heart.echoed(at(1051), HeartbeatEcho(2, 0))
    assert next_due_ms(1080) == 50
    assert not heart.rested(at(1100)) and heart.rested(Nanos(at(1100) + 1))
    assert next_due_ms(3050) == 50
    assert next_due_ms(3111) == 50, "this one was late by itself"
    assert next_due_ms(5112) == 50
    assert next_due_ms(7113) == 50
    heart.rest()
    assert next_due_ms(9200) == 90, "a stream that has just begun is not late"
