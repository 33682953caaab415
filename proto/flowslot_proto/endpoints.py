# SPDX-License-Identifier: Apache-2.0
"""Where "host:port" is: on this machine, or elsewhere."""

import ipaddress
from collections.abc import Collection

from flowslot.model.topology_file import split_endpoint


def is_loopback(endpoint: str) -> bool:
    """Whether it is surely on this machine. Names other than localhost may be anywhere."""
    host, _ = split_endpoint(endpoint)
    return _is_loopback(host) or host == "localhost"


def why_only_here(endpoint: str, addresses: Collection[str]) -> str:
    """Why other hosts cannot reach an endpoint whose name this machine takes for these addresses;
    or "". Distributions give a machine's own name to 127.0.1.1."""
    host, _ = split_endpoint(endpoint)
    if is_loopback(endpoint) or not addresses or not all(map(_is_loopback, addresses)):
        return ""
    return (
        f"{host} is {', '.join(dict.fromkeys(addresses))} on this machine, which no other host can "
        f"reach: mend /etc/hosts, or have {host}'s address in the topology instead of the name"
    )


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text.partition("%")[0]).is_loopback
    except ValueError:
        return False
