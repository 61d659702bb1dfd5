"""Inputs quantised by what they hold when they are seen: no range is kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from eff_kernels.quantization_group import fake_quantize_fp8, fake_quantize_groups
from torch import Tensor, nn

from shared_core.quantization.block_fake_quant import mxfp4_fake_quantize, nvfp4_fake_quantize
from shared_core.quantization.schemes import LayerScheme


def _token(x: Tensor, scheme: LayerScheme) -> Tensor:
    return fake_quantize_groups(x, x.shape[-1], scheme.activation_bits, not scheme.affine_input)


def _fp8(x: Tensor, scheme: LayerScheme) -> Tensor:
    return fake_quantize_fp8(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn, 0).view(x.shape)


# ``LayerScheme.input`` → a function of vectors along the last axis
_QUANTIZE: dict[str, Callable[[Tensor, LayerScheme], Tensor]] = {
    "token": _token,
    "fp8": _fp8,
    "mxfp4": lambda x, scheme: mxfp4_fake_quantize(x),
    "nvfp4": lambda x, scheme: nvfp4_fake_quantize(x),
}


def quantize_input(module: nn.Module, x: Tensor, scheme: LayerScheme) -> Tensor:
    """Return a layer's input fake-quantised by its own values, with a straight-through gradient.

    A vector of features has a scale of its own: a token's, or for a convolution that of all channels at one place.

    Args:
        module: The layer, which says where its features lie.
        x: Its input.
        scheme: How; unchanged where `LayerScheme.input` is ``none``.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> quantize_input(layer, torch.tensor([[3.0, 1.4]]), LayerScheme(input="token", activation_bits=3))
        tensor([[3., 1.]])
    """
    quantize = _QUANTIZE.get(scheme.input)
    if quantize is None or not x.numel():
        return x
    if isinstance(module, nn.modules.conv._ConvNd):
        axis = -1 - len(module.kernel_size)
        return quantize(x.movedim(axis, -1), scheme).movedim(-1, axis)
    return quantize(x, scheme)
