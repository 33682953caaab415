# SPDX-License-Identifier: Apache-2.0
"""MLCC: each host plans its flows over the next K slots from the loads of their paths.

Source: Zhao, Wu, Zhu, "Dynamic Flow Scheduling for DNN Training Workloads in Data Centers",
sections III to V. `plan` is its Algorithm 1, `depend` its Algorithm 2, `bandwidth` what it
estimates from the last slots, `links` how it reads the switches' load tables; `policy` puts them
together. With the options as they are by default that is what the paper says, which can stop
altogether: `livelock` reports when it does. Each remedy is an option of its own.
"""

from flowslot.policy.mlcc.bandwidth import Observed
from flowslot.policy.mlcc.depend import Dependency
from flowslot.policy.mlcc.livelock import LivelockDetector, Stall
from flowslot.policy.mlcc.options import MlccOptions
from flowslot.policy.mlcc.policy import MlccPolicy, Update

__all__ = [
    "Dependency",
    "LivelockDetector",
    "MlccOptions",
    "MlccPolicy",
    "Observed",
    "Stall",
    "Update",
]
