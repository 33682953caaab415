# SPDX-License-Identifier: Apache-2.0
"""The four use cases of SDCC, section 6, as programs. Lines of user code: Table 4."""
