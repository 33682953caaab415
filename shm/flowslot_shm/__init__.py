# SPDX-License-Identifier: Apache-2.0
"""The progress record: shared memory in which jobs tell the daemon of their host what they send."""
