# SPDX-License-Identifier: Apache-2.0
"""Jobs that come, queue for GPUs, train for a number of iterations, and leave."""
