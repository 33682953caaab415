# SPDX-License-Identifier: Apache-2.0
# cython: infer_types=True
"""Jobs on GPUs and on the network, from event to event. Compiled (engine.pxd).

J jobs, W workers, G GPUs, P phases. A GPU runs one phase of one worker at a time, to its end; of
several that want it, that of the job with the least remaining service, then the first job. When all
workers of a job have done a phase with a volume, the job's transfer is ready, and begins when the
gate lets it. A job on one server sends nothing. Times are ns; transfers end at multiples of
`tick_ns`. Rows of `Transfers` and `Sharing` are jobs.
"""

from typing import Any

import numpy as np

from flowslot.policy.gate import Gate, Transfers
from flowslot_sim.cluster.jobs import Table
from flowslot_sim.cluster.sharing import Sharing

COMPILED = not __file__.endswith(".py")
NEVER = 1 << 62
IDLE, WANTS, COMPUTES, WAITS, SENDS = range(5)  # what a worker does; a job's transfer SENDS
_never, _second = NEVER, 1e9
_rounding = 1e-3  # ns of an end that are due to floating point
_forever = 1e9  # s: what would take longer is not sent at this rate
_idle, _wants, _computes, _waits, _sends = range(5)


class Engine:
    """`gate`: None lets every transfer begin at once. `latency_ns`: of each transfer, before its
    first byte. `recount`: a transfer counts its last bytes once more for each one that waits after
    a look at it. `record`: ends of so many iterations of each job are kept, in `ends`. `onset`,
    `period`: when a job's last transfer was ready, and how long after the one before. `log`: None,
    or who is told what happens: `recording.clusters.Watch`."""

    def __init__(
        self,
        table: Table,
        gpus: int,
        transfers: Transfers,
        sharing: Sharing,
        gate: Gate | None = None,
        *,
        tick_ns: int = 1,
        latency_ns: int = 0,
        recount: bool = False,
        record: int = 0,
    ) -> None:
        jobs, workers = len(table.jobs), len(table.job_of)
        self.sharing, self.gate, self.transfers = sharing, gate, transfers
        self.tick, self.latency, self.recount, self.now = tick_ns, latency_ns, recount, 0
        self.compute, self.volume, self.stretch = table.compute, table.volume, table.stretch
        self.phases, self.iterations = table.phases, table.iterations
        self.first, self.job_of = table.first, table.job_of
        self.paths, self.flows = np.asarray(sharing.paths), np.asarray(sharing.flows)
        self.size = np.asarray(transfers.size)
        self.left, self.sends = np.asarray(transfers.left), np.asarray(transfers.sends)
        self.ready, self.asked = np.asarray(transfers.ready), np.asarray(transfers.asked)
        self.service = np.asarray(transfers.service)
        np.copyto(np.asarray(transfers.service), table.service)
        self.ready_count = 0
        self.changed = False
        self.log: Any = None
        self.rate, self.since = np.zeros(jobs), np.zeros(jobs, np.int64)
        self.due = np.full(jobs, NEVER, np.int64)
        self.onset, self.period = np.full(jobs, -1, np.int64), np.zeros(jobs, np.int64)
        self.carried = np.zeros(sharing.links + 1)
        self.done, self.arrived = np.zeros(jobs, np.int64), np.zeros(jobs, np.intp)
        self.alone = np.zeros(jobs, np.uint8)
        self.finished, self.finished_count = np.zeros(jobs, np.intp), 0
        self.ends = np.zeros((jobs, record), np.int64)
        self.state, self.phase = np.zeros(workers, np.intp), np.zeros(workers, np.intp)
        self.members = np.diff(table.first)
        self.gpu_of, self.next_on = np.full(workers, -1, np.intp), np.full(workers, -1, np.intp)
        self.head, self.runs = np.full(gpus, -1, np.intp), np.full(gpus, -1, np.intp)
        self.gpu_due = np.full(gpus, NEVER, np.int64)
        self.busy, self.began = np.zeros(gpus, np.int64), np.zeros(gpus, np.int64)
        self.free, self.free_count = np.zeros(gpus, np.intp), 0
        self.is_free = np.zeros(gpus, np.uint8)

    def place(self, i: int, gpus: Any, path: Any, flows: Any) -> None:
        """Job i begins or goes on, with a worker on each of these GPUs, intp[n]: at most as many as
        it has workers, then these. `path`, int32[...]: the links of
        its transfers, each once; none: it sends nothing. `flows`, int32[...]: how many cross it."""
        for h in range(self.paths.shape[1]):
            self.paths[i, h] = path[h] if h < len(path) else self.sharing.links
            self.flows[i, h] = flows[h] if h < len(path) else 0
        self.alone[i], self.members[i] = len(path) == 0, len(gpus)
        for k in range(len(gpus)):
            w, g = self.first[i] + k, gpus[k]
            self.phase[w] = 0
            self.gpu_of[w], self.next_on[w], self.head[g] = g, self.head[g], w
            self.want(w)

    def share_anew(self) -> None:
        """Rates of transfers are to be found again, before anything else happens."""
        self.changed = True

    def run(self, until: int) -> int:
        """Go on until a job finishes, or until a time. Returns how many have: which, in
        `finished`."""
        self.finished_count = 0
        while True:
            self.start_transfers()
            self.start_computing()
            then = min(self.next_event(), until)
            if then == _never:
                return 0
            self.now = then
            self.end_transfers()
            self.end_computing()
            if self.finished_count > 0 or then >= until:
                return self.finished_count

    def next_event(self) -> int:
        """When something happens by itself; NEVER: nothing does."""
        first = _never
        for at in range(self.sharing.n):
            first = min(first, self.due[self.sharing.live[at]])
        for g in range(len(self.gpu_due)):
            first = min(first, self.gpu_due[g])
        return first

    def start_transfers(self) -> int:
        """Ask the gate, if anything has changed, and find the rates anew. Returns how many have a
        new one."""
        if not self.changed:
            return 0
        self.changed = False
        if self.gate is None:
            for k in range(self.ready_count):
                self.sends[self.ready[k]] = True
        elif self.ready_count > 0:
            for at in range(self.sharing.n):
                i = self.sharing.live[at]
                self.settle(i)
                self.asked[i] = 0
            self.gate.decide(self.transfers, self.ready_count)
        for k in range(self.ready_count):
            i = self.ready[k]
            if self.sends[i] and self.sharing.place[i] < 0:
                self.sharing.enter(i)
                self.since[i] = self.now + self.latency
                self.rate[i] = 0.0
                self.tell(i, _sends)
            elif not self.sends[i] and self.sharing.place[i] >= 0:
                self.sharing.leave(i)
                self.tell(i, _waits)
        touched: int = self.sharing.share()
        for at in range(touched):
            self.retime(self.sharing.touched[at])
        return touched

    def tell(self, i: int, state: int) -> None:
        """Job i's transfer is now in this state, or done."""
        if self.log is not None:
            self.log.turned(i, state)

    def settle(self, i: int) -> None:
        """What transfer i has sent until now."""
        if self.now > self.since[i]:
            sent = min(self.rate[i] * (self.now - self.since[i]) / _second, self.left[i])
            self.count(i, sent)
            self.left[i] -= sent
            self.since[i] = self.now

    def count(self, i: int, sent: float) -> None:
        """So many bytes of each flow of transfer i have crossed the links."""
        for h in range(self.paths.shape[1]):
            if self.paths[i, h] >= self.sharing.links:
                break
            self.carried[self.paths[i, h]] += sent * self.flows[i, h]

    def retime(self, i: int) -> None:
        """Transfer i has a new rate."""
        rate = self.sharing.rate[i]
        if self.recount:
            rate *= 1 + self.asked[i]
        self.settle(i)
        self.rate[i] = rate
        self.due[i] = _never
        if rate * _forever > self.left[i]:
            end = self.since[i] + round_up(self.left[i] / rate * _second - _rounding)
            self.due[i] = (end + self.tick - 1) // self.tick * self.tick

    def start_computing(self) -> None:
        """Every GPU that is free takes the most urgent of those that want it."""
        for k in range(self.free_count):
            g = self.free[k]
            self.is_free[g] = False
            if self.runs[g] < 0:
                best = self.most_urgent(g)
                if best >= 0:
                    self.begin(g, best)
        self.free_count = 0

    def most_urgent(self, g: int) -> int:
        """The worker that GPU g runs next; -1: none wants it."""
        best = -1
        w = self.head[g]
        while w >= 0:
            if self.state[w] == _wants and (best < 0 or self.sooner(w, best)):
                best = w
            w = self.next_on[w]
        return best

    def sooner(self, w: int, v: int) -> bool:
        """Worker w is of a more urgent job than worker v."""
        i, j = self.job_of[w], self.job_of[v]
        less: bool = self.service[i] < self.service[j]
        equal: bool = self.service[i] == self.service[j]
        first: bool = i < j
        return less or (equal and first)

    def begin(self, g: int, w: int) -> None:
        """GPU g runs the phase of worker w."""
        i = self.job_of[w]
        factor = self.stretch[i, self.done[i] % self.stretch.shape[1]]
        self.state[w], self.runs[g], self.began[g] = _computes, w, self.now
        self.gpu_due[g] = self.now + round_up(self.compute[i, self.phase[w]] * factor - 0.5)

    def end_transfers(self) -> None:
        """Those that have sent everything."""
        at = 0
        while at < self.sharing.n:
            i = self.sharing.live[at]
            if self.due[i] <= self.now:
                self.count(i, self.left[i])
                self.left[i], self.due[i], self.sends[i] = 0.0, _never, False
                self.sharing.leave(i)
                k = 0
                while self.ready[k] != i:
                    k += 1
                self.ready_count -= 1
                self.ready[k] = self.ready[self.ready_count]
                self.changed = True
                self.tell(i, _computes)
                self.next_phase(i)
            else:
                at += 1

    def end_computing(self) -> None:
        """GPUs that are done."""
        for g in range(len(self.gpu_due)):
            if self.gpu_due[g] <= self.now:
                w = self.runs[g]
                i, p = self.job_of[w], self.phase[w]
                if self.log is not None:
                    self.log.computed(w, g)
                self.runs[g], self.gpu_due[g] = -1, _never
                self.busy[g] += self.now - self.began[g]
                self.service[i] -= self.compute[i, p]
                self.release(g)
                if self.volume[i, p] > 0 or p == self.phases[i] - 1:
                    self.state[w] = _waits
                    self.arrived[i] += 1
                    if self.arrived[i] == self.members[i]:
                        self.meet(i, p)
                else:
                    self.phase[w] += 1
                    self.want(w)

    def meet(self, i: int, p: int) -> None:
        """All workers of job i have computed phase p."""
        if self.alone[i] or self.volume[i, p] <= 0:
            self.next_phase(i)
        else:
            self.size[i] = self.left[i] = self.volume[i, p]
            if self.onset[i] >= 0:
                self.period[i] = self.now - self.onset[i]
            self.onset[i] = self.now
            self.ready[self.ready_count] = i
            self.ready_count += 1
            self.changed = True
            self.tell(i, _waits)

    def next_phase(self, i: int) -> None:
        """Job i goes on to its next phase or iteration, or it is finished."""
        self.arrived[i] = 0
        p = self.phase[self.first[i]] + 1
        if p == self.phases[i]:
            p = 0
            if self.done[i] < self.ends.shape[1]:
                self.ends[i, self.done[i]] = self.now
            self.done[i] += 1
            if self.done[i] == self.iterations[i]:
                self.finish(i)
                return
        for w in range(self.first[i], self.first[i] + self.members[i]):
            self.phase[w] = p
            self.want(w)

    def want(self, w: int) -> None:
        """Worker w wants its GPU."""
        self.state[w] = _wants
        self.release(self.gpu_of[w])

    def release(self, g: int) -> None:
        """GPU g is to be looked at."""
        if not self.is_free[g]:
            self.is_free[g] = True
            self.free[self.free_count] = g
            self.free_count += 1

    def finish(self, i: int) -> None:
        """Job i leaves its GPUs."""
        for w in range(self.first[i], self.first[i] + self.members[i]):
            g = self.gpu_of[w]
            self.state[w], self.gpu_of[w] = _idle, -1
            if self.head[g] == w:
                self.head[g] = self.next_on[w]
            else:
                v = self.head[g]
                while self.next_on[v] != w:
                    v = self.next_on[v]
                self.next_on[v] = self.next_on[w]
        self.finished[self.finished_count] = i
        self.finished_count += 1
        self.tell(i, _idle)


def round_up(ns: float) -> int:
    """To whole ns, 0 at least."""
    whole = int(max(ns, 0.0))
    return whole + 1 if whole < ns else whole
