"""Weights of three values and of two, and activations of two, with straight-through gradients."""

from __future__ import annotations

from eff_kernels import quantization_ternary as kernels
from torch import Tensor

from shared_core.errors import ConfigError
from shared_core.quantization.fake_quant import check_axis, check_floats


def ternarize(weight: Tensor, axis: int | None = 0, *, threshold: float = 0.7) -> Tensor:
    """Return `weight` on the values −α, 0 and α.

    ``Δ = 0.7·E|w|``; ``ŵ = α·sign(w)`` where ``|w| > Δ`` and 0 elsewhere; α is the mean of ``|w|`` over those that
    survive, which makes ``‖w − ŵ‖`` least for that Δ. The gradient passes straight through. A channel of zeros stays
    zero; one that holds a value that is not finite becomes NaN.

    Args:
        weight: Any shape and floating type, with elements.
        axis: Δ and α for each channel along this axis; None: for the whole tensor.
        threshold: Δ over the mean magnitude, in [0, 1).

    Returns:
        Of the shape and type of `weight`; the arithmetic is float32 for float16 and bfloat16.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Li and Liu 2016, arXiv:1605.04711.

    Example:
        >>> import torch
        >>> ternarize(torch.tensor([[1.0, -3.0, 0.2]]))
        tensor([[ 2., -2.,  0.]])
    """
    _check("ternarize", weight, axis)
    if not 0 <= threshold < 1:
        raise ConfigError(f"ternarize: threshold must be in [0, 1), got {threshold}; from 1 on nothing may survive")
    return kernels.ternarize(weight, axis, float(threshold))


def binarize(weight: Tensor, axis: int | None = 0) -> Tensor:
    """Return `weight` on the values −α and α, ``ŵ = α·sign(w)`` with ``sign(0) = +1`` and ``α = E|w|``.

    The gradient, with α taken as a constant of the step, passes straight through where ``|w| <= 1`` and is zero
    elsewhere: keep weights in [−1, 1], as the source does by clipping them after each step. A channel that holds a
    NaN becomes NaN.

    Args:
        weight: Any shape and floating type, with elements.
        axis: One α for each channel along this axis; None: for the whole tensor.

    Returns:
        Of the shape and type of `weight`; the arithmetic is float32 for float16 and bfloat16.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Rastegari et al. 2016, arXiv:1603.05279; the gate: Courbariaux et al. 2016, arXiv:1602.02830.

    Example:
        >>> import torch
        >>> binarize(torch.tensor([[0.5, -1.0, 0.0]]))
        tensor([[ 0.5000, -0.5000,  0.5000]])
    """
    _check("binarize", weight, axis)
    return kernels.binarize(weight, axis, True)


def binarize_activation(x: Tensor) -> Tensor:
    """Return the signs of `x`, −1 and +1, with ``sign(0) = +1``; the gradient passes where ``|x| <= 1``.

    NaN stays NaN.

    Args:
        x: Any shape and floating type.

    Raises:
        ConfigError: If it is no floating-point tensor.

    Source: Courbariaux et al. 2016, arXiv:1602.02830.

    Example:
        >>> import torch
        >>> binarize_activation(torch.tensor([-0.3, 0.0, 2.0]))
        tensor([-1.,  1.,  1.])
    """
    check_floats("binarize_activation", x)
    return kernels.binarize(x, None, False)


def _check(where: str, weight: Tensor, axis: int | None) -> None:
    check_floats(where, weight, "weight")
    check_axis(where, weight, axis, "weight")
    if weight.numel() == 0:
        raise ConfigError(f"{where}: weight must have elements, got shape {tuple(weight.shape)}")
