# SPDX-License-Identifier: Apache-2.0
"""Simulated streams: order, second copies, how their ends learn that they are over; and that a
script's decisions do not hang on what carries its messages."""

from collections.abc import Collection

import numpy as np
import pytest
from scripts import ONE, TWO, play, some_events
from wires import Memory

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.protocol.messages import FromArbiter, FromDaemon, Opening
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


class Simulated(Memory):
    """Carries messages over a simulated stream, in its own time."""

    def __init__(self) -> None:
        super().__init__()
        self._events = Events()
        self._stream = stream(self._events)

    def say(self, message: FromDaemon, opening: Opening | None) -> None:
        arrive = super().say
        self._stream.send(True, lambda now: arrive(message, opening))

    def answer(self, message: FromArbiter) -> None:
        arrive = super().answer
        self._stream.send(False, lambda now: arrive(message))

    def said(self) -> tuple[FromDaemon, Opening | None]:
        self._wait(self._up)
        return super().said()

    def answered(self) -> FromArbiter:
        self._wait(self._down)
        return super().answered()

    def close(self) -> None:
        self._stream.close(self._events.now, Stream.DAEMON)

    def _wait(self, box: Collection[object]) -> None:
        while not box:
            self._events.run_until(Nanos(self._events.now + MILLISECOND))


@pytest.mark.parametrize("held", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_script_comes_to_the_same_decisions(
    held: tuple[tuple[int, ...], ...], seed: int
) -> None:
    events = some_events(seed)
    decisions = play(events, held)
    grants = [grant for _, *said in decisions for grant in getattr(said[0], "grants", ())]
    assert len(grants) > 20 and any(grant.must_ack for grant in grants)
    assert play(events, held, Simulated) == decisions
