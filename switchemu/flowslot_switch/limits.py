# SPDX-License-Identifier: Apache-2.0
"""How much a daemon or client may ask of us."""

MAX_MESSAGE_BYTES = 1 << 20
MAX_CALLS = 4096
"""At once, and a quarter of them from one address. A daemon has two or three, under MLCC for a
moment as many as one connection may have (64)."""
HELLO_TIMEOUT_S = 5.0
"""A stream that has not said Hello by then is closed."""
MESSAGES_PER_S, MESSAGE_BURST = 2000.0, 2000.0
"""Of one stream. A busy daemon sends some 35 in a slot of 60 ms."""
ITEMS_PER_S, ITEM_BURST = 200_000.0, 100_000.0
"""Demands, acknowledgements and ends of flows in them: 2048 flows, 5 times a slot."""


class TokenBucket:
    """Lets `rate` per second pass, and up to `burst` at once. Times in ns, never going back."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate_per_ns = rate / 1e9
        self._burst = burst
        self._tokens = burst
        self._at = 0

    def take(self, now_ns: int, tokens: float = 1.0) -> bool:
        """Whether that much may pass now."""
        grown = self._tokens + (now_ns - self._at) * self._rate_per_ns
        self._tokens, self._at = min(self._burst, grown), now_ns
        if tokens > self._tokens:
            return False
        self._tokens -= tokens
        return True
