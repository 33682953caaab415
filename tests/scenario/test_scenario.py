# SPDX-License-Identifier: Apache-2.0
from functools import partial
from pathlib import Path

import pytest
from scenariofiles import SCENARIOS, TWO_HOSTS, TWO_RACKS

from flowslot.model.errors import ConfigError
from flowslot.model.topology import parse_topology
from flowslot_lab.plane import SwitchProcesses, topology_toml
from flowslot_scenario.scenario import Scenario, load, parse


@pytest.fixture(params=sorted(path.stem for path in SCENARIOS.glob("*.toml")))
def shipped(request: pytest.FixtureRequest) -> Scenario:
    return load(SCENARIOS / f"{request.param}.toml")


def test_shipped_scenarios_have_the_name_of_their_file(shipped: Scenario) -> None:
    assert load(SCENARIOS / f"{shipped.name}.toml") == shipped


def test_shipped_jobs_send_exactly_what_was_asked(shipped: Scenario) -> None:
    for job in shipped.jobs:
        share = 2 * (job.workers - 1) / job.workers if job.is_ring else 1
        assert job.sent_bytes == share * job.bytes


def test_rings_have_exactly_the_size_that_was_asked() -> None:
    scenario = load(SCENARIOS / "two-equal.toml")
    job = scenario.jobs[0]
    assert job.sent_bytes == 5_000_000
    assert job.slice_bytes * job.slices * job.sockets * 2 == 5_000_000
    assert scenario.link_bytes(job) == dict.fromkeys(
        ["h1->s1", "s1->h1", "h2->s1", "s1->h2"], 5_000_000
    )
    assert scenario.flows_on_link() == dict.fromkeys(scenario.link_bytes(job), 4)


def test_incast_has_exactly_the_size_that_was_asked() -> None:
    scenario = load(SCENARIOS / "ps-incast.toml")
    job = scenario.jobs[0]
    assert (job.sent_bytes, job.slices, job.slice_bytes) == (1_600_000, 64, 6_250)
    assert scenario.link_bytes(job)["s1->h1"] == scenario.link_bytes(job)["h1->s1"] == 6_400_000
    assert scenario.link_bytes(job)["s1->h2"] == scenario.link_bytes(job)["h2->s1"] == 1_600_000
    assert scenario.flows_on_link()["s1->h1"] == 16
    assert scenario.flows_on_link()["h3->s1"] == 4


def test_keys_of_ps_lite_are_spread_over_its_servers() -> None:
    scenario = load(SCENARIOS / "pslite-two-jobs.toml")
    job = scenario.jobs[0]
    assert (job.sent_bytes, job.slices, job.slice_bytes) == (3_000_000, 60, 50_000)
    assert job.processes == ("h3", "h4", "h1", "h2", "h1")  # the scheduler beside a server
    ways = [f"{host}->s1" for host in ("h1", "h2", "h3", "h4")]
    assert scenario.link_bytes(job) == dict.fromkeys(
        [link for way in ways for link in (way, "->".join(way.split("->")[::-1]))], 3_000_000
    )
    assert scenario.flows_on_link()["h3->s1"] == 4  # two servers, two jobs


def test_messages_of_nccl_are_striped_over_a_channels_sockets() -> None:
    scenario = load(SCENARIOS / "nccl-shared-host.toml", ["jobs.vgg19.channels=2"])
    job = scenario.jobs[0]
    chunk = 5_490_000 // (3 * 2)
    assert (job.slices, job.flows) == (3, 8)
    whole = job.slice_bytes * job.slices * job.sockets
    assert whole == chunk
    assert job.sent_bytes == 2 * (3 - 1) * 2 * whole and job.rounds == 4
    assert scenario.flows_on_link()["h2->s1"] == 8 + 4
    assert scenario.link_bytes(job)["h1->s1"] == job.sent_bytes


def test_ideal_of_a_barrier_knows_a_slow_worker() -> None:
    text = (SCENARIOS / "ps-incast.toml").read_text() + "\nbarrier = true\n"
    scenario = parse(text, "f", ["hosts.h3.rate_mbps=10"])
    way = 1_600_000 / (10e6 / 8 * 1448 / 1514)
    assert scenario.ideal_s(scenario.jobs[0]) == pytest.approx(0.02 + 2 * way)


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


def edit(old: str, new: str, text: str = TWO_HOSTS) -> str:
    assert old in text
    return text.replace(old, new)


pslite = partial(edit, text=(SCENARIOS / "pslite-two-jobs.toml").read_text())
racks = partial(edit, text=TWO_RACKS)
LOSS = '[[losses]]\nfrom_host = "h1"\nto_host = "h2"\npercent = 3\n'
lossy = partial(edit, text=TWO_HOSTS + LOSS)
DELAY = '[[delays]]\nfrom_host = "h1"\nto_host = "h2"\nus = 1500\n'
long = partial(edit, text=TWO_HOSTS + DELAY)
nccl = partial(edit, text=edit('kind = "ring"', 'kind = "nccl"'))
PS = edit('kind = "ring"', 'kind = "ps"').replace("slice_kb = 25\n", "")
ERRORS = {
    pslite('servers = ["h1", "h2"]\n', ""): (
        'field `jobs[0].servers`: is required for kind "pslite": where the parameters are'
    ),
    pslite('servers = ["h1", "h2"]', 'servers = ["h1", "h1"]'): (
        'field `jobs[0].servers[1]`: "h1" has a server already; name each once'
    ),
    pslite('servers = ["h1", "h2"]', 'servers = ["h1", "h3"]'): (
        "field `jobs[0].servers[1]`: must be a host of its own, not one of the workers'"
    ),
    pslite('servers = ["h1", "h2"]', 'server = "h1"'): (
        'field `jobs[0].server`: is for kind "ps"; "pslite" has none'
    ),
    pslite("keys = 60", "sockets = 2\nkeys = 60"): (
        'field `jobs[0].sockets`: is for kinds "ring", "ps" and "nccl"; "pslite" has none'
    ),
    pslite("keys = 60", "keys = 61"): (
        "field `jobs[0].keys`: must be a multiple of 2: all servers hold as many"
    ),
    nccl("sockets = 2", 'sockets = 2\nserver = "h1"'): (
        'field `jobs[0].server`: is for kind "ps"; "nccl" has none'
    ),
    nccl("sockets = 2", "sockets = 2\nprotected = true"): (
        'field `jobs[0].protected`: is for kinds "ring" and "ps"; "nccl" has none'
    ),
    nccl("sockets = 2", "sockets = 6\nthreads = 4"): (
        "field `jobs[0].sockets`: must be a multiple of 4: each of `threads` has as many"
    ),
    nccl("sockets = 2", "sockets = 65"): (
        "field `jobs[0].sockets`: must be less than or equal to 64, got 65"
    ),
    nccl("sockets = 2", "channels = 33"): (
        "field `jobs[0].channels`: must be less than or equal to 32, got 33"
    ),
    nccl("sockets = 2", 'iterations_by = "guess"'): (
        "field `jobs[0].iterations_by`: must be 'pauses', 'bytes' or 'calls', got \"guess\""
    ),
    nccl('"h1", "h2"]', '"h1"]'): "field `jobs[0].hosts`: must name at least 2 hosts for a ring",
    edit("sockets = 2", "sockets = 2\nchannels = 2"): (
        'field `jobs[0].channels`: is for kind "nccl"; "ring" has none'
    ),
    lossy('to_host = "h2"', 'to_host = "h9"'): (
        'field `losses[0].to_host`: no host is called "h9"; must be one of: h1, h2'
    ),
    lossy('to_host = "h2"', 'to_host = "h1"'): (
        "field `losses[0].to_host`: must not be the host that the path begins at"
    ),
    lossy("percent = 3", "percent = 0"): (
        "field `losses[0].percent`: must be greater than or equal to 0.001, got 0"
    ),
    TWO_HOSTS + LOSS + LOSS: (
        'field `losses[1]`: path "h1 to h2" is already at `losses[0]`; name each once'
    ),
    long('from_host = "h1"', 'from_host = "h9"'): (
        'field `delays[0].from_host`: no host is called "h9"; must be one of: h1, h2'
    ),
    long('to_host = "h2"', 'to_host = "h1"'): (
        "field `delays[0].to_host`: must not be the host that the path begins at"
    ),
    long("us = 1500", "us = 99"): (
        "field `delays[0].us`: must be greater than or equal to 100, got 99"
    ),
    long("us = 1500", "us = 100001"): (
        "field `delays[0].us`: must be less than or equal to 100000, got 100001"
    ),
    TWO_HOSTS + DELAY + DELAY: (
        'field `delays[1]`: path "h1 to h2" is already at `delays[0]`; name each once'
    ),
    edit("sockets = 2", 'sockets = 2\nlibrary = "calm"'): (
        'field `jobs[0].library`: is for kind "pslite"; "ring" has none'
    ),
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
    edit('name = "small"', 'name = "Small"'): (
        'field `name`: must begin with a letter from a to z and hold only a-z, 0-9 and "-", '
        'got "Small"'
    ),
    edit('name = "h2"', 'name = "host-of-many"'): (
        'field `jobs[0].hosts[1]`: no host is called "h2"; must be one of: h1, host-of-many'
    ),
    edit('name = "h2"', 'name = "host-of-many2"'): (
        'field `hosts[1].name`: must have at most 12 characters, got "host-of-many2"'
    ),
    edit('"h1"', '"s1"'): (
        'field `hosts[0].name`: "s1" is the name of a switch; give the host another one'
    ),
    edit("warmup = 1", 'description = "a\\nb"'): (
        'field `description`: must hold printable characters only, got "a\\nb"'
    ),
    edit('kind = "ring"', 'kind = "tree"'): (
        "field `jobs[0].kind`: must be 'ring', 'ps', 'pslite', 'nccl' or 'ddp', got \"tree\""
    ),
    edit("sockets = 2", 'sockets = 2\nserver = "h1"'): (
        'field `jobs[0].server`: is for kind "ps"; "ring" has none'
    ),
    PS: 'field `jobs[0].server`: is required for kind "ps": where the parameters are',
    PS + 'server = "h1"\n': (
        "field `jobs[0].server`: must be a host of its own, not one of the workers'"
    ),
    TWO_HOSTS + TWO_HOSTS[TWO_HOSTS.index("[[jobs]]") :]: (
        'field `jobs[1].name`: job "a" is already at `jobs[0].name`; name each once'
    ),
    **{
        racks(f'name = "h{n + 1}"\nrack = "r{r}"', f'name = "h{n + 1}"'): (
            f"field `hosts[{n}].rack`: is required, as there is `hosts[{other}].rack`: all hosts "
            "have one, or none has"
        )
        for n, r, other in ((0, 1, 1), (2, 2, 0))
    },
    **{
        edit("[links]", f"[links]\n{key} = 10"): (
            f"field `links.{key}`: is for uplinks of racks; give every host a `rack`, or leave it "
            "out"
        )
        for key in ("uplink_mbps", "uplink_buffer_kb")
    },
    racks('"r2"', '"core"'): (
        'field `hosts[2].rack`: "core" is the name of a switch; give the rack another one'
    ),
    racks('"r1"', '"s1"'): (
        'field `hosts[0].rack`: "s1" is the name of a switch; give the rack another one'
    ),
    racks('"r2"', '"h2"'): (
        'field `hosts[2].rack`: "h2" is already at `hosts[1].name`; give the rack another name'
    ),
    racks('"h3"', '"core"'): (
        'field `hosts[2].name`: "core" is the name of a switch; give the host another one'
    ),
    racks('"r2"', '"R1"'): (
        "field `hosts[2].rack`: must begin with a letter from a to z and hold only a-z, 0-9 and "
        '"-", got "R1"'
    ),
    racks('"r2"', '"rack-of-many2"'): (
        'field `hosts[2].rack`: must have at most 12 characters, got "rack-of-many2"'
    ),
    racks("uplink_mbps = 50", "uplink_mbps = 0"): (
        "field `links.uplink_mbps`: must be greater than or equal to 1, got 0"
    ),
    racks("uplink_buffer_kb = 32", "uplink_buffer_kb = 1"): (
        "field `links.uplink_buffer_kb`: must be greater than or equal to 2, got 1"
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
        ("job.bytes=1", "must begin with links., hosts., jobs., losses. or delays., or be one key"),
        ("jobs.bytes", "must be KEY=VALUE"),
        ("jobs.bytes=-1", "field `jobs[0].bytes`: must be greater than or equal to 1, got -1"),
        ("jobs.bytes=1979-05-27", 'field `jobs[0].bytes`: must be a valid integer, got "1979-05-'),
        ("jobs.bytes=" + "[" * 20_000, "field `jobs[0].bytes`: must be a valid integer, got"),
        ("jobs.bytes=" + "1" * 5000, "field `jobs[0].bytes`: must be a valid integer, got"),
        ("links.rate_mbps=inf", "field `links.rate_mbps`: must be a finite number"),
        ("jobs.x\ny.bytes=1", '--set: must hold printable characters only, got "jobs.x\\ny'),
        ("jobs.bytes=\udcff", "--set: must hold printable characters only"),
        (
            "x" * 5000 + ".y=1",
            "must begin with links., hosts., jobs., losses. or delays., or be one key",
        ),
        ("jobs." + "x" * 5000 + ".y=1", '..."; of: a, b'),
        ("jobs.sokets=1", "field `jobs[0].sokets`: unknown key; did you mean `sockets`?"),
    ],
)
def test_a_bad_variant_is_explained(change: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SCENARIOS / "two-equal.toml", [change])
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("changes", [[], ["jobs.bytes=1"], ["jobs.a.bytes=1"]])
@pytest.mark.parametrize(
    "name", ['= "a\\nb"', ".x = 0x" + "f" * 5000, "." + ".".join("a" * 2000) + " = 1"]
)
def test_a_variant_of_what_has_a_strange_name_is_explained(
    tmp_path: Path, name: str, changes: list[str]
) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(edit('name = "a"', f"name {name}"))
    with pytest.raises(ConfigError) as caught:
        load(path, changes)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("change", ["jobs.x=1", "jobs.name=a"])
def test_a_variant_of_what_is_no_table_is_explained(tmp_path: Path, change: str) -> None:
    path = tmp_path / "odd.toml"
    head = TWO_HOSTS[: TWO_HOSTS.index("[links]")]
    rest = TWO_HOSTS[TWO_HOSTS.index("[links]") : TWO_HOSTS.index("[[jobs]]")]
    path.write_text(f"{head}jobs = [1, 2]\n{rest}")
    with pytest.raises(ConfigError) as caught:
        load(path, [change])
    assert str(caught.value) == f"{path}: field `jobs[0]`: must be an object, got 1"


def test_variants_leave_everything_else_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('description = "\\" \\U0001F600"\n' + TWO_HOSTS, encoding="utf-8")
    assert load(path, ["seed=1"]) == load(path)
    path.write_text("description = 1979-05-27\n" + TWO_HOSTS)
    assert load(path, ["seed=1"]) == load(path)


BOUNDS = {
    "links.rate_mbps": (1, 1e6),
    "hosts.rate_mbps": (1, 1e6),
    "links.buffer_kb": (2, 1e6),
    "hosts.buffer_kb": (2, 1e6),
    "seed": (0, 2**32 - 1),
    "iterations": (1, 10**6),
    "warmup": (0, 10**6),
    "rtt_us": (0, 1e6),
    "rto_min_ms": (1, 10_000),
    "slower": (1, 50),
    "jobs.bytes": (1, 10**10),
    "jobs.sockets": (1, 64),
    "jobs.keys": (1, 65_536),
    "jobs.slice_kb": (1, 1e6),
    "jobs.compute_s": (0, 30),
    "jobs.start_s": (0, 3600),
    "jobs.jitter": (0, 0.5),
}


@pytest.mark.parametrize(("key", "bounds"), BOUNDS.items(), ids=BOUNDS)
def test_quantities_have_bounds(key: str, bounds: tuple[float, float]) -> None:
    least, most = bounds
    for value, word in ((least - 1, "greater"), (most * 1000, "less"), (1e300, "less")):
        with pytest.raises(ConfigError) as caught:
            load(SCENARIOS / "ps-incast.toml", [f"{key}={value}"])
        field = key.rpartition(".")[2]
        assert f"{field}`: must be {word} than or equal to " in str(caught.value)


@pytest.mark.parametrize(("key", "bounds"), BOUNDS.items(), ids=BOUNDS)
def test_the_extremes_that_are_accepted_can_be_used(key: str, bounds: tuple[float, float]) -> None:
    for value in bounds:
        scenario = load(SCENARIOS / "ps-incast.toml", [f"{key}={value}"])
        assert (
            len(parse_topology(topology_toml(scenario, SwitchProcesses(scenario)), "t").links) == 10
        )
        for job in scenario.jobs:
            assert 0 < scenario.ideal_s(job) < 1e9
            assert job.slice_bytes * job.slices * job.sockets >= job.bytes


def test_rings_can_be_had_at_their_bounds() -> None:
    changes = ["jobs.bytes=10000000000", "jobs.slice_kb=1", "jobs.sockets=64"]
    scenario = load(SCENARIOS / "two-equal.toml", changes)
    assert scenario.jobs[0].sent_bytes >= 10_000_000_000
    assert load(SCENARIOS / "two-equal.toml", ["jobs.bytes=1", "jobs.slice_kb=1e6"]).jobs[0].slices


def test_slower_keeps_bytes_and_slowdowns() -> None:
    plain = load(SCENARIOS / "ps-incast.toml")
    slow = load(SCENARIOS / "ps-incast.toml", ["slower=3"])
    for link, was in plain.directed_links().items():
        now = slow.directed_links()[link]
        assert now.rate_mbps == pytest.approx(was.rate_mbps / 3)
        assert now.buffer_bytes == was.buffer_bytes
    for job, before in zip(slow.jobs, plain.jobs, strict=True):
        assert job.sent_bytes == before.sent_bytes
        assert job.compute_s == pytest.approx(3 * before.compute_s)
        assert job.compute_ns(1, 7) == pytest.approx(3 * before.compute_ns(1, 7), abs=3)
        assert slow.ideal_s(job) == pytest.approx(3 * plain.ideal_s(before))
    assert plain.rto_min_ms is slow.rto_min_ms is None
    assert load(SCENARIOS / "ps-incast.toml", ["slower=3", "rto_min_ms=5"]).rto_min_ms == 15
    assert plain.title == "ps-incast" and slow.title == "ps-incast, 3 times slower"


def test_a_round_trip_has_the_delays_of_both_directions() -> None:
    back = DELAY.replace("h1", "h3").replace("h2", "h1").replace("h3", "h2").replace("1500", "250")
    for text, expected in ((TWO_HOSTS + DELAY, 1500), (TWO_HOSTS + DELAY + back, 1750)):
        for scenario, times in ((parse(text, "f"), 1), (parse(text, "f", ["slower=3"]), 3)):
            for delay in scenario.delays:
                assert scenario.round_trip_us(delay) == times * expected


def test_slower_than_a_field_can_be() -> None:
    with pytest.raises(ConfigError, match=r"20 times slower.*compute_s"):
        load(SCENARIOS / "ps-incast.toml", ["slower=20", "jobs.compute_s=2"])
