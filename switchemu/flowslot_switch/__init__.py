# SPDX-License-Identifier: Apache-2.0
"""The emulated switch: a process that arbitrates the links of one contention domain."""

import flowslot_proto  # noqa: F401 - sets gRPC up; before anybody imports that
