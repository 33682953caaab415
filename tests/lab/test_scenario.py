# SPDX-License-Identifier: Apache-2.0
import pytest

from flowslot.errors import ConfigError
from flowslot_lab.scenario import Scenario, load, parse

from .conftest import SCENARIOS, TWO_HOSTS


@pytest.fixture(params=["two-equal", "three-equal", "ps-incast"])
def shipped(request: pytest.FixtureRequest) -> Scenario:
    return load(SCENARIOS / f"{request.param}.toml")


def test_shipped_scenarios_have_the_name_of_their_file(shipped: Scenario) -> None:
    assert load(SCENARIOS / f"{shipped.name}.toml") == shipped


def test_rings_have_exactly_the_size_that_was_asked() -> None:
    scenario = load(SCENARIOS / "two-equal.toml")
    job = scenario.jobs[0]
    assert job.sent_bytes == 5_000_000
    assert job.slice_bytes * job.slices * job.sockets * 2 == 5_000_000
    assert job.link_bytes() == dict.fromkeys(["h1->s1", "s1->h1", "h2->s1", "s1->h2"], 5_000_000)
    assert scenario.flows_on_link() == dict.fromkeys(job.link_bytes(), 4)


def test_incast_has_exactly_the_size_that_was_asked() -> None:
    scenario = load(SCENARIOS / "ps-incast.toml")
    job = scenario.jobs[0]
    assert (job.sent_bytes, job.slices, job.slice_bytes) == (1_600_000, 64, 6_250)
    assert job.link_bytes()["s1->h1"] == job.link_bytes()["h1->s1"] == 6_400_000
    assert job.link_bytes()["s1->h2"] == job.link_bytes()["h2->s1"] == 1_600_000
    assert scenario.flows_on_link()["s1->h1"] == 16
    assert scenario.flows_on_link()["h3->s1"] == 4


def test_ideal_of_a_ring_counts_steps_and_round_trips() -> None:
    text = TWO_HOSTS.replace('["h1", "h2"]', '["h1", "h2", "h3"]').replace(
        '[[hosts]]\nname = "h2"', '[[hosts]]\nname = "h2"\n[[hosts]]\nname = "h3"\nrate_mbps = 100'
    )
    scenario = parse("rtt_us = 1000\n" + text.replace("500_000", "600_000"), "f")
    goodput = 100e6 / 8 * 1448 / 1514  # the slow host's link
    assert scenario.ideal_s(scenario.jobs[0]) == pytest.approx(
        0.01 + 4 / 3 * 600_000 / goodput + 4 * 0.001, rel=1e-3
    )


def test_ideal_of_a_barrier_is_the_sum_of_both_ways() -> None:
    text = (SCENARIOS / "ps-incast.toml").read_text()
    pipelined, barrier = parse(text, "f"), parse(text + "\nbarrier = true\n", "f")
    way = 6_400_000 / (400e6 / 8 * 1448 / 1514)
    assert pipelined.ideal_s(pipelined.jobs[0]) == pytest.approx(0.02 + way)
    assert barrier.ideal_s(barrier.jobs[0]) == pytest.approx(0.02 + 2 * way)


def test_the_formula_is_printed_with_its_numbers() -> None:
    scenario = load(SCENARIOS / "two-equal.toml")
    assert scenario.explain_ideal(scenario.jobs[0]) == (
        "a: 0.125 s compute + 5 MB / (400 Mbit/s x 1448/1514) on h1->s1 "
        "+ 2 round trips of 20 us = 0.2296 s"
    )


def test_sizes_that_do_not_divide_are_rounded_up_to_whole_words() -> None:
    scenario = parse(TWO_HOSTS.replace("500_000", "500_001"), "f")
    job = scenario.jobs[0]
    assert job.slice_bytes % 2 == 0
    assert 500_001 <= job.sent_bytes < 500_001 * 1.01


def edit(old: str, new: str) -> str:
    assert old in TWO_HOSTS
    return TWO_HOSTS.replace(old, new)


PS = edit('kind = "ring"', 'kind = "ps"').replace("slice_kb = 25\n", "")

ERRORS = {
    edit('name = "h2"', 'name = "h1"'): (
        'field `hosts[1].name`: host "h1" is already at `hosts[0].name`; name each once'
    ),
    edit('"h1", "h2"]', '"h1", "h9"]'): (
        'field `jobs[0].hosts[1]`: no host is called "h9"; must be one of: h1, h2'
    ),
    edit('"h1", "h2"]', '"h1", "h1"]'): (
        'field `jobs[0].hosts[1]`: "h1" has a worker already; name each once'
    ),
    edit('"h1", "h2"]', '"h1"]'): "field `jobs[0].hosts`: must name at least 2 hosts for a ring",
    edit("500_000", "-1"): "field `jobs[0].bytes`: must be greater than 0, got -1",
    edit("buffer_kb = 128", "buffer_kb = -1"): (
        "field `links.buffer_kb`: must be greater than 0, got -1"
    ),
    edit("rate_mbps = 400\n", ""): "field `links.rate_mbps`: is required but missing",
    edit("compute_s", "compute_ms"): (
        "field `jobs[0].compute_ms`: unknown key; did you mean `compute_s`?"
    ),
    edit('kind = "ring"', 'kind = "tree"'): (
        "field `jobs[0].kind`: must be 'ring' or 'ps', got \"tree\""
    ),
    edit("sockets = 2", 'sockets = 2\nserver = "h1"'): (
        'field `jobs[0].server`: is for kind "ps"; a ring has none'
    ),
    PS: 'field `jobs[0].server`: is required for kind "ps": the parameter server\'s host',
    PS + 'server = "h1"\n': (
        "field `jobs[0].server`: must be a host of its own, not one of the workers'"
    ),
    TWO_HOSTS + TWO_HOSTS[TWO_HOSTS.index("[[jobs]]") :]: (
        'field `jobs[1].name`: job "a" is already at `jobs[0].name`; name each once'
    ),
}


@pytest.mark.parametrize(("text", "problem"), ERRORS.items(), ids=range(len(ERRORS)))
def test_errors_name_file_field_and_what_would_be_right(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x.toml")
    assert str(caught.value) == f"x.toml: {problem}"


def test_variants_change_single_values() -> None:
    path = SCENARIOS / "two-equal.toml"
    changes = ["links.buffer_kb=16", "jobs.compute_s=0.15", "jobs.b.bytes=6e6", "seed=7"]
    varied = load(path, [*changes, "hosts.h2.rate_mbps=200"])
    assert varied.links.buffer_kb == 16
    assert [job.compute_s for job in varied.jobs] == [0.15, 0.15]
    assert [job.bytes for job in varied.jobs] == [5_000_000, 6_000_000]
    assert varied.seed == 7
    assert [varied.link_of(host).rate_mbps for host in ("h1", "h2")] == [400, 200]
    unchanged = load(path)
    assert load(path, ["jobs.bytes=5000000"]) == unchanged


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("jobs.c.bytes=1", 'none of `jobs` is called "c"; of: a, b'),
        ("job.bytes=1", "must begin with links., hosts. or jobs., or be one key"),
        ("jobs.bytes", "must be KEY=VALUE"),
        ("jobs.bytes=-1", "field `jobs[0].bytes`: must be greater than 0, got -1"),
        ("jobs.sokets=1", "field `jobs[0].sokets`: unknown key; did you mean `sockets`?"),
    ],
)
def test_a_bad_variant_is_explained(change: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SCENARIOS / "two-equal.toml", [change])
    assert problem in str(caught.value)
