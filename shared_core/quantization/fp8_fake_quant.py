"""Fake quantisation to FP8: what a value becomes when it is stored as a float of eight bits."""

from __future__ import annotations

from typing import Literal

import torch
from eff_kernels import quantization_group as kernels
from torch import Tensor

from shared_core.errors import ConfigError, did_you_mean
from shared_core.quantization.fake_quant import check_axis, check_floats

_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def fp8_fake_quantize(
    x: Tensor, format: Literal["fp8_e4m3", "fp8_e5m2"] = "fp8_e4m3", axis: int | None = None
) -> Tensor:
    """Return `x` rounded to FP8 under a scale that puts the largest magnitude on the largest value.

    ``s = max(max|x|, 2⁻¹²⁶·M)/M`` with M the format's largest value, ``x̂ = s·cast(x/s)``, halves to even. No value lies
    outside, so the gradient passes everywhere. What shares a scale with a value that is not finite becomes NaN: the
    format saturates, and an overflow would not be seen.

    Args:
        x: Any shape and floating type, with elements; computed in float32.
        format: ``"fp8_e4m3"`` for weights and activations, ``"fp8_e5m2"`` for gradients.
        axis: One scale for each channel along this axis; None: one for all.

    Returns:
        Of the shape and type of `x`.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.

    Example:
        >>> fp8_fake_quantize(torch.tensor([448.0, 17.0, 1.0]))
        tensor([448.,  16.,   1.])
    """
    where = "fp8_fake_quantize"
    check_floats(where, x)
    check_axis(where, x, axis)
    if x.numel() == 0:
        raise ConfigError(f"{where}: x must have elements, got shape {tuple(x.shape)}")
    if format not in _DTYPES:
        raise ConfigError(
            f"{where}: format must be one of {sorted(_DTYPES)}, got {format!r}{did_you_mean(format, _DTYPES)}"
        )
    return kernels.fake_quantize_fp8(x, _DTYPES[format], axis)
