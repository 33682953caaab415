# SPDX-License-Identifier: Apache-2.0
"""Scenario files for the tests of everything that reads them."""

from pathlib import Path

SCENARIOS = Path(__file__).parents[2] / "lab/scenarios"
TWO_HOSTS = """
name = "small"
warmup = 1
[links]
rate_mbps = 400
buffer_kb = 128
[[hosts]]
name = "h1"
[[hosts]]
name = "h2"
[[jobs]]
name = "a"
kind = "ring"
hosts = ["h1", "h2"]
bytes = 500_000
sockets = 2
slice_kb = 25
compute_s = 0.01
"""
