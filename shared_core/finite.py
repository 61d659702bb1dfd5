"""Whether many tensors hold neither NaN nor infinity."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether every element of every tensor is finite; one read of the device for all of them.

    Args:
        tensors: Floating point, dense, any shapes, dtypes and devices; none, or empty ones, are finite.

    Example:
        >>> all_finite([torch.ones(2), torch.zeros(0)]), all_finite([torch.ones(2), torch.tensor(math.nan)])
        (True, False)
    """
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not filled:
        return True
    # the largest magnitude is not finite where an element is not
    largest = torch._foreach_norm(filled, math.inf)
    return bool(torch.stack([one.isfinite().to(filled[0].device) for one in largest]).all())
