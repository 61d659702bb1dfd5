"""FP8 matrices without checks of the caller's options, for hot paths: block maxima, scales, casts and products.

Every matrix is (rows, contracted axis); a product is ``a @ b.t()``. Scales multiply a code back to its value:
``value = code · scale``. A block (r, c) has one scale. 0 means the whole axis, so (0, 0) is one scale per tensor
and (1, 0) one per row. Nothing here reads a value on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eff_kernels._triton.launch import on_eager_cuda

Block = tuple[int, int]
Rounding = Literal["exact", "power_of_two", "mx"]
_MX = (1, 32)
_KERNEL_BLOCKS = ((0, 0), (1, 0), (1, 32), (1, 128), (128, 128))


class Scaled(NamedTuple):
    """An FP8 matrix: codes (R, K) and scales, one per block, of shape (⌈R/r⌉, ⌈K/c⌉) in float32.

    `quantize` with the rounding "mx" returns scales as bytes of `swizzled_e8m0`, as matmuls read them.
    """

    codes: Tensor
    scale: Tensor
    block: Block


class Quantized(NamedTuple):
    """An FP8 matrix, and its transpose if requested."""

    matrix: Scaled
    transposed: Scaled | None


def block_amax(x: Tensor, block: Block) -> Tensor:
    """Return the largest magnitude per block in float32, NaN for blocks with NaN.

    Args:
        x: (R, K) of any floating type, not empty.
        block: Rows and columns of a block, 0 for all. Blocks at the edge may be smaller.

    Example:
        >>> block_amax(torch.tensor([[1.0, -3.0], [0.5, 2.0]]), (1, 0))
        tensor([[3.],
                [2.]])
    """
    if block == (0, 0):
        low, high = torch.aminmax(x)
        return torch.maximum(high, -low).float().reshape(1, 1)
    rows, columns = (size or length for size, length in zip(block, x.shape, strict=True))
    if (rows, columns) == (1, x.shape[1]):
        return x.abs().amax(1, keepdim=True).float()
    x = _padded(x, rows, columns).abs()
    return x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns).amax((1, 3)).float()


def block_scale(amax: Tensor, dtype: torch.dtype, rounding: Rounding) -> Tensor:
    """Return ``s = max(amax, 2^-126·M)/M`` with M the largest value of `dtype`, or a power of two near it.

    ``"power_of_two"`` takes the smallest power of two that is not below amax/M, so that nothing saturates.
    ``"mx"`` takes ``2^(floor(log2 amax) - floor(log2 M))``, as in the OCP microscaling formats: values between
    ``M·s`` and ``2^(emax + 1)·s`` saturate. NaN if `amax` is not finite, because saturation would hide an overflow.

    Args:
        amax: Largest magnitudes, float32, any shape.
        dtype: An FP8 type.
        rounding: See above.

    Example:
        >>> amax = torch.tensor([448.0, 449.0])
        >>> block_scale(amax, torch.float8_e4m3fn, "power_of_two").tolist()
        [1.0, 2.0]
        >>> block_scale(amax, torch.float8_e4m3fn, "mx").tolist()
        [1.0, 1.0]
    """
    largest = torch.finfo(dtype).max
    at_least = amax.clamp_min(2.0**-126 * largest)
    if rounding == "exact":
        # divide by a tensor: for a number CUDA multiplies by 1/largest, which differs from the CPU by an ulp
        scale = at_least / at_least.new_full((), largest)
    else:
        # exponents from bits: log2 and exp2 of vector libraries are not exact at powers of two
        bits, limit = at_least.view(torch.int32), math.frexp(largest)
        exponent = (bits >> 23) - 127 - (limit[1] - 1)
        if rounding == "power_of_two":
            exponent = exponent + ((bits & 0x7FFFFF) > round((2 * limit[0] - 1) * 2**23)).int()
        scale = ((exponent.clamp(-126, 127) + 127) << 23).view(torch.float32)
    return torch.where(torch.isfinite(amax), scale, math.nan)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, block: Block) -> Scaled:
    """Return ``cast(clamp(x/s, -M, M))``, rounded to nearest, halves to even; NaN stays NaN.

    Args:
        x: (R, K) of any floating type.
        scale: One for each block, float32.
        dtype: An FP8 type.
        block: Rows and columns of a block, 0 for all.

    Example:
        >>> cast(torch.tensor([[1.0, 1.06]]), torch.tensor([[0.5]]), torch.float8_e4m3fn, (0, 0)).codes.float()
        tensor([[2., 2.]])
    """
    largest = torch.finfo(dtype).max
    # clamped first, because torch's conversion saturates or overflows depending on the version (e5m2, torch < 2.12)
    codes = (x.float() / _along(scale, block, x.shape)).clamp_(-largest, largest).to(dtype)
    return Scaled(codes, scale, block)


class Source(NamedTuple):
    """A matrix to be quantized, see `quantize`."""

    x: Tensor
    past: Tensor | None = None
    both: bool = False
    seen: Tensor | None = None


def quantize(
    x: Tensor,
    dtype: torch.dtype,
    block: Block,
    rounding: Rounding,
    past: Tensor | None = None,
    both: bool = False,
    seen: Tensor | None = None,
) -> Quantized:
    """Return `x` in FP8 by `block_amax`, `block_scale` and `cast`. Scales of 1x32 blocks, rounded "mx", are bytes.

    On CUDA this takes one launch if the blocks allow it, and two with one scale per tensor, or with the transpose of a
    large matrix and a scale per row.

    Args:
        x: (R, K) of any floating type and strides, not empty.
        dtype: An FP8 type.
        block: Rows and columns of a block, 0 for all.
        rounding: Rounding of scales, see `block_scale`.
        past: Largest magnitude of other steps, one value, which sets the tensor's scale instead of its own, unless
            it is 0 or x is not finite. Only with the block (0, 0).
        both: Also return the transpose, (K, R) padded with zeros to a multiple of 16 columns: the same codes
            with one scale per tensor, else blocks of this shape along its own rows.
        seen: Tensor in which to record x's magnitude, see `note_`; float32 only with the block (0, 0).

    Example:
        >>> one = quantize(torch.tensor([[1.0, 448.0]]), torch.float8_e4m3fn, (0, 0), "exact", both=True)
        >>> one.matrix.codes.float(), one.transposed.codes.shape
        (tensor([[  1., 448.]]), torch.Size([2, 16]))
    """
    return quantize_all([Source(x, past, both, seen)], dtype, block, rounding)[0]


def quantize_all(sources: Sequence[Source], dtype: torch.dtype, block: Block, rounding: Rounding) -> list[Quantized]:
    """Return `quantize` of each matrix. Two on one CUDA device, with one scale per tensor, share their two launches.

    Args:
        sources: Either all or none have `past` and `seen`.
        dtype: As in `quantize`.
        block: As in `quantize`.
        rounding: As in `quantize`.
    """
    if not (block in _KERNEL_BLOCKS and all(on_eager_cuda(source.x) for source in sources)):
        return [_quantize(source, dtype, block, rounding) for source in sources]
    from eff_kernels._triton.fp8 import quantize_triton

    is_near = all(source.seen is not None and source.seen.device == source.x.device for source in sources)
    given = sources if is_near else [source._replace(seen=None) for source in sources]
    found = []
    for source, made in zip(sources, quantize_triton(given, dtype, block, rounding), strict=True):
        turned = Scaled(made.turned, made.turned_scale, block) if source.both else None
        found.append(Quantized(Scaled(made.codes, made.scale, block), turned))
        if source.seen is not None and not is_near:
            note_(source.seen, float_scale(found[-1].matrix) if made.amax is None else made.amax)
    return found


def note_(seen: Tensor, magnitudes: Tensor) -> None:
    """Record magnitudes in one value, in place, on any device, without a host read.

    Args:
        seen: float32: becomes the largest of itself and the magnitudes, or NaN if there is one. int32: becomes 1 if any
            value is not finite.
        magnitudes: Any shape and floating type, not empty.

    Example:
        >>> flag, largest = torch.tensor(0, dtype=torch.int32), torch.tensor(2.0)
        >>> for seen in (flag, largest):
        ...     note_(seen, torch.tensor([1.0, math.inf]))
        >>> flag.item(), largest.item()
        (1, inf)
    """
    magnitudes = magnitudes.detach()
    if seen.is_floating_point():
        seen.copy_(torch.maximum(seen, magnitudes.amax().to(seen)))
    else:
        # inf - inf is NaN, and NaN counts as true
        seen.bitwise_or_((magnitudes - magnitudes).any().to(seen.device))


def _quantize(source: Source, dtype: torch.dtype, block: Block, rounding: Rounding) -> Quantized:
    x, past, both, seen = source
    x = x.contiguous()
    amax = block_amax(x, block)
    own = amax if past is None else torch.where((past > 0) & torch.isfinite(amax), past, amax)
    matrix, other = cast(x, block_scale(own, dtype, rounding), dtype, block), None
    if is_swizzled(block, rounding):
        matrix = matrix._replace(scale=swizzled_e8m0(matrix.scale).view(torch.uint8))
    if both and block == (0, 0):
        # as bytes, because not every device can pad float8; the code of zero is zero
        turned = F.pad(matrix.codes.view(torch.uint8), (0, 0, 0, -x.shape[0] % 16)).t().contiguous()
        other = Scaled(turned.view(dtype), matrix.scale, block)
    elif both:
        other = quantize(F.pad(x, (0, 0, 0, -x.shape[0] % 16)).t(), dtype, block, rounding).matrix
    if seen is not None:
        note_(seen, amax)
    return Quantized(matrix, other)


def is_swizzled(block: Block, rounding: Rounding) -> bool:
    """Return True if `quantize` returns scales as bytes, see `swizzled_e8m0`."""
    return block == _MX and rounding == "mx"


def swizzled_e8m0(scale: Tensor) -> Tensor:
    """Return power-of-two scales of 1x32 blocks, (R, C), as e8m0 in the layout named 32x4x4.

    Tiles of 128 rows by 4 columns are stored row by row. In a tile, scale (r, c) is byte
    ``16·(r mod 32) + 4·⌊r/32⌋ + c``. The last tiles are padded with 2^-127.

    Args:
        scale: Powers of two from 2^-126 to 2^127, or NaN, in float32; or bytes of an earlier result.

    Returns:
        float8_e8m0fnu, one axis of 512·⌈R/128⌉·⌈C/4⌉.

    Example:
        >>> scale = torch.ones(40, 2)
        >>> scale[33, 1] = 2.0
        >>> swizzled_e8m0(scale).view(torch.uint8)[16 * 1 + 4 * 1 + 1].item()  # 2^(128 - 127)
        128
    """
    if scale.dtype == torch.uint8:
        return scale.view(torch.float8_e8m0fnu)
    # e8m0 is float32's exponent field, also for NaN. Few devices can convert and copy float8_e8m0fnu.
    codes = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    codes = F.pad(codes, (0, -scale.shape[1] % 4, 0, -scale.shape[0] % 128))
    tiles = codes.view(-1, 4, 32, codes.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(torch.float8_e8m0fnu)


def float_scale(matrix: Scaled) -> Tensor:
    """Return the scales in float32, (⌈R/r⌉, ⌈K/c⌉).

    Args:
        matrix: A result of `cast` or `quantize`.

    Example:
        >>> float_scale(quantize(torch.full((1, 33), 448.0), torch.float8_e4m3fn, (1, 32), "mx").matrix)
        tensor([[1., 1.]])
    """
    if matrix.scale.dtype != torch.uint8:
        return matrix.scale
    (rows, columns), tiles = matrix.codes.shape, -(-matrix.codes.shape[0] // 128)
    codes = matrix.scale.view(tiles, -1, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(tiles * 128, -1)
    exponents = codes[:rows, : -(-columns // _MX[1])].int()
    return torch.where(exponents == 255, math.nan, (exponents << 23).view(torch.float32))


def dequantize(matrix: Scaled) -> Tensor:
    """Return the values of an FP8 matrix in float32.

    Args:
        matrix: Codes and scales from `cast` or `quantize`.
    """
    return matrix.codes.float() * _along(float_scale(matrix), matrix.block, matrix.codes.shape)


def check_scaled_mm_constraints(a: Scaled, b: Scaled) -> None:
    """Raise an error for operands that FP8 tensor cores cannot multiply, on every device, so that CPU runs find it too.

    Args:
        a: (M, K).
        b: (N, K), multiplied as its transpose.

    Raises:
        ValueError: If K differs, K or N is no multiple of 16, a matrix is not contiguous, or both are e5m2.

    Source: the checks of torch's ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` for compute capability 9.0.

    Example:
        >>> one = Scaled(torch.zeros(4, 24).to(torch.float8_e4m3fn), torch.ones(1, 1), (0, 0))
        >>> check_scaled_mm_constraints(one, one)
        Traceback (most recent call last):
        ValueError: scaled matmul: K must be a multiple of 16, got 24
    """
    (m, k), (n, other) = a.codes.shape, b.codes.shape
    if k != other:
        raise ValueError(f"scaled matmul: a and b must have the same K, got {k} and {other}")
    for name, size in (("K", k), ("N", n)):
        if size % 16:
            raise ValueError(f"scaled matmul: {name} must be a multiple of 16, got {size}")
    if not (a.codes.is_contiguous() and b.codes.is_contiguous()):
        raise ValueError(f"scaled matmul: operands must be contiguous along K, got shapes {(m, k)} and {(n, k)}")
    if a.codes.dtype == b.codes.dtype == torch.float8_e5m2:
        raise ValueError("scaled matmul: at most one operand may be e5m2, got two")


def emulated_mm(a: Scaled, b: Scaled, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return ``(Â·B̂ᵀ)·(s_a·s_b)``, accumulated in float32, on hardware without FP8 products.

    If scales change along K, the dequantized values are multiplied.

    Args:
        a: (M, K).
        b: (N, K).
        out_dtype: Type of the result.
        bias: (N,), added before the result is rounded.

    Example:
        >>> a = cast(torch.full((1, 16), 3.0), torch.ones(1, 1), torch.float8_e4m3fn, (0, 0))
        >>> emulated_mm(a, Scaled(a.codes.expand(16, 16).contiguous(), *a[1:]), torch.float32)[0, 0].item()
        144.0
    """
    with torch.autocast(a.codes.device.type, enabled=False):
        if a.block[1] == b.block[1] == 0:
            product = a.codes.float() @ b.codes.float().t()
            # one after the other, because the product of two small scales may be 0 in float32
            product.mul_(a.scale).mul_(b.scale.t())
        else:
            product = dequantize(a) @ dequantize(b).t()
        return (product if bias is None else product.add_(bias)).to(out_dtype)


def scaled_mm(a: Scaled, b: Scaled, out_dtype: torch.dtype, fast: bool = False, bias: Tensor | None = None) -> Tensor:
    """Compute `emulated_mm` by torch's scaled matmul, with one scale per tensor or per row in both operands.

    If the device supports products with a scale per row only in 16 bits, a float32 result is rounded to bfloat16.

    Args:
        a: (M, K).
        b: (N, K).
        out_dtype: float32, bfloat16 or float16.
        fast: Let tensor cores keep the whole sum in their own accumulator of about 14 bits.
        bias: As in `emulated_mm`, in `out_dtype`, which must then have 16 bits.
    """
    if a.block == (0, 0):
        scale_a, scale_b, given = a.scale.reshape(()), b.scale.reshape(()), out_dtype
    else:
        narrow = out_dtype == torch.float32 and not _rows_in_float32(a.codes.device)
        scale_a, scale_b, given = a.scale, b.scale.t(), torch.bfloat16 if narrow else out_dtype
    product: Tensor = torch._scaled_mm(
        a.codes, b.codes.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=given, use_fast_accum=fast
    )
    return product.to(out_dtype)


def _rows_in_float32(device: torch.device) -> bool:
    # torch's ScaledBlas.cpp: cuBLAS 12.9 on compute capability 9.0; CUTLASS, used elsewhere, gives 16 bits
    if device.type != "cuda":
        return True
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return cuda >= (12, 9) and torch.cuda.get_device_capability(device) == (9, 0)


def multiplies_fp8(device: torch.device) -> bool:
    """Return True if a device has FP8 tensor cores: NVIDIA, compute capability 8.9 or later.

    Args:
        device: Any device. False for all except CUDA.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    down, right = -x.shape[0] % rows, -x.shape[1] % columns
    return F.pad(x, (0, right, 0, down)) if down or right else x.contiguous()


def _along(scale: Tensor, block: Block, shape: torch.Size) -> Tensor:
    if scale.shape[0] in (1, shape[0]) and scale.shape[1] == 1:
        return scale
    for axis in (0, 1):
        if scale.shape[axis] > 1:
            scale = scale.repeat_interleave(block[axis], axis)
    return scale[: shape[0], : shape[1]]
