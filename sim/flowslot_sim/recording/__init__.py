# SPDX-License-Identifier: Apache-2.0
"""What happened in a run, for people: figures, and traces for chrome://tracing and Perfetto.

    Recording   spans of time, and how much of each link was used (record.py)
    watchers    fill one: of the event-driven simulator (events.py), and of clusters (clusters.py)
    chrome      a trace as JSON
    figures     distributions, use of links over time, slowdown by load

A run that is recorded has the same results as one that is not.
"""
