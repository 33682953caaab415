# SPDX-License-Identifier: Apache-2.0
"""Wire format between daemons and the emulated switch; `convert` is the way in and out of it."""
