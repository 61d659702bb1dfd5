"""Fake quantisation whose grid training learns: LSQ, LSQ+, learned ranges and PACT.

What is learned is a parameter of the training run: it takes no weight decay (PACT's α does, Choi et al. 2018, 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization import learned
from torch import Tensor

from shared_core.errors import ConfigError
from shared_core.numerics.deferred_checks import refuse
from shared_core.quantization.functional.affine import check_axis, check_bits, check_codes, check_floats, check_gate


def lsq_fake_quantize(
    x: Tensor,
    scale: Tensor,
    qmin: int,
    qmax: int,
    *,
    axis: int | None = None,
    zero_point: Tensor | None = None,
    gate: Literal["unrounded", "rounded"] = "unrounded",
    grad_scale: float | None = None,
) -> Tensor:
    """Return `x` rounded to a grid whose step, and with LSQ+ whose offset, gets a gradient.

    ``x̂ = s·(clamp(ne(x/s) + ẑ, qmin, qmax) − ẑ)`` with ``ẑ = clamp(ne(z), qmin, qmax)``. With ``v = x/s``, by where
    ``v + ẑ`` lies:

    ============  ===========  ==============  =======
    ..            ∂x̂/∂x        ∂x̂/∂s           ∂x̂/∂z
    ============  ===========  ==============  =======
    below qmin    0            ``qmin − ẑ``    ``−s``
    inside        1            ``ne(v) − v``   0
    above qmax    0            ``qmax − ẑ``    ``−s``
    ============  ===========  ==============  =======

    and the gradients of s and z are multiplied by `grad_scale`. LSQ+'s offset β is ``−s·z``; its rounding passes the
    gradient straight through, so that zero keeps a code of its own and an integer model computes the same.

    The scale is kept positive by reading what is below 2⁻¹²⁶ as 2⁻¹²⁶, with the gradient there: it points back up, for
    nearly all values are then outside. NaN stays NaN, also from scale and zero point. Computed in float32 for
    float16 and bfloat16; the sums over what shares a scale too.

    Args:
        x: Values of any shape and floating type.
        scale: The learned step (divides); one number, or with `axis` one for each channel; floating.
        qmin: Smallest code, inclusive. LSQ's own: −2^(b−1), or 0 for values that are not negative.
        qmax: Largest code, at least 1. LSQ's own: 2^(b−1) − 1, or 2^b − 1.
        axis: Channels lie along this axis of `x`; None: one scale for all.
        zero_point: The learned zero point, any real number, of the shape of `scale`; None: 0.
        gate: ``"rounded"`` asks where the rounded code lies, as torch's own learnable ops do.
        grad_scale: Factor on the gradients of scale and zero point, 0 or more; None: `lsq_grad_scale` of `x` as a
            weight. Activations take ``lsq_grad_scale(x.shape, qmax, axis, activation=True)``.

    Returns:
        Of the shape and type of `x`.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Esser et al. 2020, arXiv:1902.08153; Bhalgat et al. 2020, arXiv:2004.09576.

    Example:
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> y = lsq_fake_quantize(torch.tensor([0.7, 9.0]), scale, -8, 7, grad_scale=1.0)
        >>> y.sum().backward()
        >>> y.tolist(), round(scale.grad.item(), 4)  # (1 − 1.4) + 7
        ([0.5, 3.5], 6.6)
    """
    where = "lsq_fake_quantize"
    check_floats(where, x)
    check_codes(where, qmin, qmax)
    if qmax < 1:
        raise ConfigError(where, f"qmax must be at least 1, got {qmax}", "LSQ scales its gradient by 1/√qmax")
    check_gate(where, gate)
    if grad_scale is None:
        grad_scale = lsq_grad_scale(x.shape, qmax, axis)
    elif not 0 <= grad_scale < math.inf:
        raise ConfigError(where, f"grad_scale must be 0 or more and finite, got {grad_scale}")
    scales = _learned(where, "scale", scale, x, axis)
    zeros = None if zero_point is None else _learned(where, "zero_point", zero_point, x, axis)
    return learned.lsq_fake_quantize(x, scales, zeros, qmin, qmax, float(grad_scale), gate == "rounded")


def lsq_grad_scale(shape: Sequence[int], qmax: int, axis: int | None = None, *, activation: bool = False) -> float:
    """Return LSQ's factor on the gradient of a scale, ``1/√(n·qmax)``.

    n is the number of elements that share the scale; of an activation, those of one example, so that the factor does
    not depend on the batch.

    Args:
        shape: Of what is quantised; of an activation with the examples along axis 0.
        qmax: Largest code, at least 1.
        axis: Channels with a scale each lie along this axis; None: one scale. For an activation not axis 0.
        activation: Whether the shape is that of an activation.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Esser et al. 2020, arXiv:1902.08153, section 2.2.

    Example:
        >>> lsq_grad_scale((4, 16), 1), lsq_grad_scale((4, 16), 1, 0), lsq_grad_scale((4, 16), 1, activation=True)
        (0.125, 0.25, 0.25)
    """
    where, dims = "lsq_grad_scale", len(shape)
    if isinstance(qmax, bool) or not isinstance(qmax, int) or qmax < 1:
        raise ConfigError(where, f"qmax must be a whole number of at least 1, got {qmax!r}")
    if axis is not None and not -dims <= axis < dims:
        raise ConfigError(where, f"axis must name one of the {dims} axes of the shape, got {axis}")
    # n counts the values that share one scale; in an activation not the examples, whose number is no property of the
    # layer.
    shared = set(range(dims)) - (set() if axis is None else {axis % dims})
    if activation:
        if dims == 0 or (axis is not None and axis % dims == 0):
            raise ConfigError(where, f"axis 0 of an activation must hold its examples, got shape {tuple(shape)}")
        shared -= {0}
    # an empty tensor has an empty gradient; any factor will do
    # a list: torch.compile takes no generator (torch 2.13)
    return 1.0 / math.sqrt(max(1, math.prod([shape[dim] for dim in shared])) * qmax)


def lsq_init_scale(x: Tensor, qmax: int, axis: int | None = None) -> Tensor:
    """Return the scale that LSQ starts from, ``2·mean|x|/√qmax``; 1 where all is zero.

    LSQ+ starts a scale and zero point from the range instead: `choose_qparams_affine`.

    Args:
        x: A weight, or the first activations; any floating type, finite.
        qmax: Largest code, at least 1.
        axis: One scale for each channel along this axis; None: one for all.

    Returns:
        Of shape (channels,) or (), detached; float64 for float64 and float32 for all other types.

    Raises:
        ConfigError: If an argument breaks its rule or a value is not finite.

    Source: Esser et al. 2020, arXiv:1902.08153, section 2.1.

    Example:
        >>> lsq_init_scale(torch.tensor([[1.0, -3.0], [0.0, 0.0]]), 4, axis=0)
        tensor([2., 1.])
    """
    where = "lsq_init_scale"
    check_floats(where, x)
    check_axis(where, x, axis)
    if x.numel() == 0:
        raise ConfigError(where, f"x must have elements, got shape {tuple(x.shape)}")
    if isinstance(qmax, bool) or not isinstance(qmax, int) or qmax < 1:
        raise ConfigError(where, f"qmax must be a whole number of at least 1, got {qmax!r}")
    magnitude = x.detach().to(kernels.compute_dtype(x.dtype)).abs()
    dims = [dim for dim in range(x.dim()) if axis is None or dim != axis % x.dim()]
    # a mean over no axes would be one over all
    mean = magnitude.mean(dims) if dims else magnitude
    scale = 2 * mean / math.sqrt(qmax)
    refuse(
        ~torch.isfinite(scale).all(),
        lambda: ConfigError(f"{where}: x must be finite, got NaN or infinity; look for the step that diverged"),
    )
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def learned_range_fake_quantize(
    x: Tensor,
    minimum: Tensor,
    maximum: Tensor,
    qmin: int,
    qmax: int,
    *,
    axis: int | None = None,
    gate: Literal["unrounded", "rounded"] = "unrounded",
) -> Tensor:
    """Return `x` fake-quantised over a learned range [minimum, maximum], widened to contain 0.

    Scale and zero point are those of `choose_qparams_affine`. A gradient goes, undiminished, to `minimum` where the
    code of `x` lies below `qmin`, to `maximum` where it lies above `qmax`, and else to `x`. Because of the widening a
    minimum above 0 counts as 0, and so does a maximum below: no step can turn the range round. NaN stays NaN.

    Args:
        x: Values of any shape and floating type.
        minimum: Learned; one number, or with `axis` one for each channel; floating.
        maximum: Likewise.
        qmin: Smallest code, inclusive.
        qmax: Largest code, inclusive.
        axis: Channels lie along this axis of `x`; None: one range for all.
        gate: ``"rounded"`` asks where the rounded code lies, as torch's own ops do.

    Returns:
        Of the shape and type of `x`.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Jacob et al. 2018, arXiv:1712.05877; the gradient is that of TensorFlow's ``fake_quant_with_min_max_vars``.

    Example:
        >>> low, high = torch.tensor(-1.0), torch.tensor(1.0, requires_grad=True)
        >>> learned_range_fake_quantize(torch.tensor([0.5, 2.0, 3.0]), low, high, 0, 255).sum().backward()
        >>> high.grad
        tensor(2.)
    """
    where = "learned_range_fake_quantize"
    check_floats(where, x)
    check_codes(where, qmin, qmax)
    check_gate(where, gate)
    low, high = (_learned(where, name, bound, x, axis) for name, bound in (("minimum", minimum), ("maximum", maximum)))
    return learned.range_fake_quantize(x, low, high, qmin, qmax, gate == "rounded")


def pact(x: Tensor, alpha: Tensor, bits: int, *, axis: int | None = None) -> Tensor:
    """Return ``clip(x, 0, α)`` on a grid of 2^bits values, with a gradient for α.

    ``y = clip(x, 0, α)``, ``s = α/(2^b − 1)``, ``x̂ = s·ne(y/s)``; ``∂x̂/∂x = 1`` where ``0 <= x < α``, ``∂x̂/∂α = 1``
    where ``x >= α``, and 0 elsewhere. It takes the place of a ReLU. α is kept positive by reading a smaller one as
    (2^b − 1)·2⁻¹²⁶, where its gradient leads back. NaN stays NaN.

    Args:
        x: Values of any shape and floating type, before the activation function.
        alpha: The learned bound; one number, or with `axis` one for each channel; floating. The source starts it at
            10 and gives it L2 decay; a calibrated percentile is a start too.
        bits: Width of a code, 2 to 8.
        axis: Channels lie along this axis of `x`; None: one bound for all.

    Returns:
        Of the shape and type of `x`.

    Raises:
        ConfigError: If an argument breaks its rule.

    Source: Choi et al. 2018, arXiv:1805.06085.

    Example:
        >>> alpha = torch.tensor(3.0, requires_grad=True)
        >>> y = pact(torch.tensor([-1.0, 0.6, 3.0, 9.0]), alpha, bits=2)
        >>> y.sum().backward()
        >>> y.tolist(), alpha.grad
        ([0.0, 1.0, 3.0, 3.0], tensor(2.))
    """
    where = "pact"
    check_floats(where, x)
    check_bits(where, bits)
    return learned.pact(x, _learned(where, "alpha", alpha, x, axis), 2**bits - 1)


def _learned(where: str, name: str, values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Return learned values shaped to broadcast with x, in its type of computation, part of the graph."""
    check_floats(where, values, name)
    check_axis(where, x, axis)
    if axis is None:
        if values.numel() != 1:
            raise ConfigError(
                where,
                f"{name} must be one number without an axis, got shape {tuple(values.shape)}",
                "pass axis for one a channel",
            )
        values = values.reshape(())
    elif values.shape != (x.shape[axis],):
        raise ConfigError(
            where,
            f"{name} must have one value for each of the {x.shape[axis]} channels along axis {axis}, got shape "
            f"{tuple(values.shape)}",
        )
    else:
        values = kernels.along(values, x.dim(), axis)
    return values.to(x.device, kernels.compute_dtype(x.dtype))
