"""Recognize classes of users and libraries that compute what a stock layer of torch computes, by their operations.

The forward runs on a small layer that has only what the stock class has, beside the stock forward. It counts as the
same if both run the same operations on the same tensors, and if it reads no attribute that the stock class lacks, also
with weights of eight bits, for which layers of quantized models have other code.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from shared_core.modules.weight_views import CONVOLUTIONS

_NARROW = (torch.float8_e4m3fn, torch.int8, torch.uint8)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_Build = Callable[[], nn.Module]


@functools.cache
def computes_like(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return True if a class derived from a linear layer or convolution computes exactly that.

    Example:
        >>> class Wrapped(nn.Linear):
        ...     __module__ = "users_code"
        ...     def forward(self, x):
        ...         return nn.functional.linear(x, self.weight, self.bias)
        >>> class Scaled(Wrapped):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> computes_like(Wrapped, nn.Linear), computes_like(Scaled, nn.Linear)
        (True, False)
    """
    if not _is_judged(kind, base) or (base is not nn.Linear and base not in CONVOLUTIONS):
        return False
    cases = _linear_cases() if base is nn.Linear else _convolution_cases(base)
    # if types differ both fail, else the class casts
    return all(
        _trace(build, inputs, training) == _trace(build, inputs, training, kind)
        for build, inputs in cases
        for training in (True, False)
    )


def steps_after_norm(module: nn.Module) -> tuple[str, ...] | None:
    """Return the submodules that a batch norm's forward calls on its result, in order; None if it does other things.

    Example:
        >>> class Activated(nn.BatchNorm2d):
        ...     __module__ = "users_code"
        ...     def __init__(self, channels):
        ...         super().__init__(channels)
        ...         self.act = nn.ReLU()
        ...     def forward(self, x):
        ...         return self.act(super().forward(x))
        >>> steps_after_norm(Activated(2)), steps_after_norm(nn.BatchNorm2d(2)), steps_after_norm(nn.SyncBatchNorm(2))
        (('act',), (), None)
    """
    kind: Any = type(module)
    if kind in NORMS:
        return ()
    base = next((base for base in NORMS if issubclass(kind, base)), None)
    parts = tuple((name, child is not None) for name, child in module._modules.items())
    return None if base is None else _steps(kind, base, parts)


@functools.cache
def _steps(kind: type[nn.Module], base: type[nn.Module], parts: tuple[tuple[str, bool], ...]) -> tuple[str, ...] | None:
    if not _is_judged(kind, base):
        return None
    found: set[tuple[str, ...]] = set()
    for (build, inputs), training in itertools.product(_norm_cases(base), (True, False)):
        theirs, mine = _trace(build, inputs, training), _trace(build, inputs, training, kind, dict(parts))
        if isinstance(theirs, str) or isinstance(mine, str):
            return None
        (calls, value), (all_calls, result) = theirs, mine
        steps = tuple(name for name, _ in all_calls[len(calls) :] if isinstance(name, str))
        for name in steps:  # each reads the result of the one before it
            calls, value = [*calls, (name, value)], name
        if (all_calls, result) != (calls, value) or len({*steps}) < len(steps):
            return None
        found.add(steps)
    return found.pop() if len(found) == 1 else None


def _is_judged(kind: Any, base: Any) -> bool:
    # torch's own subclasses are called by other code of torch, and ours are layers of techniques
    return kind.__call__ is base.__call__ and not kind.__module__.startswith(("torch.", "shared_core."))


def _linear_cases() -> Iterator[tuple[_Build, Tensor]]:
    for bias in (True, False):
        build = functools.partial(nn.Linear, 3, 5, bias, "cpu")
        for shape in ((3,), (2, 3), (2, 4, 3)):
            for dtype in (torch.float32, torch.bfloat16):
                yield functools.partial(build, dtype), torch.ones(shape, dtype=dtype, device="cpu")
        yield functools.partial(build, torch.float32), torch.ones(2, 3, dtype=torch.bfloat16, device="cpu")
        for dtype in _NARROW:
            yield functools.partial(_narrowed, build, dtype), torch.ones(2, 3, dtype=torch.float32, device="cpu")


def _convolution_cases(base: Any) -> Iterator[tuple[_Build, Tensor]]:
    place = CONVOLUTIONS.index(base)
    padded: dict[str, Any] = {"padding": 1, **({"padding_mode": "circular"} if place < 3 else {"output_padding": 1})}
    types = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
    for options in ({"stride": 2}, {"dilation": 2, "groups": 2, "bias": False}, {"stride": 2, **padded}):
        for dtype, of_inputs in types:
            build = functools.partial(base, 4, 6, 3, device="cpu", dtype=dtype, **options)
            for side in (6, 9):
                yield build, torch.ones(2, 4, *[side] * (place % 3 + 1), dtype=of_inputs, device="cpu")
        for dtype in _NARROW:
            build = functools.partial(_narrowed, functools.partial(base, 4, 6, 3, device="cpu", **options), dtype)
            yield build, torch.ones(2, 4, *[6] * (place % 3 + 1), dtype=torch.float32, device="cpu")


def _narrowed(build: Callable[..., nn.Module], dtype: torch.dtype) -> nn.Module:
    layer = build(dtype=torch.float32)
    layer.weight = nn.Parameter(layer.get_parameter("weight").detach().to(dtype), requires_grad=False)
    return layer


def _norm_cases(base: Any) -> Iterator[tuple[_Build, Tensor]]:
    shapes = ((4, 3), (4, 3, 2)) if base is nn.BatchNorm1d else ((4, 3, *[2] * (NORMS.index(base) + 1)),)
    for shape in shapes:
        for momentum, affine in ((0.1, True), (None, False)):
            build = functools.partial(base, 3, 1e-5, momentum, affine, device="cpu", dtype=torch.float32)
            yield build, torch.ones(shape, device="cpu", dtype=torch.float32)


def _trace(
    build: _Build,
    inputs: Tensor,
    training: bool,
    kind: type[nn.Module] | None = None,
    parts: Mapping[str, bool] | None = None,
) -> tuple[list[Any], Any] | str:
    """Return (operations, result) of a layer's forward, or of that of a derived class; ``"fails"`` or ``"strays"``.

    `parts` are the submodules of that class, and whether they are there.
    """
    quiet = warnings.catch_warnings()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False), quiet:
        layer: Any = build().train(training)
        recorder = _Recorder(layer, inputs)
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

    return type(kind.__name__, (kind,), {"__getattribute__": look_up, "__module__": kind.__module__})


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
