# SPDX-License-Identifier: Apache-2.0
"""CASSINI: jobs that share links are shifted in time, once, so that they send one after the other.

Source: the CASSINI/MLTCP thesis, chapter 4. Pure: whoever uses it brings the time.

    Profile     a job as it is alone: period, up phases, links (profile.py)
    shifts      profiles -> of each job its time shift and score (shifts.py)
    Drift       observed starts and ends -> who is to be held back, and how long (drift.py)
    Coordinator what is seen of running jobs -> holds: all of the above, for live jobs and
                simulated ones (coordinator.py)

How it is used live. Whoever holds the links keeps one Coordinator, and tells it in its own clock
when a job's transfers begin (`started`, with the bytes of the iteration on each of its links),
when the last of them has ended (`ended`), and when a job is `gone`. After each call `changed()`
gives the holds that are new: job -> ns. The job's next iteration is to send its first byte no
earlier than so many ns after the first byte of the one that was last reported as started. So hosts
need no common clock. A hold is about that one iteration, and ends with it. A later one about the
same iteration takes its place; 0 takes it back. Nobody waits for a hold that does not come. A
transfer that is held back has not started: `started` is told of its first byte.
"""

from flowslot.policy.cassini.coordinator import Coordinator
from flowslot.policy.cassini.drift import Drift
from flowslot.policy.cassini.profile import Phase, Profile, alone
from flowslot.policy.cassini.shifts import Plan, Shift, best, plan, shifts

__all__ = [
    "Coordinator",
    "Drift",
    "Phase",
    "Plan",
    "Profile",
    "Shift",
    "alone",
    "best",
    "plan",
    "shifts",
]
