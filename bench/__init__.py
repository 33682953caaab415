# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: each prints what it measured; bench.run compares with the recorded bounds."""

import flowslot_proto  # noqa: F401 - sets gRPC up; before anybody imports that
