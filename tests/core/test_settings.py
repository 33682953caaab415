# SPDX-License-Identifier: Apache-2.0
import pytest
from pydantic import Field

from flowslot.errors import ConfigError
from flowslot.settings import Settings, parse_toml


class Inner(Settings):
    rate_gbps: float = Field(gt=0)
    names: tuple[str, ...] = ()


class Outer(Settings):
    title: str
    slot_ms: int = 60
    inner: Inner | None = None
    items: tuple[Inner, ...] = ()


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
        ('title="t"\nxyz=1', "xyz", "unknown key; known keys: title, slot_ms, inner, items"),
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
    ],
)
def test_one_clear_error(text: str, field: str, says: str) -> None:
    error = problem(text)
    assert (error.source, error.field, error.problem) == ("some.toml", field, says)
    assert str(error) == f"some.toml: field `{field}`: {says}"


def test_syntax_error_names_the_line() -> None:
    error = problem('title="t"\nslot_ms=\n')
    assert error.field == ""
    assert "not valid TOML" in error.problem and "line 2" in error.problem
