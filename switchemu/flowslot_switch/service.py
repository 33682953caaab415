# SPDX-License-Identifier: Apache-2.0
"""The gRPC service around the runner: the paper's two calls, the stream, and Describe."""

import logging
import os
from collections.abc import Callable, Sequence

import numpy as np
from google.protobuf.message import Message

from flowslot.model.errors import ConfigError, FlowslotError, ProtocolError, ScheduleRefused
from flowslot.model.units import Nanos
from flowslot_proto import flowslot_pb2 as pb
from flowslot_proto import methods
from flowslot_proto.checks import MAX_NAME, M, parse
from flowslot_proto.control import Json
from flowslot_proto.convert import read_links, read_rates
from flowslot_switch import limits
from flowslot_switch.caller import Caller, Denied
from flowslot_switch.runner import Runner
from flowslot_switch.server import Call, Closing, Handler, unary
from flowslot_switch.stream import Stream, check_links

log = logging.getLogger(__name__)


class SwitchService:
    """Serves one runner, which a reload of the configuration replaces."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._started = runner.now()
        self._streams: set[Stream] = set()
        self._rejected = 0
        self._lines = limits.Rates(limits.LINES_PER_S, limits.LINE_BURST)
        self._all_lines = limits.TokenBucket(1.0, 20.0)
        self._messages_in = 0
        self._messages_out = 0

    def replace(self, runner: Runner, why: str) -> None:
        """Go on with another runner: all daemons have to say Hello again."""
        old, self.runner = self.runner, runner
        old.close(Closing(why))

    def close(self) -> None:
        """End all streams."""
        self.runner.close(Closing("the switch process stops"))

    def handlers(self) -> dict[str, Handler]:
        """What serves each method."""
        return {
            methods.FETCH_FEEDBACK: self._unary(pb.FetchFeedbackRequest, self.fetch_feedback),
            methods.UPDATE_SCHEDULE: self._unary(pb.UpdateScheduleRequest, self.update_schedule),
            methods.DESCRIBE: self._unary(pb.DescribeRequest, self.describe),
            methods.NEGOTIATE: self._negotiate,
        }

    def rejected(self, peer: str, why: str) -> None:
        """A caller has broken a rule or a limit."""
        self._rejected += 1
        now = self.runner.now()
        address = peer.rpartition(":")[0]
        if self._lines.take(address, now) and self._all_lines.take(now):  # anybody can provoke them
            log.warning("rejected %s: %s", peer, why)

    def _unary(self, kind: type[M], answer: Callable[[M, Caller], Message]) -> Handler:
        def handle(caller: Caller, raw: bytes) -> bytes:
            if caller.names and not any(map(self.runner.config.knows, caller.names)):
                raise Denied(f"no host of the topology is called {caller.host}")
            return answer(parse(kind, raw), caller).SerializeToString()

        return unary(handle)

    # --- the two calls of the paper

    def fetch_feedback(self, request: pb.FetchFeedbackRequest, _: Caller) -> pb.FetchFeedbackReply:
        """Load of the next slots, link by link in the order asked, and their sum."""
        runner = self.runner
        now = runner.now()
        horizon = runner.config.settings.arbiter.horizon
        links = read_links("links", request.links, runner.switch.link_index)
        if request.slots > horizon:
            raise ProtocolError(f"field `slots`: must be at most {horizon}")
        rows = self._rows(runner, now, links, request.slots or horizon)
        path = np.sum([row.load for row in rows], axis=0).tolist()
        slot, slot_ns = runner.slot(now), runner.config.slot_ns
        return pb.FetchFeedbackReply(slot=slot, slot_ns=slot_ns, links=rows, path=path)

    def update_schedule(
        self, request: pb.UpdateScheduleRequest, caller: Caller
    ) -> pb.UpdateScheduleReply:
        """Reserve a flow's rates on all its links, or refuse and say why."""
        runner = self.runner
        now = runner.now()
        slot = runner.slot(now)
        links = read_links("links", request.links, runner.switch.link_index)
        rates = read_rates("rates", request.rates, runner.config.settings.arbiter.horizon)
        if len(request.scheduler) > MAX_NAME:
            raise ProtocolError(f"field `scheduler`: must have at most {MAX_NAME} characters")
        owner = caller.owner
        if caller.names:
            owner = caller.check("scheduler", request.scheduler.partition("/")[0])
            check_links("links", request.links, runner.config, owner)
        offset = request.slot - slot if request.HasField("slot") else 0
        reply = pb.UpdateScheduleReply(status=pb.UpdateScheduleReply.STATUS_OK, slot=slot)
        try:
            runner.arbiter.update_schedule(
                now,
                (owner, request.scheduler, request.flow),
                links,
                rates[max(0, -offset) :],
                max(0, offset),
            )
        except ScheduleRefused as refusal:
            reply.status = pb.UpdateScheduleReply.STATUS_REFUSED
            reply.reason = refusal.reason
            if refusal.link is not None:
                reply.link = runner.config.links[refusal.link].name
        else:
            runner.changed()
        return reply

    # --- the stream

    async def _negotiate(self, call: Call) -> None:
        """See Stream."""
        stream = Stream(self.runner, call)
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            self._messages_in += stream.messages_in
            self._messages_out += stream.messages_out

    # --- the control socket

    def policy(self) -> Json:
        """What decides here."""
        runner = self.runner
        name = runner.config.settings.name
        return {"process": f"switch process {name}", "policy": runner.switch.policy, "switches": []}

    def set_policy(self, name: str) -> Json:
        """Decide by another policy, until the next reload or restart. Raises ConfigError."""
        try:
            self.runner.use(self.runner.config, name)
        except FlowslotError as error:
            raise ConfigError("policy", "", str(error)) from None
        log.info("policy: %s", name)
        return self.policy()

    # --- the process

    def describe(self, request: pb.DescribeRequest, caller: Caller) -> pb.DescribeReply:
        """What the process is, has done, and holds. Numbers of sessions are for their owner only:
        another caller could use the next one before the daemon does."""
        runner, arbiter = self.runner, self.runner.arbiter
        now = runner.now()
        synced = [s for s in self._streams if s.session >= 0]
        return pb.DescribeReply(
            name=runner.config.settings.name,
            policy=runner.switch.policy,
            pid=os.getpid(),
            uptime_ns=now - self._started,
            slot=runner.slot(now),
            slot_ns=runner.config.slot_ns,
            lease_ns=arbiter.config.lease_ns,
            recovering=not arbiter.recovered(now),
            counters=pb.Counters(
                granted=arbiter.granted,
                refused=arbiter.refused,
                scheduled=arbiter.scheduled,
                preempted=arbiter.preempted,
                expired=arbiter.expired,
                rejected=self._rejected,
                messages_in=self._messages_in + sum(s.messages_in for s in self._streams),
                messages_out=self._messages_out + sum(s.messages_out for s in self._streams),
                steps=runner.switch.steps,
                step_ns=runner.step_ns,
            ),
            sessions=[
                pb.SessionState(
                    session=s.session if s.owner == caller.owner else 0,
                    daemon=s.daemon,
                    peer=s.peer,
                    messages_in=s.messages_in,
                    messages_out=s.messages_out,
                )
                for s in synced
            ],
            links=self._rows(
                runner, now, range(len(runner.config.links)), runner.config.settings.arbiter.horizon
            ),
        )

    def _rows(
        self, runner: Runner, now: Nanos, links: Sequence[int], slots: int
    ) -> list[pb.LinkLoad]:
        load = runner.arbiter.load_table(now)
        target = runner.arbiter.config.target
        held = runner.config.links
        return [
            pb.LinkLoad(
                link=held[i].name,
                goodput=held[i].goodput,
                reservable=target * held[i].goodput,
                load=load[i, :slots].tolist(),
            )
            for i in links
        ]
