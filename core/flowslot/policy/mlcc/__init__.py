# SPDX-License-Identifier: Apache-2.0
"""MLCC, the main paper's host policy: each host plans its flows over the next K slots."""
