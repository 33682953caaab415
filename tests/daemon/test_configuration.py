# SPDX-License-Identifier: Apache-2.0
"""The configuration file, and what a reload of it may change."""

import pytest

from flowslot.model.errors import ConfigError
from flowslotd import config
from flowslotd.diagnose.preflight import changes

from .conftest import TOPOLOGY


def test_defaults_observe_and_change_nothing(write):
    loaded = config.load(write('host = "h1"'))
    assert loaded.settings.mode == "observe"
    assert loaded.instance == "h1"
    assert loaded.settings.unpatched.pslite is False
    assert (loaded.grid.slot_ns, loaded.grid.horizon) == (60_000_000, 10)


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ('host = "h9"', "host", 'no host is called "h9" in topology.toml; must be one of: h1, h2'),
        ('host = "H2"', "host", 'no host is called "H2" in topology.toml; did you mean "h2"?'),
        ('host = "h2.rack3.example.net"', "host", 'did you mean "h2"?'),
        ('host = "h1"\nmod = "x"', "mod", "unknown key; did you mean `mode`?"),
        ('host = "h1"\npolicy = "stager"', "policy", "did you mean \"stagger\"?"),
        ('host = "h1"\nslot_ms = -1', "slot_ms", "must be greater than or equal to 5, got -1"),
        ('host = "h1"\n[pacing]\nhrd = true', "pacing.hrd", "did you mean `hard`?"),
        ('host = "h1"\n[static]\nflows_on_link = {"h1->s9" = 4}',
         "static.flows_on_link.h1->s9", "no link"),
        ('host = "h1"\n[static]\nflows_on_link = {"h1->s1" = 10000000000000000000}',
         "static.flows_on_link.h1->s1", "must be less than or equal to 1000000, got 1"),
        ('host = "h1"\n[arbiter]\ntarget = 1e-320',
         "arbiter.target", "must be greater than or equal to 0.01, got 1e-320"),
        ('host = "h1"\n[arbiter]\nfloor_share = 1e-320',
         "arbiter.floor_share", "must be greater than or equal to 0.001, got 1e-320"),
        ('host = "h1"\ntopology = "a\\u0000b"', "topology", "must hold printable characters only"),
        ('host = "h1"\nruntime_dir = "x\\u0000"', "runtime_dir", 'only, got "x\\u0000"'),
        (f'host = "h1"\nruntime_dir = "/tmp/{"é" * 60}"', "runtime_dir", "at most 90 bytes"),
        ('host = "h1"\ntopology = "no.toml"', "topology", "No such file or directory"),
        ('host = "h1"\n[unpatched]\npslite = "yes"', "unpatched.pslite", "must be"),
        ("host = ", "", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_bad_configuration_names_file_field_and_what_is_right(write, text, field, problem):
    with pytest.raises(ConfigError) as caught:
        config.load(write(text))
    assert caught.value.source.endswith("flowslotd.toml")
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_an_error_in_the_topology_names_that_file(write):
    bad = TOPOLOGY.replace("capacity_gbps = 0.2", "capacity_gbps = -1")
    with pytest.raises(ConfigError, match=r"topology.toml: field `links\[3\].capacity_gbps`"):
        config.load(write('host = "h1"', bad))


def test_of_several_switch_processes_those_matter_that_flows_of_this_host_may_cross(write):
    several = TOPOLOGY.replace('name = "h1->s1"\ncap', 'name = "h1->s1"\nswitch = "s1"\ncap')
    several = several.replace('name = "s1->h1"\ncap', 'name = "s1->h1"\nswitch = "s2"\ncap')
    several = several.replace('name = "s1->h2"\ncap', 'name = "s1->h2"\nswitch = "s3"\ncap')
    several += "".join(
        f'[[switches]]\nname = "s{i}"\naddress = "127.0.0.1:740{i}"\n' for i in (1, 2, 3)
    )
    for host, expected in (("h1", ["s1", "s3"]), ("h2", ["s2"]), ("h3", ["s2", "s3"])):
        made = config.load(write(f'host = "{host}"\nmode = "enforce"', several))
        assert made.switches == expected
    assert config.load(write('host = "h1"')).switches == []


def test_a_file_that_is_no_text_is_said_to_be_none(write):
    file = write('host = "h1"')
    (file.parent / "topology.toml").write_bytes(b"\xaf")
    with pytest.raises(ConfigError, match=r"`topology`: cannot read .*toml: not UTF-8 text$"):
        config.load(file)
    file.write_bytes(b"\xaf")
    with pytest.raises(ConfigError, match=r"toml: cannot be read: not UTF-8 text$"):
        config.load(file)


def test_a_byte_order_mark_before_the_first_line_is_passed_over(write):
    file = write('host = "h2"')
    for path in (file, file.parent / "topology.toml"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert config.load(file).settings.host == "h2"
    file.write_text('host = "h2"', encoding="utf-16")
    with pytest.raises(ConfigError, match="cannot be read: UTF-16 text; save it as UTF-8"):
        config.load(file)


def test_a_reload_may_change_what_does_not_need_a_restart(write):
    old = config.load(write('host = "h1"'))
    new = config.load(
        write('host = "h1"\nmode = "enforce"\npolicy = "static"\n[unpatched]\npslite = true')
    )
    assert config.changed(old, new) == ["mode", "policy", "unpatched"]
    fixed = config.load(write('host = "h1"\nslot_ms = 20'))
    with pytest.raises(ConfigError, match="cannot change while running"):
        config.changed(old, fixed)
    moved = config.load(write('host = "h1"', TOPOLOGY.replace("= 0.2", "= 0.3")))
    assert config.changed(old, moved) == ["topology links"]


@pytest.mark.parametrize(("backend", "said"), [("bpf", True), ("socket", False)])
def test_preflight_says_that_sockets_of_unpatched_jobs_would_be_changed(write, backend, said):
    text = 'host = "h1"\nmode = "enforce"\n[unpatched]\npslite = true'
    found = changes(config.load(write(text)), backend)
    when = [(change.where, change.when) for change in found if "ps-lite" in change.what]
    assert when == [("sockets", "as soon as they are found")] * said  # not only while paced
