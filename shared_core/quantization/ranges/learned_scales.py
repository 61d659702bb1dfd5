"""Fake quantization with a learned grid (LSQ, LSQ+, learned ranges, PACT), and a layer's learned scales.

Learned scales are parameters for the optimizer, but are not in the model's checkpoints. They have no weight
decay (except PACT's α, Choi et al. 2018, 5.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization import learned
from torch import Tensor, nn

from shared_core.distributed.collectives import broadcast_
from shared_core.distributed.sharded_tensors import fill_, whole
from shared_core.errors import ConfigError
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.numerics.deferred_checks import refuse
from shared_core.quantization.affine import (
    LARGEST_CODE,
    by_axis,
    check_axis,
    check_bits,
    check_choice,
    check_codes,
    check_floats,
    check_whole,
)
from shared_core.quantization.batch_norm import folded_weight
from shared_core.quantization.schemes import LayerScheme


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
    """Return `x` rounded to a grid whose step, and for LSQ+ whose offset, gets a gradient.

    ``x̂ = s·(clamp(ne(x/s) + ẑ, qmin, qmax) − ẑ)`` with ``ẑ = clamp(ne(z), qmin, qmax)``. With ``v = x/s``, depending on
    ``v + ẑ``:

    ============  ===========  ==============  =======
    ..            ∂x̂/∂x        ∂x̂/∂s           ∂x̂/∂z
    ============  ===========  ==============  =======
    below qmin    0            ``qmin − ẑ``    ``−s``
    inside        1            ``ne(v) − v``   0
    above qmax    0            ``qmax − ẑ``    ``−s``
    ============  ===========  ==============  =======

    and the gradients of s and z are multiplied by `grad_scale`. LSQ+'s offset β is ``−s·z``; it is rounded with a
    straight-through gradient, so that zero stays representable and an integer model computes the same.

    A scale below 2⁻¹²⁶ counts as 2⁻¹²⁶, with the gradient there. It points back up, because
    nearly all values are then outside. NaN stays NaN, also in scale and zero point. For float16 and bfloat16 the
    arithmetic, including sums over values that share a scale, is in float32.

    Args:
        x: Values of any shape and floating type.
        scale: The learned step (divides), floating: one number, or one per channel along `axis`.
        qmin: Smallest code, inclusive. LSQ's own: −2^(b−1), or 0 for values that are not negative.
        qmax: Largest code, at least 1. LSQ's own: 2^(b−1) − 1, or 2^b − 1.
        axis: Channels lie along this axis of `x`; None: one scale for all.
        zero_point: The learned zero point, any real number, of the shape of `scale`; None: 0.
        gate: ``"rounded"`` decides by the rounded code, as torch's own learnable ops do.
        grad_scale: Factor on the gradients of scale and zero point, 0 or more; None: `lsq_grad_scale` of `x` as a
            weight. For activations pass ``lsq_grad_scale(x.shape, qmax, axis, activation=True)``.

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
    check_whole(where, "qmax", qmax, 1, LARGEST_CODE)
    _check_gate(where, gate)
    if grad_scale is None:
        grad_scale = lsq_grad_scale(x.shape, qmax, axis)
    elif not 0 <= grad_scale < math.inf:
        raise ConfigError(where, f"grad_scale must be 0 or more and finite, got {grad_scale}")
    scales = _learned(where, "scale", scale, x, axis)
    zeros = None if zero_point is None else _learned(where, "zero_point", zero_point, x, axis)
    return learned.lsq_fake_quantize(x, scales, zeros, qmin, qmax, float(grad_scale), gate == "rounded")


def lsq_grad_scale(shape: Sequence[int], qmax: int, axis: int | None = None, *, activation: bool = False) -> float:
    """Return LSQ's factor on the gradient of a scale, ``1/√(n·qmax)``.

    n is the number of elements that share the scale. For an activation it counts those of one example, so that the
    factor does not depend on the batch size.

    Args:
        shape: Shape of the quantized tensor, for an activation with examples along axis 0.
        qmax: Largest code, at least 1.
        axis: Axis of the channels with one scale each, for an activation not 0; None: one scale.
        activation: True for an activation.

    Source: Esser et al. 2020, arXiv:1902.08153, section 2.2.

    Example:
        >>> lsq_grad_scale((4, 16), 1), lsq_grad_scale((4, 16), 1, 0), lsq_grad_scale((4, 16), 1, activation=True)
        (0.125, 0.25, 0.25)
    """
    where, dims = "lsq_grad_scale", len(shape)
    check_whole(where, "qmax", qmax, 1, LARGEST_CODE)
    check_axis(where, dims, axis)
    # n counts the values that share one scale, within one example: the batch size is no property of the layer.
    shared = set(range(dims)) - (set() if axis is None else {axis % dims})
    if activation:
        if dims == 0 or (axis is not None and axis % dims == 0):
            raise ConfigError(where, f"axis 0 of an activation must hold its examples, got shape {tuple(shape)}")
        shared -= {0}
    # an empty tensor has an empty gradient, so any factor will do
    # a list: torch.compile takes no generator (torch 2.13)
    return 1.0 / math.sqrt(max(1, math.prod([shape[dim] for dim in shared])) * qmax)


def lsq_init_scale(x: Tensor, qmax: int, axis: int | None = None) -> Tensor:
    """Return LSQ's initial scale, ``2·mean|x|/√qmax``; 1 where all values are zero.

    LSQ+ starts a scale and zero point from the range instead: `choose_qparams_affine`.

    Args:
        x: A weight, or the first activations; any floating type, finite.
        qmax: Largest code, at least 1.
        axis: One scale for each channel along this axis; None: one for all.

    Returns:
        Scale of shape (channels,) or (), detached, float64 for float64 and float32 for all other types.

    Raises:
        ConfigError: If an argument is invalid or a value is not finite.

    Source: Esser et al. 2020, arXiv:1902.08153, section 2.1.

    Example:
        >>> lsq_init_scale(torch.tensor([[1.0, -3.0], [0.0, 0.0]]), 4, axis=0)
        tensor([2., 1.])
    """
    where = "lsq_init_scale"
    check_floats(where, x, elements=True)
    check_axis(where, x.dim(), axis)
    check_whole(where, "qmax", qmax, 1, LARGEST_CODE)
    magnitude = x.detach().to(kernels.compute_dtype(x.dtype)).abs()
    dims = [dim for dim in range(x.dim()) if axis is None or dim != axis % x.dim()]
    # torch takes a mean over no axes as one over all
    mean = magnitude.mean(dims) if dims else magnitude
    scale = 2 * mean / math.sqrt(qmax)
    refuse(
        ~torch.isfinite(scale).all(),
        lambda: ConfigError(f"{where}: x must be finite, got NaN or infinity; find the step that diverged"),
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
    """Return `x` fake-quantized over a learned range [minimum, maximum], widened to contain 0.

    Scale and zero point are those of `choose_qparams_affine`. The gradient goes unscaled to `minimum` where the
    code of `x` is below `qmin`, to `maximum` where it is above `qmax`, and else to `x`. A
    minimum above 0 or a maximum below 0 counts as 0, so that no step can swap the bounds. NaN stays NaN.

    Args:
        x: Values of any shape and floating type.
        minimum: Learned lower bound, floating: one number, or one per channel along `axis`.
        maximum: Learned upper bound, likewise.
        qmin: Smallest code, inclusive.
        qmax: Largest code, inclusive.
        axis: Channels lie along this axis of `x`; None: one range for all.
        gate: ``"rounded"`` decides by the rounded code, as torch's own ops do.

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
    _check_gate(where, gate)
    low, high = (_learned(where, name, bound, x, axis) for name, bound in (("minimum", minimum), ("maximum", maximum)))
    return learned.range_fake_quantize(x, low, high, qmin, qmax, gate == "rounded")


def pact(x: Tensor, alpha: Tensor, bits: int, *, axis: int | None = None) -> Tensor:
    """Return ``clip(x, 0, α)`` on a grid of 2^bits values, with a gradient for α.

    ``y = clip(x, 0, α)``, ``s = α/(2^b − 1)``, ``x̂ = s·ne(y/s)``; ``∂x̂/∂x = 1`` where ``0 <= x < α``, ``∂x̂/∂α = 1``
    where ``x >= α``, and 0 elsewhere. It replaces a ReLU. A smaller α counts as
    (2^b − 1)·2⁻¹²⁶, where its gradient leads back, so that α stays positive. NaN stays NaN.

    Args:
        x: Values of any shape and floating type, before the activation function.
        alpha: The learned bound, floating: one number, or one per channel along `axis`. The source starts it at
            10 and applies L2 decay. A calibrated percentile works as a start too.
        bits: Width of a code, 2 to 8.
        axis: Channels lie along this axis of `x`; None: one bound for all.

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


def _check_gate(where: str, gate: str) -> None:
    check_choice(where, "gate", gate, ("unrounded", "rounded"))


def _learned(where: str, name: str, values: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Return learned values shaped to broadcast with x, in its compute type and part of the graph."""
    check_floats(where, values, name)
    values = by_axis(where, name, values, x, axis)
    return values.to(x.device, kernels.compute_dtype(x.dtype))


class _StayInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def stay_in_graph(x: Tensor, *parameters: Any) -> Tensor:
    """Return `x`. In backward the parameters get zero gradients, without which DDP would wait forever."""
    y: Tensor = _StayInGraph.apply(x, *parameters)  # type: ignore[no-untyped-call]
    return y


def _learn(module: nn.Module, name: str, value: Tensor) -> None:
    module.register_parameter(name, nn.Parameter(value.detach().clone()))


def _set(module: nn.Module, name: str, value: Tensor | float) -> None:
    parameter: Any = getattr(module, name)
    if not isinstance(value, Tensor) or (value.is_cpu and value.dim() == 0):
        # created on the device, because a copy to it would wait
        value = torch.full((), float(value), dtype=parameter.dtype, device=parameter.device)
    # `to`, because `as_tensor` would move it to the default device, which is the CPU in `begin`
    fill_(parameter, value.to(parameter.dtype).expand(parameter.shape))


def learned_value(module: nn.Module, name: str) -> Tensor:
    """Return a learned value, whole. If it is sharded and `Learned.gather` has not run, all processes must call it."""
    gathered: dict[str, Tensor] = vars(module).get("gathered", {})
    return gathered[name] if name in gathered else whole(getattr(module, name))


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, magnitude: Tensor, steps: float) -> Tensor:
        ctx.steps = steps
        return magnitude / steps

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.steps, None  # steps² / steps


def _scale_of(magnitude: Tensor, steps: float) -> Tensor:
    """Return the scale of a learned magnitude, ``magnitude / steps``."""
    # LSQ's gradient factor lets SGD change scales by as small a share as weights, but Adam cancels such factors: it
    # moves each parameter by the learning rate, which is most of an 8-bit scale. So we learn a number of the magnitude
    # of the values. `steps²` compensates for the division in gradient and step, so that SGD moves the scale as if it
    # were learned directly.
    scale: Tensor = _Scale.apply(magnitude, steps)  # type: ignore[no-untyped-call]
    return scale


SMALLEST_MAGNITUDE = 2.0**-50
"""Lower bound of a learned magnitude. From far below zero it would take many steps to return."""


class WeightScale:
    """LSQ for a layer's weight, one scale per output channel (Esser et al. 2020, arXiv:1902.08153).

    Codes run from −2^(b−1) to 2^(b−1) − 1. LSQ starts from ``2·mean|w|/√qmax``, LSQ+ from
    ``max(|µ − 3σ|, |µ + 3σ|)/2^(b−1)`` (Bhalgat et al. 2020, arXiv:2004.09576).
    """

    def __init__(self, module: nn.Module, scheme: LayerScheme, plus: bool, rounded_gate: bool) -> None:
        self.qmin, self.qmax = scheme.weight_range
        self.plus, self.rounded_gate = plus, rounded_gate
        # LSQ+: a range of 3σ in steps of the grid; LSQ: its initial scale, 2 E|w| / √qmax, in units of E|w|.
        self._steps = -self.qmin / 3 if plus else math.sqrt(self.qmax) / 2
        _learn(module, "weight_magnitude", self._initial(module) * self._steps)

    def start(self, module: nn.Module) -> None:
        """Set the scale from the current weight, for a folded layer with the main process's statistics."""
        scale = self._initial(module)
        self.set(module, scale if getattr(module, "fold", None) is None else broadcast_(scale))

    def set(self, module: nn.Module, scale: Tensor) -> None:
        """Set the scale, (channels,)."""
        _set(module, "weight_magnitude", scale * self._steps)

    def scale(self, module: nn.Module) -> Tensor:
        """Return the scale, (channels,)."""
        return _scale_of(learned_value(module, "weight_magnitude"), self._steps)

    def _initial(self, module: nn.Module) -> Tensor:
        rows = as_rows(module, folded_weight(module, whole(module.weight.detach())))  # type: ignore[operator, union-attr]
        if not self.plus:
            return lsq_init_scale(rows, self.qmax, axis=0)
        rows = rows.to(kernels.compute_dtype(rows.dtype))
        mean, spread = rows.mean(1), 3 * rows.std(1, correction=0)
        scale = torch.maximum((mean - spread).abs(), (mean + spread).abs()) / -self.qmin
        return torch.where(scale > 0, scale, torch.ones_like(scale))

    def quantize(self, module: nn.Module, weight: Tensor, name: str = "weight", noise: Tensor | None = None) -> Tensor:
        """Return `weight` on the learned grid, rounded to nearest."""
        rows = as_rows(module, weight)
        scale = self.scale(module).to(rows.device, kernels.compute_dtype(rows.dtype))
        factor = lsq_grad_scale(rows.shape, self.qmax, axis=0)
        rows = learned.lsq_fake_quantize(
            rows, scale.unsqueeze(1), None, self.qmin, self.qmax, factor, self.rounded_gate
        )
        return from_rows(module, rows, weight)


class InputRange:
    """The learned grid of a layer's input: LSQ's scale, LSQ+'s scale and offset β = −s·z, or PACT's clip.

    It starts from the inputs of one step. LSQ uses unsigned codes if no input was
    negative, else signed ones. PACT learns only if no input was negative, because it clips at zero. Otherwise the
    observed range stays.
    """

    def __init__(self, module: nn.Module, kind: str, scheme: LayerScheme, rounded_gate: bool) -> None:
        self.kind, self.bits, self.rounded_gate = kind, scheme.activation_bits, rounded_gate
        self.signed_codes, self.symmetric = scheme.input_range, scheme.symmetric
        self.started = self.learns = self.unsigned = False
        self.names = {
            "lsq": ["input_magnitude"],
            "lsq_plus": ["input_magnitude", "input_offset"],
            "pact": ["input_clip"],
        }[kind]
        like: Tensor = next(module.parameters(recurse=False))
        for name in self.names:
            _learn(module, name, torch.ones(1, device=like.device, dtype=kernels.compute_dtype(like.dtype)))

    def parameters(self, module: nn.Module) -> list[Any]:
        """Return the learned parameters."""
        return [getattr(module, name) for name in self.names]

    def start(self, module: nn.Module, minimum: float, maximum: float, mean: float) -> None:
        """Set the parameters from the observed range and mean magnitude."""
        self.started, self.unsigned = True, minimum >= 0 and not self.symmetric
        # PACT clips at 0 below: an input with negative values keeps its observed range.
        self.learns = self.kind != "pact" or self.unsigned
        qmin, qmax = self.codes
        if self.kind == "lsq":
            _set(module, "input_magnitude", (2 * mean / math.sqrt(qmax) or 1.0) * self._steps)
        elif self.kind == "lsq_plus":
            bounds = torch.tensor([minimum, maximum], dtype=torch.float64)
            scale, zero_point = kernels.affine_qparams(bounds[0], bounds[1], qmin, qmax)
            _set(module, "input_magnitude", scale * self._steps)
            _set(module, "input_offset", -scale * zero_point)
        elif self.learns:
            # 10 if the window held only zeros, because a clip of 0 would have no gradient.
            _set(module, "input_clip", maximum or 10.0)

    @property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return (0, 2**self.bits - 1) if self.unsigned and self.kind != "lsq_plus" else self.signed_codes

    @property
    def _steps(self) -> float:
        """Number of grid steps in a learned magnitude: a range of −3σ to 3σ, or LSQ's initial scale."""
        qmin, qmax = self.codes
        return (qmax - qmin) / 6 if self.kind == "lsq_plus" else math.sqrt(qmax) / 2

    def _grid(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point of LSQ and LSQ+."""
        magnitude, *offset = (learned_value(module, name).reshape(()) for name in self.names)
        scale = _scale_of(magnitude, self._steps)
        # z = -β / s: the offset is learned in units of x, so that changing only s does not move the grid's zero.
        return scale, -offset[0] / scale if offset else None

    def quantize(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return `x` on the learned grid."""
        qmin, qmax = self.codes
        dtype = kernels.compute_dtype(x.dtype)
        if self.kind == "pact":
            return learned.pact(x, learned_value(module, "input_clip").to(dtype).reshape(()), qmax)
        scale, zero_point = self._grid(module)
        # a matrix with one or no example still has its features on the last axis
        shape = x.shape if x.dim() > 1 else (1, *x.shape)
        factor = lsq_grad_scale(shape, qmax, activation=True)
        zero_point = None if zero_point is None else zero_point.to(dtype)
        return learned.lsq_fake_quantize(x, scale.to(dtype), zero_point, qmin, qmax, factor, self.rounded_gate)

    @torch.no_grad()
    def _final_grid(self, module: nn.Module) -> tuple[Tensor, Tensor | int]:
        """Return scale and zero point in signed codes."""
        qmin, qmax = self.codes
        point = None
        if self.kind == "pact":
            scale = learned_value(module, "input_clip").reshape(()).clamp_min(qmax * learned.SMALLEST_SCALE) / qmax
        else:
            scale, point = self._grid(module)
        # shift unsigned codes down
        return scale, self.signed_codes[0] - qmin if point is None else point.round().clamp(qmin, qmax)

    def limits(self, module: nn.Module) -> Tensor:
        """Return the two values between which inputs are rounded to the nearest code, not clipped."""
        scale, zero_point = self._final_grid(module)
        low, high = self.signed_codes
        return torch.stack([scale * (low - 0.5 - zero_point), scale * (high + 0.5 - zero_point)])

    def entry(self, module: nn.Module) -> dict[str, Any]:
        """Return scale, zero point and range in signed codes, as plain values."""
        low, high = self.signed_codes
        scale, point = self._final_grid(module)
        step, zero_point = scale.item(), int(point)
        bounds = {"min": step * (low - zero_point), "max": step * (high - zero_point)}
        return {**bounds, "scale": step, "zero_point": zero_point}

    def state_dict(self) -> dict[str, bool]:
        """Return the state that is not in the parameters."""
        return {"started": self.started, "learns": self.learns, "unsigned": self.unsigned}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Restore a saved state."""
        self.started, self.learns, self.unsigned = (bool(state[name]) for name in ("started", "learns", "unsigned"))
