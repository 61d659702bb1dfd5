"""Forms that round: 16-bit floats, and 8-bit codes in groups with stochastic rounding."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shared_core.saved_activations.forms import Form, Parts

LEVELS = 255


def narrow_form(flat: Tensor, dtype: torch.dtype) -> Form:
    """Return values rounded to a 16-bit format, to nearest; relative error at most 2^-8 (bf16) or 2^-11 (fp16).

    Values beyond float16's range become its largest; NaN and infinity stay.

    Example:
        >>> form = narrow_form(torch.tensor([1.001, 1e6]), torch.float16)
        >>> form.rebuild(form.parts)
        tensor([1.0010e+00, 6.5504e+04])
    """
    if dtype is torch.float16:
        bound = torch.finfo(dtype).max
        flat = flat.where(flat.isinf(), flat.clamp(-bound, bound))
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return Form(name, (flat.to(dtype),), partial(_widened, dtype=flat.dtype))


def _widened(parts: Parts, dtype: torch.dtype) -> Tensor:
    return parts[0].to(dtype)


def int8_form(flat: Tensor, group_size: int, generator: torch.Generator | None = None) -> Form:
    """Return values as 8-bit codes, each group of consecutive ones with a scale and zero point of its own.

    ``code = ⌊(x - min) / s + u⌋`` with ``s = (max - min) / 255`` and u uniform on [0, 1), so the mean over draws of
    ``code · s + min`` is x, and its variance at most s²/4. A group with NaN or infinity becomes NaN.

    Args:
        flat: (n,) of any floating type up to 32 bits.
        group_size: Values in a group; the last one may have fewer.
        generator: Source of u, on the device of `flat`.

    Source: Chen et al. 2021, ActNN, arXiv:2104.14294.

    Example:
        >>> form = int8_form(torch.tensor([0.0, 51.0, 255.0, -1.0]), 3)
        >>> form.rebuild(form.parts), form.nbytes
        (tensor([  0.,  51., 255.,  -1.]), 20)
    """
    count, dtype = flat.numel(), flat.dtype
    groups = flat.float()
    if padding := -count % group_size:
        groups = torch.cat([groups, groups[-1:].expand(padding)])
    groups = groups.view(-1, group_size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / LEVELS
    # multiplied by the inverse, a value at the top would not always come to 255
    codes = (groups - low).div_(scale.where(scale > 0, 1.0))
    codes += torch.rand(codes.shape, generator=generator, device=codes.device)
    # NaN has no code; its group's scale is NaN, which makes NaN of all of them
    codes = codes.floor_().clamp_(0, LEVELS).nan_to_num_(0.0).to(torch.uint8)
    scale = scale.where(scale.isfinite(), torch.nan)

    def rebuild(parts: Parts) -> Tensor:
        codes = torch.cat([parts[0], parts[0].new_zeros(padding)]) if padding else parts[0]
        return (codes.view(-1, group_size) * parts[1]).add_(parts[2]).view(-1)[:count].to(dtype)

    return Form("int8", (codes.view(-1)[:count].clone() if padding else codes.view(-1), scale, low), rebuild)
