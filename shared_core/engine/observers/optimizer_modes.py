"""Optimizers with a mode to train in and one to evaluate in (schedule-free): each mode keeps other weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

_MODES = ("train", "eval")


def has_modes(optimizer: Any) -> bool:
    """Return True if an optimizer moves the weights between training and evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in _MODES)


class OptimizerModes:
    """Keeps ``train()`` and ``eval()`` of optimizers from moving weights that are not the optimizer's.

    In these calls schedule-free optimizers move the parameters from the weights of training to their average, or back.
    Calls wait while something else is in the parameters. Final weights stay as they are.

    Args:
        moved: Called once an optimizer has moved the weights.
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
        """Watch those of some optimizers that have modes.

        Args:
            optimizers: Torch's own.
            wrappers: Of a trainer, whose methods call the optimizer's class and not the optimizer.
        """
        self.close()
        self._optimizers = [optimizer for optimizer in optimizers if has_modes(optimizer)]
        found = {id(optimizer): optimizer for optimizer in self._optimizers}
        around = [(one, getattr(one, "optimizer", None)) for one in wrappers]
        pairs = [(one, one) for one in self._optimizers] + [pair for pair in around if id(pair[1]) in found]
        for owner, optimizer in pairs:
            for name in _MODES:
                earlier = vars(owner).get(name)
                if isinstance(earlier, _Switch):  # of a run that is over
                    earlier.modes.close()
                self._switches.append(_Switch(self, owner, optimizer, name))

    def hold(self) -> None:
        """Let calls wait: the parameters hold other weights from now on."""
        self._is_held = True

    def release(self) -> None:
        """Make the calls that waited: the weights are back."""
        self._is_held = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def settle(self) -> None:
        """Put the weights of evaluation into the parameters; from now on no call moves them, until the next step."""
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
        """Make a call of `train` or `eval`, or let it wait."""
        if self._is_held:
            self._waiting.append(functools.partial(self.switch, optimizer, name, method))
            return
        if self._mode.get(id(optimizer)) == name:
            method()
            return
        # Lightning validates in inference mode, whose tensors no later step could write
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
    """Stands in for one of the two methods on an object until `undo`."""

    def __init__(self, modes: OptimizerModes, owner: Any, optimizer: Any, name: str) -> None:
        self.modes = modes
        self._owner, self._optimizer, self._name, self._method = owner, optimizer, name, getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self) -> None:
        self.modes.switch(self._optimizer, self._name, self._method)

    def undo(self) -> None:
        if vars(self._owner).get(self._name) is self:
            delattr(self._owner, self._name)
