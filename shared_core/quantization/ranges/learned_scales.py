"""Scales that a layer learns: parameters that the optimizer sees and that no checkpoint of the model holds."""

from __future__ import annotations

import math
from typing import Any

import torch
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization import learned
from torch import Tensor, nn

from shared_core.distributed.collectives import broadcast_
from shared_core.distributed.sharded_tensors import fill_, whole
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.quantization.batch_norm import folded_weight
from shared_core.quantization.functional.learned import lsq_grad_scale, lsq_init_scale
from shared_core.quantization.schemes import LayerScheme


class _StayInGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def stay_in_graph(x: Tensor, *parameters: Any) -> Tensor:
    """Return `x`; in backward the parameters get a gradient of zero, without which DDP waits for them for ever."""
    y: Tensor = _StayInGraph.apply(x, *parameters)  # type: ignore[no-untyped-call]
    return y


def _learn(module: nn.Module, name: str, value: Tensor) -> None:
    module.register_parameter(name, nn.Parameter(value.detach().clone()))


def _set(module: nn.Module, name: str, value: Tensor | float) -> None:
    parameter: Any = getattr(module, name)
    if not isinstance(value, Tensor) or (value.is_cpu and value.dim() == 0):
        # made on the device: a copy to it would wait
        value = torch.full((), float(value), dtype=parameter.dtype, device=parameter.device)
    # by `to`: `as_tensor` would bring it to the default device, which is the CPU in `begin`
    fill_(parameter, value.to(parameter.dtype).expand(parameter.shape))


def learned_value(module: nn.Module, name: str) -> Tensor:
    """Return what a layer has learned, whole; of what is sharded what `Learned.gather` found, else all must call it."""
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
    """Return the scale that a learned magnitude stands for, ``magnitude / steps``."""
    # LSQ's factor on the gradient makes SGD change scales by as small a share as weights, but Adam divides every such
    # factor out: it moves each parameter by the learning rate, which is most of an 8-bit scale. So a number of the size
    # of the values is learned. SGD moves the scale as if it were learned itself: `steps²` is what the division takes
    # from its gradient and its step.
    scale: Tensor = _Scale.apply(magnitude, steps)  # type: ignore[no-untyped-call]
    return scale


SMALLEST_MAGNITUDE = 2.0**-50
"""Below it no step takes a learned magnitude: from far below zero many steps would have to lead back."""


class WeightScale:
    """LSQ on a layer's weight, one scale for each output channel (Esser et al. 2020, arXiv:1902.08153).

    Codes run from −2^(b−1) to 2^(b−1) − 1. LSQ starts from ``2·mean|w|/√qmax``, LSQ+ from
    ``max(|µ − 3σ|, |µ + 3σ|)/2^(b−1)`` (Bhalgat et al. 2020, arXiv:2004.09576).
    """

    def __init__(self, module: nn.Module, scheme: LayerScheme, plus: bool, rounded_gate: bool) -> None:
        self.qmin, self.qmax = -(2 ** (scheme.weight_bits - 1)), 2 ** (scheme.weight_bits - 1) - 1
        self.plus, self.rounded_gate = plus, rounded_gate
        # LSQ+: a range of 3σ in units of the grid; LSQ: the 2 E|w| / √qmax of its initial scale, in units of E|w|.
        self._steps = -self.qmin / 3 if plus else math.sqrt(self.qmax) / 2
        _learn(module, "weight_magnitude", self._initial(module) * self._steps)

    def start(self, module: nn.Module) -> None:
        """Set the scale from the weight that the layer has now, a folded one's from the main process's statistics."""
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

    def quantize(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Return `weight` on the learned grid."""
        rows = as_rows(module, weight)
        scale = self.scale(module).to(rows.device, kernels.compute_dtype(rows.dtype))
        factor = lsq_grad_scale(rows.shape, self.qmax, axis=0)
        rows = learned.lsq_fake_quantize(
            rows, scale.unsqueeze(1), None, self.qmin, self.qmax, factor, self.rounded_gate
        )
        return from_rows(module, rows, weight)


class InputRange:
    """The learned grid of a layer's input: LSQ's scale, LSQ+'s scale and offset β = −s·z, or PACT's clip.

    Until it has seen a step's inputs it does not know where to start. LSQ takes unsigned codes where no input was
    negative, else signed ones; PACT learns only where no input was negative, for it clips at zero: elsewhere the
    observed range stays.
    """

    def __init__(self, module: nn.Module, kind: str, scheme: LayerScheme, rounded_gate: bool) -> None:
        self.kind, self.bits, self.rounded_gate = kind, scheme.activation_bits, rounded_gate
        self.signed_codes = scheme.input_range
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
        """Return what is learned."""
        return [getattr(module, name) for name in self.names]

    def start(self, module: nn.Module, minimum: float, maximum: float, mean: float) -> None:
        """Set the parameters from what was observed: range and mean magnitude."""
        self.started, self.unsigned = True, minimum >= 0
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
            # 10 where the window held zeros alone: a clip of 0 would have no gradient.
            _set(module, "input_clip", maximum or 10.0)

    @property
    def codes(self) -> tuple[int, int]:
        """Smallest and largest code."""
        return (0, 2**self.bits - 1) if self.unsigned and self.kind != "lsq_plus" else self.signed_codes

    @property
    def _steps(self) -> float:
        """Number of steps of the grid in a learned magnitude: of a range from −3σ to 3σ, or of LSQ's beginning."""
        qmin, qmax = self.codes
        return (qmax - qmin) / 6 if self.kind == "lsq_plus" else math.sqrt(qmax) / 2

    def _grid(self, module: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point of LSQ and LSQ+."""
        magnitude, *offset = (learned_value(module, name).reshape(()) for name in self.names)
        scale = _scale_of(magnitude, self._steps)
        # z = -β / s: the offset is learned in units of x, so that a step of s alone does not move the grid's zero.
        return scale, -offset[0] / scale if offset else None

    def quantize(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return `x` on the learned grid."""
        qmin, qmax = self.codes
        dtype = kernels.compute_dtype(x.dtype)
        if self.kind == "pact":
            return learned.pact(x, learned_value(module, "input_clip").to(dtype).reshape(()), qmax)
        scale, zero_point = self._grid(module)
        # a matrix of one example, or of none, still has its features on the last axis
        shape = x.shape if x.dim() > 1 else (1, *x.shape)
        factor = lsq_grad_scale(shape, qmax, activation=True)
        zero_point = None if zero_point is None else zero_point.to(dtype)
        return learned.lsq_fake_quantize(x, scale.to(dtype), zero_point, qmin, qmax, factor, self.rounded_gate)

    @torch.no_grad()
    def entry(self, module: nn.Module) -> dict[str, Any]:
        """Return scale, zero point and range in signed codes, as plain values."""
        low, high = self.signed_codes
        qmin, qmax = self.codes
        point = None
        if self.kind == "pact":
            scale = learned_value(module, "input_clip").reshape(()).clamp_min(qmax * learned.SMALLEST_SCALE) / qmax
        else:
            scale, point = self._grid(module)
        zero_point = low - qmin  # unsigned codes, moved down
        if point is not None:
            zero_point = int(point.round().clamp(qmin, qmax))
        step = scale.item()
        bounds = {"min": step * (low - zero_point), "max": step * (high - zero_point)}
        return {**bounds, "scale": step, "zero_point": zero_point}

    def state_dict(self) -> dict[str, bool]:
        """Return what the parameters do not tell."""
        return {"started": self.started, "learns": self.learns, "unsigned": self.unsigned}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Restore a saved state."""
        self.started, self.learns, self.unsigned = (bool(state[name]) for name in ("started", "learns", "unsigned"))
