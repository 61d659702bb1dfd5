"""Binary and ternary weights without checks, for hot paths. Nothing here reads a value on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eff_kernels.parts import by_parts
from eff_kernels.quantization.affine import compute_dtype, pass_inside, values_of, with_signature


def ternary_values(weight: Tensor, axis: int | None, threshold: float) -> tuple[Tensor, Tensor]:
    """Return codes −1, 0 and 1, and the scale: weights with ``|w| > threshold·E|w|`` stay, and their mean is the scale.

    Args:
        weight: Any shape and floating type, not empty.
        axis: One threshold and scale per channel along this axis; None: one for all.
        threshold: In units of the mean magnitude.

    Returns:
        Codes in `compute_dtype`, and the scale, which broadcasts with them: 0 if all weights are zero, NaN if one
        is not finite.

    Example:
        >>> ternary_values(torch.tensor([[1.0, -3.0, 0.2]]), 0, 0.7)
        (tensor([[ 1., -1.,  0.]]), tensor([[2.]]))
    """
    exact = weight.to(compute_dtype(weight.dtype))
    magnitude = exact.abs()
    # Threshold 0.7 E|w| (Li et al. 2016, arXiv:1605.04711) lies between the best ones for uniform weights, 2/3, and
    # normal, 0.75.
    mean = _mean(magnitude, axis)
    kept = (magnitude > threshold * mean).to(exact.dtype)
    # the mean of the kept weights as a quotient of two means; none is kept only if all are zero
    share = _mean(kept, axis)
    # E[|w| of kept] = E[|w| 1_kept] / P(kept), in which each channel may have a different number of
    # kept weights.
    scale = _mean(magnitude * kept, axis) / torch.where(share == 0, 1.0, share)
    # no weight exceeds an infinite or NaN mean, so all would look like zeros; add mean − mean, which is 0 or NaN
    return exact.sign() * kept, scale + (mean - mean)


def binary_values(weight: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Return codes −1 and 1, 1 for zero, and the scale: the mean magnitude.

    Args:
        weight: Any shape and floating type, not empty.
        axis: One scale per channel along this axis; None: one for all.

    Returns:
        Codes in `compute_dtype`, NaN for NaN, and the scale, which broadcasts with them.

    Example:
        >>> binary_values(torch.tensor([[1.0, -3.0, 0.0]]), 0)
        (tensor([[ 1., -1.,  1.]]), tensor([[1.3333]]))
    """
    exact = weight.to(compute_dtype(weight.dtype))
    return signs(exact), _mean(exact.abs(), axis)


def signs(x: Tensor) -> Tensor:
    """Return −1 where `x` is negative, NaN where it is NaN, and 1 elsewhere, including zeros of both signs.

    Args:
        x: Any shape, floating.

    Example:
        >>> signs(torch.tensor([-2.0, -0.0, 0.0, 3.0, float("nan")]))
        tensor([-1.,  1.,  1.,  1., nan])
    """
    # +0 turns -0 into +0. The last term is NaN for NaN, else 0. `torch.where` with numbers takes ten times as long.
    return x.new_ones(()).copysign(x + 0.0) + x.clamp(-1, 1) * 0.0


@with_signature
class _Ternarize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, axis: int | None, threshold: float) -> Tensor:
        def ternarized(rows: Tensor) -> Tensor:
            return values_of(*ternary_values(rows, axis, threshold), weight.dtype)

        return by_parts(ternarized, weight) if axis == 0 else ternarized(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None


def ternarize(weight: Tensor, axis: int | None, threshold: float = 0.7) -> Tensor:
    """Return ``scale · code`` of `ternary_values` in the type of `weight`; gradient 1.

    Args:
        weight: Floating, any shape.
        axis: Of its channels, each with a scale; None: one scale for all.
        threshold: In units of the mean magnitude. Smaller weights become 0.

    Example:
        >>> ternarize(torch.tensor([[1.0, -3.0, 0.2]]), 0)
        tensor([[ 2., -2.,  0.]])
    """
    y: Tensor = _Ternarize.apply(weight, axis, threshold)  # type: ignore[no-untyped-call]
    return y


@with_signature
class _Binarize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, axis: int | None, scaled: bool) -> Tensor:
        if not scaled:
            return by_parts(signs, x)

        def binarized(rows: Tensor) -> Tensor:
            return values_of(*binary_values(rows, axis), x.dtype)

        return by_parts(binarized, x) if axis == 0 else binarized(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors  # read once, because activation checkpointing recomputes on each read
        exact = x.to(compute_dtype(x.dtype))
        return pass_inside(grads[0].to(exact.dtype), exact, -1, 1).to(grads[0].dtype), None, None


def binarize(x: Tensor, axis: int | None, scaled: bool) -> Tensor:
    """Return the signs of `x`, times the mean magnitude if scaled; the gradient passes where ``|x| <= 1``.

    Args:
        x: Floating, any shape.
        axis: Of its channels, each with a scale; None: one scale for all.
        scaled: Multiply signs by the mean magnitude.

    Example:
        >>> binarize(torch.tensor([[1.0, -3.0, 0.5]]), 0, True)
        tensor([[ 1.5000, -1.5000,  1.5000]])
    """
    y: Tensor = _Binarize.apply(x, axis, scaled)  # type: ignore[no-untyped-call]
    return y


def _mean(magnitude: Tensor, axis: int | None) -> Tensor:
    dims = [dim for dim in range(magnitude.dim()) if axis is None or dim != axis % magnitude.dim()]
    # torch takes no axes as all axes
    return magnitude.mean(dims, keepdim=True) if dims or axis is None else magnitude
