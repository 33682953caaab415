# SPDX-License-Identifier: Apache-2.0
"""Scripts: what may happen in a World, and the same script over any kind of wire."""

import math
import random
from collections.abc import Callable, Sequence

from wires import Memory, Wire
from world import World

from flowslot.arbiter import LEASE_SLOTS

Event = tuple[str, int, int, int]
"""What happens, to lane k of daemon i (modulo how many there are), and a number for details."""

ONE, TWO = ((0, 1, 2),), ((0,), (2, 1))
"""Links held by one switch process, or by two."""


def demand(w: World, i: int, k: int, n: int) -> None:
    cap = (math.inf, math.inf, 0.0, 5e6)[n // 4 % 4]
    w.demand(i, n % 4, 1 + n * 100, idle=n % 3 == 0, cap=cap)


def round_trip(w: World, i: int, k: int, n: int) -> None:
    """What daemons have to say is answered; the answers get as far as `n` says."""
    for one, daemon in enumerate(w.daemons):
        for at, lane in enumerate(daemon.lanes):
            if lane.session.lost:
                w.close(one, at)
            if lane.session.dial(w.now):
                w.connect(one, at)
            speak(w, one, at, n)
            for _ in range(2 - n % 3):
                w.deliver_up(one, at)
            w.step(lane.process)
            w.send(lane.streams[-1])
            for _ in range(2 - n // 3 % 3):
                w.deliver_down(one, at)
            n //= 9


def speak(w: World, i: int, k: int, n: int) -> None:
    if w.daemons[i].lanes[k].open:
        w.speak(i, k)


MOMENTS = (0.1, 1, 1, 3, 3, 5, 10, 30, 60, 100, 130, 150, 240, 310)
# What may happen, to lane k of daemon i; `n` decides about the details.
HAPPENINGS: dict[str, Callable[[World, int, int, int], object]] = {
    "demand": demand,
    "give back": lambda w, i, k, n: w.give_back(i, n % 4, idle=n % 3 > 0),
    "round trip": round_trip,
    "speak": speak,
    "up": lambda w, i, k, n: w.deliver_up(i, k),
    "step": lambda w, i, k, n: w.step(w.processes[k]),
    "send": lambda w, i, k, n: w.send(w.daemons[i].lanes[k].streams[-1]),
    "down": lambda w, i, k, n: w.deliver_down(i, k),
    "enforce": lambda w, i, k, n: w.enforce(i),
    "time": lambda w, i, k, n: w.advance(MOMENTS[n % len(MOMENTS)]),
    "sleep": lambda w, i, k, n: w.advance(MOMENTS[n % len(MOMENTS)], asleep=True),
    "beat": lambda w, i, k, n: w.beat(i),
    "end": lambda w, i, k, n: w.end(i, n % 4),
    "old up": lambda w, i, k, n: w.deliver_up(i, k, which=n),
    "old down": lambda w, i, k, n: w.deliver_down(i, k, which=n),
    "old send": lambda w, i, k, n: w.send(w.daemons[i].lanes[k].streams[0]),
    "again up": lambda w, i, k, n: w.deliver_up(i, k, which=n, again=n // 7),
    "again down": lambda w, i, k, n: w.deliver_down(i, k, which=n, again=n // 7),
    "close": lambda w, i, k, n: w.close(i, k),
    "reconnect": lambda w, i, k, n: (w.close(i, k), w.connect(i, k)),
    "crash": lambda w, i, k, n: w.crash(i),
    "amnesia": lambda w, i, k, n: w.amnesia(w.processes[k]),
    "schedule": lambda w, i, k, n: w.schedule(n % 4, n % 3, float(n % 11) * 1e7, n // 16 % 8),
    "policy": lambda w, i, k, n: w.decide_by(w.processes[k], n),
    # So that grants exist by the time something goes wrong.
    "calm": lambda w, i, k, n: w.exchange(4 + n % 12, (1, 1, 30)[n % 3]),
}
USUAL = list(HAPPENINGS)[: list(HAPPENINGS).index("old up")]
FREQUENT = [*USUAL * 2, *["demand", "round trip", "round trip", "enforce"] * 6]

HAPPENS = (*HAPPENINGS, *FREQUENT)


def happen(world: World, event: Event) -> None:
    """Also checks what must always hold."""
    what, i, k, n = event
    HAPPENINGS[what](world, i % len(world.daemons), k % len(world.processes), n)
    world.check()


def some_events(seed: int, length: int = 300) -> list[Event]:
    """Disasters are rare."""
    draw = random.Random(seed)
    kinds = draw.choices((list(HAPPENINGS), FREQUENT), (1, 12), k=length)
    return [
        (draw.choice(kind), draw.randrange(3), draw.randrange(2), draw.randrange(2**16))
        for kind in kinds
    ]


def play(
    events: Sequence[Event],
    held: Sequence[Sequence[int]],
    wire: Callable[[], Wire] = Memory,
    *,
    gathers: bool = False,
) -> list[tuple[object, ...]]:
    """All decisions, see World: switch processes' and daemons'. Whatever carries the messages, they
    must be the same."""
    world = World(2, held=held, gathers=gathers, wire=wire)
    world.exchange(LEASE_SLOTS + 1, 60)
    for event in events:
        happen(world, event)
    world.exchange(LEASE_SLOTS, 60)
    world.close_all()
    return world.decisions
