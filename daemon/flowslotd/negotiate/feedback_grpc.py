# SPDX-License-Identifier: Apache-2.0
"""The paper's two calls to a switch process, by the daemon."""

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message

from flowslot.policy.mlcc import Update
from flowslot.policy.mlcc.planner import Feedback
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods
from flowslot_proto.checks import M, parse
from flowslot_proto.convert import read_feedback
from flowslot_proto.grpcio import grpc
from flowslotd.config import Config
from flowslotd.negotiate.channel import Channel, RpcFailed
from flowslotd.negotiate.load_tables import NoAnswer


class GrpcRemote:
    """A switch process that holds links. Calls raise NoAnswer, or ProtocolError when the answer
    makes no sense. All in the event loop's thread."""

    def __init__(self, config: Config, switch: str) -> None:
        topology = config.topology
        self.switch = switch
        self.held = frozenset(topology.switch_links(switch))
        """Its links, by index in the topology."""
        self.connected = False
        """It answered the last call."""
        # A host's daemons have flows of their own each.
        self._scheduler = f"{config.settings.host}/{config.instance}"
        self._slot_ns = config.grid.slot_ns
        self._names = [link.name for link in topology.links]
        self._channel = Channel(topology.switches[switch], config.tls)

    async def fetch(self, links: Sequence[int], timeout_s: float) -> Feedback:
        """Load of these links of its own."""
        names = [self._names[link] for link in links]
        request = pb.FetchFeedbackRequest(links=names)
        reply = await self._call(methods.FETCH_FEEDBACK, request, pb.FetchFeedbackReply, timeout_s)
        self.connected = True
        said = read_feedback(reply, names)
        if said.slot_ns != self._slot_ns:
            theirs, ours = said.slot_ns / 1e6, self._slot_ns / 1e6
            raise NoAnswer(f"has slots of {theirs:g} ms, this daemon of {ours:g}: set the same")
        return Feedback(said.slot, tuple(links), np.array(said.load), np.array(said.reservable))

    async def update(self, update: Update, timeout_s: float) -> bool:
        """Reserve on links of its own; False: refused, nothing has changed there."""
        request = pb.UpdateScheduleRequest(
            scheduler=self._scheduler,
            flow=update.flow,
            links=[self._names[link] for link in update.links],
            slot=update.slot,
            rates=update.rates.tolist(),
        )
        reply = await self._call(
            methods.UPDATE_SCHEDULE, request, pb.UpdateScheduleReply, timeout_s
        )
        return bool(reply.status == pb.UpdateScheduleReply.STATUS_OK)

    async def close(self) -> None:
        """Let the connection go."""
        await self._channel.close()
        self.connected = False

    async def _call(self, path: str, request: Message, kind: type[M], timeout_s: float) -> M:
        try:
            raw = await self._channel.unary(path, request.SerializeToString(), timeout_s)
        except RpcFailed as error:
            # Late is not gone, as long as there is a connection.
            late = error.code is grpc.StatusCode.DEADLINE_EXCEEDED and self._channel.connected
            self.connected = self.connected and late
            raise NoAnswer(str(error)) from None
        return parse(kind, raw)
