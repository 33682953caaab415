# SPDX-License-Identifier: Apache-2.0
"""What waits to be sent to one daemon: bounded, however slowly its stream takes it."""

from collections.abc import Sequence
from dataclasses import replace

from flowslot.protocol.messages import FromArbiter, Grant, HeartbeatEcho, Refusal


class Outbox:
    """Per flow only the newest grant and refusal are kept, and the newest echo."""

    def __init__(self, most_refusals: int) -> None:
        """`most_refusals`: of so many flows at once; a daemon has no more flows that it may ask
        for, so one that provokes more is hostile."""
        self._most_refusals = most_refusals
        self._grants: dict[int, Grant] = {}
        self._refusals: dict[int, Refusal] = {}
        self._echo: HeartbeatEcho | None = None

    def __bool__(self) -> bool:
        return bool(self._grants or self._refusals or self._echo)

    def post(
        self,
        grants: Sequence[Grant] = (),
        refusals: Sequence[Refusal] = (),
        echo: HeartbeatEcho | None = None,
    ) -> bool:
        """Keep this for sending; False: there are more refusals than may wait, end the stream."""
        for grant in grants:
            waiting = self._grants.get(grant.flow)
            if waiting is not None and waiting.must_ack:
                # The acknowledgement of a later grant covers the lower that was never sent.
                self._grants[grant.flow] = replace(grant, must_ack=True)
            else:
                self._grants[grant.flow] = grant
        self._echo = echo or self._echo
        for refusal in refusals:
            if refusal.flow not in self._refusals and len(self._refusals) >= self._most_refusals:
                return False
            self._refusals[refusal.flow] = refusal
        return True

    def take(self, session: int) -> FromArbiter:
        """All that waits, as one message of this session; nothing waits any more."""
        grants, refusals = list(self._grants.values()), list(self._refusals.values())
        message = FromArbiter(session, grants, refusals, self._echo)
        self._grants, self._refusals, self._echo = {}, {}, None
        return message
