"""Hands over what a layer saw in forward together with the gradient of its output, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.errors import TrainingError

Call = tuple[Tensor, Tensor]


class _Carry(torch.autograd.Function):
    """Saves a tensor the way layers do, so that activation checkpointing drops and recomputes it; computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


class BackwardWatch:
    """Watches layers in training and calls ``take(name, calls)`` once for each layer and backward pass.

    Only forwards in train mode with gradients count. What forward keeps is held by the autograd graph: a segment under
    activation checkpointing keeps nothing until it is recomputed, and the recomputed forward, whose output's gradient
    never comes (non-reentrant) or is the only one that comes (reentrant), is not counted twice. All is let go of as
    soon as it was taken. Calls of one layer before its backward are handed over together: with as many examples they
    are about the same examples.

    Under ``torch.compile`` hooks stay outside the graph (a graph break at each layer, so no ``fullgraph=True``), and
    they must be registered before the first compiled call.

    Args:
        modules: Layers by name, each with one tensor as output.
        keep: ``keep(x, output)`` returns what to hold until backward.
        take: Gets a layer's name and its (kept, gradient of the output) pairs, without gradients.
        where: The criterion, for errors.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        keep: Callable[[Tensor, Tensor], Tensor],
        take: Callable[[str, list[Call]], None],
        where: str,
    ) -> None:
        self._modules, self._keep, self._take, self._where = modules, keep, take, where
        self._handles: list[RemovableHandle] = []
        self._generation = 0
        self._expected: dict[str, int] = {}
        self._arrived: dict[str, list[Call]] = {}

    def attach(self) -> None:
        """Register the hooks. Safe to call twice."""
        if not self._handles:
            self._handles = [
                module.register_forward_hook(self._hook(name), with_kwargs=True)
                for name, module in self._modules.items()
            ]

    def detach(self) -> None:
        """Remove the hooks; a graph that is still there reports nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.clear()

    def clear(self) -> None:
        """Forget what arrived and is not taken, and whatever a forward kept so far."""
        self._generation += 1
        self._expected, self._arrived = {}, {}

    def hand_over(self) -> None:
        """Hand over what arrived, as the next forward would."""
        for name in list(self._arrived):
            self._flush(name)

    def flush(self) -> None:
        """Hand over what arrived: the step is complete, and no more gradients come."""
        self.hand_over()
        self._expected = {}

    def _hook(self, name: str) -> Callable[..., None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # hooks are copied with a module, and the copy is another layer
            if module is self._modules[name] and module.training and isinstance(output, Tensor):
                self._seen(name, args[0] if args else next(iter(kwargs.values())), output)

        return hook  # type: ignore[no-any-return]

    def _seen(self, name: str, x: Tensor, output: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # else backward recomputes a forward that was counted
            if self._arrived.get(name):
                self._flush(name)
            self._expected[name] = self._expected.get(name, 0) + 1
        if not (torch.is_grad_enabled() and output.requires_grad):
            return
        anchor = torch.empty(0, requires_grad=True)
        carry: Any = _Carry.apply  # untyped
        carriers = [carry(anchor, self._keep(x.detach(), output.detach()))]
        generation = self._generation

        def arrive(gradient: Tensor) -> None:
            if generation != self._generation:
                carriers.clear()
                return
            if not carriers:
                raise TrainingError(
                    f"{self._where}: a forward of {name} must have one backward, got a second; add the losses up, or "
                    "use the criterion taylor"
                )
            carrier = carriers.pop()  # torch 2.11 frees what a node saved with its tensor
            (kept,) = carrier.grad_fn.saved_tensors
            self._arrived.setdefault(name, []).append((kept, gradient.detach()))
            if len(self._arrived[name]) >= self._expected.get(name, 0):
                self._flush(name)

        hooked: Any = output  # register_hook has no annotations
        hooked.register_hook(arrive)

    def _flush(self, name: str) -> None:
        calls = self._arrived.pop(name, [])
        self._expected.pop(name, None)
        with torch.no_grad():
            by_examples: dict[int, list[Call]] = {}
            for kept, gradient in calls:
                by_examples.setdefault(kept.shape[0], []).append((kept, gradient))
            for same in by_examples.values():
                self._take(name, same)
