# SPDX-License-Identifier: Apache-2.0
"""What is asked of switch processes and of other daemons, and what they answer."""
