"""The table of number formats, the only source of format properties."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

from shared_core.errors import ConfigError, nearest

Kind = Literal["float", "integer", "binary", "posit", "log", "scale"]
Overflow = Literal["inf", "nan", "largest"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One number format. A code is a bit pattern read as an unsigned integer.

    Floats have sign, exponent and mantissa, with subnormals. ``overflow`` describes values beyond the largest:
    ``"inf"``: an exponent reserved for Inf and NaN as in IEEE 754; ``"nan"``: one NaN pattern per sign and no Inf;
    ``"largest"``: neither, so that every conversion saturates.

    Args:
        name: Key in `FORMATS`.
        kind: Family.
        bits: Width of a code.
        use: What the format is for.
        source: The definition of the format.
        exponent_bits: Width of the exponent field (floats), of the posit exponent, or of the integer part of log2.
        mantissa_bits: Width of the stored fraction.
        bias: Exponent field minus exponent; None if there is no such field.
        overflow: Result for values beyond the largest if a conversion does not saturate.
        qmin: Smallest value of an integer format.
        qmax: Largest value of an integer format.

    Example:
        >>> row = FORMATS["fp8_e4m3"]
        >>> row.largest, row.smallest_normal, row.smallest_subnormal, row.relative_error
        (448.0, 0.015625, 0.001953125, 0.0625)
    """

    name: str
    kind: Kind
    bits: int
    use: str
    source: str
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int | None = None
    overflow: Overflow = "largest"
    qmin: int = 0
    qmax: int = 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value of a float format, else 0."""
        return 1 - self.bias if self.kind == "float" and self.bias is not None else 0

    @property
    def largest(self) -> float:
        """Largest finite value."""
        if self.kind == "float":
            # With infinities the top exponent is reserved. e4m3fn reserves only its top code, for NaN.
            reserved_exponents = 1 if self.overflow == "inf" else 0
            lost_fractions = 2 if self.overflow == "nan" else 1
            top = 2**self.exponent_bits - 1 - reserved_exponents + self.min_exponent - 1
            # (2 - lost · ulp) 2^top: the largest fraction below 2, minus the codes that are NaN.
            return (2.0 - lost_fractions * 0.5**self.mantissa_bits) * math.ldexp(1.0, top)
        return float(self.qmax) if self.kind in ("integer", "binary") else self.magnitudes[-1]

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with full precision; without subnormals the smallest positive value."""
        if self.kind == "float":
            return math.ldexp(1.0, self.min_exponent)
        return 1.0 if self.kind in ("integer", "binary") else min(value for value in self.magnitudes if value)

    @property
    def smallest_subnormal(self) -> float | None:
        """Smallest positive subnormal value, or None."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits) if self.kind == "float" else None

    @property
    def smallest(self) -> float:
        """Smallest positive value."""
        return self.smallest_subnormal or self.smallest_normal

    @property
    def relative_error(self) -> float:
        """Largest relative error of rounding to nearest.

        Floats: ``2^-(mantissa_bits + 1)``, at normal values. Posits: the same around 1, where they are finest.
        Logarithms: half a step of log2. Integers and binary: half of their absolute step, divided by the largest value.
        """
        if self.kind == "log":
            return math.exp2(0.5 ** (self.mantissa_bits + 1)) - 1.0
        if self.kind in ("integer", "binary"):
            step = 2.0 if self.kind == "binary" else 1.0
            return 0.5 * step / max(self.qmax, -self.qmin)
        return math.ldexp(1.0, -self.precision)

    @property
    def precision(self) -> int:
        """Significant bits, including the implicit one, to hold every value (irrational log values: as fp32)."""
        if self.kind in ("integer", "binary"):
            return self.qmax.bit_length()
        return 24 if self.kind == "log" else self.mantissa_bits + 1

    @property
    def decades(self) -> float:
        """Dynamic range, ``log10(largest / smallest positive)``."""
        return math.log10(self.largest) - math.log10(self.smallest)

    @property
    def nan_code(self) -> int | None:
        """Canonical code of NaN, or None."""
        if self.kind == "float":
            top = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
            quiet, fraction = 1 << (self.mantissa_bits - 1), (1 << self.mantissa_bits) - 1
            return {"inf": top | quiet, "nan": top | fraction, "largest": None}[self.overflow]
        if self.kind in ("posit", "log"):
            return 1 << (self.bits - 1)
        if self.kind == "scale":
            return (1 << self.bits) - 1
        return 2 if self.name == "ternary" else None

    @property
    def special_share(self) -> float:
        """Share of all codes spent on NaN and infinity."""
        if self.kind == "float":
            return {"inf": math.ldexp(1.0, -self.exponent_bits), "nan": math.ldexp(2.0, -self.bits), "largest": 0.0}[
                self.overflow
            ]
        return 0.0 if self.nan_code is None else math.ldexp(1.0, -self.bits)

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """Non-negative values of a posit, log or scale format, by code."""
        return _LATTICES[self.name][0]

    @property
    def thresholds(self) -> tuple[float, ...]:
        """For each of `magnitudes`, the largest float64 that rounds to it or to a smaller one."""
        return _LATTICES[self.name][1]

    def holds(self, other: Format) -> bool:
        """Return True if this float format has every value of `other`."""
        # Higher precision and a wider range at both ends: this format has every value of `other`.
        finer = self.precision >= other.precision and self.smallest <= other.smallest
        return self.kind == "float" and finer and self.largest >= other.largest

    def row(self) -> dict[str, str | int | float | None]:
        """Return the figures of the table, by column."""
        return {
            "format": self.name,
            "bits": self.bits,
            "exponent bits": None if self.kind in ("integer", "binary") else self.exponent_bits,
            "mantissa bits": None if self.kind in ("integer", "binary") else self.mantissa_bits,
            "bias": self.bias,
            "smallest normal": self.smallest_normal,
            "smallest subnormal": self.smallest_subnormal,
            "largest": self.largest,
            "relative error": self.relative_error,
            "decades": self.decades,
            "NaN/Inf share": self.special_share,
        }


def posit_value(code: int, bits: int, exponent_bits: int) -> Fraction:
    """Return the value of a positive posit code, exactly: ``(1 + f)·2^(2^es·r + e)``.

    Source: Posit Working Group 2022, *Standard for Posit Arithmetic*, 3.4.
    """
    body = f"{code:0{bits}b}"[1:]
    # The regime is a run of equal bits: r = run - 1 for ones, -run for zeros. It leaves fewer bits for the fraction.
    run = len(body) - len(body.lstrip(body[0]))
    regime = run - 1 if body[0] == "1" else -run
    tail = body[run + 1 :]
    # Exponent bits without room after the regime count as zeros.
    exponent = int(tail[:exponent_bits].ljust(exponent_bits, "0") or "0", 2)
    fraction = tail[exponent_bits:]
    significand = 1 + Fraction(int(fraction or "0", 2), 2 ** len(fraction))
    power = regime * 2**exponent_bits + exponent
    return significand * (Fraction(2**power) if power >= 0 else Fraction(1, 2**-power))


def _lattice(row: Format) -> tuple[tuple[float, ...], tuple[float, ...]]:
    last = 2 ** (row.bits - 1) - 1
    if row.kind == "posit":
        # The standard's boundary between two posits is the posit with one more bit between them, not their mean. Ties
        # go to the even code, and only zero becomes zero.
        values = [0.0] + [float(posit_value(code, row.bits, row.exponent_bits)) for code in range(1, last + 1)]
        middles = [float(posit_value(2 * code + 1, row.bits + 1, row.exponent_bits)) for code in range(1, last)]
        edges = [m if code % 2 == 0 else math.nextafter(m, 0.0) for code, m in enumerate(middles, 1)]
        return tuple(values), (0.0, *edges, math.inf)
    if row.kind == "log":
        steps, bias = 2**row.mantissa_bits, row.bias or 0
        # The boundary is halfway between codes in the logarithm: values are 2^(code / steps - bias).
        values = [0.0] + [_power_of_two(Fraction(code, steps) - bias)[0] for code in range(1, last + 1)]
        edges = [_power_of_two(Fraction(2 * code + 1, 2 * steps) - bias)[1] for code in range(last + 1)]
        return tuple(values), tuple(edges)
    values = [2.0 ** (code - (row.bias or 0)) for code in range(2**row.bits - 1)]
    # The mean of v and 2v is 1.5 v; ties go to the even code.
    edges = [1.5 * v if code % 2 == 0 else math.nextafter(1.5 * v, 0.0) for code, v in enumerate(values)]
    return tuple(values), tuple(edges)


def _power_of_two(exponent: Fraction) -> tuple[float, float]:
    """Return 2^exponent as the nearest float64 and rounded down, neither of which C's pow guarantees."""
    with localcontext() as context:
        # 60 digits decide on which side of an irrational 2^x a float64 lies.
        context.prec = 60
        exact = Decimal(2) ** (Decimal(exponent.numerator) / Decimal(exponent.denominator))
    value = float(exact)
    return value, value if Decimal(value) <= exact else math.nextafter(value, 0.0)


_IEEE = "IEEE 754-2019"
_OCP = "OCP 8-bit Floating Point Specification (OFP8) 1.0; Micikevicius et al. 2022, arXiv:2209.05433"
_MX = "OCP Microscaling Formats (MX) 1.0; Rouhani et al. 2023, arXiv:2310.10537"
_QUANTIZATION = "Jacob et al. 2017, arXiv:1712.05877"


def _float(
    name: str, exponent_bits: int, mantissa_bits: int, use: str, source: str, *,
    bias: int | None = None, overflow: Overflow = "inf",
) -> Format:  # fmt: skip
    return Format(
        name=name, kind="float", bits=1 + exponent_bits + mantissa_bits, use=use, source=source,
        exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, overflow=overflow,
        bias=2 ** (exponent_bits - 1) - 1 if bias is None else bias,
    )  # fmt: skip


def _integer(name: str, bits: int, qmin: int, qmax: int, use: str, source: str = _QUANTIZATION) -> Format:
    return Format(name=name, kind="integer", bits=bits, qmin=qmin, qmax=qmax, use=use, source=source)


def _posit(name: str, exponent_bits: int, use: str, source: str) -> Format:
    fraction_bits = 8 - 3 - exponent_bits  # sign and a regime of two bits leave most: around 1
    return Format(
        name=name, kind="posit", bits=8, exponent_bits=exponent_bits, mantissa_bits=fraction_bits, use=use,
        source=source,
    )  # fmt: skip


_ROWS = (
    _float("fp64", 11, 52, "references", _IEEE),
    _float("fp32", 8, 23, "primary weights, optimizer state, accumulation", _IEEE),
    _float("tf32", 8, 10, "inputs of fp32 matrix products on tensor cores (19 bits)", "NVIDIA A100 white paper, 2020"),
    _float("bf16", 8, 7, "training without loss scaling", "Kalamkar et al. 2019, arXiv:1905.12322"),
    _float("fp16", 5, 10, "training with loss scaling; inference", _IEEE + "; arXiv:1710.03740"),
    _float("fp24", 8, 15, "between bf16 and fp32: fp32's range in three bytes", "IEEE-like, as bf16 with 8 more bits"),
    _float("fp9", 5, 3, "what hardware multiplies both fp8 formats in", "Sun et al. 2019 (HFP8), NeurIPS 32"),
    _float("fp8_e4m3", 4, 3, "fp8 weights and activations", _OCP, overflow="nan"),
    _float("fp8_e4m3_ieee", 4, 3, "e4m3 with an exponent kept for Inf and NaN", "IEEE 754-2019's rules at 8 bits"),
    _float("fp8_e5m2", 5, 2, "fp8 gradients", _OCP),
    _float("fp8_ibm", 4, 3, "HFP8's forward pass: e4m3 moved by 2^-4", "Sun et al. 2019 (HFP8), NeurIPS 32", bias=11),
    _float("fp6_e2m3", 2, 3, "MXFP6 elements", _MX, overflow="largest"),
    _float("fp4_e2m1", 2, 1, "MXFP4 and NVFP4 elements", _MX, overflow="largest"),
    Format(name="e8m0", kind="scale", bits=8, exponent_bits=8, bias=127, overflow="nan",
           use="power-of-two scales of MX blocks", source=_MX),
    _integer("int4", 4, -8, 7, "weights, in groups"),
    _integer("int8", 8, -128, 127, "weights and activations"),
    _integer("int16", 16, -(2**15), 2**15 - 1, "training with a shared exponent", "Das et al. 2018, arXiv:1802.00930"),
    _integer("int32", 32, -(2**31), 2**31 - 1, "accumulators and biases of integer models"),
    _integer("uint4", 4, 0, 15, "asymmetric weights, in groups"),
    _integer("uint8", 8, 0, 255, "activations that are not negative"),
    _integer("ternary", 2, -1, 1, "weights; the fourth code is NaN", "Li et al. 2016, arXiv:1605.04711"),
    Format(name="binary", kind="binary", bits=1, qmin=-1, qmax=1, use="weights and activations: the sign",
           source="Courbariaux et al. 2016, arXiv:1602.02830"),
    _posit("posit8", 2, "tapered: finest around 1", "Posit Working Group 2022, Standard for Posit Arithmetic"),
    _posit("posit8_es0", 0, "tapered, as before the standard", "Gustafson and Yonemoto 2017, Beating Floating Point"),
    Format(name="log8", kind="log", bits=8, exponent_bits=4, mantissa_bits=3, bias=8, overflow="nan",
           use="products become sums", source="Miyashita et al. 2016, arXiv:1603.01025"),
)  # fmt: skip

FORMATS: Mapping[str, Format] = MappingProxyType({row.name: row for row in _ROWS})
_LATTICES = {row.name: _lattice(row) for row in _ROWS if row.kind in ("posit", "log", "scale")}


def lookup(name: str) -> Format:
    """Return the row of a format.

    Args:
        name: A key of `FORMATS`, such as ``fp8_e4m3``.

    Raises:
        ConfigError: If there is no such format. The message names the nearest.

    Example:
        >>> lookup("fp8_e5m2").largest
        57344.0
    """
    if name not in FORMATS:
        raise ConfigError("numerics", f"format must be a known name, got {name!r}{nearest(str(name), FORMATS)}")
    return FORMATS[name]
