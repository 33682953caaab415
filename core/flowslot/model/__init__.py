# SPDX-License-Identifier: Apache-2.0
"""What the cluster is: units, slots, links, topology, settings, errors."""
