# SPDX-License-Identifier: Apache-2.0
"""Scenarios with racks: names, paths, what jobs send over uplinks, and the topology files."""

import itertools

import pytest
from scenariofiles import SCENARIOS, TWO_RACKS

from flowslot.model.topology import Topology, parse_topology
from flowslot_lab.net import control_ip, data_ip
from flowslot_lab.plane import SwitchProcesses, topology_toml
from flowslot_scenario.scenario import Link, Scenario, load, parse


@pytest.fixture
def scenario() -> Scenario:
    return parse(TWO_RACKS, "racks.toml")


def goodput(mbps: float) -> float:
    """Payload bytes per second."""
    return mbps * 1e6 / 8 * 1448 / 1514


def test_paths_within_and_between_racks(scenario: Scenario) -> None:
    assert scenario.racks == ("r1", "r2")
    assert scenario.path("h1", "h2") == ("h1->r1", "r1->h2")
    assert scenario.path("h3", "h1") == ("h3->r2", "r2->core", "core->r1", "r1->h1")
    for src, dst in (("h1", "h4"), ("h4", "h1"), ("r1", "h1")):
        with pytest.raises(KeyError):
            scenario.path(src, dst)
    with pytest.raises(ValueError, match="h1 and h1 are the same host"):
        scenario.path("h1", "h1")


def test_uplinks_have_their_own_rate_and_buffer(scenario: Scenario) -> None:
    links = scenario.directed_links()
    uplinks = ["r1->core", "core->r1", "r2->core", "core->r2"]
    assert list(links)[-4:] == uplinks
    assert all(links[name] == Link(rate_mbps=50, buffer_bytes=32_000) for name in uplinks)
    assert links["h3->r2"] == links["r2->h3"] == Link(rate_mbps=100, buffer_bytes=64_000)
    assert scenario.capacity_bps("core->r2") == 50e6
    with pytest.raises(KeyError):
        scenario.capacity_bps("h1->s1")


def test_uplinks_are_as_the_hosts_links_unless_said() -> None:
    text = TWO_RACKS.replace("uplink_mbps = 50\nuplink_buffer_kb = 32\n", "")
    scenario = parse(text, "f", ["hosts.h1.rate_mbps=10"])
    assert scenario.directed_links()["r1->core"] == Link(rate_mbps=100, buffer_bytes=64_000)
    varied = parse(text, "f", ["links.uplink_mbps=25", "links.uplink_buffer_kb=8"])
    assert varied.directed_links()["core->r2"] == Link(rate_mbps=25, buffer_bytes=8_000)


def test_what_a_ring_sends_over_each_link(scenario: Scenario) -> None:
    ring = scenario.jobs[0]
    sent = 2 * 2 * 120_000 // 3
    # h1 -> h2 stays in the rack; h2 -> h3 and h3 -> h1 cross both uplinks, one way each.
    assert scenario.link_bytes(ring) == dict.fromkeys(scenario.directed_links(), sent)
    assert scenario.ideal_s(ring) == pytest.approx(0.01 + sent / goodput(50) + 4 * 20e-6)
    assert "0.16 MB / (50 Mbit/s x 1448/1514) on r1->core" in scenario.explain_ideal(ring)
    within = ring.model_copy(update={"hosts": ("h1", "h2")})
    assert list(scenario.link_bytes(within)) == ["h1->r1", "r1->h1", "h2->r1", "r1->h2"]


def test_what_a_parameter_server_sends_over_each_link(scenario: Scenario) -> None:
    ps = scenario.jobs[1]
    worker, server = 60_000, 120_000
    assert scenario.link_bytes(ps) == {
        "h1->r1": server, "r1->h1": server, "h2->r1": worker, "r1->h2": worker,
        "h3->r2": worker, "r2->h3": worker,
        "r1->core": worker, "core->r1": worker, "r2->core": worker, "core->r2": worker,
    }  # fmt: skip
    flows = scenario.flows_on_link()  # the ring's are two on every link
    assert (flows["r1->h1"], flows["r1->h2"], flows["core->r1"]) == (2 + 6, 2 + 3, 2 + 3)
    # The server's link at 100 Mbit/s takes as long as an uplink with half of that at 50.
    assert scenario.ideal_s(ps) == pytest.approx(0.01 + server / goodput(100))
    barrier = scenario.model_copy(update={"jobs": (ps.model_copy(update={"barrier": True}),)})
    assert barrier.ideal_s(barrier.jobs[0]) == pytest.approx(0.01 + 2 * server / goodput(100))


def test_ideal_of_ring4_by_hand() -> None:
    scenario = load(SCENARIOS / "ring4-two-jobs.toml")
    # Each worker sends 2 x 3/4 of 1 MB to the next; of four links h1->h2->h3->h4->h1, two leave
    # their rack, over different uplinks: no directed link carries more than one worker's.
    by_hand = 0.15 + 1_500_000 * 8 / 100e6 * 1514 / 1448 + 6 * 20e-6
    for job in scenario.jobs:
        assert set(scenario.link_bytes(job).values()) == {1_500_000}
        assert scenario.ideal_s(job) == pytest.approx(by_hand) == pytest.approx(0.27559, abs=1e-5)
    assert set(scenario.flows_on_link().values()) == {4}


def assert_paths_agree(scenario: Scenario, topology: Topology) -> None:
    """Daemons see flows on the links that the scenario says."""
    for src, dst in itertools.permutations([host.name for host in scenario.hosts], 2):
        ends = [data_ip(scenario.index(host)) for host in (src, dst)]
        path = topology.path(*ends)
        assert tuple(topology.links[i].name for i in path) == scenario.path(src, dst)


@pytest.mark.parametrize("name", ["ring4-two-jobs", "ps-incast"])
@pytest.mark.parametrize("use_switch", [True, False])
def test_the_topology_file_has_the_scenarios_paths(name: str, use_switch: bool) -> None:
    scenario = load(SCENARIOS / f"{name}.toml")
    assert len(scenario.racks) == (2 if name == "ring4-two-jobs" else 0)
    switches = SwitchProcesses(scenario, use_switch)
    topology = parse_topology(topology_toml(scenario, switches), "topology.toml")
    assert_paths_agree(scenario, topology)
    assert {link.switch for link in topology.links} == ({"s1"} if use_switch else {None})
    for link in topology.links:
        assert link.capacity_bps == pytest.approx(scenario.capacity_bps(link.name))


def test_a_switch_process_per_rack_holds_what_touches_its_switch(scenario: Scenario) -> None:
    switches = SwitchProcesses(scenario, per_rack=True)
    topology = parse_topology(topology_toml(scenario, switches), "topology.toml")
    assert_paths_agree(scenario, topology)
    held = {
        name: {topology.links[i].name for i in topology.switch_links(name)}
        for name in topology.switches
    }
    assert held == {
        "r1": {"h1->r1", "r1->h1", "h2->r1", "r1->h2", "r1->core", "core->r1"},
        "r2": {"h3->r2", "r2->h3", "r2->core", "core->r2"},
    }
    assert switches.hosts == {"r1": ["h1", "h2"], "r2": ["h3"]}
    addresses = [switch.address for switch in topology.switches.values()]
    assert addresses == ["10.77.1.1:7400", "10.77.1.2:7400"]
    assert not {address.split(":")[0] for address in addresses} & {
        control_ip(i) for i in range(200)
    }


def test_one_rack_needs_no_routes() -> None:
    scenario = parse(TWO_RACKS, "f", ["hosts.rack=r1"])
    topology = parse_topology(topology_toml(scenario, SwitchProcesses(scenario)), "topology.toml")
    assert topology.settings.routes == ()
    assert_paths_agree(scenario, topology)
