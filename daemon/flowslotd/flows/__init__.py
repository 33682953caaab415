# SPDX-License-Identifier: Apache-2.0
"""What observing, negotiating and pacing share: the flows of this host, a row for each."""
