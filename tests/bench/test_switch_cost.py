# SPDX-License-Identifier: Apache-2.0
"""Who talks to whom in the benchmark of the switch process, and how often."""

import pytest
from bench.switch_cost import RACKS, _Racks
from bench.switch_load import DAEMONS, LOADS, Daemon


@pytest.mark.parametrize("name", LOADS)
def test_each_daemon_has_about_100_flows_to_hosts_of_its_group(name: str) -> None:
    load = LOADS[name]
    assert DAEMONS % load.ranks == 0
    for host in (0, 37, DAEMONS - 1):
        flows = [flow for flows in Daemon(host, load)._flows for flow in flows]
        assert len({flow.flow for flow in flows}) == len(flows)
        assert 98 <= len(flows) <= 100
        assert {flow.links[1] for flow in flows} == set(range(1, load.others + 1))


@pytest.mark.parametrize(
    ("name", "each", "over_all"),
    [("racks", 10, 160), ("wide", 10, 10), ("few", 0.625, 10)],
)
def test_phases_in_a_second(name: str, each: float, over_all: float) -> None:
    load = LOADS[name]
    assert load.jobs / load.period_s == pytest.approx(each)
    assert load.jobs / load.period_s * DAEMONS / load.ranks == pytest.approx(over_all)


def test_news_of_one_rack_are_of_about_one_in_a_hundred_flows() -> None:
    racks = _Racks()
    racks.say(range(RACKS), everyone=True)
    flows = racks._arbiter._flows
    assert (flows.n, len(flows._members)) == (DAEMONS * 99, RACKS)
    news = sum(len(racks._demands(host, (0, 2))) for host in range(4))
    assert news / flows.n == pytest.approx(0.01, rel=0.2)
