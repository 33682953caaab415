# SPDX-License-Identifier: Apache-2.0
"""What waits to be sent to a daemon."""

from hypothesis import given
from hypothesis import strategies as st

from flowslot.protocol.messages import FromArbiter, Grant, HeartbeatEcho, Refusal
from flowslot.protocol.outbox import Outbox


def grant(flow: int, seq: int, rate: float = 1.0, *, must_ack: bool = False) -> Grant:
    return Grant(flow, 1, seq, rate, 9.0, must_ack)


def test_what_waits_is_taken_once_and_in_order() -> None:
    box = Outbox(4)
    assert not box and box.take(1) == FromArbiter(1, [], [], None)
    assert box.post([grant(7, 1), grant(8, 2)], [Refusal(9, 1, "no")], HeartbeatEcho(3))
    assert box.post(echo=HeartbeatEcho(4)) and box
    message = box.take(5)
    assert message == FromArbiter(
        5, [grant(7, 1), grant(8, 2)], [Refusal(9, 1, "no")], HeartbeatEcho(4)
    )
    assert not box


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30))
def test_of_each_flow_the_newest_grant_waits_and_a_lower_stays_to_be_acknowledged(
    lowers: list[tuple[int, bool]],
) -> None:
    box = Outbox(4)
    for seq, (flow, must_ack) in enumerate(lowers, 1):
        box.post([grant(flow, seq, must_ack=must_ack)])
    sent = {g.flow: g for g in box.take(1).grants}
    for flow in range(3):
        mine = [(seq, must) for seq, (of, must) in enumerate(lowers, 1) if of == flow]
        if mine:
            assert sent[flow].seq == mine[-1][0]
            assert sent[flow].must_ack == any(must for _, must in mine)
        else:
            assert flow not in sent


def test_refusals_are_bounded() -> None:
    box = Outbox(2)
    for reason in ("no", "never"):
        assert box.post(refusals=[Refusal(flow, 1, reason) for flow in (1, 2)])
    assert not box.post(refusals=[Refusal(3, 1, "no")])
    assert [r.reason for r in box.take(1).refusals] == ["never", "never"]
    assert box.post(refusals=[Refusal(3, 1, "no")])
