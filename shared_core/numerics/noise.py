"""How far rounded values are from the exact ones."""

from __future__ import annotations

import math

import torch


def sqnr(weight: torch.Tensor, rounded: torch.Tensor) -> float:
    """Return the signal-to-quantisation-noise ratio ``10·log10(Σw² / Σ(w - ŵ)²)`` in dB, infinite without noise.

    Example:
        >>> sqnr(torch.tensor([10.0, 0.0]), torch.tensor([9.0, 0.0]))
        20.0
    """
    weight, rounded = weight.double(), rounded.double()
    signal, noise = weight.square().sum().item(), (weight - rounded).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


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
