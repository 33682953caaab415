# SPDX-License-Identifier: Apache-2.0
"""What daemons tell each other of their flows, and what follows for those that wait for them."""

import math
from dataclasses import replace

import pytest

from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.mlcc.depend import adjusted, may_send
from flowslot.policy.mlcc.peers import (
    ASKS_PER_SLOT,
    PATIENCE_SLOTS,
    Group,
    LocalFlow,
    Peers,
    Progress,
    letters,
)

SLOT = Nanos(60 * MILLISECOND)
NOW = Nanos(10**12)
ONE_TWO, ZERO_ONE = Group("j", "ring", 1, 2), Group("j", "ring", 0, 1)
RING = LocalFlow(7, "h2", ONE_TWO, 5, total=600.0, ready=100.0, sent=20.0, rate=0.0)
BEFORE = Progress(ZERO_ONE, 5, total=600.0, sent=40.0, by_end=90.0)
TO, FROM = Group("j", "push", 0, 9, 3), Group("j", "pull", 9, 0, 3)
PUSH = LocalFlow(1, "h9", TO, 5, total=50.0, ready=50.0, sent=10.0, rate=100.0)
PULL = replace(PUSH, flow=2, host="h0", group=FROM, ready=6.0, sent=4.0)


def heard(*said: Progress) -> Peers:
    peers = Peers(SLOT)
    assert peers.hear(NOW, "h0", 1, said)
    return peers


def test_who_receives_a_flow_is_told_how_far_it_will_be() -> None:
    told = letters([replace(RING, rate=1000.0)], left_s=0.03)
    assert told == {"h2": [Progress(ONE_TWO, 5, 600.0, 20.0, 50.0)]}
    (most,) = letters([replace(RING, rate=1e9)], left_s=0.03)["h2"]
    assert most.by_end == 600.0, "no more than there is"


def test_all_workers_of_a_server_are_told_of_all_its_broadcasts() -> None:
    other = replace(PULL, flow=3, host="h1", group=FROM._replace(peer=1))
    told = letters([PULL, other], left_s=0.0)
    assert {host: [p.group.peer for p in said] for host, said in told.items()} == {
        "h0": [0, 1],
        "h1": [0, 1],
    }


def test_channels_of_a_ring_are_rings_and_those_to_a_server_are_one() -> None:
    rings = letters([RING, replace(RING, flow=8, group=ONE_TWO._replace(channel=1))], 0.0)["h2"]
    assert [(p.group.channel, p.total) for p in rings] == [(0, 600.0), (1, 600.0)]
    (push,) = letters([PUSH, replace(PUSH, flow=8, group=TO._replace(channel=4), sent=50.0)], 0.1)[
        "h9"
    ]
    assert (push.group.channel, push.total, push.sent, push.by_end) == (0, 100.0, 60.0, 70.0)


def test_a_group_whose_sockets_begin_one_after_the_other_is_in_the_earlier_iteration() -> None:
    (push,) = letters([PUSH, replace(PUSH, flow=8, iteration=6, sent=0.0)], 0.0)["h9"]
    assert (push.iteration, push.sent) == (5, 60.0)


def test_a_rank_follows_the_one_before_it() -> None:
    (dependency,) = heard(BEFORE).dependencies(NOW, [RING]).values()
    assert (dependency.sent, dependency.other) == (20.0, 90.0)
    # 100 are ready, and 50 more are to come until the end of the slot.
    assert dependency.other + dependency.lead == 150.0
    assert adjusted(dependency, 0.0, math.inf, 0.1) == pytest.approx(700.0)
    assert adjusted(dependency, 2000.0, math.inf, 0.1) == pytest.approx(1300.0)


@pytest.mark.parametrize(
    "other",
    [
        replace(BEFORE, group=ZERO_ONE._replace(job="k")),
        replace(BEFORE, group=ZERO_ONE._replace(peer=2)),
        replace(BEFORE, group=ZERO_ONE._replace(channel=1)),
        replace(BEFORE, group=ZERO_ONE._replace(role="push")),
        replace(BEFORE, sent=600.0, by_end=600.0),
        replace(BEFORE, iteration=6),
    ],
)
def test_others_and_those_that_are_done_hold_nobody_up(other: Progress) -> None:
    assert not heard(other).dependencies(NOW, [RING])


def test_one_that_has_not_begun_lets_pass_what_is_ready() -> None:
    behind = replace(BEFORE, iteration=4, sent=600.0, by_end=600.0)
    (dependency,) = heard(behind).dependencies(NOW, [RING]).values()
    assert dependency.other == 0.0 and may_send(dependency)
    (dependency,) = heard(behind).dependencies(NOW, [replace(RING, sent=100.0)]).values()
    assert not may_send(dependency)
    assert not heard(behind).dependencies(NOW, [replace(RING, sent=600.0)]), "nothing left to send"


def test_a_broadcast_waits_for_the_slowest_push_counted_as_parts() -> None:
    pushes = [
        Progress(Group("j", "push", 0, 9), 5, total=100.0, sent=20.0, by_end=60.0),
        Progress(Group("j", "push", 1, 9), 5, total=100.0, sent=12.0, by_end=30.0),
    ]
    (dependency,) = heard(*pushes).dependencies(NOW, [PULL]).values()
    assert dependency.other == 15.0
    assert dependency.lead == 6.0 - 6.0  # of 50 bytes 6 have come by all, and 6 are ready


def test_a_push_waits_for_nobody_and_goes_by_the_furthest_broadcast() -> None:
    pulls = [
        Progress(Group("j", "pull", 9, r), 5, 200.0, 20.0, by) for r, by in ((4, 100.0), (5, 60.0))
    ]
    (dependency,) = heard(*pulls).dependencies(NOW, [PUSH]).values()
    assert (dependency.other, dependency.lead) == (25.0, math.inf)


def test_overtaken_messages_and_silent_hosts_count_for_nothing() -> None:
    peers = heard(BEFORE)
    assert not peers.hear(NOW, "h0", 1, [])
    assert peers.dependencies(NOW, [RING])
    later = Nanos(NOW + PATIENCE_SLOTS * SLOT)
    assert peers.dependencies(later, [RING])
    assert not peers.dependencies(Nanos(later + 1), [RING])
    assert not peers.hear(Nanos(later + 1), "h0", 0, [BEFORE]), "no other stage than before"
    assert peers.dependencies(Nanos(later + 1), [RING]), "its clock was set back: heard again"


def test_only_ends_and_beginnings_call_for_a_decision_and_not_too_often() -> None:
    pause = SLOT // ASKS_PER_SLOT
    peers, later = heard(BEFORE), Nanos(NOW + pause)
    ended = replace(BEFORE, sent=600.0)
    sixth, seventh = replace(BEFORE, iteration=6), replace(BEFORE, iteration=7)
    assert peers.hear(later, "h0", 2, [replace(BEFORE, sent=50.0)]) is None
    assert peers.hear(later, "h0", 3, [ended]) == later
    assert peers.hear(Nanos(later + 1), "h0", 4, [sixth]) == later + pause, "put off, not lost"
    assert peers.hear(Nanos(later + 2), "h0", 5, [seventh]) is None, "that is to come"
    assert peers.hear(Nanos(later + SLOT), "h0", 6, [seventh]) is None, "nothing new since"
    assert peers.hear(Nanos(later + SLOT), "h0", 7, [sixth]) == later + SLOT
