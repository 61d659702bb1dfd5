"""Measure how far rounded values are from the exact ones."""

from __future__ import annotations

import math

import torch


def decibels(signal: float, noise: float) -> float:
    """Return ``10·log10(signal / noise)`` of two sums of squares, infinite without noise."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


class SignalToNoise:
    """Sums of squares of what is exact and of what rounding adds to it, over many tensors.

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
        """The signal-to-quantisation-noise ratio ``10·log10(Σy² / Σ(ŷ - y)²)``, infinite without noise."""
        return decibels(self._signal, self._noise)


def sqnr(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio of one tensor, see `SignalToNoise`."""
    sums = SignalToNoise()
    sums.add(exact, rounded)
    return sums.decibels


def relative_error(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return ``‖exact - rounded‖ / ‖exact‖`` in Frobenius norms, 0 for two zeros.

    Example:
        >>> relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0]))
        0.2
    """
    exact = exact.double()
    error = (exact - rounded.double()).norm().item()
    size = exact.norm().item()
    return error / size if size else (math.inf if error else 0.0)
