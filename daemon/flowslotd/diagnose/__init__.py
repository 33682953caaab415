# SPDX-License-Identifier: Apache-2.0
"""What is wrong with this host, and what would change on it."""
