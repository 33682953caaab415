# SPDX-License-Identifier: Apache-2.0
"""The benchmark runner's verdicts, and that every recorded bound is complete."""

import importlib
import tomllib

from bench.run import BOUNDS, report

BOUND = {"metric": "m.p90_ms", "unit": "ms", "must": 5.0, "target": 2.0}
BOUND |= {"recorded_mean": 1.0, "recorded_spread": [0.9, 1.1]}


def verdict(*values: float) -> tuple[bool, bool]:
    (row,) = report([BOUND], {"m.p90_ms": list(values)})
    return row["holds"], row["meets_target"]


def test_the_mean_over_repeats_decides() -> None:
    assert verdict(1.0, 2.5) == (True, True)
    assert verdict(1.0, 8.0) == (True, False)
    assert verdict(4.0, 8.0) == (False, False)


def test_the_margin_says_what_a_change_may_cost() -> None:
    (row,) = report([BOUND], {"m.p90_ms": [2.0, 3.0]})
    assert row["margin"] == 2.0
    assert (row["min"], row["max"]) == (2.0, 3.0)


def test_every_bound_names_a_benchmark_and_what_was_measured() -> None:
    read = tomllib.loads(BOUNDS.read_text())
    assert list(read) == ["bound", "reported"]
    for one in (*read["bound"], *read["reported"]):
        module = importlib.import_module(f"bench.{one['metric'].split('.')[0]}")
        assert callable(module.measure)
    for one in read["reported"]:
        assert one["beside"].split(".")[0] == one["metric"].split(".")[0], "of the same run"
    for bound in read["bound"]:
        least, most = bound["recorded_spread"]
        assert 0 < least <= bound["recorded_mean"] <= most
        assert bound.get("target", bound["must"]) <= bound["must"]
