# SPDX-License-Identifier: Apache-2.0
"""The paper's two calls to a switch process, by the daemon."""

from collections.abc import Sequence

import grpc
import numpy as np

from flowslot.policy.mlcc import Update
from flowslot.policy.reserving import Feedback
from flowslot.topology import Topology
from flowslot.topology_file import SwitchSettings
from flowslot.units import Nanos
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto.flowslot_pb2_grpc import EmulatedSwitchStub
from flowslotd.domain_grpc import CHANNEL_OPTIONS
from flowslotd.feedback import NoAnswer


class GrpcRemote:
    """A Remote. All in the event loop's thread, in which it must also be made to call first."""

    def __init__(
        self, topology: Topology, switch: SwitchSettings, scheduler: str, slot_ns: Nanos
    ) -> None:
        """`scheduler`: whose flows these are, unique among all daemons of this switch process."""
        self.switch = switch.name
        self.held = frozenset(topology.switch_links(switch.name))
        self.connected = False
        """It answered the last call."""
        self._address = switch.address
        self._scheduler = scheduler
        self._slot_ns = slot_ns
        self._names = [link.name for link in topology.links]
        self._channel: grpc.aio.Channel | None = None
        self._stub: EmulatedSwitchStub | None = None

    async def fetch(self, links: Sequence[int], timeout_s: float) -> Feedback:
        """See Remote."""
        request = pb.FetchFeedbackRequest(links=[self._names[link] for link in links])
        try:
            reply = await self._calls().FetchFeedback(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._lost(error) from None
        self.connected = True
        load = np.array([row.load for row in reply.links], dtype=np.float64)
        reservable = np.array([row.reservable for row in reply.links], dtype=np.float64)
        if reply.slot_ns != self._slot_ns:
            theirs, ours = reply.slot_ns / 1e6, self._slot_ns / 1e6
            raise NoAnswer(f"has slots of {theirs:g} ms, this daemon of {ours:g}: set the same")
        if load.shape != (len(links), len(reply.path)) or not np.isfinite(load).all():
            raise NoAnswer("answered something other than the load of the links that were asked")
        return Feedback(reply.slot, tuple(links), load, reservable)

    async def update(self, update: Update, links: Sequence[int], timeout_s: float) -> bool:
        """See Remote."""
        request = pb.UpdateScheduleRequest(
            scheduler=self._scheduler,
            flow=update.flow,
            links=[self._names[link] for link in links],
            slot=update.slot,
            rates=update.rates.tolist(),
        )
        try:
            reply = await self._calls().UpdateSchedule(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._lost(error) from None
        return bool(reply.status == pb.UpdateScheduleReply.STATUS_OK)

    async def close(self) -> None:
        """See Remote."""
        if self._channel is not None:
            await self._channel.close(None)
        self._channel = self._stub = None
        self.connected = False

    def _calls(self) -> EmulatedSwitchStub:
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
            self._stub = EmulatedSwitchStub(self._channel)  # type: ignore[no-untyped-call]
        return self._stub

    def _lost(self, error: grpc.aio.AioRpcError) -> NoAnswer:
        # Late is not gone: what is in flight keeps the connection.
        self.connected = self.connected and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        return NoAnswer(f"{error.code().name}: {error.details()}")
