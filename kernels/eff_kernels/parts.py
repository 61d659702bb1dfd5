"""Passes over a large tensor on a CPU, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eff_kernels._triton.launch import is_plain

_PART = 1 << 17  # values: in float32, a few tensors of this size fit into a cache


def by_parts(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)`` for a function of several passes that treats each row along the first axis alone.

    On a CPU it gets a few rows of a large tensor at a time, so that all passes but the first and the last find their
    values in the cache. A compiler fuses the passes anyway.

    Args:
        function: Returns a tensor of the shape and dtype that it gets.
        x: At least one axis.

    Example:
        >>> by_parts(lambda rows: rows - rows.amax(1, keepdim=True), torch.tensor([[1.0, 2.0], [5.0, 3.0]]))
        tensor([[-1.,  0.],
                [ 0., -2.]])
    """
    if not x.is_cpu or x.numel() <= _PART or not is_plain(x) or torch.compiler.is_compiling():
        return function(x)
    result = torch.empty_like(x)
    rows = max(1, _PART * len(x) // x.numel())
    for part, target in zip(torch.split(x, rows), torch.split(result, rows), strict=True):
        target.copy_(function(part))
    return result
