# SPDX-License-Identifier: Apache-2.0
"""An adversarial world around the objects that ship: Hosts, Switches, and lanes between them.

Each daemon has a lane to each switch process, with one stream after the other. A stream keeps its
order in each direction. Everything else is up to the script: when a message is delivered, whether
it comes again, or long after its stream was given up; when a daemon puts a grant into force; when
it looks at its leases; who crashes, and who forgets. `check` holds after every event.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from lanes import CAPACITY, CONFIG, LIMIT, NAMES, OWN, PATHS, STREAMS, Daemon, Lane, Process, Stream
from wires import Memory, Wire

from flowslot.model.errors import ScheduleRefused
from flowslot.model.units import MILLISECOND, Nanos
from flowslot.policy.base import Floats
from flowslot.policy.job_classes import JobClass
from flowslot.policy.registry import PolicyOptions, allocator
from flowslot.policy.stagger import StaggerAllocator
from flowslot.protocol.grants import Granted
from flowslot.protocol.host import Changes, Host
from flowslot.protocol.loopback import Loopback
from flowslot.protocol.messages import Demand, Done, FromArbiter, Opening
from flowslot.protocol.session import News, Session

POLICIES = ("stagger", "srsf1", "adadual", "srsf-chunked", "cassini")


class World:
    """The whole. All methods take effect at `now`; only `advance` moves it. `i`: a daemon, `k`: one
    of its lanes."""

    def __init__(
        self,
        hosts: int = 3,
        *,
        held: Sequence[Sequence[int]] = ((0, 1, 2),),
        gathers: bool = False,
        wire: Callable[[], Wire] = Memory,
    ) -> None:
        """`held`: the links of each switch process."""
        config = replace(CONFIG, coalesce_ns=Nanos(4 * MILLISECOND)) if gathers else CONFIG
        self.now = Nanos(1_000_000_000)
        self.decisions: list[tuple[object, ...]] = []
        """All that switch processes have said, and all that kernels were told."""
        self._wire = wire
        self._named = 0
        self._ghosts: list[tuple[int, Process, Floats]] = []
        """Kernels of dead daemons: until when they enforce what."""
        # They number links in another order than daemons do.
        self.processes = [Process(sorted(links), config, len(held) > 1) for links in held]
        for process in self.processes:
            process.begin(self.now)
        self.daemons = [self._daemon(i, [[] for _ in held]) for i in range(hosts)]
        for i in range(hosts):
            for k in range(len(held)):
                self.connect(i, k)

    def _daemon(self, i: int, streams: Sequence[list[Stream]]) -> Daemon:
        self._named += 1
        lanes = []
        for k, process in enumerate(self.processes):
            session = Session(
                f"h{i}#{self._named}",
                process.links[::-1],
                [NAMES[link] for link in process.links[::-1]],
                slot_ns=CONFIG.slot_ns,
                lease_ns=CONFIG.lease_ns,
                first_session=1000 * (10 * self._named + k),
            )
            lanes.append(Lane(process, session, streams[k]))
        host = Host([lane.session for lane in lanes], self._own, CONFIG.slot_ns)
        host.start(self.now)
        return Daemon(host, lanes)

    def _own(self, now: Nanos) -> Loopback:
        allocator = StaggerAllocator(partial=True)
        return Loopback(now, OWN, CAPACITY.tolist(), allocator=allocator, config=CONFIG)

    # --- time and disasters

    def advance(self, milliseconds: float, *, asleep: bool = False) -> None:
        """`asleep`: daemons do not notice what happens meanwhile, not even the end of leases."""
        self.now = Nanos(self.now + int(milliseconds * MILLISECOND))
        for daemon in [] if asleep else self.daemons:
            self._take(daemon, daemon.host.wake(self.now).grants)

    def crash(self, i: int) -> None:
        """The daemon dies: its kernel enforces what it had until each lease ends."""
        dead = self.daemons[i]
        for lane in dead.lanes:
            end, load = lane.session.lease_end, dead.load(self.now, lane)
            self._ghosts.append((end or 0, lane.process, load))
            if lane.open:
                lane.streams[-1].up.append(False)
        self.daemons[i] = self._daemon(i, [lane.streams for lane in dead.lanes])
        for k in range(len(dead.lanes)):
            self.connect(i, k)

    def amnesia(self, process: Process) -> None:
        """The switch process begins anew without any memory; all its streams break."""
        process.begin(self.now)
        for daemon in self.daemons:
            for lane in daemon.lanes:
                for stream in lane.streams:
                    if stream.process is process and not stream.ended:
                        stream.ended = True
                        stream.down.append(False)

    # --- daemons

    def demand(
        self, i: int, flow: int, remaining: int, idle: bool = False, cap: float = math.inf
    ) -> None:
        """One of a few flows per host; two jobs span all hosts. Each life has another path."""
        daemon = self.daemons[i]
        if flow not in daemon.demands:
            daemon.incs[flow] = daemon.incs.get(flow, 0) + 1
        inc = daemon.incs[flow]
        demand = Demand(
            flow=flow,
            inc=inc,
            job=f"job{(flow + i) % 2}",
            links=PATHS[(flow + i + inc) % len(PATHS)],
            remaining=0 if idle else remaining,
            cap=cap,
            period_ns=300 * MILLISECOND,
            next_in_ns=50 * MILLISECOND,
            next_bytes=remaining if idle else 0,
        )
        self._demand(daemon, [demand])

    def _demand(self, daemon: Daemon, demands: Sequence[Demand]) -> None:
        daemon.demands.update((demand.flow, demand) for demand in demands)
        self._take(daemon, daemon.host.demand(self.now, demands))

    def report(self) -> None:
        """All daemons report all flows: puts right a repeated old demand."""
        for daemon in self.daemons:
            self._demand(daemon, list(daemon.demands.values()))

    def give_back(self, i: int, flow: int, *, idle: bool = True) -> None:
        """The daemon stops using a grant and says so. `idle`: because the flow's phase has
        ended."""
        daemon = self.daemons[i]
        if flow in daemon.demands:
            self._take(daemon, daemon.host.give_back([flow]))
            if idle:
                self._demand(daemon, [replace(daemon.demands[flow], remaining=0)])

    def end(self, i: int, flow: int) -> None:
        daemon = self.daemons[i]
        if flow in daemon.demands:
            self.enforce_all(i)
            del daemon.demands[flow]
            daemon.kernel.pop(flow, None)
            self._take(daemon, daemon.host.done(self.now, [Done(flow, daemon.incs[flow])]))

    def beat(self, i: int) -> None:
        """A slot of this host begins."""
        self.daemons[i].beaten = self.now
        self.daemons[i].host.beat(self.now)

    def enforce(self, i: int) -> bool:
        """The daemon gets to put into force what came next, and lets the acknowledgements go. By
        then more may have come."""
        daemon = self.daemons[i]
        if not daemon.news:
            return False
        k, changes = daemon.news.popleft()
        self._put(daemon, changes.grants)
        news = changes.news
        assert news is not None
        daemon.lanes[k].in_force |= {(news.session, ack.flow, ack.seq) for ack in news.acks}
        daemon.host.enforced(k, changes)
        return True

    def enforce_all(self, i: int) -> None:
        while self.enforce(i):
            pass

    def _take(self, daemon: Daemon, grants: Sequence[Granted]) -> None:
        """What the Host returns is put into force in the order in which it was returned."""
        if grants:
            self.enforce_all(self.daemons.index(daemon))
            self._put(daemon, grants)

    def _put(self, daemon: Daemon, grants: Sequence[Granted]) -> None:
        for grant in grants:
            daemon.kernel.pop(grant.flow, None)
            rate = None if math.isnan(grant.rate) else grant.rate
            self.decisions.append((self.now, self.daemons.index(daemon), grant.flow, rate))
            if rate is not None and grant.flow in daemon.demands:
                daemon.kernel[grant.flow] = rate

    # --- streams, seen from the daemon

    def connect(self, i: int, k: int = 0) -> None:
        """A stream is open; its first message is written."""
        daemon, lane = self.daemons[i], self.daemons[i].lanes[k]
        stream = Stream(lane.process, self._wire())
        for old in lane.streams[: 1 - STREAMS]:
            old.leave(self.now)
            old.wire.close()
        lane.streams = [*lane.streams[1 - STREAMS :], stream]
        self.enforce_all(i)
        opening, changes = daemon.host.connect(self.now, k)
        self._put(daemon, changes.grants)
        lane.open = True
        self.speak(i, k, opening)

    def close(self, i: int, k: int = 0) -> None:
        """The daemon ends the stream, or learns of its end."""
        daemon, lane = self.daemons[i], self.daemons[i].lanes[k]
        self.enforce_all(i)
        if lane.open:
            lane.open = False
            lane.streams[-1].up.append(False)
            self._put(daemon, daemon.host.closed(self.now, k).grants)

    def speak(self, i: int, k: int = 0, opening: Opening | None = None) -> None:
        """The stream takes the daemon's next message."""
        daemon, lane = self.daemons[i], self.daemons[i].lanes[k]
        message = daemon.host.take_message(self.now, k, self.now)
        if message is None:
            assert opening is None, "the first message says at least that the daemon lives"
            return
        for ack in message.acks:
            assert (message.session, ack.flow, ack.seq) in lane.in_force, "not in force yet"
        lane.streams[-1].wire.say(message, opening)
        lane.streams[-1].up.append(True)

    def deliver_down(self, i: int, k: int = 0, which: int = -1, again: int | None = None) -> bool:
        """The next message of a stream comes to the daemon, or an earlier one once more."""
        lane = self.daemons[i].lanes[k]
        stream = lane.streams[which % len(lane.streams)]
        if again is not None:
            if not stream.seen_down:
                return False
            self._hear(i, k, stream, stream.seen_down[again % len(stream.seen_down)])
        elif not stream.down:
            return False
        elif stream.down.popleft():
            stream.seen_down.append(stream.wire.answered())
            self._hear(i, k, stream, stream.seen_down[-1])
        elif stream is lane.streams[-1]:
            self.close(i, k)
        return True

    def _hear(self, i: int, k: int, stream: Stream, message: FromArbiter) -> None:
        daemon, lane = self.daemons[i], self.daemons[i].lanes[k]
        stale = stream is not lane.streams[-1] or not lane.open
        before = daemon.believes() if stale else None
        changes = daemon.host.received(self.now, k, message)
        if stale:
            assert changes == Changes([], News(message.session))
            assert daemon.believes() == before, "what is stale has no effect"
        else:
            now = [daemon.host.grant(grant.flow) for grant in changes.grants]
            assert repr(now) == repr(changes.grants)
        daemon.news.append((k, changes))

    # --- switch processes

    def deliver_up(self, i: int, k: int = 0, which: int = -1, again: int | None = None) -> bool:
        """The next message of a stream comes to the process, or an earlier one once more."""
        lane = self.daemons[i].lanes[k]
        stream = lane.streams[which % len(lane.streams)]
        if again is not None:
            if not stream.seen_up:
                return False
            stream.arrive(self.now, *stream.seen_up[again % len(stream.seen_up)])
        elif not stream.up:
            return False
        elif stream.up.popleft():
            stream.seen_up.append(stream.wire.said())
            stream.arrive(self.now, *stream.seen_up[-1])
        else:
            stream.leave(self.now)
        return True

    def step(self, process: Process | None = None) -> None:
        """The process decides."""
        process = process or self.processes[0]
        process.switch.decide(self.now)
        for stream, _ in process.switch.take_ended():
            stream.leave(self.now)

    def send(self, stream: Stream) -> int:
        """The stream takes what waits for it; returns the number of grants."""
        message = None if stream.ended else stream.process.switch.take(stream)
        if message is None:
            return 0
        self.decisions.append((self.now, message))
        stream.wire.answer(message)
        stream.down.append(True)
        return len(message.grants)

    def decide_by(self, process: Process, n: int) -> None:
        """Somebody sets another policy: number n; 0 is the one that it begins with."""
        classes = (JobClass(jobs="job1", protected=True), JobClass(jobs="job*", floor=0.2))
        name = POLICIES[n % len(POLICIES)]
        options = PolicyOptions(partial=process.partial, classes=classes[: n // 8 % 3])
        process.switch.use(self.now, allocator(name, options), name)

    def schedule(self, key: int, link: int, rate: float, offset: int) -> None:
        """Somebody reserves slots of a link."""
        for process in self.processes:
            if link in process.links:
                at = [process.links.index(link)]
                with suppress(ScheduleRefused):
                    process.switch.arbiter.update_schedule(self.now, key, at, [rate] * 2, offset)
                    process.switch.changed(self.now)

    # --- everybody

    def exchange(self, rounds: int, milliseconds: float = 1.0) -> int:
        """Everything happens promptly for a while, as transports do it; returns the number of
        grants in the last third."""
        late = 0
        for r in range(rounds):
            self.advance(milliseconds)
            lanes = [(i, k) for i, d in enumerate(self.daemons) for k in range(len(d.lanes))]
            for i, k in lanes:
                self._attend(i, k)
                self._deliver_all(self.deliver_up, i, k)
            sent = sum(map(self._answer, self.processes))
            late += sent if r >= 2 * rounds // 3 else 0
            for i, k in lanes:
                self._deliver_all(self.deliver_down, i, k)
            self.check()
        return late

    def _attend(self, i: int, k: int) -> None:
        daemon, session = self.daemons[i], self.daemons[i].lanes[k].session
        self.enforce_all(i)
        if self.now >= daemon.beaten + CONFIG.slot_ns:
            self.beat(i)
        if session.lost:
            self.close(i, k)
        if session.dial(self.now):
            self.connect(i, k)
        self.speak(i, k)

    def _answer(self, process: Process) -> int:
        if self.now >= process.switch.next_wakeup:
            self.step(process)
        return sum(map(self.send, process.switch.take_ready()))

    def _deliver_all(self, deliver: Callable[[int, int, int], bool], i: int, k: int) -> None:
        for which in range(len(self.daemons[i].lanes[k].streams)):
            while deliver(i, k, which):
                self.enforce_all(i)

    def close_all(self) -> None:
        """The end of the world."""
        for daemon in self.daemons:
            for lane in daemon.lanes:
                for stream in lane.streams:
                    stream.wire.close()

    # --- what must always hold

    def enforced(self, process: Process) -> Floats:
        """What all kernels enforce at this moment of what the process has a say in, on each of its
        links."""
        load, k = np.zeros(len(CAPACITY)), self.processes.index(process)
        for daemon in self.daemons:
            load += daemon.load(self.now, daemon.lanes[k])
        self._ghosts = [ghost for ghost in self._ghosts if ghost[0] > self.now]
        for _, of, ghost in self._ghosts:
            load += ghost if of is process else 0.0
        return load[process.links]

    def granted(self, process: Process) -> Floats:
        """What daemons believe that the process grants them, on each of its links."""
        load, k = np.zeros(len(CAPACITY)), self.processes.index(process)
        for daemon in self.daemons:
            for flow, demand in daemon.demands.items():
                load[list(demand.links)] += max(0.0, daemon.lanes[k].session.grant(flow).rate)
        return load[process.links]

    def check(self) -> None:
        """What is enforced is committed, and fits."""
        for process in self.processes:
            arbiter, limit = process.switch.arbiter, LIMIT[process.links] * (1 + 1e-9)
            arbiter.heartbeat(self.now, -1)  # ends leases that are over, and nothing else
            enforced = self.enforced(process)
            assert np.all(enforced <= limit), (enforced, limit)
            if arbiter.recovered(self.now):  # until then it may not know of all that is enforced
                committed = arbiter.commitments()
                assert np.all(enforced <= committed * (1 + 1e-9) + 1e-3), (enforced, committed)
            # Nothing that the arbiter decides takes the load above the limit. A Hello may, until a
            # lease has passed: it can tell of an earlier arbiter's grants that are void by then.
            load = arbiter.load_table(self.now).max(axis=1)
            assert process.greeted or np.all(load <= np.maximum(limit, process.load))
            process.load, process.greeted = load, False
        for daemon in self.daemons:
            assert (daemon.host.own is None) == daemon.host.live
            if daemon.host.own is not None:
                for link in OWN:
                    flows = [flow for flow, d in daemon.demands.items() if link in d.links]
                    load = sum(daemon.kernel.get(flow, 0.0) for flow in flows)
                    assert load <= LIMIT[link] * (1 + 1e-9)
