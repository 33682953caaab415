# SPDX-License-Identifier: Apache-2.0
"""What was measured is complete, and the pages show it as it was recorded."""

from pathlib import Path

import pytest
from bench.recorded import PAGES, SHOWN, described, read, renewed


def test_every_set_is_complete_and_names_its_command() -> None:
    sets = read()
    assert {"acceptance", "mixes", "benchmarks"} <= sets.keys()
    for one in sets.values():
        assert one["command"] in described(one)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_fresh(page: Path) -> None:
    text = page.read_text()
    assert SHOWN.search(text)
    assert renewed(text, read()) == text, "python -m bench.recorded --write"


def test_a_changed_figure_makes_a_table_stale() -> None:
    sets = read()
    sets["acceptance"]["rows"][0][1] = "9.999"
    assert "9.999" in renewed(PAGES[0].read_text(), sets)


def test_a_table_without_a_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="no set is called nothing"):
        renewed("<!-- table: nothing -->\n", read())
