# SPDX-License-Identifier: Apache-2.0
"""Limits that one client cannot use up alone."""

import ipaddress
from collections import Counter

SHARE = 4
"""One address may have this part (a quarter) of what all may have: many daemons in tests and
laboratories share one, and who wants to keep others out needs several. Of IPv6, 64 bits of an
address count: whoever has one has all that begin like it."""


class Quota:
    """How many of something there may be at once: in all, and of one address."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._each = -(-most // SHARE)
        self._of: Counter[str] = Counter()
        self._all = 0

    def __str__(self) -> str:
        return f"{self._most} {self._what} at once, {self._each} of one address"

    def take(self, host: str) -> bool:
        """One more for this address, unless that would be too many."""
        owner = _owner(host)
        if self._all >= self._most or self._of[owner] >= self._each:
            return False
        self._of[owner] += 1
        self._all += 1
        return True

    def give_back(self, host: str) -> None:
        """One less."""
        owner = _owner(host)
        self._all -= 1
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]


def _owner(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # of a connection that has none
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
