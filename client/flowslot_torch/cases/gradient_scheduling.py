# SPDX-License-Identifier: Apache-2.0
"""Gradient scheduling (SDCC 6.2): the layers that the next forward pass needs first go first."""

from collections.abc import Sequence

from flowslot_torch.program import Program
from flowslot_torch.tensors import Tensor


class GradientScheduling(Program):
    """Priorities, and parts of at most `elements`, so that what is urgent has not long to wait."""

    elements = 1 << 18

    def on_tensor_ready(self, tensor: Tensor) -> Sequence[Tensor]:
        """The later in the backward pass, the sooner."""
        tensor.priority = self.tasks.get_backward_order(tensor)
        return tensor.split(self.elements)
