# SPDX-License-Identifier: Apache-2.0
"""The daemon of a host: sees transfers, negotiates, paces."""

import flowslot_proto  # noqa: F401 - sets gRPC up; before anybody imports that
