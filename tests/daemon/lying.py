# SPDX-License-Identifier: Apache-2.0
"""A switch process whose load tables are made up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flowslot.model.units import MILLISECOND
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods
from flowslot_switch.caller import Caller
from flowslot_switch.server import Call, Server, unary
from flowslotd.clock import wall


class Liar:
    """Answers `rows`, whatever it is asked, accepts all schedules, and is silent on streams."""

    def __init__(self, slot_ms: int) -> None:
        self.rows: list[pb.LinkLoad] = []
        self._slot_ns = slot_ms * MILLISECOND

    @asynccontextmanager
    async def at(self, port: int) -> AsyncIterator[None]:
        accepted = pb.UpdateScheduleReply(status=pb.UpdateScheduleReply.STATUS_OK)
        handlers = {
            methods.FETCH_FEEDBACK: unary(self._answer),
            methods.UPDATE_SCHEDULE: unary(lambda caller, request: accepted.SerializeToString()),
            methods.NEGOTIATE: self._listen,
        }
        server = Server(handlers)
        await server.listen(f"127.0.0.1:{port}")
        try:
            yield
        finally:
            await server.stop(0.0)

    def _answer(self, caller: Caller, request: bytes) -> bytes:
        slot = wall() // self._slot_ns
        reply = pb.FetchFeedbackReply(slot=slot, slot_ns=self._slot_ns, links=self.rows)
        return reply.SerializeToString()

    async def _listen(self, call: Call) -> None:
        await asyncio.Event().wait()
