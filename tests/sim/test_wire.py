# SPDX-License-Identifier: Apache-2.0
"""Simulated streams: order, second copies, and how their ends learn that they are over."""

import numpy as np

from flowslot.model.units import MILLISECOND, Nanos
from flowslot_sim.events import Events
from flowslot_sim.plane.wire import Delays, Stream


def ms(x: float) -> Nanos:
    return Nanos(int(x * MILLISECOND))


def stream(events: Events, **delays: float) -> Stream:
    return Stream(events, np.random.default_rng(1), Delays(high=ms(9), **delays))  # type: ignore[arg-type]


def test_messages_keep_their_order_but_second_copies_do_not() -> None:
    events, heard = Events(), list[int]()
    one = stream(events, twice=0.5)
    for n in range(50):
        one.send(True, lambda now, n=n: heard.append(n))
    events.run_until(ms(30))
    assert sorted(set(heard)) == list(range(50)) and len(heard) > 60
    assert [n for i, n in enumerate(heard) if n not in heard[:i]] == list(range(50))
    assert heard != sorted(heard)


def test_the_other_end_learns_of_the_end_after_what_was_said_before() -> None:
    events, seen = Events(), list[str]()
    one = stream(events)
    one.on_close(Stream.DAEMON, lambda now: seen.append("daemon"))
    one.on_close(Stream.SWITCH, lambda now: seen.append("switch"))
    one.send(True, lambda now: seen.append("last words"))
    one.send(False, lambda now: seen.append("to nobody"))
    one.close(Nanos(0), Stream.DAEMON)
    one.send(True, lambda now: seen.append("too late"))
    assert seen == ["daemon"]
    events.run_until(ms(30))
    assert seen == ["daemon", "last words", "switch"]
    one.close(ms(30), Stream.SWITCH)
    events.run_until(ms(60))
    assert seen == ["daemon", "last words", "switch"]
