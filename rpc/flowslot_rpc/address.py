# SPDX-License-Identifier: Apache-2.0
"""Addresses as gRPC and topologies write them."""


def split(address: str) -> tuple[str, int]:
    """ "host:port" as (host, port); an IPv6 address may stand in brackets."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host, int(port)
