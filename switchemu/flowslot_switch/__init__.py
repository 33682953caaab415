# SPDX-License-Identifier: Apache-2.0
"""The emulated switch: a process that arbitrates the links of one contention domain."""
