# SPDX-License-Identifier: Apache-2.0
"""Somebody attacks the shipped switch process from another address: an honest daemon keeps its
stream, its grant and its calls, and the process its size. How long calls take then: bench.hostile.
"""

from pathlib import Path

import pytest
from attacks import ATTACKS, SOURCE, Attack, Result, Victim
from rawhttp2 import RawClient, message
from switchproc import Switch
from tlsfiles import TlsSwitch
from waiting import settle

from flowslot_proto import methods

MOST_RSS = 256 << 20
LEASE = {"slot_ms": 400, "lease_slots": 5}  # 2 s: a machine may stand still
SERVED, ALIVE = 100, 20
"""So often the daemon has called, and the attacker done what it does (as far as it is let)."""


@pytest.mark.parametrize(
    ("name", "tls"),
    [
        *((name, False) for name in ATTACKS if name != "strangers"),
        *((name, True) for name in ("rapid_reset", "sessions", "handshakes", "strangers")),
    ],
)
def test_an_honest_daemon_notices_nothing(tmp_path: Path, name: str, tls: bool) -> None:
    """`tls`: the attacker has a certificate."""
    with (TlsSwitch if tls else Switch)(tmp_path, **LEASE) as switch:
        switch.start().wait_recovered()
        with Victim(switch) as victim, Attack(switch, name, tmp_path if tls else None) as attack:
            result = victim.result = Result()
            settle(lambda: min(map(len, result.times)) > SERVED, what="the daemon is served")
            achieved = attack.stop()
            victim.stop()
            rate = victim.peer.rate(7)
    assert max(achieved.values()) >= ALIVE, achieved
    assert (result.lost, result.errors) == ("", [])
    assert rate > 0
    assert 0 < result.most_rss < MOST_RSS


def test_who_attacks_is_shut_out_and_let_in_again(tmp_path: Path) -> None:
    with Switch(tmp_path, **LEASE) as switch:
        switch.start()
        with Attack(switch, "sessions") as attack:
            settle(lambda: not answered(switch, SOURCE), what="its calls are refused")
            settle(lambda: closed(switch, SOURCE), what="and its connections")
            assert answered(switch, "127.0.0.1")
            attack.stop()
        settle(lambda: answered(switch, SOURCE), what="it may come again")
        log = switch.logged("rejected")
        assert f"rejected {SOURCE}:" in log and log.count("\n") < 20


def closed(switch: Switch, source: str) -> bool:
    """A connection that asks nothing, and would have 5 s for that."""
    with RawClient(switch.port, source) as raw:
        return not all(raw.hear(0.1) for _ in range(20))


def answered(switch: Switch, source: str) -> bool:
    try:
        with RawClient(switch.port, source) as raw:
            return not raw.answer(methods.DESCRIBE, message(b""))
    except OSError:
        return False
