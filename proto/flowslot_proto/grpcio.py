# SPDX-License-Identifier: Apache-2.0
"""The gRPC library, set up for small messages. Import `grpc` from here and from nowhere else.

By default a pool of threads polls all connections, and each message wakes two more threads than the
one that waits for it. With these experiments off, that one polls: a quarter less processor time for
each message. They are read when the library is loaded. To compare, set GRPC_EXPERIMENTS to nothing.
"""

import os

os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import grpc  # noqa: TID251

__all__ = ["grpc"]
