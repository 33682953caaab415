# SPDX-License-Identifier: Apache-2.0
"""PyTorch: progress in one line, and collectives that users program (SDCC).

`attach` needs torch; the programs and their NumPy engine do not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowslot_torch.ddp import Attachment, attach

__all__ = ["Attachment", "attach"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from flowslot_torch import ddp as module  # noqa: PLC0415 - torch takes seconds

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
