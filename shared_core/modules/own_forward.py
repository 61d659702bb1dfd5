"""Detect forwards that bypass the stored weight: those of user classes, and torch's fused evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared_core.modules.attention import OpenAttention, is_stock_attention, opened
from shared_core.modules.calls import buffers_restored, modes_restored
from shared_core.modules.like_stock import stock_kind
from shared_core.modules.matching import change_class, own_class
from shared_core.modules.weight_views import CONVOLUTIONS

COMPUTED = "its forward multiplies by a weight that it computes from the stored one"
UNKNOWN = "its custom forward does not run on a small input"

_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "matmul", "convolution", "mkldnn_linear", "_convolution",
)  # fmt: skip


def why_computed(module: nn.Module, *, keeps_zeros: bool = False) -> str | None:
    """Return why a linear or convolutional layer may not multiply by its stored weight; None if it does.

    A layer with torch's forward multiplies by its weight. Any other is run on a small input, in evaluation mode
    and without gradients. Its buffers and the random state are not changed.

    Args:
        module: A module with a parameter `weight`.
        keeps_zeros: Also accept a weight that is 0 where the stored one is and whose elements do not depend on each
            other, such as a masked weight or one times a constant.

    Example:
        >>> class Centered(nn.Linear):
        ...     __module__ = "users_code"
        ...     def forward(self, x):
        ...         return nn.functional.linear(x, self.weight - self.weight.mean())
        >>> why_computed(nn.Linear(2, 2)), why_computed(Centered(2, 2))
        (None, 'its forward multiplies by a weight that it computes from the stored one')
    """
    kind: Any = own_class(module)
    is_own = not kind.__module__.startswith(("torch.", "shared_core."))
    if not is_own or stock_kind(kind) is not None or not isinstance(module, (nn.Linear, *CONVOLUTIONS)):
        return None
    stored = module.weight.detach()
    with modes_restored(module), buffers_restored(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
        module.eval()
        try:
            seen = _products(module, stored)
            if seen.stored or not keeps_zeros or stored.is_meta:
                return None if seen.stored else COMPUTED
            ones = torch.ones_like(stored)
            kept = (torch.arange(stored.numel(), device=stored.device) % 2).view(stored.shape).bool()
            full, half = (_products(module, values).used for values in (ones, ones * kept))
        except Exception:  # a user's forward may need anything
            return UNKNOWN
    is_kept = [
        any(_equal(one, half_of, other) for half_of in (kept, kept.mT)) for one, other in zip(full, half, strict=True)
    ]
    return None if is_kept and all(is_kept) else COMPUTED


def _equal(whole: Tensor, kept: Tensor, half: Tensor) -> bool:
    return whole.shape == kept.shape and torch.equal(whole * kept, half)


def _products(module: Any, weight: Tensor) -> _Products:
    """Return the factors that a layer with this weight multiplies by on a small input."""
    try:
        vars(module)["weight"] = weight  # Python finds it before the parameter of that name
        seen = _Products(weight)
        with seen:
            own_class(module).forward(module, _input(module))
    finally:
        del vars(module)["weight"]
    return seen


def _input(module: Any) -> Tensor:
    like = {"device": module.weight.device, "dtype": module.weight.dtype}
    rows = next(count for count in range(2, 9) if count not in module.weight.shape)  # must not look like the weight
    if isinstance(module, nn.Linear):
        return torch.ones(rows, module.in_features, **like)
    sides = [step * (size - 1) + 3 for size, step in zip(module.kernel_size, module.dilation, strict=True)]
    return torch.ones(rows, module.in_channels, *sides, **like)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches for products by a weight or a view of it, and records other factors with its shape."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage, self._shape = weight.untyped_storage()._cdata, weight.shape
        self.stored = False
        self.used: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _PRODUCTS:
            for leaf in tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata == self._storage:
                    self.stored = True
                elif isinstance(leaf, Tensor) and leaf.ndim > 1 and self._shape in (leaf.shape, leaf.mT.shape):
                    self.used.append(leaf.clone())
        return func(*args, **(kwargs or {}))


Undo = list[Callable[[], object]]


def fast_paths_off(model: nn.Module, layers: tuple[type[nn.Module], ...]) -> Undo:
    """Switch off code of torch that reads weights and bypasses swapped layers.

    That is the fused evaluation of `nn.TransformerEncoder`, and `nn.MultiheadAttention`, which never calls its output
    projection: it becomes an `OpenAttention`.
    """
    undo: Undo = []
    for parent in model.modules():
        if not any(isinstance(child, layers) for child in parent.modules()):
            continue
        kind: Any = own_class(parent)
        if is_stock_attention(kind) and not issubclass(kind, OpenAttention):
            undo.append(partial(_close, parent))
            change_class(parent, kind, opened(kind))
        name = {nn.TransformerEncoderLayer: "activation_relu_or_gelu", nn.TransformerEncoder: "use_nested_tensor"}.get(
            type(parent)
        )
        if name is not None and hasattr(parent, name):
            undo.append(partial(setattr, parent, name, getattr(parent, name)))
            # 0: no activation known to the fused kernel, and nested tensors off.
            setattr(parent, name, 0)
    return undo


def close_attention(model: nn.Module) -> None:
    """Give opened attention whose output projection is torch's again its own class."""
    for module in model.modules():
        if isinstance(module, OpenAttention) and own_class(module.out_proj) is NonDynamicallyQuantizableLinear:
            _close(module)


def _close(module: nn.Module) -> None:
    kind: Any = own_class(module)
    if issubclass(kind, OpenAttention) and kind is opened(stock := kind.__bases__[-1]):
        change_class(module, kind, stock)


def fast_paths_on(undo: Undo) -> None:
    """Undo `fast_paths_off`, and empty its list."""
    while undo:
        undo.pop()()
