"""Round tensors to the values of any format, exactly for float32 and float64 input, and encode them as bit patterns.

Also measures the error of rounded values.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from eff_kernels._triton.launch import is_plain, on_eager_cuda
from eff_kernels.rounding import nearest_float, power_below, round_float_
from torch import Tensor

from shared_core.errors import ConfigError, nearest
from shared_core.numerics.formats import FORMATS, Format, lookup

RoundingMode = Literal["nearest_even", "stochastic", "toward_zero"]

INPUTS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
STORAGE = INPUTS | {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


_BLOCK = 1 << 14
_NATIVE = {name: dtype for dtype, name in INPUTS.items() if dtype.itemsize == 2}
"""Format → the dtype to which torch rounds float32 exactly."""


def round_to(
    x: Tensor,
    format: str,
    *,
    mode: RoundingMode = "nearest_even",
    saturate: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `x` rounded to values of `format`.

    With ``ulp`` the distance of the two values around x, ``nearest_even`` is ``ulp·ne(x/ulp)``, ties to the even code;
    ``toward_zero`` is ``ulp·trunc(x/ulp)``; ``stochastic`` is ``ulp·(⌊x/ulp⌋ + Bernoulli(frac(x/ulp)))``, whose mean
    is x. Posits to nearest follow their standard (the boundary is the posit with one more bit, and only zero becomes
    zero). log8 rounds log2|x|. binary is the sign, with +1 for zero, and has no ``toward_zero``. Stochastic binary has
    the mean ``clamp(x, -1, 1)``.

    Beyond the largest value a result is

    - with ``saturate=True`` ± the largest value, in every format, and no longer unbiased;
    - with ``saturate=False`` Inf in formats that have it, NaN in those that have only NaN (fp8_e4m3, e8m0, log8), and
      ± the largest in those that have neither (fp4_e2m1, integers, ternary, binary) and in posits. ``toward_zero``
      never leaves the finite values.

    An infinite x stays infinite in formats with Inf, for any `saturate`. In posits and e8m0 it becomes NaN.
    In other formats it is treated like any value beyond the largest: **check for Inf before rounding**. NaN
    stays NaN, even if the format has no code for it. A negative x becomes NaN in e8m0 and 0 in unsigned integers.
    Floats keep the sign of zero, all others drop it.

    Args:
        x: Any shape; float64, float32, bfloat16 or float16. Not changed.
        format: Name in `FORMATS`.
        mode: How to round.
        saturate: How to treat values beyond the largest, see above.
        generator: Source of the stochastic mode's randomness, on x's device; torch's global one if None.

    Returns:
        A detached tensor with the shape of `x`, and its dtype if that holds every result, else float32 or float64.

    Raises:
        ConfigError: Unknown format or mode, a dtype that is no float, or a generator on another device.

    Source: IEEE 754-2019, 4.3; OFP8 1.0, 5.2; Gupta et al. 2015, arXiv:1502.02551 (stochastic rounding).

    Example:
        >>> round_to(torch.tensor([0.3, 17.0, 500.0]), "fp8_e4m3").tolist()
        [0.3125, 16.0, 448.0]
        >>> round_to(torch.tensor([0.3, 1e5]), "fp16", mode="toward_zero").tolist()
        [0.2998046875, 65504.0]
        >>> round_to(torch.tensor([1e5, 500.0]), "fp8_e4m3", saturate=False).tolist()
        [nan, nan]
    """
    row = lookup(format)
    check_rounding(row, mode, x, generator)
    x = x.detach()
    source = FORMATS[INPUTS[x.dtype]]
    # The format has all values of the source's dtype, so there is nothing to round.
    if row.holds(source):
        return x.clone()
    # The narrowest dtype that holds the format: fp64 input rounded to bf16 may be computed in float32 only if that is
    # exact.
    dtype = x.dtype if source.holds(row) else torch.float32 if FORMATS["fp32"].holds(row) else torch.float64
    if _has_kernel(row, x):
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        return _round_by_kernel_(out, x, row, mode, saturate, generator)
    work = x.to(torch.promote_types(dtype, torch.float32))
    if row.kind == "float" and mode == "nearest_even" and saturate and (row.largest < 2**64 or row.name in _NATIVE):
        return _round_nearest(work, row).to(dtype)
    if row.kind == "float":
        y, beyond = _round_float(work.abs(), row, mode, generator)
    elif row.kind == "integer":
        y, beyond = _round_to_integer(work, mode, generator).clamp_(row.qmin, row.qmax), None
    elif row.kind == "binary":
        y, beyond = _round_binary(work, mode, generator), None
    else:
        y, beyond = _round_by_table(work.abs(), row, mode, generator)
    if beyond is not None:
        # toward_zero never rounds up to infinity: values beyond become the largest value.
        y = torch.where(beyond, row.largest if saturate or mode == "toward_zero" else _outside(row), y)
        y = torch.where(work.isinf(), _of_infinity(row, saturate), y).copysign(work)
    if row.kind == "scale":
        y = y.abs().masked_fill_(work < 0, math.nan)
    if row.kind != "float":
        y = y + 0.0  # their only zero is +0
    return y.masked_fill_(work.isnan(), math.nan).to(dtype)


def stochastic_round_(
    target: Tensor,
    source: Tensor,
    *,
    format: str | None = None,
    saturate: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Write `source`, stochastically rounded, into `target` and return it: ``ulp·(⌊x/ulp⌋ + Bernoulli(frac(x/ulp)))``.

    The mean of the result is the source, so updates smaller than half an ulp of a 16-bit weight are not lost, and it
    trains without an fp32 copy. NaN is kept, and Inf if the format has it. With ``saturate=True`` a finite value beyond
    the largest becomes the largest (there the mean is too small). Otherwise as in `round_to`.

    Args:
        target: Changed in place. Its dtype must hold every value of the format.
        source: Same shape, usually float32; may be `target` itself.
        format: Name in `FORMATS`; the target's own format if None.
        saturate: Keep finite values finite.
        generator: Source of the randomness, on the source's device; its state belongs to a checkpoint.

    Raises:
        ConfigError: Unknown format, or one that the target's dtype cannot hold; shapes that differ.

    Source: Gupta et al. 2015, *Deep Learning with Limited Numerical Precision*, arXiv:1502.02551.

    Example:
        >>> weight = torch.zeros(1000, dtype=torch.bfloat16)
        >>> update = torch.full((1000,), 1 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
        >>> _ = stochastic_round_(weight, update, generator=torch.Generator().manual_seed(0))
        >>> sorted(set(weight.tolist())), round((weight > 1).float().mean().item(), 1)
        ([1.0, 1.0078125], 0.2)
    """
    own = FORMATS.get(STORAGE.get(target.dtype, ""))
    row = own if format is None else lookup(format)
    if own is None or row is None or not own.holds(row):
        wanted = f"hold every value of {format}" if format else "have a float dtype"
        raise ConfigError("stochastic_round_", f"target must {wanted}, got {target.dtype}")
    if target.shape != source.shape:
        raise ConfigError(
            "stochastic_round_", f"source must have the target's shape {tuple(target.shape)}, got {tuple(source.shape)}"
        )
    with torch.no_grad():
        # In place only with a plain memory layout; otherwise rounded in a temporary and copied.
        writable = is_plain(target) and target.is_contiguous() and target.device == source.device
        if writable and target.dtype != torch.float64 and _has_kernel(row, source):
            check_rounding(row, "stochastic", source, generator)
            _round_by_kernel_(target.detach(), source.detach(), row, "stochastic", saturate, generator)
            return target
        if row.name == "bf16" and source.dtype == torch.float32:
            check_rounding(row, "stochastic", source, generator)
            if writable and source.is_cpu and is_plain(source) and source.is_contiguous():
                # A size that malloc keeps: larger pieces return to the system, and each use faults in pages again.
                blocks = (torch.split(tensor.view(-1), _BLOCK) for tensor in (target, source))
                for rounded, given in zip(*blocks, strict=True):
                    rounded.copy_(_to_bf16(given, saturate, generator))
                return target
            return target.copy_(_to_bf16(source, saturate, generator))
        rounded = round_to(source, row.name, mode="stochastic", saturate=saturate, generator=generator)
        return target.copy_(rounded)


def check_rounding(row: Format, mode: str, x: Tensor, generator: torch.Generator | None) -> None:
    """Raise `ConfigError` for a mode, dtype or generator that rounding to `row` does not support."""
    # binary has no zero to round toward
    known = [name for name in get_args(RoundingMode) if name != "toward_zero" or row.kind != "binary"]
    if mode not in known:
        raise ConfigError(
            "numerics", f"mode must be a known one for {row.name}, got {mode!r}{nearest(str(mode), known)}"
        )
    check_input("numerics", x)
    if generator is not None and generator.device.type != x.device.type:
        raise ConfigError("numerics", f"generator must be on {x.device}, got {generator.device}")


def check_input(where: str, x: Tensor) -> None:
    """Raise `ConfigError` unless `x` has a dtype that can be rounded."""
    if x.dtype not in INPUTS:
        raise ConfigError(where, f"x must be float64, float32, bfloat16 or float16, got {x.dtype}", "cast it first")


def binade(a: Tensor, row: Format) -> Tensor:
    """Return the power of two at or below `|a|`, at least the format's smallest normal value."""
    return power_below(a, row.smallest_normal)


def _round_nearest(x: Tensor, row: Format) -> Tensor:
    if x.dtype == torch.float32 and row.name in _NATIVE:
        y = x.clamp(-row.largest, row.largest).to(_NATIVE[row.name]).to(x.dtype)
    else:
        y = nearest_float(x, row.largest, row.smallest_normal, row.mantissa_bits)
    if row.overflow == "inf":
        # subtracts an infinity where x is infinite, and +0 elsewhere
        limit = torch.finfo(x.dtype).max
        y.sub_(x.clamp(-limit, limit).sub_(x))
    return y


def _has_kernel(row: Format, x: Tensor) -> bool:
    # offsets of random numbers have 32 bits
    return row.kind == "float" and row.mantissa_bits < 23 and on_eager_cuda(x) and x.numel() < 2**31


def _round_by_kernel_(
    out: Tensor, x: Tensor, row: Format, mode: RoundingMode, saturate: bool, generator: torch.Generator | None
) -> Tensor:
    seed = None
    if mode == "stochastic":
        seed = torch.empty((), dtype=torch.int64, device=x.device).random_(generator=generator)
    beyond = row.largest if saturate or mode == "toward_zero" else _outside(row)
    infinite = _of_infinity(row, saturate)
    round_float_(out, x, mode, row.mantissa_bits, row.bias, row.largest, beyond, infinite, seed)
    return out


def _round_float(
    a: Tensor, row: Format, mode: RoundingMode, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    # Scaling by powers of two is exact, so the only rounding is that of a number of ulps to an integer. Dividing by the
    # binade first keeps intermediates normal, because an ulp may be subnormal and its reciprocal infinite.
    power = binade(a, row)
    # a / power lies in [1, 2) or below (subnormal): times 2^mantissa it is a number of ulps.
    ulps = _round_to_integer(a / power * 2.0**row.mantissa_bits, mode, generator)
    y = ulps * 2.0**-row.mantissa_bits * power
    return y, y > row.largest


def _round_to_integer(x: Tensor, mode: RoundingMode, generator: torch.Generator | None) -> Tensor:
    if mode == "nearest_even":
        return x.round()
    if mode == "toward_zero":
        return x.trunc()
    # x - floor(x) is exact. Adding the random number to x before the floor would round and introduce a bias.
    floor = x.floor()
    return floor + (_uniform(x, generator) < x - floor)


def _round_binary(x: Tensor, mode: RoundingMode, generator: torch.Generator | None) -> Tensor:
    positive = x >= 0 if mode == "nearest_even" else _uniform(x, generator) < (x.double() + 1.0) / 2.0
    return torch.where(positive, 1.0, -1.0).to(x.dtype)


def _round_by_table(
    a: Tensor, row: Format, mode: RoundingMode, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    # Round log8's irrational values to the result's dtype first. Otherwise truncating one twice would lose a code.
    values = torch.tensor(row.magnitudes, dtype=torch.float64, device=a.device).to(a.dtype).double()
    last = len(row.magnitudes) - 1
    exact = a.double()
    if mode == "nearest_even":
        index = nearest_magnitude(exact, row)
    # The last value at or below. The next one is taken with the probability of the distance.
    else:
        index = torch.bucketize(exact, values, right=True).sub_(1).clamp_(min=0)
    if mode == "stochastic":
        low, high = values[index], values[(index + 1).clamp_(max=last)]
        index = index + (_uniform(a, generator) * (high - low) < exact - low)
    return values[index.clamp(max=last)].to(a.dtype), index > last


def nearest_magnitude(a: Tensor, row: Format) -> Tensor:
    """Return the code of the magnitude that float64 `a` >= 0 rounds to; one past the last code if beyond it."""
    return torch.bucketize(a, torch.tensor(row.thresholds, dtype=torch.float64, device=a.device))


def _to_bf16(x: Tensor, saturate: bool, generator: torch.Generator | None) -> Tensor:
    # bfloat16 is the upper half of float32: a random lower half, added, carries with probability frac.
    noise = torch.empty_like(x, dtype=torch.int32).random_(generator=generator).bitwise_and_(0xFFFF)
    y = noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    if saturate:
        largest = FORMATS["bf16"].largest
        y = y.clamp_(-largest, largest)
    # Not `isfinite`, which takes ten times as long on a CPU (torch 2.13). NaN compares as false.
    return torch.where(x.abs() < math.inf, y, x)


def _uniform(x: Tensor, generator: torch.Generator | None) -> Tensor:
    # 53 bits, because with float32's 24 bits a value of 2^-40 ulps would be rounded up 2^16 times too often.
    return torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator)


def _outside(row: Format) -> float:
    if row.kind == "posit" or row.overflow == "largest":
        return row.largest
    return math.inf if row.overflow == "inf" else math.nan


def _of_infinity(row: Format, saturate: bool) -> float:
    if row.kind in ("posit", "scale"):
        return math.nan
    return math.inf if row.overflow == "inf" else row.largest if saturate else _outside(row)


def encode(
    x: Tensor,
    format: str,
    *,
    mode: RoundingMode = "nearest_even",
    saturate: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the codes of `x` in `format`: bit patterns, read as unsigned integers.

    Rounds, overflows and saturates like `round_to`. NaN becomes the format's canonical NaN, or without one (fp4_e2m1,
    integers, binary) the code of zero (+1 in binary). Integers are two's complement, so that
    ``encode(x, "int8").view(torch.int8)`` are their values, as ``encode(x, "fp8_e4m3").view(torch.float8_e4m3fn)``
    is the cast.

    Args:
        x: Any shape; float64, float32, bfloat16 or float16.
        format: Name in `FORMATS`.
        mode: How to round, see `round_to`.
        saturate: How to treat values beyond the largest, see `round_to`.
        generator: Source of the stochastic mode's randomness.

    Returns:
        Codes in the shape of `x`: uint8 for up to 8 bits, int32 up to 24, else int64 (fp64 also uses its sign bit).

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
    # Codes of NaN and infinity are inserted at the end.
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
        codes: Any shape, any integer dtype. Only the format's number of lowest bits counts.
        format: Name in `FORMATS`.
        dtype: Type of the result; None: float32, or float64 for fp64 and int32. log8's values are irrational and are
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
        # The sign bit weighs -2^(bits - 1), so subtract 2^bits where it is set.
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
    # Number of ulps in the binade: subnormals have fewer than 2^mantissa_bits, normals at least that.
    ulps = (magnitude / power * 2.0**row.mantissa_bits).long()
    # A normal number's ulps include the implicit bit, by which the biased exponent of its binade is ahead.
    if power.dtype == torch.float64:
        exponent = (power.view(torch.int64) >> 52) - 1023
    else:
        exponent = (power.view(torch.int32).long() >> 23) - 127
    # Adding ulps to the exponent field carries the implicit bit into it, with one formula for normal and subnormal
    # numbers.
    return ((exponent - row.min_exponent) << row.mantissa_bits) + ulps


def _float_values(codes: Tensor, row: Format) -> Tensor:
    fraction = codes & (2**row.mantissa_bits - 1)
    field = (codes >> row.mantissa_bits) & (2**row.exponent_bits - 1)
    ulps = (fraction + ((field > 0).long() << row.mantissa_bits)).double()
    # 2^e as a float64 from its exponent bits, which is exact, unlike pow.
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
    # Codes of negative values run backwards in posits (two's complement), forwards with a sign bit.
    negative = [-value for value in magnitudes[1:]]
    return [*magnitudes, math.nan, *(negative[::-1] if row.kind == "posit" else negative)]


def _sign_bit(row: Format) -> int:
    return -(1 << 63) if row.bits == 64 else 1 << (row.bits - 1)


def decibels(signal: float, noise: float) -> float:
    """Return ``10·log10(signal / noise)`` of two sums of squares, infinite without noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


class SignalToNoise:
    """Sums of squares of exact values and rounding errors, over many tensors.

    Example:
        >>> sums = SignalToNoise()
        >>> sums.add(torch.tensor([10.0, 0.0]), torch.tensor([9.0, 0.0]))
        >>> sums.decibels
        20.0
    """

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def add(self, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Count a tensor."""
        exact = exact.double()
        self._signal += exact.square().sum().item()
        self._noise += (rounded.double() - exact).square().sum().item()

    @property
    def decibels(self) -> float:
        """The signal-to-quantization-noise ratio ``10·log10(Σy² / Σ(ŷ - y)²)``, infinite without noise."""
        return decibels(self._signal, self._noise)


def sqnr(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return the signal-to-quantization-noise ratio of one tensor, see `SignalToNoise`."""
    sums = SignalToNoise()
    sums.add(exact, rounded)
    return sums.decibels


def relative_error(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return ``‖exact - rounded‖ / ‖exact‖`` in Frobenius norms, 0 for two zeros."""
    exact = exact.double()
    error = (exact - rounded.double()).norm().item()
    size = exact.norm().item()
    return error / size if size else (math.inf if error else 0.0)
