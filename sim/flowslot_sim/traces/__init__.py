# SPDX-License-Identifier: Apache-2.0
"""Public traces of clusters: when jobs came, how many GPUs they had, and for how long.

Users bring the files. What is read: `collection_events` of Google's 2019 traces, as CSV (arrivals
only); `pai_task_table.csv` of Alibaba's cluster-trace-gpu-v2020; `cluster_job_log` of Philly
(JSON); `trace_seren.csv` and `trace_kalos.csv` of Acme. Jobs without GPUs, or that never ran, are
left out. None says which model a job trains: see `convert`.
"""

from flowslot_sim.traces.convert import arrivals, to_jobs
from flowslot_sim.traces.read import FORMATS, TracedJob, read

__all__ = ["FORMATS", "TracedJob", "arrivals", "read", "to_jobs"]
