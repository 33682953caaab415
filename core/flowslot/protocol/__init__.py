# SPDX-License-Identifier: Apache-2.0
"""Both ends of the negotiation, without I/O: messages in, messages and changes out."""
