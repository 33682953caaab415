# SPDX-License-Identifier: Apache-2.0
"""Unpatched ps-lite processes, seen from outside: their sockets, their progress, their iterations.

For each of them the daemon keeps a progress record itself (a shadow record), as the process would
if it were patched. Everything behind the record is the same for both.
"""
