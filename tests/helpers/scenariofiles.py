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
TWO_RACKS = """
name = "racks"
warmup = 1
[links]
rate_mbps = 100
buffer_kb = 64
uplink_mbps = 50
uplink_buffer_kb = 32
[[hosts]]
name = "h1"
rack = "r1"
[[hosts]]
name = "h2"
rack = "r1"
[[hosts]]
name = "h3"
rack = "r2"
[[jobs]]
name = "a"
kind = "ring"
hosts = ["h1", "h2", "h3"]
bytes = 120_000
sockets = 2
slice_kb = 10
compute_s = 0.01
[[jobs]]
name = "ps"
kind = "ps"
server = "h1"
hosts = ["h2", "h3"]
bytes = 60_000
sockets = 3
keys = 10
compute_s = 0.01
"""
