# SPDX-License-Identifier: Apache-2.0
"""Wire formats: of daemons and the emulated switch (`convert`), and among daemons (`peers`)."""
