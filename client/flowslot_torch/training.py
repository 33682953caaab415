# SPDX-License-Identifier: Apache-2.0
"""A PyTorch model whose gradients go a program's way, with per-layer locks across the iteration's
barrier."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from flowslot_torch.membership import Membership
from flowslot_torch.program import Links, Program
from flowslot_torch.report import Reporter
from flowslot_torch.tasks import DEFAULT_FUSION_BYTES, TaskManager
from flowslot_torch.torch_engine import NAMES, TorchEngine
from flowslot_torch.transport import Transport


class Training:
    """Instead of DDP:

    training = Training(model, lambda params: SGD(params, lr=0.1), MyProgram(), transport)
    for x, y in data:
        loss(model(x), y).backward()
        training.step()
    training.finish()

    A layer's parameters are updated once its gradients have come, at the latest when its next
    forward pass begins: until then the layer is locked, others compute. So a parameter is to be
    used by the module that holds it, or by one above it that was called in the first forward pass
    where the module was not; and by nobody else before `finish`. `barrier`: update everything in
    `step`, by one optimizer, as plain DDP does; then anybody may.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        program: Program,
        transport: Transport,
        *,
        links: Links | None = None,
        fusion_bytes: int = DEFAULT_FUSION_BYTES,
        barrier: bool = False,
        reporter: Reporter | None = None,
        membership: Membership | None = None,
    ) -> None:
        """Ranks must have equal models, and each gradient in every backward pass. `membership`:
        may change between two iterations, which implies `barrier`; who joins gets the model, the
        optimizer's state and `iteration` from the others. TypeError: a parameter's type."""
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype not in NAMES:
                known = ", ".join(NAMES.values())
                raise TypeError(f"{name}: is {parameter.dtype}; gradients must be one of {known}")
        self.iteration = 0
        """Iterations that are complete, by all who take part."""
        self.tasks = TaskManager(
            program,
            TorchEngine(),
            transport,
            links=links,
            fusion_bytes=fusion_bytes,
            reporter=reporter,
            membership=membership,
        )
        self._barrier = barrier or membership is not None
        self._layer_of: dict[nn.Parameter, _Layer] = {}
        self._layers: list[_Layer] = []
        self._handles: list[Any] = []
        self._model = model
        self._called: set[nn.Module] = set()
        self._locks: dict[nn.Module, list[_Layer]] = {}
        self.tasks.save = self._save
        try:
            self._add_layers(make_optimizer)
            if self.tasks.told:
                self._load(self.tasks.told)
        except BaseException:
            self.close()  # nobody waits for who cannot take part
            raise
        self._loose: list[_Layer] = list(self._layers)
        """Layers that no module's forward pass unlocks: all of them, before the first."""

    def step(self) -> None:
        """A backward pass is over: its layers are locked. Raises what ended the communication."""
        self._settle(self._loose)
        if not self._barrier:  # nobody waits for the others yet
            self.tasks.flush()
        if not (self._locks or self._barrier):
            self._assign(self._model, None, set())
        self.iteration += 1
        self.tasks.boundary()

    def _save(self) -> bytes:
        file = io.BytesIO()
        optimizers = [layer.optimizer.state_dict() for layer in self._layers]
        torch.save([self.iteration, self._model.state_dict(), optimizers], file)
        return file.getvalue()

    def _load(self, state: bytes) -> None:
        """It comes from a peer: tensors and plain values are taken, no code."""
        iteration, model, optimizers = torch.load(io.BytesIO(state), weights_only=True)
        if type(iteration) is not int or iteration < 0:
            raise ValueError(f"state: iteration must be a number from 0, is {iteration!r:.40}")
        self.iteration = iteration
        self._model.load_state_dict(model)
        for layer, one in zip(self._layers, optimizers, strict=True):
            layer.optimizer.load_state_dict(one)

    def finish(self) -> None:
        """Update what is not yet updated: before anybody but the layers looks at parameters."""
        self._settle(self._layers)

    def close(self) -> None:
        """End the communication, and leave the model as it is."""
        for handle in self._handles:
            handle.remove()
        self.tasks.close()

    def _add_layers(
        self, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        if self._barrier:
            self._add_layer(self._model.parameters(), make_optimizer)
            return
        for module in self._model.modules():
            self._add_layer(module.parameters(recurse=False), make_optimizer)
            self._handles.append(module.register_forward_pre_hook(self._unlock))

    def _add_layer(
        self,
        parameters: Iterable[nn.Parameter],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        """Of those that are trained, and in no other one."""
        new = [p for p in parameters if p.requires_grad and p not in self._layer_of]
        if new:
            layer = _Layer(make_optimizer(new))
            self._layers.append(layer)
            for parameter in new:
                index = len(self._layer_of)
                self._layer_of[parameter] = layer
                layer.indices.append(index)
                hook = partial(self._on_gradient, layer, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def _on_gradient(self, layer: _Layer, index: int, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise TypeError(f"parameter {index}: gradient is {gradient.layout}; must be dense")
        if not gradient.is_contiguous():
            gradient = parameter.grad = gradient.contiguous()
        layer.locked = True
        self.tasks.enqueue(index, gradient.view(-1))

    def _unlock(self, module: nn.Module, _: Any) -> None:
        if self._locks:
            self._settle(self._locks.get(module, ()))
        else:
            self._called.add(module)

    def _assign(self, module: nn.Module, above: nn.Module | None, seen: set[_Layer]) -> None:
        """A module unlocks its parameters, and those of modules below it that were not called in
        the first forward pass: it uses them itself, as attention does its projection's."""
        owner = module if module in self._called else above
        for parameter in module.parameters(recurse=False):
            layer = self._layer_of.get(parameter)
            if layer is not None and owner is not None:
                self._locks.setdefault(owner, []).append(layer)
                seen.add(layer)
        for child in module.children():
            self._assign(child, owner, seen)
        if module is self._model:
            self._loose = [layer for layer in self._layers if layer not in seen]

    def _settle(self, layers: Iterable[_Layer]) -> None:
        for layer in layers:
            if layer.locked:
                for index in layer.indices:
                    self.tasks.wait(index)
                layer.optimizer.step()
                layer.optimizer.zero_grad()
                layer.locked = False


class _Layer:
    """Parameters that are updated together, by their tensors' indices."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.indices = optimizer, list[int]()
        self.locked = False
