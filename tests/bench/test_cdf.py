# SPDX-License-Identifier: Apache-2.0
"""The distributions of decision and negotiation times."""

from pathlib import Path

import pytest
from bench.cdf import PANELS, draw, ecdf


def test_the_share_of_samples_that_are_at_most_as_long() -> None:
    ms, share = ecdf([3_000_000, 1_000_000, 2_000_000, 2_000_000])
    assert ms.tolist() == [1.0, 2.0, 2.0, 3.0]
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_a_figure_of_two_panels_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw({panel: {"a": [10_000, 1_000_000], "b": [5]} for panel in PANELS}, tmp_path / "cdf.svg")
    text = (tmp_path / "cdf.svg").read_text()
    assert text.lstrip().startswith("<?xml")
