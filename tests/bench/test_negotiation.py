# SPDX-License-Identifier: Apache-2.0
"""Who talks to whom in the negotiation benchmark, what the wire's counters mean, and how times are
drawn."""

from collections import Counter
from pathlib import Path

import pytest
from bench.cdf import PANELS, draw
from bench.negotiation import percentiles
from bench.negotiation_client import peers, rack, topology_text
from bench.wire import Traffic, of_loopback, per_second

from flowslot.model.topology import parse_topology

PROC_NET_DEV = """Inter-|   Receive                            |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:   15520      20    0    0    0     0          0         0    15520      20    0    0
  eth0:     111       2    0    0    0     0          0         0      333       4    0    0
"""


def test_one_switch_process_and_all_talk_to_all() -> None:
    assert peers(2, 5, 1, 5) == [0, 1, 3, 4]


@pytest.mark.parametrize(("ranks", "near", "far"), [(4, 1, 2), (8, 3, 4)])
def test_jobs_have_as_many_hosts_of_each_rack(ranks: int, near: int, far: int) -> None:
    hosts, switches = 8, 2
    topology = parse_topology(topology_text(hosts, (7401, 7402)), "test")
    heard: Counter[int] = Counter()
    for host in range(hosts):
        others = peers(host, hosts, switches, ranks)
        heard.update(others)
        crossed = []
        for other in others:
            path = topology.path(f"10.78.0.{host + 1}", f"10.78.0.{other + 1}")
            assert path is not None
            crossed.append({topology.links[link].switch for link in path})
        mine = f"s{rack(host, hosts, switches) + 1}"
        assert crossed.count({mine}) == near
        assert crossed.count({"s1", "s2"}) == far == len(others) - near
    assert set(heard.values()) == {ranks - 1}


@pytest.mark.parametrize(("hosts", "switches"), [(5, 1), (8, 2), (9, 3), (7, 2)])
def test_every_host_has_peers_and_every_switch_process_its_links(hosts: int, switches: int) -> None:
    topology = parse_topology(topology_text(hosts, range(7400, 7400 + switches)), "test")
    assert sum(len(topology.switch_links(s)) for s in topology.switches) == 2 * hosts
    for host in range(hosts):
        others = peers(host, hosts, switches, hosts)
        assert host not in others
        assert len(others) == len(set(others)) >= 2


def test_what_a_wire_carries() -> None:
    assert of_loopback(PROC_NET_DEV) == Traffic(15520, 20)
    # 20 packets of 38 bytes of Ethernet each: 16,280 bytes in 2 s.
    result = per_second(Traffic(15520, 20), 2.0)
    assert result["bandwidth_mbps"] == 0.065
    assert result["bandwidth_ip_mbps"] == 0.062
    assert result["bandwidth_packets_per_s"] == 10


def test_percentiles_are_in_milliseconds() -> None:
    assert percentiles([1_000_000, 2_000_000, 3_000_000])["p50_ms"] == 2.0
    assert percentiles([]) == {"count": 0}


def test_a_figure_of_two_panels_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw({panel: {"a": [10_000, 1_000_000], "b": [5]} for panel in PANELS}, tmp_path / "cdf.svg")
    text = (tmp_path / "cdf.svg").read_text()
    assert text.lstrip().startswith("<?xml")
