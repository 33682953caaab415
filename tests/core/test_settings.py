# SPDX-License-Identifier: Apache-2.0
import pytest
from pydantic import Field

from flowslot.model.errors import ConfigError, why_unreadable
from flowslot.model.settings import PathText, Settings, one_of, parse_toml


class Inner(Settings):
    rate_gbps: float = Field(gt=0)
    names: tuple[str, ...] = ()


class Outer(Settings):
    title: str
    slot_ms: int = 60
    inner: Inner | None = None
    items: tuple[Inner, ...] = ()
    file: PathText = "f"


def problem(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_toml(text, "some.toml", Outer)
    return caught.value


def test_reads_values_and_turns_arrays_into_tuples() -> None:
    read = parse_toml('title="t"\nitems=[{rate_gbps=1, names=["a"]}]', "f", Outer)
    assert read.items[0].names == ("a",)
    assert read.items[0].rate_gbps == 1.0


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ('titel="t"', "titel", "unknown key; did you mean `title`?"),
        ('title="t"\nxyz=1', "xyz", "unknown key; known keys: title, slot_ms, inner, items, file"),
        ("slot_ms=1", "title", "is required but missing"),
        ('title="t"\nslot_ms="60"', "slot_ms", 'must be a valid integer, got "60"'),
        ('title="t"\nslot_ms=true', "slot_ms", "must be a valid integer, got true"),
        (
            'title="t"\n[[items]]\nrate_gbps=1\n[[items]]\nrate_gbps=-1',
            "items[1].rate_gbps",
            "must be greater than 0, got -1",
        ),
        (
            'title="t"\n[inner]\nrate_gbp=1',
            "inner.rate_gbp",
            "unknown key; did you mean `rate_gbps`?",
        ),
        (
            'title="t"\n[[items]]\nrate_gbps=1\nname=["x"]',
            "items[0].name",
            "unknown key; did you mean `names`?",
        ),
        ('title="t"\nfile="a\\u0000b"', "file",
         'must hold printable characters only, got "a\\u0000b"'),
        ('title="t"\nfile=""', "file", 'must have at least 1 character, got ""'),
        ('title="t"\n"a\\nb"=1', '"a\\nb"',
         "unknown key; known keys: title, slot_ms, inner, items, file"),
        (f'title="t"\nslot_ms="{"9" * 1000}"', "slot_ms",
         f'must be a valid integer, got "{"9" * 79}...'),
    ],
)  # fmt: skip
def test_one_clear_error(text: str, field: str, says: str) -> None:
    error = problem(text)
    assert (error.source, error.field, error.problem) == ("some.toml", field, says)
    assert str(error) == f"some.toml: field `{field}`: {says}"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a = " + "[" * 20_000, "nested too deeply"),
        ("a = " + "[" * 300 + "]" * 300, "nested too deeply"),
        ("a" + ".a" * 300 + " = 1", "nested too deeply"),
        ("a" + ".a" * 20_000 + " = 1", "nested too deeply"),
        ("slot_ms = " + "1" * 5000, "an integer has thousands of digits"),
        ("slot_ms = 0x" + "f" * 5000, "an integer has thousands of digits"),
        ("slot_ms =\n", "line 2"),
    ],
    ids=range(7),
)
def test_what_the_parsers_cannot_take_is_a_syntax_error(value: str, says: str) -> None:
    error = problem(f'title = "t"\n{value}')
    assert error.field == ""
    assert error.problem.startswith("not valid TOML: ")
    assert says in error.problem
    assert len(str(error)) < 100


@pytest.mark.parametrize(
    ("name", "names", "right"),
    [
        ("Node7", ["node6", "node7", "node8"], 'did you mean "node7"?'),
        ("node7.pod.example.net", ["node6", "node7"], 'did you mean "node7"?'),
        ("node7", ["node6.pod.example.net", "node7.pod.example.net"],
         'did you mean "node7.pod.example.net"?'),
        ("node7", ["node7.a.net", "node8.a.net", "node7.b.net"],
         "must be one of: node7.a.net, node7.b.net, ..."),
        ("node9->leaf2", [f"node{i}->leaf1" for i in range(40)], 'did you mean "node9->leaf1"?'),
        ("node9", ["node1", "node2", "store"], "must be one of: node1, node2, ..."),
        ("x", [f"node{i}" for i in range(9)],
         "must be one of: node0, node1, node2, node3, node4, node5, node6, node7, ..."),
        ("x", [], "must be one of: (none)"),
    ],
)  # fmt: skip
def test_for_a_wrong_name_the_one_is_offered_that_was_meant(
    name: str, names: list[str], right: str
) -> None:
    assert one_of(name, names) == right


def test_why_a_file_cannot_be_read_is_said_in_words() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xaf".decode()
    assert why_unreadable(caught.value) == "not UTF-8 text"
    assert why_unreadable(OSError(2, "No such file or directory")) == "No such file or directory"
    assert why_unreadable(OSError("odd")) == "odd"
