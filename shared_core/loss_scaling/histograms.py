"""Histograms of log2|x|: which powers of two weights, activations, gradients and updates really use."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from eff_kernels.loss_scaling import Exponents, count_exponents
from torch import Tensor

from shared_core.loss_scaling.auto_scale import FORMATS

_COUNTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# On CPU the float64 difference stays in cache; on a GPU fewer launches count.
_CPU_PIECE, _DEVICE_PIECE = 1 << 15, 1 << 22


@dataclass
class Log2Histogram:
    """Counts of ``⌊log2|x|⌋``, with what has no logarithm apart."""

    zeros: int = 0
    infinite: int = 0
    nan: int = 0
    exponents: dict[int, int] = field(default_factory=dict)
    """Exponent e → elements with ``2^e <= |x| < 2^(e + 1)``; no key where there are none."""

    @property
    def elements(self) -> int:
        """How many elements were counted."""
        return self.zeros + self.infinite + self.nan + sum(self.exponents.values())

    def add(self, other: Log2Histogram) -> None:
        """Add the counts of other elements."""
        self.zeros += other.zeros
        self.infinite += other.infinite
        self.nan += other.nan
        for exponent, count in other.exponents.items():
            self.exponents[exponent] = self.exponents.get(exponent, 0) + count

    def below(self, exponent: int) -> float:
        """Return the share of elements with ``0 < |x| < 2^exponent``."""
        return sum(count for e, count in self.exponents.items() if e < exponent) / max(self.elements, 1)

    @property
    def median(self) -> int | None:
        """The exponent of the median magnitude of the finite elements that are not zero; None without any."""
        half, seen = sum(self.exponents.values()) / 2, 0
        for exponent in sorted(self.exponents):
            seen += self.exponents[exponent]
            if seen >= half:
                return exponent
        return None

    def summary(self, format: str) -> dict[str, Any]:
        """Return element count, shares below the smallest normal and subnormal number of a format, and the range.

        Args:
            format: ``"fp16"`` or ``"fp8_e5m2"``.
        """
        normal, subnormal = smallest_exponents(format)
        return {
            "elements": self.elements,
            "zero": self.zeros / max(self.elements, 1),
            "infinite": self.infinite,
            "nan": self.nan,
            "below_normal": self.below(normal),
            "below_subnormal": self.below(subnormal),
            "log2_lowest": min(self.exponents, default=None),
            "log2_median": self.median,
            "log2_highest": max(self.exponents, default=None),
        }

    def counts(self) -> dict[str, int]:
        """Return the counts by exponent, from the lowest up, as JSON can hold them."""
        return {str(exponent): self.exponents[exponent] for exponent in sorted(self.exponents)}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"zeros": self.zeros, "infinite": self.infinite, "nan": self.nan, "exponents": self.counts()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Log2Histogram:
        """Return the histogram whose `state_dict` this is."""
        exponents = {int(exponent): count for exponent, count in state["exponents"].items()}
        return cls(state["zeros"], state["infinite"], state["nan"], exponents)


def smallest_exponents(format: str) -> tuple[int, int]:
    """Return log2 of a format's smallest normal and smallest subnormal number.

    Example:
        >>> smallest_exponents("fp16"), smallest_exponents("fp8_e5m2")
        ((-14, -24), (-14, -16))
    """
    limits = torch.finfo(FORMATS[format])
    normal = limits.smallest_normal
    # a subnormal number is a multiple of the smallest one, which is one ulp of the smallest normal
    return int(math.log2(normal)), int(math.log2(normal * limits.eps))


def log2_histogram(tensors: Iterable[Tensor]) -> Log2Histogram:
    """Return the exact histogram of log2|x| over all elements of some tensors, one pass over the bits of each.

    ``⌊log2|x|⌋`` is read from the exponent field, or for subnormal numbers from their highest bit.

    Args:
        tensors: Floating point, any shape and device; 8-bit floats are counted as the float32 that they are.

    Example:
        >>> found = log2_histogram([torch.tensor([0.0, 0.75, -3.0]), torch.tensor([2.0**-24]).half()])
        >>> found.zeros, found.counts()
        (1, {'-24': 1, '-1': 1, '1': 1})
    """
    found = Log2Histogram()
    for tensor in tensors:
        found.add(read_counts(device_counts(tensor)))
    return found


def device_counts(tensor: Tensor) -> Exponents:
    """Return the counts on the tensor's own device: nothing waits for them there."""
    return count_exponents(tensor if tensor.dtype in _COUNTED else tensor.detach().float())


def update_counts(new: Tensor, old: Tensor) -> Exponents:
    """Return the counts of ``new − old``, subtracted in float64: exact where the difference has 53 bits or fewer."""
    size = _CPU_PIECE if new.device.type == "cpu" else _DEVICE_PIECE
    pieces = (torch.split(tensor.detach().reshape(-1), size) for tensor in (new, old))
    parts = (count_exponents(after.double() - before.double()) for after, before in zip(*pieces, strict=True))
    return functools.reduce(lambda total, part: Exponents(part.lowest, total.counts + part.counts), parts)


def read_counts(found: Exponents) -> Log2Histogram:
    """Return the counts as a histogram; this waits for the device."""
    lowest, counts = found
    zeros, *finite, infinite, nan = counts.tolist()
    return Log2Histogram(zeros, infinite, nan, {lowest + i: count for i, count in enumerate(finite) if count})
