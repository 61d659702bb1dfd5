"""Recognize layers of users and libraries that compute what a stock layer of torch computes, by their operations.

The forward runs on a small layer that has only what the stock class has, beside the stock forward. It counts as the
same if both run the same operations on the same tensors, and if it reads no attribute that the stock class lacks, also
with weights of eight bits, for which layers of quantized models have other code.

If the class alone does not decide, because it reads attributes of its own or derives from no stock class, the layer
does: its forward runs on a copy without values (device meta) that has the layer's plain attributes. The layer itself
is never called.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from shared_core.modules.attention import is_stock_attention
from shared_core.modules.matching import change_class, conv1d_kind, own_class
from shared_core.modules.recording import Build, trace
from shared_core.modules.weight_views import CONVOLUTIONS, RECURRENT

_BASES = (nn.Linear, *CONVOLUTIONS, nn.Embedding, *RECURRENT, nn.MultiheadAttention)
_NARROW = (torch.float8_e4m3fn, torch.int8, torch.uint8)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_Function = TypeVar("_Function", bound=Callable[..., Any])


def stock_kind(kind: Any) -> type[nn.Module] | None:
    """Return the class of torch or transformers that a class computes; None if it computes something else.

    That is a class that keeps the forward, has one that runs the same operations (`computes_like`), or was made by
    `take_look_alikes`.

    Example:
        >>> class Orthogonal(nn.Linear):
        ...     def reset_parameters(self):
        ...         nn.init.orthogonal_(self.weight)
        >>> stock_kind(Orthogonal), stock_kind(nn.LazyLinear)
        (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    if kind in _TAKEN:
        return _TAKEN[kind][1]  # type: ignore[no-any-return]
    for base in (*_BASES, conv1d_kind(kind)):
        if base is None or not issubclass(kind, base):
            continue
        if base is nn.MultiheadAttention:
            return base if is_stock_attention(kind) else None
        # torch's other subclasses are called by other code of torch, or not at all. Attention's projection is a linear
        # layer, which `fast_paths_off` has called.
        is_own = kind in (base, NonDynamicallyQuantizableLinear) or not kind.__module__.startswith("torch.")
        methods = [name for name in ("forward", "_conv_forward", "__call__") if hasattr(base, name)]
        keeps_all = all(getattr(kind, name) is getattr(base, name) for name in methods)
        return base if is_own and (keeps_all or computes_like(kind, base)) else None
    return None


def why_not_stock(module: nn.Module) -> str:
    """Return why a layer whose class `stock_kind` does not take for a stock layer is left out."""
    kind = own_class(module)
    if parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization"
    return f"{kind.__name__} has a forward of its own, which is not that of a stock layer"


def why_not_float(weights: Collection[Tensor]) -> str | None:
    """Return why these are not a layer's weights in floating point, None if they are."""
    if not weights:
        return "its weight is computed by other code (a parametrization, torch.nn.utils.prune)"
    odd = next((weight.dtype for weight in weights if not weight.is_floating_point()), None)
    return None if odd is None else f"its weight is {odd}, not floating point"


def take_look_alikes(model: nn.Module) -> list[nn.Module]:
    """Give each layer that computes a stock layer without deriving from it a class that derives from both, in place.

    All techniques then take it for the stock layer. The new class has the name and the code of the user's. Attributes,
    parameters and keys stay as they are. Returns the changed layers, whose classes `leave_look_alikes` restores.

    Example:
        >>> class Dense(nn.Module):  # as in torch_geometric
        ...     __module__ = "users_code"
        ...     def __init__(self, channels):
        ...         super().__init__()
        ...         self.weight, self.bias = nn.Parameter(torch.ones(channels, channels)), None
        ...     def forward(self, x):
        ...         return nn.functional.linear(x, self.weight, self.bias)
        >>> layer = Dense(3)
        >>> _ = take_look_alikes(layer)
        >>> isinstance(layer, nn.Linear), layer.in_features
        (True, 3)
        >>> leave_look_alikes([layer])
        >>> type(layer) is Dense
        True
    """
    taken = []
    for module in model.modules():
        kind: Any = own_class(module)
        if (base := _look_alike(module, kind)) is not None:
            change_class(module, kind, _both(kind, base))
            taken.append(module)
    return taken


def leave_look_alikes(layers: Iterable[nn.Module]) -> None:
    """Restore the classes that `take_look_alikes` changed. Layers that a technique has changed since keep theirs."""
    for module in layers:
        kind = own_class(module)
        if kind in _TAKEN:
            change_class(module, kind, _TAKEN[kind][0])


def class_of_user(module: nn.Module) -> Any:
    """Return a layer's class before `take_look_alikes` and before FSDP2 sharded it."""
    kind = own_class(module)
    return _TAKEN[kind][0] if kind in _TAKEN else kind


@contextlib.contextmanager
def look_alikes_taken(model: nn.Module) -> Iterator[None]:
    """Take look-alikes for stock layers, as `take_look_alikes` does, and restore their classes at the end."""
    taken = take_look_alikes(model)
    try:
        yield
    finally:
        leave_look_alikes(taken)


def taking_look_alikes(function: _Function) -> _Function:
    """Return a function of a model that takes look-alikes for stock layers while it runs.

    Used as a decorator. Classes are restored at the end.
    """

    @functools.wraps(function)
    def taken(model: Any, *args: Any, **kwargs: Any) -> Any:
        with look_alikes_taken(model) if isinstance(model, nn.Module) else contextlib.nullcontext():
            return function(model, *args, **kwargs)

    return cast("_Function", taken)


class _Both(type):
    """Class of the classes that derive from a user's class and a stock class. Pickle finds them by those two."""


_TAKEN: dict[Any, tuple[Any, Any]] = {}
_OF_EMBEDDINGS = {
    "padding_idx": None, "max_norm": None, "norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False
}  # fmt: skip


class _Size:
    """A size of the weight, for layers that do not store it. Attributes of the layer come first."""

    def __init__(self, axis: int) -> None:
        self._axis = axis

    def __get__(self, module: Any, owner: type) -> int:
        return int(module.weight.shape[self._axis])


@functools.cache
def _both(kind: Any, base: Any) -> Any:
    about: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__, "__deepcopy__": _deep_copy}
    if not issubclass(kind, base):
        names = ("out_features", "in_features") if base is nn.Linear else ("num_embeddings", "embedding_dim")
        about |= {name: _Size(axis) for axis, name in enumerate(names)}
        about |= _OF_EMBEDDINGS if base is nn.Embedding else {}
    made = _Both(kind.__name__, (kind,) if issubclass(kind, base) else (kind, base), about)
    _TAKEN[made] = kind, base
    return made


copyreg.pickle(_Both, lambda made: (_both, _TAKEN[made]))  # type: ignore[arg-type, return-value]


def _deep_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    # a user's own would return a layer of the user's class
    made = memo[id(module)] = type(module).__new__(type(module))
    vars(made).update(copy.deepcopy(vars(module), memo))
    return made


def _look_alike(module: Any, kind: Any) -> Any:
    """Return the stock class that a layer computes although `stock_kind` does not take its class for one."""
    if kind.__module__.startswith("torch.") or kind in _TAKEN:
        return None
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None:
        return None
    held = {**module._parameters, **module._modules, **module._buffers}
    if {name for name, value in held.items() if value is not None} - {"weight", "bias"}:
        return None
    if is_lazy(weight) or not weight.is_floating_point() or "forward" in vars(module) or stock_kind(kind) is not None:
        return None
    bases = [base for base in _BASES if issubclass(kind, base)]
    if not bases and weight.ndim == 2:
        bases = [nn.Linear] if bias is not None else [nn.Linear, nn.Embedding]
    for base in bases:
        arguments = _arguments(module, base) if base not in RECURRENT and _is_judged(kind, nn.Module) else ()
        if arguments and (
            computes_like(kind, base)
            or _layer_computes(kind, base, arguments, tuple(_plain_attributes(module, kind).items()))
        ):
            return base
    return None


def _plain_attributes(module: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
    """Return the attributes of a layer and its class that its copy may have, apart from those of the stock layer."""
    ours = [each for each in kind.__mro__ if not each.__module__.startswith("torch.")]
    known: dict[str, Any] = {name: value for each in reversed(ours) for name, value in vars(each).items()}
    known |= module._modules | module._buffers | vars(module)
    return {
        name: value for name, value in known.items()
        if _is_plain(value) and name != "training" and not name.startswith("__")
    }  # fmt: skip


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype, torch.device)


def _arguments(module: Any, base: type[nn.Module]) -> tuple[tuple[str, Any], ...]:
    """Return the arguments that build the stock layer, or none if the layer's attributes do not fit its weight."""
    bias = module._parameters.get("bias") is not None
    given = {"device": "meta", "dtype": module.weight.dtype}
    if base is nn.Linear:
        given |= {"in_features": module.weight.shape[1], "out_features": module.weight.shape[0], "bias": bias}
    elif base is nn.Embedding:
        stored = {name: vars(module).get(name, default) for name, default in _OF_EMBEDDINGS.items()}
        given |= {"num_embeddings": module.weight.shape[0], "embedding_dim": module.weight.shape[1], **stored}
    else:
        names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups"]
        names += ["padding_mode", *(["output_padding"] if module.transposed else [])]
        given |= {name: getattr(module, name) for name in names} | {"bias": bias}
    with contextlib.suppress(TypeError, ValueError):
        stock: Any = base(**given)
        mine, theirs = (_plain_attributes(one, type(one)) for one in (module, stock))
        fits = all(mine[name] == value for name, value in theirs.items() if name in mine)
        fits &= all(
            value is None or value.shape == stock._parameters[name].shape for name, value in module._parameters.items()
        )
        return tuple(given.items()) if fits else ()
    return ()


@functools.cache
def _layer_computes(
    kind: Any,
    base: Any,
    arguments: tuple[tuple[str, Any], ...],
    plain: tuple[tuple[str, Any], ...],
) -> bool:
    return all(
        trace(build, inputs, training) == trace(build, inputs, training, kind, plain=dict(plain))
        for build, inputs in _layer_cases(base, dict(arguments))
        for training in (True, False)
    )


def _layer_cases(base: Any, arguments: dict[str, Any]) -> Iterator[tuple[Build, Tensor]]:
    own = arguments.pop("dtype")
    for dtype in dict.fromkeys((own, torch.bfloat16)):
        build = functools.partial(base, dtype=dtype, **arguments)
        shapes = list(_shapes(base, arguments))
        of_inputs = torch.int64 if base is nn.Embedding else dtype
        for shape in shapes:
            yield build, torch.ones(shape, dtype=of_inputs, device="meta")
        for narrow in _NARROW:
            small = functools.partial(_narrowed, build, narrow)
            yield small, torch.ones(shapes[0], dtype=of_inputs, device="meta")
        if base is not nn.Embedding:  # under autocast inputs may be of another type
            yield build, torch.ones(shapes[0], dtype=torch.float16, device="meta")


def _shapes(base: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    if base in (nn.Linear, nn.Embedding):
        last = (arguments["in_features"],) if base is nn.Linear else ()
        yield from ((2, *last), (2, 3, 4, *last), last or (5,))
        return
    sizes = zip(arguments["kernel_size"], arguments["dilation"], arguments["stride"], strict=True)
    least = [step * (size - 1) + 1 + 2 * stride for size, step, stride in sizes]
    for more in range(2 * max(arguments["stride"]) + 1):  # a forward may pad by the size of its input
        yield 2, arguments["in_channels"], *[side + more for side in least]


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
        trace(build, inputs, training) == trace(build, inputs, training, kind)
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
        theirs, mine = trace(build, inputs, training), trace(build, inputs, training, kind, dict(parts))
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


def _linear_cases() -> Iterator[tuple[Build, Tensor]]:
    for bias in (True, False):
        build = functools.partial(nn.Linear, 3, 5, bias, "cpu")
        for shape in ((3,), (2, 3), (2, 4, 3)):
            for dtype in (torch.float32, torch.bfloat16):
                yield functools.partial(build, dtype), torch.ones(shape, dtype=dtype, device="cpu")
        yield functools.partial(build, torch.float32), torch.ones(2, 3, dtype=torch.bfloat16, device="cpu")
        for dtype in _NARROW:
            yield functools.partial(_narrowed, build, dtype), torch.ones(2, 3, dtype=torch.float32, device="cpu")


def _convolution_cases(base: Any) -> Iterator[tuple[Build, Tensor]]:
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


def _norm_cases(base: Any) -> Iterator[tuple[Build, Tensor]]:
    shapes = ((4, 3), (4, 3, 2)) if base is nn.BatchNorm1d else ((4, 3, *[2] * (NORMS.index(base) + 1)),)
    for shape in shapes:
        for momentum, affine in ((0.1, True), (None, False)):
            build = functools.partial(base, 3, 1e-5, momentum, affine, device="cpu", dtype=torch.float32)
            yield build, torch.ones(shape, device="cpu", dtype=torch.float32)
