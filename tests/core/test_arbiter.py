# SPDX-License-Identifier: Apache-2.0
"""The arbiter's rules, one by one. Rates in these tests: one link carries 100 bytes/s."""

import math
from dataclasses import replace
from typing import Any

import pytest
from arbiters import LEASE, Bench, Wanted, at

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.arbiter.config import ACK_LEASES
from flowslot.arbiter.validate import MAX_SOCKETS
from flowslot.model.errors import ProtocolError, ScheduleRefused, SessionEnded
from flowslot.protocol.messages import Demand, Held, Hello


def test_raises_wait_for_the_acknowledgement_of_lowers() -> None:
    b = Bench({7: (1, 0), 8: (2, 0, 1)})
    first = b.step(f7=100.0)
    assert first[1, 7].rate == 100.0 and not first[1, 7].must_ack and first[1, 7].ceiling == 100.0
    lower = b.step(f7=20.0, f8=80.0)
    assert list(lower) == [(1, 7)] and lower[1, 7].must_ack
    assert b.committed() == [100.0, 0.0]
    assert b.step() == {}
    b.ack(lower[1, 7])
    up = b.step()
    assert up[2, 8].rate == 80.0
    assert b.committed() == [100.0, 80.0]
    assert (b.arbiter.granted, b.arbiter.preempted) == (2, 1)


def test_every_lower_stays_committed_until_it_is_acknowledged() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=90.0)
    lowers = [b.step(f7=rate)[1, 7] for rate in (70.0, 50.0)]
    again = b.step(f7=60.0)[1, 7]
    assert b.committed()[0] == 90.0 and again.rate == 60.0
    b.ack(lowers[0])
    assert b.committed()[0] == 70.0
    b.ack(lowers[0])  # repeated
    b.ack(replace(lowers[0], seq=999))  # never sent
    b.ack(lowers[1], session=2)  # not his
    assert b.committed()[0] == 70.0
    b.ack(again)
    assert b.committed()[0] == 60.0


def test_no_more_lowers_than_can_be_remembered() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=90.0)
    rates = (80.0, 70.0, 60.0, 50.0, 40.0, 30.0)
    sent = [b.step(f7=rate).get((1, 7)) for rate in rates]
    assert [g is not None for g in sent] == [True] * 4 + [False] * 2
    assert b.committed()[0] == 90.0
    last = sent[3]
    assert last is not None
    b.ack(last)
    assert b.step()[1, 7].rate == 30.0


def test_raised_on_all_links_at_once_to_the_least_available() -> None:
    b = Bench({7: (1, 0), 8: (1, 1), 9: (2, 0, 1)})
    b.step(f7=60.0, f8=90.0)
    sent = b.step(f7=50.0, f8=50.0, f9=50.0)
    assert sent.keys() == {(1, 7), (1, 8), (2, 9)}
    assert sent[2, 9].rate == pytest.approx(10.0)
    b.ack(sent[1, 8])
    assert b.step()[2, 9].rate == pytest.approx(40.0)
    assert max(b.committed()) <= 100.0
    b.ack(sent[1, 7])
    assert b.step()[2, 9].rate == pytest.approx(50.0)


def test_what_one_with_nothing_waits_for_is_kept_for_it_on_every_link() -> None:
    b = Bench({6: (2, 0), 7: (1, 0), 8: (1, 1)})
    b.step(f6=10.0, f7=90.0, f8=100.0)
    b.demand(9, 0, 1, session=2)
    sent = b.step(f7=30.0, f8=60.0, f9=40.0)
    b.ack(sent[1, 7])
    assert b.step(f6=30.0)[2, 6].rate == 30.0, "60 are left, of which 40 wait for link 1"
    lower = b.step(f6=40.0, f7=20.0)
    assert lower.keys() == {(1, 7)}, "nothing of the 40 for the one that has something already"
    b.ack(sent[1, 8])
    assert b.step()[2, 9].rate == 40.0
    b.ack(lower[1, 7])
    assert b.step()[2, 6].rate == 40.0


def test_lowers_for_one_with_nothing_are_not_taken_back_before_it_has_it() -> None:
    b = Bench({7: (1, 0), 8: (2, 0, 1)})
    b.step(f7=60.0, f8=40.0)
    b.demand(9, 0, session=2)
    first = b.step(f7=10.0, f8=40.0, f9=50.0)[1, 7]
    then = b.step(f7=50.0, f8=0.0)
    assert then.keys() == {(2, 8)}, "raised, both would be committed to all they had for ever"
    b.ack(first)
    assert b.step()[2, 9].rate == 50.0
    b.ack(then[2, 8], session=2)
    assert b.step()[1, 7].rate == 50.0


def test_two_that_send_in_turns_do_not_keep_a_third_from_its_first_rate() -> None:
    b = Bench({7: (1, 0), 8: (2, 0, 1)})
    got = b.step(f7=50.0, f8=50.0)
    b.demand(9, 0, session=2)
    for on in (0, 1, 0, 1, 0):  # each has the time to acknowledge its first lower
        sent, got = got, b.step(f7=50.0 * on, f8=50.0 * (1 - on), f9=50.0)
        if (2, 9) in got:
            break
        for (session, _), grant in sent.items():
            b.ack(grant, session)
    assert (2, 9) in got and max(b.committed()) <= 100.0


def test_small_changes_are_ignored_except_to_zero() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=50.0)
    assert b.step(f7=50.4) == {} and b.step(f7=49.6) == {}
    assert b.step(f7=50.6)[1, 7].rate == 50.6
    b.step(f7=0.4)
    assert b.step(f7=0.0)[1, 7].rate == 0.0
    # A small flow's whole rate may be less than that part of a link.
    assert b.step(f7=0.3)[1, 7].rate == 0.3


def test_ignored_changes_never_add_up_to_more_than_the_link() -> None:
    b = Bench()
    for flow in range(10):
        b.demand(flow)
    b.step(**{f"f{k}": 10.0 for k in range(10)})
    b.demand(99)
    lowers = b.step(**{f"f{k}": 9.6 for k in range(10)}, f99=4.0)
    assert len([g for g in lowers.values() if g.must_ack]) == 10
    for grant in lowers.values():
        b.ack(grant)
    assert b.step()[1, 99].rate == pytest.approx(4.0)


def test_lease_and_echo() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=50.0)
    assert b.arbiter.heartbeat(at(300), 1)
    assert b.arbiter.next_wakeup(at(301)) == at(200 + LEASE + 1)  # the other session's
    assert not b.arbiter.heartbeat(at(300), 99)
    b.arbiter.step(at(300 + LEASE))
    assert b.arbiter.honours(1)
    assert b.committed()[0] == 50.0
    b.arbiter.step(at(300 + LEASE + 1))
    assert not b.arbiter.honours(1)
    assert b.committed()[0] == 0.0
    assert not b.arbiter.heartbeat(at(425), 1), "an echo would revive void grants"
    assert b.demand(7) == [] and b.step() == {}
    assert b.arbiter.expired == 2


def test_a_closed_stream_keeps_its_commitments_until_the_lease_ends() -> None:
    b = Bench({7: (1, 0), 8: (2, 0)})
    b.step(f7=100.0)
    b.arbiter.goodbye(b.now(), 1)
    assert not b.arbiter.honours(1)
    assert not b.arbiter.heartbeat(b.now(), 1)
    b.keep_alive(300, 2)
    assert b.step(f7=0.0, f8=100.0) == {}
    b.keep_alive(350, 2)
    assert b.step()[2, 8].rate == 100.0


def test_hello_replaces_everything() -> None:
    b = Bench({7: (1, 0), 8: (1, 0)})
    b.step(f7=50.0, f8=30.0)
    b.step(f7=40.0)  # not acknowledged
    b.hello(11, Held(7, 1, 45.0), daemon=1)
    assert b.committed()[0] == 45.0
    assert not b.arbiter.honours(1)
    # Whatever still arrives from the old stream, or arrives again, has no effect.
    b.demand(8)
    b.done(7)
    b.hello(1)
    b.hello(11, daemon=1)
    assert b.committed()[0] == 45.0
    assert b.step()[11, 7].rate == 40.0


def test_recovery_raises_nothing_for_a_lease() -> None:
    want = Wanted()
    config = ArbiterConfig(target=1.0, lease_ns=at(LEASE))
    arbiter = Arbiter([100.0, 100.0], config, want)
    arbiter.hello(at(1000), Hello("h1", 1, (Held(7, 1, 60.0),)))
    arbiter.hello(at(1000), Hello("h2", 2))
    assert arbiter.commitments().tolist() == [60.0, 60.0], "its path is not known yet"
    arbiter.demand(at(1001), 1, [Demand(7, 1, "a", (0,), 100)])
    arbiter.demand(at(1001), 2, [Demand(8, 1, "b", (1,), 100)])
    assert arbiter.commitments().tolist() == [60.0, 0.0]
    want.rates = {7: 20.0, 8: 100.0}
    lower = arbiter.step(at(1002))
    assert [g.rate for g in lower[1]] == [20.0] and 2 not in lower
    with pytest.raises(ScheduleRefused, match="just started"):
        arbiter.update_schedule(at(1002), "x", [1], [1.0])
    for time in (1060, 1119):
        assert arbiter.heartbeat(at(time), 1) and arbiter.heartbeat(at(time), 2)
        assert arbiter.step(at(time)) == {}
    assert arbiter.next_wakeup(at(1120)) == at(1121)
    assert [g.rate for g in arbiter.step(at(1121))[2]] == [100.0]


def test_held_flows_without_a_demand_are_taken_back() -> None:
    b = Bench(time=100)
    b.hello(11, Held(7, 1, 60.0), daemon=1)
    b.keep_alive(b.time + LEASE // 2, 11, 2)
    assert b.step() == {}
    b.keep_alive(b.time + LEASE // 2, 11, 2)
    taken = b.step()[11, 7]
    assert taken.rate == 0.0 and taken.must_ack
    assert b.committed() == [60.0, 60.0]
    b.ack(taken, session=11)
    assert b.committed() == [0.0, 0.0]


def test_nobody_holds_what_was_not_granted() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=60.0)
    b.step(f7=20.0)
    for flow, rate in ((7, 60.1), (9, 1e-3)):
        with pytest.raises(SessionEnded, match=f"flow {flow} holds more than was granted here"):
            b.hello(11, Held(flow, 1, rate), daemon=1)
    assert b.arbiter.honours(1), "nothing has changed"
    b.hello(12, Held(7, 1, 60.0), Held(9, 1, 0.0), daemon=1)
    assert b.committed() == [60.0, 0.0]


def test_of_a_loan_the_lender_or_the_borrower_holds_a_part() -> None:
    b = Bench({7: (1, 0), 8: (1, 0)})
    b.step(f7=60.0, f8=40.0)
    b.step(f7=30.0, f8=70.0)  # by one message
    for lender, borrower in ((60.0, 70.0), (31.0, 70.0), (60.0, 41.0), (30.0, 71.0)):
        with pytest.raises(SessionEnded):
            b.hello(11, Held(7, 1, lender), Held(8, 1, borrower), daemon=1)
    b.hello(11, Held(7, 1, 30.0), Held(8, 1, 70.0), daemon=1)  # read
    b.step(f7=60.0, f8=40.0)
    b.hello(12, Held(7, 1, 30.0), Held(8, 1, 70.0), daemon=1)  # not read
    assert b.committed()[0] == 100.0


def test_a_name_is_kept_while_its_session_lives() -> None:
    b = Bench({7: (1, 0)}, max_sessions=3)
    b.step(f7=60.0)
    for other in range(10, 30):
        b.hello(other)
        b.keep_alive(b.time + 2 * LEASE, 1, 2)
    b.hello(31, Held(7, 1, 60.0), daemon=1)
    assert b.committed()[0] == 60.0


def test_no_new_stream_puts_a_lower_off() -> None:
    b = Bench({7: (1, 0), 8: (2, 0)})
    b.step(f7=60.0)
    b.step(f7=20.0, f8=80.0)  # never acknowledged
    errors = set()
    while (2, 8) not in b.step():
        b.keep_alive(b.time + 50, 2)
        try:
            b.hello(b.time, Held(7, 1, 60.0), daemon=1)
        except SessionEnded as error:
            errors.add(str(error))
        assert b.committed()[0] <= 100.0 and b.time < 200 + (ACK_LEASES + 3) * LEASE
    assert "a lower was not acknowledged in time; its lease has to end first" in errors
    assert b.committed() == [80.0, 0.0]


def test_a_claim_that_is_what_the_flow_is_to_have_is_no_lower_that_is_old() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=60.0)
    b.step(f7=20.0)
    b.hello(11, Held(7, 1, 60.0), daemon=1)
    b.step(f7=60.0)
    b.keep_alive(b.time + 2 * ACK_LEASES * LEASE, 11)
    b.step(f7=20.0)
    b.step()
    assert b.arbiter.honours(11)


def test_explicit_schedules_and_commitments_share_the_link() -> None:
    b = Bench({7: (1, 0)})
    b.step(f7=50.0)
    with pytest.raises(ScheduleRefused) as caught:
        b.arbiter.update_schedule(b.now(), "x", [1, 0], [10.0, 60.0])
    assert caught.value.link == 0
    b.arbiter.update_schedule(b.now(), "x", [1, 0], [10.0, 40.0])
    assert b.arbiter.load_table(b.now())[0, :3].tolist() == [60.0, 90.0, 50.0]
    assert b.step(f7=80.0)[1, 7].rate == 60.0, "a grant has no end: no slot may be too full"
    for _ in range(3):
        b.keep_alive(b.time + 50, 1)
    assert b.step()[1, 7].rate == 80.0, "the schedule is over"


def test_ended_flows_do_not_come_back_by_late_demands() -> None:
    b = Bench()
    b.demand(7, inc=3)
    b.step(f7=50.0)
    b.done(7, 2)  # of an earlier life
    b.done(7, 3, session=2)  # not his
    assert b.committed()[0] == 50.0
    b.done(7, 3)
    assert b.committed()[0] == 0.0
    assert b.demand(7, inc=3) == []
    assert b.step() == {}
    b.demand(7, inc=4)
    assert b.step()[1, 7].inc == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"links": (2,)}, "link index must be from 0 to 1"),
        ({"links": (-1,)}, "link index must be from 0 to 1"),
        ({"links": ()}, "path must have 1 to 16 links"),
        ({"links": (0,) * 17}, "path must have 1 to 16 links"),
        ({"links": (0, 0)}, "path crosses a link twice"),
        ({"cap": math.nan}, "cap is not a number"),
        ({"job": ""}, "job name must have 1 to 64 characters"),
        ({"job": "j" * 65}, "job name must have 1 to 64 characters"),
        ({"flow": -1}, "flow or incarnation is out of range"),
        ({"flow": 2**64}, "flow or incarnation is out of range"),
        ({"inc": 2**63}, "flow or incarnation is out of range"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], reason: str) -> None:
    b = Bench()
    assert b.demand(7, **change) == [reason]
    assert b.arbiter.refused == 1
    assert b.step(f7=50.0) == {}


def test_numbers_out_of_range_are_clamped() -> None:
    b = Bench()
    wild: dict[str, Any] = {"remaining": 2**80, "cap": -math.inf, "wait_ns": -5, "period_ns": 2**80}
    assert b.demand(7, **wild, next_in_ns=-(2**90), next_bytes=-1) == []
    assert b.demand(8, flow=2**64 - 1, remaining=-3, sockets=10**6) == []
    assert b.arbiter._flows.rows["sockets"].tolist() == [1, MAX_SOCKETS]
    b.want.rates[2**64 - 1] = 5.0
    assert b.step(f7=50.0).keys() == {(1, 7), (1, 2**64 - 1)}


def test_limits_and_changed_paths() -> None:
    b = Bench(max_flows_per_session=2)
    assert b.demand(1) == [] and b.demand(2) == []
    assert b.demand(3) == ["the session already has 2 flows"]
    assert "path cannot change" in b.demand(2, 1)[0]
    b.done(1)
    assert b.demand(3) == []


@pytest.mark.parametrize(
    "hello",
    [
        Hello("", 5),
        Hello("h" * 65, 5),
        Hello("h5", -1),
        Hello("h5", 1),  # somebody else's session
        Hello("h5", 5, (Held(1, 1, math.nan),)),
        Hello("h5", 5, (Held(1, 1, math.inf),)),
        Hello("h5", 5, (Held(1, 1, -1.0),)),
        Hello("h5", 5, (Held(-1, 1, 1.0),)),
        Hello("h5", 5, (Held(1, 1, 1.0), Held(1, 1, 1.0))),
        Hello("h5", 5, tuple(Held(f, 1, 1.0) for f in range(2049))),
    ],
)
def test_a_hello_that_makes_no_sense_changes_nothing(hello: Hello) -> None:
    b = Bench()
    with pytest.raises(ProtocolError):
        b.arbiter.hello(b.now(), hello)
    assert not b.arbiter.honours(5)
    assert b.committed() == [0.0, 0.0]


def test_too_many_sessions_and_names_that_are_anothers() -> None:
    b = Bench(max_sessions=5, max_sessions_per_owner=2)
    for session, owner in ((3, "a"), (4, "a"), (5, "b")):
        b.hello(session, owner=owner)
    with pytest.raises(ProtocolError, match="already 5 sessions"):
        b.hello(6)
    with pytest.raises(ProtocolError, match="already 2 sessions of a"):
        b.hello(6, owner="a")
    b.hello(6, daemon=2)  # replaces its own
    b.hello(7, daemon=3, owner="a")
    assert [b.arbiter.honours(session) for session in (2, 3, 6, 7)] == [False, False, True, True]


def test_nobody_takes_anothers_name() -> None:
    b = Bench()
    b.hello(3, owner="a")
    b.hello(2**60, daemon=3, owner="b")  # says it is a's, with a huge number
    assert b.arbiter.honours(3)
    b.hello(7, daemon=3, owner="a")
    assert b.arbiter.honours(7) and not b.arbiter.honours(3)


@pytest.mark.parametrize("capacity", [[], [0.0], [-1.0], [math.nan], [math.inf], [[1.0]]])
def test_capacity_is_checked(capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity"):
        Arbiter(capacity, ArbiterConfig(), Wanted())
