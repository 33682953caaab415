# SPDX-License-Identifier: Apache-2.0
"""Limits that one client cannot use up alone."""

from collections import Counter

SHARE = 4
"""One address may have this part (a quarter) of what all may have: many daemons in tests and
laboratories share one, and who wants to keep others out needs several."""


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
        if self._all >= self._most or self._of[host] >= self._each:
            return False
        self._of[host] += 1
        self._all += 1
        return True

    def give_back(self, host: str) -> None:
        """One less."""
        self._all -= 1
        self._of[host] -= 1
        if not self._of[host]:
            del self._of[host]
