# SPDX-License-Identifier: Apache-2.0
"""Ways of pacing flows in the kernel."""
