# SPDX-License-Identifier: Apache-2.0
"""What flows do: records, kernel counters, and what is learnt from them."""
