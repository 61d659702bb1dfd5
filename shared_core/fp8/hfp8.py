"""HFP8: one 8-bit format forward, another backward, loss scaling, weights of 16 bits rounded stochastically."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shared_core.errors import ConfigError
from shared_core.numerics import round_to, stochastic_round_

_FORWARD, _BACKWARD, _SIXTEEN_BIT = "fp8_ibm", "fp8_e5m2", "fp16"


class Hfp8Cast:
    """fp8_ibm (1, 4, 3, bias 11) for inputs and weights, e5m2 for gradients, without scales.

    Inputs and weights saturate at 15: the format's range is their range. Gradients do not: beyond 57344 they become
    infinite, so that the loss scaler sees the overflow. NaN and infinities pass everywhere. The products accumulate
    in float32, where the paper's chunks accumulate in 16 bits.

    Source: Sun et al. 2019, *Hybrid 8-bit Floating Point (HFP8) Training and Inference for Deep Neural Networks*,
    NeurIPS 32.
    """

    def cast(self, matrix: Tensor, role: str, record: bool) -> Tensor:
        """Return the values that the role's format holds.

        Example:
            >>> Hfp8Cast().cast(torch.tensor([[0.3, 20.0]]), "weight", False).tolist()
            [[0.3125, 15.0]]
            >>> Hfp8Cast().cast(torch.tensor([[0.3, 1e5]]), "gradient", False).tolist()
            [[0.3125, inf]]
        """
        return _widened(round_to(matrix, _format(role, _FORWARD, _BACKWARD), saturate=role != "gradient"))


class Hfp8EndCast:
    """16 bits for every operand of the first and the last layer, which 8 bits cost the most accuracy."""

    def cast(self, matrix: Tensor, role: str, record: bool) -> Tensor:
        """Return the values that fp16 holds, see `cast_16bit`."""
        return cast_16bit(matrix, role)


def cast_16bit(matrix: Tensor, role: str) -> Tensor:
    """Return values of fp16; gradients beyond 65504 become infinite, inputs and weights saturate.

    Args:
        matrix: Any shape and floating type.
        role: "input", "weight" or "gradient".

    Returns:
        float32, or float64 for float64.

    Example:
        >>> cast_16bit(torch.tensor([0.1, 1e5]), "input").tolist()
        [0.0999755859375, 65504.0]
    """
    return _widened(round_to(matrix, _SIXTEEN_BIT, saturate=role != "gradient"))


def round_weights_(weights: Iterable[Tensor]) -> None:
    """Round weights to the nearest values of fp16, in place: where training with `round_update_` begins.

    Args:
        weights: float32 or float64. Finite ones stay finite, NaN and infinities pass.

    Raises:
        ConfigError: A weight of another type.

    Example:
        >>> weight = torch.tensor([0.1])
        >>> round_weights_([weight])
        >>> weight.item()
        0.0999755859375
    """
    with torch.no_grad():
        for weight in weights:
            _check(weight)
            weight.copy_(round_to(weight, _SIXTEEN_BIT))


def round_update_(weights: Iterable[Tensor], generator: torch.Generator) -> None:
    """Round weights to values of fp16 stochastically, in place: after each step, so that small updates survive.

    A weight was on the grid before the step; after it ``w = ulp·(⌊w/ulp⌋ + Bernoulli(frac(w/ulp)))``, whose mean is the
    updated weight. One that has not moved stays. Ranks with equal weights, order and generators get equal weights. The
    paper's 16 bits are (1, 6, 9); these are IEEE's (1, 5, 10).

    Args:
        weights: float32 or float64 on one device. Finite ones stay finite, NaN and infinities pass.
        generator: On that device; its state belongs to a checkpoint.

    Raises:
        ConfigError: A weight of another type, or on another device than the generator.

    Source: Sun et al. 2019, NeurIPS 32; Gupta et al. 2015, arXiv:1502.02551.

    Example:
        >>> weight = torch.full((1000,), 1 + 2**-13)  # an eighth of the way from 1 to the next value of fp16
        >>> round_update_([weight], torch.Generator().manual_seed(0))
        >>> sorted(set(weight.tolist())), round((weight > 1).float().mean().item(), 1)
        ([1.0, 1.0009765625], 0.1)
    """
    for weight in weights:
        _check(weight)
        stochastic_round_(weight, weight, format=_SIXTEEN_BIT, generator=generator)


def _format(role: str, forward: str, backward: str) -> str:
    return backward if role == "gradient" else forward


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _check(weight: Tensor) -> None:
    if weight.dtype not in (torch.float32, torch.float64):
        # in 16 bits the optimizer has rounded its update to nearest already, and lost the small ones
        raise ConfigError(f"hfp8: weights must be float32 or float64, got {weight.dtype}; load the model in float32")
