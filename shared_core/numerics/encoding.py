"""Bit patterns of any format, and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared_core.errors import ConfigError
from shared_core.numerics.formats import FORMATS, Format, lookup
from shared_core.numerics.rounding import RoundingMode, binade, nearest_magnitude, round_to


def encode(
    x: Tensor,
    format: str,
    *,
    mode: RoundingMode = "nearest_even",
    saturate: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the codes of `x` in `format`: bit patterns, read as unsigned integers.

    Rounds, overflows and saturates as `round_to` does. NaN becomes the format's canonical NaN, and the code of zero
    (of +1 in binary) where there is none: fp4_e2m1, integers, binary. Integers are two's complement, so that
    ``encode(x, "int8").view(torch.int8)`` are their values, as ``encode(x, "fp8_e4m3").view(torch.float8_e4m3fn)``
    is the cast.

    Args:
        x: Any shape; float64, float32, bfloat16 or float16.
        format: Name in `FORMATS`.
        mode: How to round, see `round_to`.
        saturate: What happens beyond the largest value, see `round_to`.
        generator: Source of the stochastic mode's randomness.

    Returns:
        The shape of `x`; uint8 for formats of up to 8 bits, int32 up to 24, else int64 (fp64 fills its sign bit).

    Raises:
        ConfigError: As `round_to`.

    Example:
        >>> encode(torch.tensor([1.0, -448.0, 0.001953125]), "fp8_e4m3").tolist()
        [56, 254, 1]
        >>> encode(torch.tensor([-1.0, 3.0]), "int4").tolist()
        [15, 3]
    """
    row = lookup(format)
    y = round_to(x, format, mode=mode, saturate=saturate, generator=generator)
    y = y.to(torch.promote_types(y.dtype, torch.float32 if FORMATS["fp32"].holds(row) else torch.float64))
    # NaN and infinity have codes of their own, put in at the end.
    finite = torch.where(y.isfinite(), y, 0.0)
    if row.kind == "float":
        codes = _float_codes(finite, row)
        if row.overflow == "inf":
            infinity = (2**row.exponent_bits - 1) << row.mantissa_bits
            codes = torch.where(y.isinf(), infinity, codes)
        codes = codes | torch.where(y.signbit(), _sign_bit(row), 0)
    elif row.kind == "integer":
        # Two's complement, cut to the format's bits.
        codes = finite.long() & (2**row.bits - 1)
    elif row.kind == "binary":
        codes = (finite < 0).long()
    else:
        codes = nearest_magnitude(finite.abs().double(), row)
        if row.kind == "posit":
            # Posits negate as integers: two's complement of the code.
            codes = torch.where(y < 0, 2**row.bits - codes, codes)
        else:
            codes = codes | torch.where(y < 0, _sign_bit(row), 0)
    if row.nan_code is not None:
        codes = torch.where(y.isnan(), row.nan_code, codes)
    elif row.kind == "float":
        codes = torch.where(y.isnan(), 0, codes)
    return codes.to(torch.uint8 if row.bits <= 8 else torch.int32 if row.bits <= 24 else torch.int64)


def decode(codes: Tensor, format: str, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the values of codes.

    Args:
        codes: Any shape, any integer dtype; only the lowest bits, as many as the format has, count.
        format: Name in `FORMATS`.
        dtype: Of the result; None is float32, or float64 for fp64 and int32. log8's values are irrational and come
            rounded to it.

    Returns:
        The shape of `codes`.

    Raises:
        ConfigError: Unknown format, or codes that are not integers.

    Example:
        >>> decode(torch.tensor([0x38, 0xFE, 0x7F]), "fp8_e4m3").tolist()
        [1.0, -448.0, nan]
        >>> decode(torch.tensor([0x40, 0x7F, 0x80]), "posit8").tolist()
        [1.0, 16777216.0, nan]
    """
    row = lookup(format)
    if codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
        raise ConfigError("decode", f"codes must be integers, got {codes.dtype}", "view them as integers first")
    codes = codes.long()
    if row.bits < 64:
        codes = codes & (2**row.bits - 1)
    if row.kind == "float":
        values = _float_values(codes, row)
    elif row.kind == "integer":
        signed = row.qmin < 0
        # The sign bit weighs -2^(bits - 1): subtract 2^bits where it is set.
        values = (codes - ((codes >> (row.bits - 1)) << row.bits) if signed else codes).double()
    elif row.kind == "binary":
        values = 1.0 - 2.0 * codes.double()
    else:
        values = torch.tensor(_table_values(row), dtype=torch.float64, device=codes.device)[codes]
    if row.nan_code is not None and row.kind != "float":
        values = values.masked_fill(codes == row.nan_code, math.nan)
    return values.to(dtype or (torch.float32 if FORMATS["fp32"].holds(row) else torch.float64))


def _float_codes(y: Tensor, row: Format) -> Tensor:
    magnitude = y.abs()
    power = binade(magnitude, row)
    # Whole number of ulps in the binade: subnormals have fewer than 2^mantissa_bits, normals at least that.
    ulps = (magnitude / power * 2.0**row.mantissa_bits).long()
    # A normal number's ulps carry the implicit bit, which is what the biased exponent of its binade is ahead by.
    if power.dtype == torch.float64:
        exponent = (power.view(torch.int64) >> 52) - 1023
    else:
        exponent = (power.view(torch.int32).long() >> 23) - 127
    # Adding ulps to the exponent field carries the implicit bit into it: one formula for normal and subnormal
    # numbers.
    return ((exponent - row.min_exponent) << row.mantissa_bits) + ulps


def _float_values(codes: Tensor, row: Format) -> Tensor:
    fraction = codes & (2**row.mantissa_bits - 1)
    field = (codes >> row.mantissa_bits) & (2**row.exponent_bits - 1)
    ulps = (fraction + ((field > 0).long() << row.mantissa_bits)).double()
    # 2^e as a float64 by its exponent bits: exact, and no pow.
    power = ((field.clamp(min=1) - 1 + row.min_exponent + 1023) << 52).view(torch.float64)
    values = ulps * 2.0**-row.mantissa_bits * power
    top = field == 2**row.exponent_bits - 1
    if row.overflow == "inf":
        values = torch.where(top, torch.where(fraction == 0, math.inf, math.nan), values)
    elif row.overflow == "nan":
        values = values.masked_fill(top & (fraction == 2**row.mantissa_bits - 1), math.nan)
    negative = (codes >> (row.bits - 1)) & 1 == 1
    return torch.where(negative, -values, values)


def _table_values(row: Format) -> list[float]:
    magnitudes = list(row.magnitudes)
    if row.kind == "scale":
        return [*magnitudes, math.nan]
    # Codes of negative values run backwards in posits (two's complement), forwards where the sign is a bit.
    negative = [-value for value in magnitudes[1:]]
    return [*magnitudes, math.nan, *(negative[::-1] if row.kind == "posit" else negative)]


def _sign_bit(row: Format) -> int:
    return -(1 << 63) if row.bits == 64 else 1 << (row.bits - 1)
