# SPDX-License-Identifier: Apache-2.0
"""For all tests here."""

from registering import starting

start_daemon = starting
