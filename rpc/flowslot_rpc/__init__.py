# SPDX-License-Identifier: Apache-2.0
"""gRPC for long-lived streams of small messages, in one event loop, without threads of its own.

HTTP/2 is nghttp2's (`http2`); this adds gRPC's framing and statuses, a channel (`client`) and a
server (`server`). Messages are bytes: what they mean is the caller's business. Why not grpcio:
docs/adr/0026.
"""
