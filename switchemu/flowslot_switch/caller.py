# SPDX-License-Identifier: Apache-2.0
"""Who calls: the host of a certificate, or, without TLS, an address."""

import ipaddress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import unquote

from flowslot.model.topology_file import normal_ip


class Denied(Exception):
    """The caller claims to be somebody else, or wants what is not its own."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The other end of a connection.

    `address`: of IPv6 the network of 64 bits, because whoever has one address has them all.
    `names`: the DNS names of its certificate; none: there is no TLS. `owner`: whom limits count
    for, and to whom daemons' names belong: the first of those names, else the address.
    """

    peer: str
    address: str
    names: tuple[str, ...]
    owner: str

    @classmethod
    def of(cls, context: Any) -> Self:
        """The caller of a gRPC call."""
        peer = unquote(context.peer()).partition(":")[2]  # "ipv4:192.0.2.1:7400"
        names = tuple(name.decode() for name in context.auth_context().get("peer_dns", ()))
        address = owner_of(peer.rpartition(":")[0].strip("[]"))
        return cls(peer, address, names, names[0] if names else address)

    def check(self, field: str, host: str) -> str:
        """Returns that name of a host. Raises Denied: this caller has no certificate for it."""
        if self.names and host not in self.names:
            raise Denied(f'field `{field}`: is "{host}", but the certificate is for {self.host}')
        return host

    @property
    def host(self) -> str:
        """Of its certificate, to be shown."""
        return " and ".join(f'"{name}"' for name in self.names)

    def __str__(self) -> str:
        return f"{self.peer} ({self.host})" if self.names else self.peer


def owner_of(address: str) -> str:
    """Whom an address belongs to, as far as limits go."""
    try:
        plain = normal_ip(address.partition("%")[0])
    except ValueError:  # of a connection that has none
        return address
    return str(ipaddress.ip_network((plain, 64), strict=False)) if ":" in plain else plain


def peer_name(address: str, port: int) -> str:
    """As gRPC writes it."""
    plain = normal_ip(address.partition("%")[0])
    return f"[{plain}]:{port}" if ":" in plain else f"{plain}:{port}"
