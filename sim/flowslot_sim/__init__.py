# SPDX-License-Identifier: Apache-2.0
"""The simulator: core's policies and arbiter on a fluid network, with discrete messages."""
