# SPDX-License-Identifier: Apache-2.0
"""What daemons tell each other survives the wire; what makes no sense is refused by field."""

import math
import random

import pytest

from flowslot.model.errors import ProtocolError
from flowslot.policy.mlcc.peers import MAX_GROUPS, Group, Progress
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.peers import read_peer, write_peer

SAID = [
    Progress(Group("a", "ring", 0, 1, 3), 7, 100.0, 20.0, 30.5),
    Progress(Group("b", "push", 0, 9, 0), 1, 1e9, 0.0, 0.0),
    Progress(Group("a", "pull", 9, -1, 0), 2**60, 1.0, 1.0, 1.0),
]


def test_what_is_written_is_read() -> None:
    assert read_peer(write_peer("h1", 5, SAID)) == ("h1", 5, SAID)
    assert read_peer(write_peer("h1", 5, [])) == ("h1", 5, [])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("host", {"host": ""}),
        ("host", {"host": "h" * 65}),
        ("n", {"n": 2**63}),
        ("peer.rank", {"rank": [0, 1]}),
        ("job", {"job": [0, 1, 2]}),
        ("jobs[1]", {"jobs": ["a", ""]}),
        ("role", {"role": [0, 1, 2]}),
        ("role", {"role": [1, 2, 4]}),
        ("iteration", {"iteration": [1, 2, 2**63]}),
        ("total", {"total": [1.0, 0.0, 1.0]}),
        ("total", {"total": [1.0, 1e-305, 1.0]}),
        ("jobs", {"jobs": ["a", "b", "c", "d"]}),
        ("total", {"total": [1.0, math.nan, 1.0]}),
        ("sent", {"sent": [1.0, -1.0, 1.0]}),
        ("by_end", {"by_end": [1.0, math.inf, 1.0]}),
    ],
)
def test_nonsense_is_refused_by_the_name_of_its_field(
    field: str, change: dict[str, object]
) -> None:
    message = pb.PeerMessage.FromString(write_peer("h1", 5, SAID))
    for name in change:
        message.ClearField(name)  # type: ignore[arg-type]
    message.MergeFrom(pb.PeerMessage(**change))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match=rf"`{field}".replace("[", r"\[")):
        read_peer(message.SerializeToString())


def test_more_groups_than_a_host_can_have_are_refused() -> None:
    with pytest.raises(ProtocolError, match="at most 512 elements"):
        read_peer(write_peer("h1", 5, SAID[:1] * (MAX_GROUPS + 1)))


def test_random_bytes_are_refused_or_make_sense() -> None:
    rng, good = random.Random(1), write_peer("h1", 5, SAID)
    for _ in range(3000):
        bad = bytearray(rng.randbytes(rng.randint(0, 80)) if rng.random() < 0.5 else good)
        for _ in range(rng.randint(0, 4)):
            if bad:
                bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            _, _, said = read_peer(bytes(bad))
        except ProtocolError:
            continue
        assert all(p.total >= 1 and p.sent >= 0 and math.isfinite(p.by_end) for p in said)
