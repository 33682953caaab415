# SPDX-License-Identifier: Apache-2.0
"""Wire format between daemons and the emulated switch; `convert` is the way in and out of it."""

import os

# Fewer of gRPC's threads between the socket and our event loop: a round trip takes a
# third less (bench.grpc_floor). It is read when grpc is imported; a user's own choice counts.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
