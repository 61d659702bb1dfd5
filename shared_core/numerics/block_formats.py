"""Block formats MX and NVFP4, in which blocks share a scale: codes, scales and rounded values."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from eff_kernels._triton.launch import directly, on_eager_cuda
from eff_kernels.parts import by_parts
from eff_kernels.quantization.affine import in_type, values_of
from eff_kernels.rounding import GROUP_SIZES, mx_round, nvfp4_round
from torch import Tensor

from shared_core.errors import ConfigError, did_you_mean
from shared_core.numerics.formats import FORMATS
from shared_core.numerics.rounding import RoundingMode, binade, check_input, encode, round_to

Element = Literal["fp4_e2m1", "fp6_e2m3", "fp8_e4m3", "fp8_e5m2"]

BEYOND: dict[Element, float] = {"fp4_e2m1": 7.0, "fp6_e2m3": 7.75, "fp8_e4m3": 464.0}
"""Half a step beyond the largest value: from there on values are clipped."""
ELEMENTS = get_args(Element)
_ON_GPU = ("fp4_e2m1", "fp8_e4m3", "fp8_e5m2")
"""Elements that a kernel rounds in one pass."""
NVFP4_GROUP = 16
_FP4, _E4M3 = FORMATS["fp4_e2m1"], FORMATS["fp8_e4m3"]
# Smaller ones would make the reciprocal of the smallest combined scale, 2^-6 times this, infinite in float32.
_SMALLEST_TENSOR_SCALE = 2.0**-121


class Blocks(NamedTuple):
    """A tensor in a block format: bit patterns as uint8, for `decode`.

    Args:
        codes: Elements, in the shape of the tensor.
        scale: One per block, in that shape except for the axis: e8m0 (MX) or fp8_e4m3 (NVFP4).
        tensor_scale: The second scale of NVFP4, a float32 scalar; None for MX.
    """

    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None


def mx_round_to(
    x: Tensor,
    element: Element = "fp4_e2m1",
    *,
    group_size: int = 32,
    axis: int = -1,
    mode: RoundingMode = "nearest_even",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `x` rounded to a microscaling format: ``s·round(x/s)`` with one power of two `s` per block.

    ``s = 2^(floor(log2 amax) - emax)``, clamped to [2^-126, 2^127], with emax the exponent of the element's largest
    value. Values beyond it saturate. A shorter last block is padded with zeros, a block of zeros
    stays zero, and **a block with NaN or infinity becomes NaN as a whole**, because it has no scale and saturation
    would hide an overflow.

    Equal, bit for bit, to torchao's ``MXTensor.to_mx(...).dequantize()`` with the floor rule while amax is finite and
    at least ``2^(emax - 126)``. Below, torchao 0.18 divides by 2^-126 but multiplies by 2^-127.

    Args:
        x: At least one axis; float64, float32, bfloat16 or float16. Not changed.
        element: Format of the elements.
        group_size: Length of a block.
        axis: Axis of the blocks, in a matrix product the contracted axis.
        mode: How elements round, see `round_to`.
        generator: Source of the stochastic mode's randomness, on x's device.

    Returns:
        A detached tensor with the shape and dtype of `x`, which holds every result.

    Raises:
        ConfigError: Unknown element or mode, a dtype that is no float, no axis, or a group size below 1.

    Source: OCP Microscaling Formats (MX) 1.0, 6.3; Rouhani et al. 2023, arXiv:2310.10537.

    Example:
        >>> mx_round_to(torch.tensor([1.0, 0.3, 7.0, -0.1])).tolist()
        [1.0, 0.5, 6.0, -0.0]
        >>> mx_round_to(torch.tensor([1.0, 0.3, 7.0, -0.1]), "fp8_e4m3", group_size=2).tolist()
        [1.0, 0.3125, 7.0, -0.1015625]
    """
    _check("mx_round_to", x, group_size, axis)
    _check_element(element)
    has_kernel = element in _ON_GPU and group_size in GROUP_SIZES
    if mode == "nearest_even" and has_kernel and _is_last(x, axis) and on_eager_cuda(x):
        rounded: Tensor = directly(mx_round)(x.detach(), element, group_size)
        return rounded

    def round_blocks(blocks: Tensor) -> Tensor:
        scale = _mx_scale(blocks, element)
        codes = round_to(blocks / scale, element, mode=mode, generator=generator)
        return values_of(codes, scale, blocks.dtype)

    # (..., blocks, group_size), with the axis moved last. Zeros of the padding change no maximum.
    blocks = _blocks(x, group_size, axis)
    # in parts, random numbers would be others
    rounded = by_parts(round_blocks, blocks) if mode == "nearest_even" else round_blocks(blocks)
    return in_type(_joined(rounded, x, axis), x.dtype)


def mx_encode(x: Tensor, element: Element = "fp4_e2m1", *, group_size: int = 32, axis: int = -1) -> Blocks:
    """Return codes and e8m0 scales of the values of `mx_round_to`.

    The scale of a block with NaN or infinity is NaN, 255.

    Args:
        x: See `mx_round_to`.
        element: Format of the elements.
        group_size: Length of a block.
        axis: Where the blocks lie.

    Raises:
        ConfigError: As `mx_round_to`.

    Example:
        >>> codes, scale, _ = mx_encode(torch.tensor([1.0, 0.3, 7.0, -0.1]))
        >>> codes.tolist(), scale.tolist()  # 1, 0.5, 6, -0 times 2^(127 - 127)
        ([2, 1, 7, 8], [127])
    """
    _check("mx_encode", x, group_size, axis)
    _check_element(element)
    blocks = _blocks(x, group_size, axis)
    scale = _mx_scale(blocks, element)
    return Blocks(
        _joined(encode(blocks / scale, element), x, axis), encode(scale, "e8m0").squeeze(-1).movedim(-1, axis)
    )


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """Return NVFP4's tensor scale, ``s_t = amax/(448·6)``, which gives the largest block the largest block scale.

    It is at least 2^-121, so that a tensor of zeros stays zero and reciprocals of scales stay finite. It is NaN if
    `amax` is not finite.

    Args:
        amax: Largest magnitude of the tensor.

    Returns:
        float32, in the shape of `amax`.

    Source: NVIDIA 2025, *Pretraining Large Language Models with NVFP4*, arXiv:2509.25149.

    Example:
        >>> nvfp4_tensor_scale(torch.tensor(2688.0)).item()
        1.0
    """
    # 448 · 6 = 2688, so that a block with the tensor's maximum has the scale 448, e4m3's largest.
    return _usable(amax.detach().float() / (_E4M3.largest * _FP4.largest))


def nvfp4_binary_scale(amax: Tensor) -> Tensor:
    """Return the smallest power of two at or above `nvfp4_tensor_scale`.

    Block scales are floats and keep their relative precision under any power of two. A tensor rounded with this scale
    has the same values with any larger power of two, as long as no block scale falls below e4m3's normal
    values. So engines may share one tensor scale among matrices, or fix it for inputs.
    """
    scale = nvfp4_tensor_scale(amax)
    below = binade(scale, FORMATS["fp32"])
    return torch.where(scale.isfinite() & (below < scale), 2 * below, scale)


def nvfp4_round_to(
    x: Tensor,
    *,
    per_tensor_scale: Tensor | None,
    axis: int = -1,
    dtype: torch.dtype | None = None,
    binary: bool = False,
) -> Tensor:
    """Return `x` rounded to NVFP4: ``s·fp4(x/s)`` with ``s = s_t·e4m3(amax_block/(6·s_t))`` for each 16 elements.

    Block scales are clamped to [2^-6, 448], the normal values of e4m3. Values beyond the largest element saturate.
    A shorter last block is padded with zeros, and zeros stay zero. **A block with NaN or infinity becomes NaN
    as a whole**. If the tensor scale is not finite, as its own is in this case, the whole tensor becomes NaN.

    Equal, bit for bit, to torchao's ``NVFP4Tensor.to_nvfp4(x, per_tensor_scale=s_t).dequantize(torch.float32)`` while
    x is finite and s_t at least 2^-121. Smaller tensor scales are raised to that.

    Args:
        x: At least one axis; float64, float32, bfloat16 or float16. Not changed.
        per_tensor_scale: s_t, one positive value on x's device, see `nvfp4_tensor_scale`; None: that of x.
        axis: Axis of the blocks, in a matrix product the contracted axis.
        dtype: Type of the result. 16-bit types round once more, because they cannot hold a product of scales. None:
            float32, or float64 for float64.
        binary: Use a power of two as x's own s_t, see `nvfp4_binary_scale`.

    Returns:
        A detached tensor with the shape of `x`.

    Raises:
        ConfigError: A dtype that is no float, no axis, or a tensor scale of more than one value.

    Source: NVIDIA 2025, *Pretraining Large Language Models with NVFP4*, arXiv:2509.25149.

    Example:
        >>> nvfp4_round_to(torch.tensor([6.0, 1.2, -0.3, 0.2]), per_tensor_scale=torch.tensor(1.0)).tolist()
        [6.0, 1.0, -0.5, 0.0]
    """
    _check("nvfp4_round_to", x, NVFP4_GROUP, axis)
    _check_tensor_scale(per_tensor_scale)
    if dtype is None:
        dtype = torch.promote_types(x.dtype, torch.float32)
    if dtype != torch.float64 and _is_last(x, axis) and on_eager_cuda(x):
        rounded: Tensor = directly(nvfp4_round)(x.detach(), per_tensor_scale, dtype, binary)
        return rounded
    blocks = _blocks(x, NVFP4_GROUP, axis)
    tensor_scale = _nvfp4_tensor_scale(blocks, per_tensor_scale, binary)

    def round_blocks(blocks: Tensor) -> Tensor:
        scale = _nvfp4_scale(blocks, tensor_scale)
        # Multiply by reciprocals like the kernel and torchao. A division would round differently.
        codes = round_to(blocks * (1.0 / tensor_scale / scale), "fp4_e2m1")
        return values_of(codes, tensor_scale * scale, blocks.dtype)

    return in_type(_joined(by_parts(round_blocks, blocks), x, axis), dtype)


def nvfp4_encode(x: Tensor, *, per_tensor_scale: Tensor | None, axis: int = -1) -> Blocks:
    """Return codes, e4m3 block scales and the tensor scale of the values of `nvfp4_round_to`.

    The scale of a block with NaN or infinity is NaN.

    Args:
        x: See `nvfp4_round_to`.
        per_tensor_scale: See `nvfp4_round_to`.
        axis: Where the blocks lie.

    Raises:
        ConfigError: As `nvfp4_round_to`.

    Example:
        >>> codes, scale, _ = nvfp4_encode(torch.tensor([6.0, 1.2, -0.3]), per_tensor_scale=torch.tensor(1.0))
        >>> codes.tolist(), scale.tolist()  # 6, 1, -0.5 times 1.0
        ([7, 2, 9], [56])
    """
    _check("nvfp4_encode", x, NVFP4_GROUP, axis)
    _check_tensor_scale(per_tensor_scale)
    blocks = _blocks(x, NVFP4_GROUP, axis)
    tensor_scale = _nvfp4_tensor_scale(blocks, per_tensor_scale)
    scale = _nvfp4_scale(blocks, tensor_scale)
    codes = encode(blocks * (1.0 / tensor_scale / scale), "fp4_e2m1")
    return Blocks(
        _joined(codes, x, axis), encode(scale, "fp8_e4m3").squeeze(-1).movedim(-1, axis), tensor_scale.float()
    )


def _check(where: str, x: Tensor, group_size: int, axis: int) -> None:
    check_input(where, x)
    if not -x.dim() <= axis < x.dim():
        raise ConfigError(where, f"axis must be one of x's {x.dim()} axes, got {axis}")
    if not group_size >= 1:
        raise ConfigError(where, f"group_size must be at least 1, got {group_size}")


def _check_element(element: str) -> None:
    if element not in ELEMENTS:
        raise ConfigError(
            "mx", f"element must be one of {ELEMENTS}, got {element!r}{did_you_mean(str(element), ELEMENTS)}"
        )


def _check_tensor_scale(per_tensor_scale: Tensor | None) -> None:
    if per_tensor_scale is not None and per_tensor_scale.numel() != 1:
        shape = tuple(per_tensor_scale.shape)
        raise ConfigError(
            "nvfp4", f"per_tensor_scale must be one value, got shape {shape}", "call it once for each tensor"
        )


def _is_last(x: Tensor, axis: int) -> bool:
    return axis in (-1, x.dim() - 1) and x.numel() > 0


def _blocks(x: Tensor, group_size: int, axis: int) -> Tensor:
    x = x.detach().movedim(axis, -1)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    groups = -(-x.shape[-1] // group_size)
    x = F.pad(x, (0, groups * group_size - x.shape[-1]))
    return x.reshape(*x.shape[:-1], groups, group_size)


def _joined(blocks: Tensor, x: Tensor, axis: int) -> Tensor:
    return blocks.flatten(-2)[..., : x.shape[axis]].movedim(-1, axis)


def _mx_scale(blocks: Tensor, element: str) -> Tensor:
    amax = blocks.abs().amax(-1, keepdim=True)
    emax = math.frexp(FORMATS[element].largest)[1] - 1
    # 2^(⌊log2 amax⌋ - emax) by masking exponent bits, which is exact at powers of two, unlike log2.
    scale = (binade(amax, FORMATS["fp32"]) * 2.0**-emax).clamp_(2.0**-126, 2.0**127)
    return torch.where(amax.isfinite(), scale, math.nan)


def _nvfp4_tensor_scale(blocks: Tensor, given: Tensor | None, binary: bool = False) -> Tensor:
    if given is not None:
        scale = _usable(given.detach().float().reshape(()))
    else:
        amax = torch.maximum(blocks.amax(), -blocks.amin()) if blocks.numel() else blocks.new_zeros(())
        scale = nvfp4_binary_scale(amax) if binary else nvfp4_tensor_scale(amax)
    return scale.to(blocks.dtype)


def _nvfp4_scale(blocks: Tensor, tensor_scale: Tensor) -> Tensor:
    amax = blocks.abs().amax(-1, keepdim=True)
    # Two divisions, and later a product with the reciprocal, to round in float32 like torchao and the GPU kernels.
    relative = (amax / _FP4.largest / tensor_scale).clamp(_E4M3.smallest_normal, _E4M3.largest)
    return round_to(torch.where(amax.isfinite(), relative, math.nan), "fp8_e4m3")


def _usable(tensor_scale: Tensor) -> Tensor:
    return torch.where(tensor_scale.isfinite(), tensor_scale.clamp_min(_SMALLEST_TENSOR_SCALE), math.nan)
