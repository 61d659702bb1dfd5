"""Round weights again in backward, so that the graph does not keep the rounded ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _View(NamedTuple):
    """A view of a rounded weight: its name and its place in it."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def recomputing(rounded: Mapping[str, Tensor], again: Callable[[str], Tensor]) -> AbstractContextManager[Any]:
    """Return a context around a layer's forward in which autograd saves no view of these weights.

    Backward calls `again`, which must return the same values in the same layout. Everything else is saved as outside,
    so hooks of checkpointing or compression around the layer still see it.

    Args:
        rounded: The rounded weights by name.
        again: Rounds the weight of this name again.

    Source: Chen et al., 2016, arXiv:1604.06174, for one operation.

    Example:
        >>> weight = torch.tensor([0.6, -1.2], requires_grad=True)
        >>> kept = []
        >>> with saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        ...     rounded = weight + (weight.round() - weight).detach()
        ...     with recomputing({"weight": rounded}, lambda name: weight.detach().round()):
        ...         loss = (rounded * torch.tensor([3.0, 4.0], requires_grad=True)).sum()
        >>> loss.backward()
        >>> [x.tolist() for x in kept], weight.grad.tolist()
        ([[3.0, 4.0]], [3.0, 4.0])
    """
    names = {weight.untyped_storage()._cdata: name for name, weight in rounded.items()}
    # torch (2.13) calls the innermost hooks alone, and shows those around them only here.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: Tensor) -> Any:
        if (name := names.get(tensor.untyped_storage()._cdata)) is not None:
            return _View(name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor if outer is None else outer[0](tensor)

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, _View):
            return again(saved.name).as_strided(saved.size, saved.stride, saved.offset)
        return saved if outer is None else outer[1](saved)  # type: ignore[no-any-return]

    return saved_tensors_hooks(pack, unpack)
