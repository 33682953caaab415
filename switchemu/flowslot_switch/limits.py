# SPDX-License-Identifier: Apache-2.0
"""How much a caller may ask of us. A caller is a certificate's host, or an address; see `caller`.

Tests and laboratories run many daemons at one address: without certificates an address has room
for some twenty.
"""

from collections import Counter
from collections.abc import Hashable

MAX_MESSAGE_BYTES = 1 << 19
"""The largest of an honest daemon, a Hello and the demands of 2048 flows, has 200 kB."""
MAX_STREAMS = 8
"""Calls at once on one connection; more wait in the caller. A daemon has two or three, under MLCC
for a moment one for each flow; but calls are begun here one after the other anyway."""
MAX_CALLS, CALLS_PER_CALLER = 4096, 128
"""At once."""
CALLS_PER_S, CALL_BURST = 2000.0, 500.0
"""Calls that one caller may begin. A daemon under MLCC begins up to 17 for each flow."""
REFUSALS_PER_S, REFUSAL_BURST = 10.0, 200.0
"""Calls of one address that may be rejected, for a rule or a limit; then it is shut out."""
BARRED_S = 5.0
"""For so long, all its connections are closed as soon as they are seen."""
MAX_CONNECTIONS, CONNECTIONS_PER_ADDRESS = 2048, 64
"""Of all and of one address. A daemon has one, laboratories some more."""
GUARD_S, NEW_CONNECTIONS = 0.05, 16
"""So many connections may come in that time: 1000 daemons that come back at once take 3 s. With TLS
each costs a millisecond, and each may begin MAX_STREAMS calls before it is known who it is."""
BACKLOG = 256
"""Of connections that wait to be accepted."""
FEW_CONNECTIONS = 4
"""... while somebody is shut out, who most likely is among them."""
LOOK_S, BURST_CONNECTIONS = 0.5, 64
"""So often connections are counted, and so many may come until then; when they do, or somebody is
shut out, it is done in each GUARD_S."""
LOOKS_PER_S, LOOK_BURST = 2.0, 20.0
"""So often we look whose handshake it is that begins or has failed."""
HELLO_TIMEOUT_S = 5
"""A connection that has not ended its handshake, or a stream that has not said Hello by then, is
closed."""
UNARY_S = 5.0
"""A call of one message each way that is not over by then is ended."""
SETTLE_S = 1.0
"""A caller that does not take our last message for so long loses its connection."""
IDLE_S = 60
"""A connection without a call is closed after so long."""
KEEPALIVE_S = 5
"""So often every caller is asked whether it is there; who has not answered after as long again is
taken to be gone."""
MESSAGES_PER_S, MESSAGE_BURST = 2000.0, 2000.0
"""Of one stream. A busy daemon sends some 35 in a slot of 60 ms."""
ITEMS_PER_S, ITEM_BURST = 200_000.0, 100_000.0
"""Demands, acknowledgements and ends of flows in them: 2048 flows, 5 times a slot."""
LINES_PER_S, LINE_BURST = 0.1, 1.0
"""In the log, about what one address did wrong."""
MAX_OWNERS = 4096
"""Callers remembered; the one that was longest silent is forgotten first."""


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


class Rates:
    """A token bucket for each owner."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._of: dict[Hashable, TokenBucket] = {}

    def take(self, owner: Hashable, now_ns: int) -> bool:
        """Whether one more of this owner may pass now."""
        bucket = self._of.pop(owner, None) or TokenBucket(self._rate, self._burst)
        self._of[owner] = bucket
        if len(self._of) > MAX_OWNERS:
            del self._of[next(iter(self._of))]
        return bucket.take(now_ns)


class Quota:
    """How many of something there may be at once: in all, and of one owner."""

    def __init__(self, most: int, each: int) -> None:
        self._most, self._each = most, each
        self._of: Counter[Hashable] = Counter()
        self._all = 0

    def take(self, owner: Hashable) -> bool:
        """One more for this owner, unless that would be too many."""
        if self._of[owner] >= self._each or self._all >= self._most:
            return False
        self._of[owner] += 1
        self._all += 1
        return True

    def give_back(self, owner: Hashable) -> None:
        """One less."""
        self._all -= 1
        self._of[owner] -= 1
        if not self._of[owner]:
            del self._of[owner]
