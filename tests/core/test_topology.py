# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterable
from itertools import permutations

import pytest

from flowslot.arbiter import Arbiter, ArbiterConfig
from flowslot.model.errors import ConfigError
from flowslot.model.topology import Topology, parse_topology
from flowslot.model.topology_file import split_endpoint
from flowslot.model.units import Nanos, goodput, wire_bps
from flowslot.policy.stagger import StaggerAllocator

GOOD = """
switches = [{name = "s1", address = "10.77.0.250:7400"}]
links = [
    {name = "h1->s1", capacity_gbps = 0.4, buffer_kb = 64, switch = "s1"},
    {name = "s1->h1", capacity_gbps = 0.4, switch = "s1"},
    {name = "h2->s1", capacity_gbps = 0.4},
    {name = "s1->h2", capacity_gbps = 0.4},
    {name = "h3->s2", capacity_gbps = 1},
    {name = "s2->h3", capacity_gbps = 1},
    {name = "r1->core", capacity_gbps = 0.8},
    {name = "core->r2", capacity_gbps = 0.8},
    {name = "h3->s3", capacity_gbps = 1},
    {name = "s3->h3", capacity_gbps = 1},
]
routes = [{from_rack = "r1", to_rack = "r2", links = ["r1->core", "core->r2"]}]
paths = [{src = "10.78.0.2", dst = "10.78.0.3", links = ["h2->s1", "s2->h3"]}]

[[hosts]]
name = "h1"
daemon = "10.77.0.1:7401"
[[hosts.nics]]
name = "eth0"
addresses = ["10.78.0.1", "fd00::1"]
up = "h1->s1"
down = "s1->h1"
rack = "r1"

[[hosts]]
name = "h2"
[[hosts.nics]]
name = "eth0"
addresses = ["10.78.0.2"]
up = "h2->s1"
down = "s1->h2"
rack = "r1"

[[hosts]]
name = "h3"
[[hosts.nics]]
name = "eth0"
addresses = ["10.78.0.3"]
up = "h3->s2"
down = "s2->h3"
rack = "r2"
[[hosts.nics]]
name = "eth1"
addresses = ["10.79.0.3"]
up = "h3->s3"
down = "s3->h3"
"""


@pytest.fixture
def topology() -> Topology:
    return parse_topology(GOOD, "topology.toml")


def names(topology: Topology, src: str, dst: str) -> list[str] | None:
    path = topology.path(src, dst)
    return None if path is None else [topology.links[i].name for i in path]


def test_paths(topology: Topology) -> None:
    assert names(topology, "10.78.0.1", "10.78.0.2") == ["h1->s1", "s1->h2"]
    assert names(topology, "::ffff:10.78.0.1", "10.78.0.2") == ["h1->s1", "s1->h2"]
    across = ["h1->s1", "r1->core", "core->r2", "s2->h3"]
    assert names(topology, "fd00:0::1", "10.78.0.3") == across
    assert names(topology, "10.78.0.2", "10.78.0.3") == ["h2->s1", "s2->h3"]
    # No rack given: the middle of the network is taken to be free.
    assert names(topology, "10.78.0.1", "10.79.0.3") == ["h1->s1", "s3->h3"]
    assert topology.path("10.78.0.3", "10.78.0.1") is None  # no route r2 -> r1
    assert topology.path("10.78.0.1", "8.8.8.8") is None
    assert topology.path("10.78.0.3", "10.79.0.3") is None  # same host
    with pytest.raises(ValueError):
        topology.path("here", "there")


def test_the_links_that_a_host_may_send_across(topology: Topology) -> None:
    addresses = {"10.78.0.1": "h1", "10.78.0.2": "h2", "10.78.0.3": "h3", "10.79.0.3": "h3"}
    for src, host in addresses.items():
        crossed = topology.links_crossed(host)
        assert crossed.issuperset(topology.host_links(host))
        assert all(crossed.issuperset(topology.path(src, dst) or ()) for dst in addresses)
    named = {topology.links[i].name for i in topology.links_crossed("h2")}
    assert "h2->s1" in named and "s1->h1" in named and not named & {"h1->s1", "h3->s2", "s1->h2"}


def test_index(topology: Topology) -> None:
    assert topology.links[0].switch == "s1"
    assert topology.links[0].buffer_bytes == 64_000
    assert topology.capacity()[0] == pytest.approx(goodput(0.4e9))
    assert wire_bps(goodput(0.4e9)) == pytest.approx(0.4e9)
    assert topology.host_links("h3") == (4, 8)
    assert topology.switch_links("s1") == (0, 1)
    assert topology.host_of("10.79.0.3") == "h3"
    assert topology.host_of("1.2.3.4") is None


@pytest.mark.parametrize(
    ("old", "new", "field", "says"),
    [
        ("_gbps = 0.4", "_gbps = -1", "links[0].capacity_gbps", "equal to 0.001, got -1"),
        ("_gbps = 0.4", "_gbps = nan", "links[0].capacity_gbps", "finite"),
        ("_kb = 64", "_kb = 1e308", "links[0].buffer_kb", "less than or equal to 1000"),
        ('"h2"', '"a\\nb"', "hosts[1].name", "must hold printable characters only"),
        ('name = "h2"', 'name = "h1"', "hosts[1].name",
         'host "h1" is already at `hosts[0].name`; name each once'),
        ('"10.78.0.2"]', '"10.78.0.1"]', "hosts[1].nics[0].addresses[0]",
         'address "10.78.0.1" is already at `hosts[0].nics[0].addresses[0]`'),
        ('"10.78.0.2"]', '"10.78.0"]', "hosts[1].nics[0].addresses[0]",
         'must be an IP address such as "10.78.0.1", got "10.78.0"'),
        ('"eth1"', '"eth0"', "hosts[2].nics[1].name", 'NIC of h3 "eth0" is already'),
        ('up = "h1->s1"', 'up = "h9->s1"', "hosts[0].nics[0].up",
         'no link is called "h9->s1"; must be one of: h1->s1,'),
        ('down = "s1->h1"', 'down = "h1->s1"', "hosts[0].nics[0].down", "must be another link"),
        ('switch = "s1"', 'switch = "s9"', "links[0].switch",
         'no switch is called "s9"; must be one of: s1'),
        ('"h2->s1", "s2->h3"]', '"h2->s1", "x"]', "paths[0].links[1]", 'no link is called "x"'),
        ('"h2->s1", "s2->h3"]', '"h2->s1", "h2->s1"]', "paths[0].links[1]", '"h2->s1" twice'),
        ("0.1:7401", "0.1:" + "7" * 5000, "hosts[0].daemon",
         'with a port from 1 to 65535, got "10.77.0.1:777'),
        ("0.1:7401", "0.1:\u0661", "hosts[0].daemon", "with a port from 1 to 65535, got"),
        (':7400"}]', ':7400"}, {name = "s1", address = "a:1"}]', "switches[1].name",
         'switch "s1" is already at `switches[0].name`'),
    ],
)  # fmt: skip
def test_mistakes(old: str, new: str, field: str, says: str) -> None:
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(ConfigError) as caught:
        parse_topology(text, "topology.toml")
    assert caught.value.field == field
    assert says in caught.value.problem
    assert str(caught.value).startswith(f"topology.toml: field `{field}`: ")


RACKS = """
links = [
{links}
]
{hosts}
{routes}
"""


def fabric(racks: dict[str, int], routes: Iterable[tuple[str, str]]) -> Topology:
    """Racks with so many hosts, of one NIC each; all routes cross the spine."""
    links, hosts = [], []
    link = '    {{ name = "{}", capacity_gbps = 10 }},'.format
    for r, (rack, size) in enumerate(racks.items()):
        links += [link(f"{rack}->spine"), link(f"spine->{rack}")]
        for h in range(size):
            up, down = f"{rack}.{h}->{rack}", f"{rack}->{rack}.{h}"
            links += [link(up), link(down)]
            hosts.append(
                f'[[hosts]]\nname = "{rack}.{h}"\n[[hosts.nics]]\nname = "eth0"\nrack = "{rack}"\n'
                f'addresses = ["10.{r}.0.{h + 1}"]\nup = "{up}"\ndown = "{down}"'
            )
    lines = [
        f'[[routes]]\nfrom_rack = "{a}"\nto_rack = "{b}"\nlinks = ["{a}->spine", "spine->{b}"]'
        for a, b in routes
    ]
    text = RACKS.format(links="\n".join(links), hosts="\n".join(hosts), routes="\n".join(lines))
    return parse_topology(text, "topology.toml")


@pytest.mark.parametrize(
    ("sizes", "routes", "says"),
    [
        ({"a": 2, "b": 1, "c": 1}, permutations("abc", 2), []),
        # A rack that is drained keeps its place, and its routes.
        ({"a": 2, "b": 0, "c": 1}, permutations("abc", 2),
         ["no host is in these racks, so no flow takes their routes: b"]),
        ({"a": 2, "b": 0, "c": 1}, permutations("ac", 2), []),
        ({"a": 2, "b": 1}, [("a", "b")],
         ["1 pairs of racks have no route, so flows between them are never paced: b -> a"]),
        ({"a": 2, "b": 1, "x": 0}, [("a", "b"), ("b", "x")],
         ["no host is in these racks, so no flow takes their routes: x",
          "1 pairs of racks have no route, so flows between them are never paced: b -> a"]),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, [],
         ["12 pairs of racks have no route, so flows between them are never paced: a -> b, a -> c, "
          "a -> d, b -> a, b -> c, b -> d, c -> a, c -> b, ..."]),
        ({"a": 3}, [], []),
    ],
)  # fmt: skip
def test_what_a_sound_topology_may_not_mean_is_said(
    sizes: dict[str, int], routes: Iterable[tuple[str, str]], says: list[str]
) -> None:
    made = fabric(sizes, routes)
    assert made.remarks == says
    assert len(made.hosts) == sum(sizes.values())


class Compared(str):
    """A name that counts how often it is compared with another one."""

    count = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return str.__eq__(self, other)  # type: ignore[no-any-return]


def test_checks_take_the_time_of_the_file_not_of_its_square() -> None:
    """How often names are compared, for there is no clock here."""
    counts = []
    for racks in (8, 32):
        names = [f"r{i}" for i in range(racks)]
        settings = fabric(dict.fromkeys(names, 4), permutations(names, 2)).settings
        size = len(settings.links) + 2 * len(settings.hosts) + 2 * len(settings.routes)
        settings = settings.model_copy(
            update={
                "links": tuple(
                    link.model_copy(update={"name": Compared(link.name)}) for link in settings.links
                )
            }
        )
        Compared.count = 0
        assert Topology(settings, "topology.toml").remarks == []
        counts.append(Compared.count / size)
    assert 0 < counts[1] < 1.5 * counts[0]


@pytest.mark.parametrize(
    ("endpoint", "meant"),
    [
        ("fd00:7::5", "[fd00:7::5]:PORT"),
        ("fd00:7::5:7401", "[fd00:7::5]:7401"),
        ("[fd00:7::5:7401", "[fd00:7::5]:7401"),
        ("fd00:7::5]:7401", "[fd00:7::5]:7401"),
        ("[fd00:7::5]", "[fd00:7::5]:PORT"),
        ("[leaf]:7401", "leaf:7401"),
        ("https://leaf:7401/", "leaf:7401"),
        ("ipv4:///10.0.0.5:7401", "10.0.0.5:7401"),
        ("leaf: 7401", "leaf:7401"),
        ("leaf:7401/daemon", "leaf:7401"),
        ("leaf", ""),
        ("leaf:", ""),
        (":7401", ""),
        ("leaf:74o1", ""),
        ("10.0.0.256:7401", ""),
        ("10.0.5:7401", ""),
        ("[::g]:7401", ""),
        ("me@leaf:7401", ""),
    ],
)
def test_what_is_no_endpoint_is_refused_and_the_one_that_was_meant_offered(
    endpoint: str, meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_topology(GOOD.replace("10.77.0.1:7401", endpoint), "topology.toml")
    assert caught.value.field == "hosts[0].daemon"
    offered = f'; did you mean "{meant}"?' if meant else ""
    assert caught.value.problem.startswith('must be "host:port" (an IPv6 address in brackets) with')
    assert caught.value.problem.endswith(f', got "{endpoint}"{offered}')


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("[fd00:7::5]:7401", ("fd00:7::5", 7401)),
        ("[fe80::5%eth0]:7401", ("fe80::5%eth0", 7401)),
        ("10.0.0.5:65535", ("10.0.0.5", 65535)),
        ("leaf_a-2.pod.example.net.:1", ("leaf_a-2.pod.example.net.", 1)),
        ("störfrei.example.net:1", ("störfrei.example.net", 1)),
    ],
)
def test_endpoints_that_are_right(endpoint: str, parts: tuple[str, int]) -> None:
    made = parse_topology(GOOD.replace("10.77.0.1:7401", endpoint), "topology.toml")
    assert made.hosts["h1"].daemon == endpoint
    assert split_endpoint(endpoint) == parts


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_every_address_is_no_address_that_others_reach(host: str) -> None:
    text = GOOD.replace("10.77.0.250:7400", f"{host}:7400")
    with pytest.raises(ConfigError, match="must be where other hosts reach it") as caught:
        parse_topology(text, "topology.toml")
    assert caught.value.field == "switches[0].address"


def test_a_flow_that_leaves_by_another_nic_has_another_path(topology: Topology) -> None:
    moved = topology.path("10.78.0.3", "10.78.0.2", "eth1")
    assert topology.path("10.78.0.3", "10.78.0.2") is None, "no route from this NIC's rack"
    assert moved is not None
    assert [topology.links[i].name for i in moved] == ["h3->s3", "s1->h2"]
    assert topology.path("10.79.0.3", "10.78.0.2", "eth0") is None
    assert moved == topology.path("10.79.0.3", "10.78.0.2")
    listed = GOOD.replace("paths = [", 'paths = [{src = "10.79.0.3", dst = "10.78.0.2", '
                          'links = ["h3->s3", "core->r2", "s1->h2"]}, ')  # fmt: skip
    whole = parse_topology(listed, "topology.toml").path("10.78.0.3", "10.78.0.2", "eth1")
    assert whole is not None and len(whole) == 3
    nic = topology.nic_of("10.79.0.3")
    assert nic is not None and nic.name == "eth1"


@pytest.mark.parametrize("gbps", [0.001, 1e6])
@pytest.mark.parametrize("buffer_kb", [1, 1e8])
def test_the_extremes_that_are_accepted_can_be_used(gbps: float, buffer_kb: float) -> None:
    text = GOOD.replace("capacity_gbps = 0.4", f"capacity_gbps = {gbps}").replace(
        "buffer_kb = 64", f"buffer_kb = {buffer_kb}"
    )
    topology = parse_topology(text, "topology.toml")
    assert topology.links[0].buffer_bytes == buffer_kb * 1000
    config = ArbiterConfig(target=0.01, horizon=1000)
    arbiter = Arbiter(topology.capacity(), config, StaggerAllocator(0.001))
    assert arbiter.load_table(Nanos(0)).shape[1] == 1000
