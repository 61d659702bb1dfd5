"""Optimizers with a training and an evaluation mode (schedule-free), which have different weights in each mode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MODES = ("train", "eval")


def has_modes(optimizer: Any) -> bool:
    """Return True if an optimizer changes the weights between training and evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in _MODES)


class OptimizerModes:
    """Keeps ``train()`` and ``eval()`` of optimizers from changing weights that a technique has put in.

    In these calls schedule-free optimizers switch the parameters between training weights and their average. Calls are
    delayed while the parameters hold other weights. Final weights never change.

    Args:
        moved: Called after an optimizer has changed the weights.
    """

    def __init__(self, moved: Callable[[], None] = lambda: None) -> None:
        self._moved = moved
        self._optimizers: list[Any] = []
        self._mode: dict[int, str] = {}
        self._switches: list[_Switch] = []
        self._waiting: list[Callable[[], Any]] = []
        self._handles: list[Any] = []
        self._is_held = self._is_final = False

    def watch(self, optimizers: Iterable[Any], wrappers: Iterable[Any] = ()) -> None:
        """Watch the optimizers that have modes.

        Args:
            optimizers: Unwrapped torch optimizers.
            wrappers: A trainer's wrappers around them, whose methods call the optimizer's class directly.
        """
        self.close()
        self._optimizers = [optimizer for optimizer in optimizers if has_modes(optimizer)]
        found = {id(optimizer): optimizer for optimizer in self._optimizers}
        around = [(one, getattr(one, "optimizer", None)) for one in wrappers]
        pairs = [(one, one) for one in self._optimizers] + [pair for pair in around if id(pair[1]) in found]
        for owner, optimizer in pairs:
            for name in _MODES:
                earlier = vars(owner).get(name)
                if isinstance(earlier, _Switch):  # from an earlier run
                    earlier.modes.close()
                self._switches.append(_Switch(self, owner, optimizer, name))

    def hold(self) -> None:
        """Delay calls: the parameters hold other weights from now on."""
        self._is_held = True

    def release(self) -> None:
        """Make the delayed calls: the optimizer's weights are back."""
        self._is_held = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def settle(self) -> None:
        """Switch to the evaluation weights. No call changes them until the next step."""
        if self._is_final:
            return
        for optimizer in self._optimizers:
            optimizer.eval()
        self._is_final = True
        self._handles = [optimizer.register_step_pre_hook(self._let_go) for optimizer in self._optimizers]

    def leave(self) -> None:
        """Stop watching, unless the weights are final."""
        if not self._is_final:
            self.close()

    def close(self) -> None:
        """Stop watching."""
        self._let_go()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _let_go(self, *_: Any) -> None:
        for switch in self._switches:
            switch.undo()
        self._switches, self._optimizers, self._waiting, self._mode = [], [], [], {}
        self._is_held = self._is_final = False

    def switch(self, optimizer: Any, name: str, method: Callable[[], Any]) -> None:
        """Make or delay a call of `train` or `eval`."""
        if self._is_held:
            self._waiting.append(functools.partial(self.switch, optimizer, name, method))
            return
        if self._mode.get(id(optimizer)) == name:
            method()
            return
        # Lightning validates in inference mode, and later steps cannot change tensors created there.
        with torch.inference_mode(False), torch.no_grad():
            weights = [held for group in optimizer.param_groups for held in group["params"]] if self._is_final else []
            kept = [weight.detach().clone() for weight in weights]
            method()
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)
            self._mode[id(optimizer)] = name
            if not self._is_final:
                self._moved()


class _Switch:
    """Replaces one of the two methods on an object until `undo`."""

    def __init__(self, modes: OptimizerModes, owner: Any, optimizer: Any, name: str) -> None:
        self.modes = modes
        self._owner, self._optimizer, self._name, self._method = owner, optimizer, name, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self) -> None:
        self.modes.switch(self._optimizer, self._name, self._method)

    def undo(self) -> None:
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
