# SPDX-License-Identifier: Apache-2.0
"""Small real models for jobs that train, and data made on the spot. Needs torch.

They have the shapes of those that papers train: VGG with most of its bytes in one layer near its
end, ResNet with many small ones, a transformer with equal blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_CLASSES, _SIDE, _BATCH = 10, 16, 8
_WORDS, _LENGTH, _WIDTH = 256, 32, 128


class _Residual(nn.Module):  # type: ignore[misc,unused-ignore]
    """Two convolutions beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Any) -> Any:
        """Float[batch, width, side, side], and so the result."""
        return functional.relu(x + self.b(functional.relu(self.a(x))))


class _Transformer(nn.Module):  # type: ignore[misc,unused-ignore]
    """Predicts a class from words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 2 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(3)
        )
        self.out = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: Any) -> Any:
        """Int[batch, length] to float[batch, classes]."""
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean(1))


def _vgg() -> Any:
    layers: list[Any] = []
    for before, after in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    wide = 32 * (_SIDE // 4) ** 2
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(wide, 1024), nn.ReLU(), nn.Linear(1024, _CLASSES)
    )


def _resnet() -> Any:
    blocks = [_Residual(32) for _ in range(6)]
    flat = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, _CLASSES)
    return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, *flat)


_MAKERS: dict[str, Callable[[], Any]] = {
    "vgg": _vgg,
    "resnet": _resnet,
    "transformer": _Transformer,
}
NAMES = tuple(_MAKERS)


def is_layer(module: Any) -> bool:
    """Whether it is called in a forward pass, and computes by itself."""
    inside = (
        nn.modules.linear.NonDynamicallyQuantizableLinear
    )  # attention's, which uses its weights
    leaf = not list(module.children()) and not isinstance(module, inside)
    return leaf or isinstance(module, nn.MultiheadAttention)


def make(name: str, seed: int) -> Any:
    """A model with the weights that the seed says, alike on all ranks. KeyError: no such model."""
    torch.manual_seed(seed)
    return _MAKERS[name]()


def loss_of(model: Any, name: str, seed: int, rank: int, iteration: int) -> Any:
    """The loss on a batch that follows from the last three: the class of noise is a projection."""
    noise = torch.Generator().manual_seed(seed * 1_000_003 + rank * 10_007 + iteration)
    if name == "transformer":
        x = torch.randint(_WORDS, (_BATCH, _LENGTH), generator=noise)
        label = x[:, 0] % _CLASSES
    else:
        x = torch.randn(_BATCH, 3, _SIDE, _SIDE, generator=noise)
        label = x.flatten(1)[:, :_CLASSES].argmax(1)
    return functional.cross_entropy(model(x), label)
