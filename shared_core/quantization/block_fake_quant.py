"""Fake quantisation in the block formats: their round trip, with a straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared_core.numerics.block_formats import mx_round_to, nvfp4_round_to


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, nvfp4: bool) -> Tensor:
        return nvfp4_round_to(x, per_tensor_scale=None, dtype=x.dtype) if nvfp4 else mx_round_to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def mxfp4_fake_quantize(x: Tensor) -> Tensor:
    """Return `x` rounded to MXFP4 in blocks of 32 along the last axis, see `mx_round_to`; gradient 1.

    Args:
        x: At least one axis, floating point.

    Source: Rouhani et al. 2023, arXiv:2310.10537.

    Example:
        >>> mxfp4_fake_quantize(torch.tensor([1.0, 0.3, 7.0, -0.1])).tolist()
        [1.0, 0.5, 6.0, -0.0]
    """
    return _StraightThrough.apply(x, False)  # type: ignore[no-untyped-call, no-any-return]


def nvfp4_fake_quantize(x: Tensor) -> Tensor:
    """Return `x` rounded to NVFP4 in blocks of 16 along the last axis, scaled by its own amax; gradient 1.

    Args:
        x: At least one axis, floating point.

    Source: NVIDIA 2025, arXiv:2509.25149.

    Example:
        >>> nvfp4_fake_quantize(torch.tensor([6.0, 1.25])).tolist()
        [6.0, 1.0]
    """
    return _StraightThrough.apply(x, True)  # type: ignore[no-untyped-call, no-any-return]
