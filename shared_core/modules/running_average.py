"""One step of running averages: of a run's weights, and of the student that becomes its own teacher."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def move_towards_(means: Iterable[Tensor], values: Iterable[Tensor], weight: float) -> None:
    """Replace each mean by ``m + weight (x - m)``, in the mean's dtype. `weight` is in [0, 1]."""
    alike: list[tuple[Tensor, Tensor]] = []
    for mean, value in zip(means, values, strict=True):
        if mean.dtype == value.dtype:
            alike.append((mean, value))
        else:  # one by one, so that only one tensor has a wide copy at a time
            mean.lerp_(value.to(mean.dtype), weight)
    if alike:
        torch._foreach_lerp_([mean for mean, _ in alike], [value for _, value in alike], weight)
