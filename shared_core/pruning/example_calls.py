"""The calls of one micro-batch, kept so that what depends on what can be traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ExampleCalls:
    """The arguments of the outermost calls that reach every weight within reach, in the user's own first micro-batch.

    A model that its trainer calls whole gives one call. A LightningModule whose ``training_step`` calls its parts gives
    one a part; what connects the parts is then not seen, and so is not pruned.

    Args:
        model: The user's model.
        modules: Modules whose weights are within reach.
    """

    def __init__(self, model: nn.Module, modules: set[nn.Module]) -> None:
        self.calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._open: list[nn.Module] = []
        self._has_expired = False
        self._handles: list[Any] = []
        for module in model.modules():
            if not modules.isdisjoint(module.modules()):
                self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._open and module.training and torch.is_grad_enabled():
            if self._has_expired:
                self.calls, self._has_expired = [], False
            if all(called is not module for called, _, _ in self.calls):
                self.calls.append((module, args, kwargs))
        self._open.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1] is module:
            self._open.pop()

    def replay(self) -> list[Any]:
        """Call the same modules with the same arguments again, and return their outputs."""
        return [module(*args, **kwargs) for module, args, kwargs in self.calls]

    def expire(self) -> None:
        """The step is over: the next micro-batch takes the place of these calls."""
        self._has_expired = True

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
