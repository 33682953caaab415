# SPDX-License-Identifier: Apache-2.0
"""Control planes: who decides about the rates of simulated flows, and what it takes to tell."""
