"""Features of all processes as one batch, with gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared_core.errors import ConfigError
from shared_core.ranks import world_size


def gather_features(features: Tensor, *, group: Any = None) -> Tensor:
    """Return the rows of all processes, rank 0's first; the tensor itself with one process.

    Its backward sums the gradients of all processes' losses for the rows of this one. If each process computes the
    same loss of the gathered batch and the gradients are averaged over processes, as DDP does, the parameters get
    the gradient of one process on the joined batch. It is a collective, forward and backward: every process must
    call both. The numbers of rows may differ, even be 0.

    Args:
        features: ``(b, ...)``, any float dtype; all but the first dimension equal on all processes.
        group: The process group; None is the default one.

    Returns:
        ``(sum of b, ...)`` of the same dtype and device.

    Raises:
        ConfigError: If there is no dimension of rows, or widths differ between processes.

    Example:
        >>> gather_features(torch.tensor([[1.0, 2.0]])).tolist()
        [[1.0, 2.0]]
    """
    if not features.ndim:
        raise ConfigError("gather_features: features must have the shape (rows, ...), got a scalar")
    if world_size() == 1 or dist.get_world_size(group) == 1:
        return features
    gathered: Tensor = _Gather.apply(features, group)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    # torch.distributed.nn's all_gather (2.13) needs as many rows on every rank, which a last batch does not have

    @staticmethod
    def forward(ctx: Any, features: Tensor, group: Any) -> Tensor:
        ranks, own = dist.get_world_size(group), dist.get_rank(group)
        size = torch.tensor([len(features), math.prod(features.shape[1:])], device=features.device)
        sizes = [torch.empty_like(size) for _ in range(ranks)]
        dist.all_gather(sizes, size, group=group)
        rows, widths = torch.stack(sizes).T.tolist()
        if len(set(widths)) > 1:
            raise ConfigError(f"gather_features: features must be as wide on every rank, got {widths}")
        padded = features.new_zeros(max(rows), *features.shape[1:])
        padded[: len(features)] = features.detach()
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=group)
        ctx.group, ctx.start, ctx.rows = group, sum(rows[:own]), rows[own]
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.start : ctx.start + ctx.rows], None
