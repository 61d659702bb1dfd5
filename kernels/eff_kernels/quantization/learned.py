"""Fake quantization with a learned grid, without checks, for hot paths: LSQ, LSQ+, learned ranges and PACT.

Learned values are clamped to valid ones inside the function, so that no optimizer step can make a result
invalid. Beyond the bound the gradient is that at the bound, which leads back. Nothing here reads a value on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eff_kernels._triton.launch import directly
from eff_kernels.quantization.affine import (
    affine_qparams,
    grid_gradients,
    grid_on_triton,
    pass_inside,
    quantize,
    round_to_grid,
    values_of,
    with_signature,
)

SMALLEST_SCALE = 2.0**-126
"""A smaller learned scale counts as this one: the smallest normal float32."""


def sum_like(values: Tensor, like: Tensor) -> Tensor:
    """Return `values` summed over the axes along which `like` is broadcast, in the shape of `like`.

    Args:
        values: Any shape that `like` broadcasts to.
        like: Gives the shape of the result.

    Example:
        >>> sum_like(torch.ones(4, 2, 3), torch.zeros(2, 1))
        tensor([[12.],
                [12.]])
    """
    lead = values.dim() - like.dim()
    dims = [dim for dim in range(values.dim()) if dim < lead or like.shape[dim - lead] == 1]
    return (values.sum(dims) if dims else values).reshape(like.shape)


@with_signature
class _LsqFakeQuantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int, rounded_gate: bool, grad_scale: float
    ) -> Tensor:
        if grid_on_triton(x, scale, zero_point):
            y: Tensor = directly(round_to_grid)(x, scale, zero_point, None, qmin, qmax, SMALLEST_SCALE)
            return y
        # An optimizer can move a learned scale to 0 or below. The value is clamped, the parameter is not changed.
        scale = scale.clamp_min(SMALLEST_SCALE)
        codes = (x.to(scale.dtype) / scale).round_()
        if zero_point is None:
            codes = codes.clamp_(qmin, qmax)
        else:
            zero = zero_point.round().clamp(qmin, qmax)
            codes = (codes + zero).clamp_(qmin, qmax).sub_(zero)
        return values_of(codes, scale, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scale, zero_point, *ctx.rest = inputs
        ctx.save_for_backward(x, scale, zero_point)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        qmin, qmax, rounded_gate, grad_scale = ctx.rest
        if grid_on_triton(x, scale, zero_point, None, grads[0]):
            x_grad, sums = directly(grid_gradients)(
                grads[0], x, scale, zero_point, None, qmin, qmax, rounded_gate, "lsq", grad_scale, SMALLEST_SCALE
            )
            zero_grad = None if zero_point is None else sums[1].view_as(zero_point)
            return x_grad, sums[0].view_as(scale), zero_grad, None, None, None, None
        scale = scale.clamp_min(SMALLEST_SCALE)
        grad = grads[0].to(scale.dtype)
        exact = x.to(scale.dtype) / scale
        zero = None if zero_point is None else zero_point.round().clamp(qmin, qmax)
        codes = exact.round() if zero is None else exact.round() + zero
        shifted = exact if zero is None or rounded_gate else exact + zero
        # LSQ (Esser et al. 2020, arXiv:1902.08153): the gradient of x passes only inside the range.
        inside = pass_inside(grad, codes if rounded_gate else shifted, qmin, qmax)
        # ne(v) − v inside and the clamped code outside, in one formula. Outside, v is multiplied by a zero gradient,
        # so it is bounded, because 0 · inf would be NaN. In place, because CPUs are limited by memory, but not if a
        # second derivative needs the values of the gate.
        clamp = torch.clamp if torch.is_grad_enabled() else torch.clamp_
        clamped = clamp(codes, qmin, qmax) if zero is None else clamp(codes, qmin, qmax) - zero
        scale_grad = (grad * clamped).addcmul_(inside, clamp(exact, qmin - qmax - 1, qmax - qmin + 1), value=-1)
        # grad_scale is LSQ's g = 1 / sqrt(N qmax): a sum over N weights would make the scale's steps too large.
        scale_grad = sum_like(scale_grad, scale) * grad_scale
        zero_grad = None
        if zero_point is not None:
            # LSQ+ (Bhalgat et al. 2020, arXiv:2004.09576): outside the range the value moves by -s for each step of
            # z.
            zero_grad = sum_like(inside - grad, zero_point) * (scale * grad_scale)
        return inside.to(x.dtype), scale_grad, zero_grad, None, None, None, None


def lsq_fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    qmin: int,
    qmax: int,
    grad_scale: float,
    rounded_gate: bool = False,
) -> Tensor:
    """Return ``s·(clamp(ne(x/s) + z, qmin, qmax) − z)`` in the type of `x`; scale and zero point get a gradient.

    With ``v = x/s``, ``∂x̂/∂s`` is ``ne(v) − v`` inside, ``qmin − z`` below and ``qmax − z`` above; ``∂x̂/∂z`` is 0
    inside and ``−s`` outside; both are multiplied by `grad_scale`. The gradient passes straight through the rounding
    and the clamp of z itself.

    Args:
        x: Any shape and floating type.
        scale: Broadcasts with `x`, of as many axes or none, in ``compute_dtype(x.dtype)``.
        zero_point: Of the shape and type of `scale`, any real number; None: 0.
        qmin: Smallest code.
        qmax: Largest code.
        grad_scale: Factor on the gradients of scale and zero point.
        rounded_gate: Gate on the rounded code instead, as torch's own ops do.

    Example:
        >>> scale = torch.tensor(0.5, requires_grad=True)
        >>> lsq_fake_quantize(torch.tensor([0.7, 9.0]), scale, None, -8, 7, 1.0).sum().backward()
        >>> round(scale.grad.item(), 4)  # (1 − 1.4) + 7
        6.6
    """
    y: Tensor = _LsqFakeQuantize.apply(x, scale, zero_point, qmin, qmax, rounded_gate, grad_scale)  # type: ignore[no-untyped-call]
    return y


@with_signature
class _LearnedRange(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, minimum: Tensor, maximum: Tensor, qmin: int, qmax: int, rounded_gate: bool) -> Tensor:
        scale, zero_point = affine_qparams(minimum, maximum, qmin, qmax)
        if grid_on_triton(x, scale, zero_point):
            y: Tensor = directly(round_to_grid)(x, scale, zero_point, None, qmin, qmax)
            return y
        return values_of(quantize(x, scale, zero_point, qmin, qmax), scale, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, minimum, maximum, *ctx.rest = inputs
        ctx.save_for_backward(x, minimum, maximum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, minimum, maximum = ctx.saved_tensors
        qmin, qmax, rounded_gate = ctx.rest
        scale, zero_point = affine_qparams(minimum, maximum, qmin, qmax)
        if grid_on_triton(x, scale, zero_point, None, grads[0]):
            x_grad, sums = directly(grid_gradients)(
                grads[0], x, scale, zero_point, None, qmin, qmax, rounded_gate, "range"
            )
            return x_grad, sums[1].view_as(minimum), sums[0].view_as(maximum), None, None, None
        grad = grads[0].to(scale.dtype)
        codes = x.to(scale.dtype) / scale
        codes = (codes.round_() if rounded_gate else codes).add_(zero_point)
        inside = pass_inside(grad, codes, qmin, qmax)
        # a code outside cannot be NaN, so one comparison separates the two sides
        outside = grad - inside
        # Values clipped below equal the minimum, those clipped above the maximum, so each bound gets their
        # gradient.
        below = torch.where(codes < qmin, outside, 0.0)
        return inside.to(x.dtype), sum_like(below, minimum), sum_like(outside.sub_(below), maximum), None, None, None


def range_fake_quantize(
    x: Tensor, minimum: Tensor, maximum: Tensor, qmin: int, qmax: int, rounded_gate: bool = False
) -> Tensor:
    """Return `x` fake-quantized over [minimum, maximum], widened to contain 0; both bounds get a gradient.

    The grid is that of `affine_qparams`. Values below it pass their gradient to `minimum`, values above to
    `maximum`, and the rest to `x`.

    Args:
        x: Any shape and floating type.
        minimum: Broadcasts with `x`, of as many axes or none, in ``compute_dtype(x.dtype)``.
        maximum: Like `minimum`.
        qmin: Smallest code.
        qmax: Largest code.
        rounded_gate: Gate on the rounded code instead, as torch's own ops do.

    Example:
        >>> low, high = torch.tensor(-1.0), torch.tensor(1.0, requires_grad=True)
        >>> range_fake_quantize(torch.tensor([0.5, 2.0, 3.0]), low, high, 0, 255).sum().backward()
        >>> high.grad
        tensor(2.)
    """
    y: Tensor = _LearnedRange.apply(x, minimum, maximum, qmin, qmax, rounded_gate)  # type: ignore[no-untyped-call]
    return y


@with_signature
class _Pact(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: Tensor, levels: int) -> Tensor:
        # α below the smallest scale would make s subnormal or 0.
        scale = alpha.clamp_min(levels * SMALLEST_SCALE) / levels
        if grid_on_triton(x, scale, None):
            y: Tensor = directly(round_to_grid)(x, scale, None, None, 0, levels)
            return y
        return values_of((x.to(scale.dtype) / scale).round_().clamp(0, levels), scale, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, alpha, ctx.levels = inputs
        ctx.save_for_backward(x, alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha = ctx.saved_tensors
        smallest = ctx.levels * SMALLEST_SCALE
        if grid_on_triton(x, alpha, None, None, grads[0]):
            x_grad, sums = directly(grid_gradients)(
                grads[0], x, alpha, None, None, 0, ctx.levels, kind="pact", smallest=smallest
            )
            return x_grad, sums[0].view_as(alpha), None
        grad, exact = grads[0].to(alpha.dtype), x.to(alpha.dtype)
        # PACT (Choi et al. 2018, arXiv:1805.06085): ∂y/∂α is 1 from α on and 0 below.
        above = exact >= alpha.clamp_min(smallest)
        inside = grad.masked_fill(above | (exact < 0), 0.0)
        return inside.to(x.dtype), sum_like(torch.where(above, grad, 0.0), alpha), None


def pact(x: Tensor, alpha: Tensor, levels: int) -> Tensor:
    """Return ``clip(x, 0, α)`` on a grid of `levels` steps: ``s = α/levels``, ``s·ne(clip(x, 0, α)/s)``.

    The gradient passes to `x` where ``0 <= x < α``, to α where ``x >= α``.

    Args:
        x: Any shape and floating type.
        alpha: Broadcasts with `x`, of as many axes or none, in ``compute_dtype(x.dtype)``.
        levels: Largest code, ``2^bits − 1``.

    Example:
        >>> pact(torch.tensor([-1.0, 0.6, 9.0]), torch.tensor(3.0), 3)
        tensor([0., 1., 3.])
    """
    y: Tensor = _Pact.apply(x, alpha, levels)  # type: ignore[no-untyped-call]
    return y
