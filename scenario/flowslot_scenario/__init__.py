# SPDX-License-Identifier: Apache-2.0
"""What the lab and the simulator share: scenario files, statistics and tables of results; and what
all commands share: the forms of their output."""
