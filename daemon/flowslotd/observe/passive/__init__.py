# SPDX-License-Identifier: Apache-2.0
"""Unpatched ps-lite processes, seen from outside: their sockets, their progress, their iterations.

For each of them the daemon keeps a progress record itself (a stand-in), as the process would if it
were patched, so that everything behind the record is the same for both.
"""
