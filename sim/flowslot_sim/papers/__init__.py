# SPDX-License-Identifier: Apache-2.0
"""What papers print, beside what comes out here."""
