"""Record which operations a layer's forward runs, so that the records of two layers can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

Build = Callable[[], nn.Module]


def trace(
    build: Build,
    inputs: Tensor,
    training: bool,
    kind: type[nn.Module] | None = None,
    parts: Mapping[str, bool] | None = None,
    plain: Mapping[str, Any] | None = None,
) -> tuple[list[Any], Any] | str:
    """Return (operations, result) of a layer's forward, or of that of a derived class; ``"fails"`` or ``"strays"``.

    Args:
        build: Makes the stock layer.
        inputs: Its input.
        training: Its mode.
        kind: The derived class; None: the stock one.
        parts: Submodules of that class, and whether they are there.
        plain: Attributes to add to the layer.
    """
    quiet = warnings.catch_warnings()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False), quiet:
        layer: Any = build().train(training)
        recorder = _Recorder(layer, inputs)
        vars(layer).update(plain or {})
        if parts:
            layer._modules |= {name: _Step(name, recorder) if there else None for name, there in parts.items()}
        try:
            warnings.simplefilter("ignore")  # the layer is only looked at
            if kind is not None:
                layer.__class__ = _watched(kind, {*dir(layer)}, recorder)
            with recorder:
                result = layer.forward(inputs)
        except Exception:  # a user's forward may need anything
            return "strays" if recorder.strayed else "fails"
    return "strays" if recorder.strayed else (recorder.calls, recorder.name(result))


def _watched(kind: type[nn.Module], known: set[str], recorder: _Recorder) -> type[nn.Module]:
    """Return a class derived from a user's that stops where it reads attributes other than these and its methods."""
    methods = (FunctionType, staticmethod, classmethod)
    defined = (entry for each in kind.__mro__ for entry in vars(each).items())
    allowed = known | {name for name, value in defined if isinstance(value, methods)}

    def look_up(self: Any, name: str) -> Any:
        if name not in allowed:
            recorder.strayed = True
            raise LookupError(name)  # before it says anything, such as that this layer is not complete
        return kind.__getattribute__(self, name)

    def assign(self: Any, name: str, value: object) -> None:
        recorder.strayed = True
        raise AttributeError(name)

    about = {"__getattribute__": look_up, "__setattr__": assign, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), about)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations. Tensors have the names of what made them, so that records of two layers can be compared."""

    def __init__(self, layer: nn.Module, inputs: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []
        self.strayed = False
        self._names: dict[int, Any] = {id(inputs): "inputs"}
        self._names |= {id(value): f"own {name}" for name, value in (layer._parameters | layer._buffers).items()}
        self._alive: list[Any] = []  # so that no id is reused

    def name(self, value: Any) -> Any:
        """Return the name of a tensor. One that comes from elsewhere is equal to no other."""
        return self._names.get(id(value), object())

    def step(self, name: str, value: Tensor) -> Tensor:
        """Record the call of a submodule, and return its result."""
        self.calls.append((name, self.name(value)))
        with _disable_current_modes():  # what the submodule computes is not recorded
            result = value.clone()
        self._names[id(result)] = name
        self._alive.append(result)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, tree_map_only(Tensor, self.name, (args, kwargs or {}))))
        result = func(*args, **(kwargs or {}))
        for place, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self._names.setdefault(id(leaf), (len(self.calls), place))
                self._alive.append(leaf)
        return result


class _Step(nn.Module):
    """Stands for a submodule of a batch norm."""

    def __init__(self, name: str, recorder: _Recorder) -> None:
        super().__init__()
        self.name, self._recorder = name, recorder

    def forward(self, input: Tensor) -> Tensor:
        return self._recorder.step(self.name, input)
