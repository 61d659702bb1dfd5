"""The gradients of an optimizer as loss scaling takes them: by device and dtype, in plain numbers.

Underflow telemetry: how much of the gradients the number format can hardly hold, per layer, in one pass.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from eff_kernels.loss_scaling import NUM_BINS, count_magnitudes
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_, local_part
from shared_core.loss_scaling.floors import FORMATS


def has_scaled_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step unscales in its own kernel, in fp32: only then may parameters be fp16."""
    # kernels that want the whole scaler as an argument would skip inside; they take unscaled gradients too
    return getattr(optimizer, "_step_supports_amp_scaling", False) and (
        "grad_scaler" not in inspect.signature(optimizer.step).parameters
    )


def _coalesced(parameter: Tensor) -> Tensor | None:
    grad = parameter.grad
    if grad is not None and grad.is_sparse and grad.dtype is torch.float16:
        # scaled fp16 values of one index can overflow when they are added up: check the sums
        parameter.grad = grad = grad.coalesce()
    return grad._values() if grad is not None and grad.is_sparse else grad


def grouped_gradients(optimizer: torch.optim.Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return the numbers to be unscaled by device and dtype; of sparse gradients, those that they store."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
    if not grads:
        return {}
    if any(map(attrgetter("is_sparse"), grads)):
        grads = [grad for parameter in parameters if (grad := _coalesced(parameter)) is not None]
    # what torch's optimizers group by; no None comes out where none went in
    groups: Any = torch._C._group_tensors_by_device_and_dtype([grads], False)
    return {
        # torch's kernel is of real numbers
        (device, dtype): [*map(torch.view_as_real, same)] if dtype.is_complex else same
        for (device, dtype), ((same,), _) in groups.items()
    }


_FLOAT32 = torch.finfo(torch.float32)
_BIAS = 127  # column k of the histogram starts at 2**(k - 127)


@dataclass
class Figures:
    """Counts of one layer's gradients, or of all, at one step."""

    elements: int = 0
    zeros: int = 0
    subnormal: int = 0
    amax: float = 0.0

    def add(self, other: Figures) -> None:
        """Add another layer's counts."""
        self.elements += other.elements
        self.zeros += other.zeros
        self.subnormal += other.subnormal
        self.amax = max(self.amax, other.amax)

    def shares(self, scale: float, largest: float) -> dict[str, float | None]:
        """Return the shares of subnormal and zero elements and the head-room in bits, None where all are zero."""
        total = max(self.elements, 1)
        return {
            "underflow": self.subnormal / total,
            "zero": self.zeros / total,
            "headroom": math.log2(largest) - math.log2(self.amax) - math.log2(scale) if self.amax else None,
        }


class UnderflowTelemetry:
    """Measures the parameter gradients as the number format saw them, scaled: a scaler sees overflow, nothing else.

    - *underflow*: share of elements with ``0 < |g|·S < smallest normal``, which have lost bits;
    - *zero*: share that is exactly 0, which flushed gradients are too;
    - *headroom*: ``log2(format maximum / (amax·S))``, the doublings until overflow.

    Args:
        format: ``"fp16"`` or ``"fp8_e5m2"``.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> weight.grad = torch.tensor([0.0, 1e-5, 0.5, 2.0])
        >>> telemetry = UnderflowTelemetry()
        >>> telemetry.measure([("head.weight", weight)], scale=1.0)
        True
        >>> {name: round(value, 2) for name, value in telemetry.figures().items()}
        {'loss_scale/underflow': 0.25, 'loss_scale/zero': 0.25, 'loss_scale/headroom': 15.0}
    """

    def __init__(self, format: str = "fp16") -> None:
        self.format = format
        self._limits = torch.finfo(FORMATS[format])
        self.step: int | None = None
        """Applied steps before the latest measurement; None before the first."""
        self.scale = 1.0
        """Scale of the latest measurement."""
        self.layers: dict[str, Figures] = {}
        """Counts of the latest measurement, by the name of the module that owns the parameters."""
        self.histograms = torch.zeros(0, NUM_BINS, dtype=torch.int64)
        """int64 ``[layers, 256]``: column k counts unscaled gradients with ``2^(k − 127) <= |g| < 2^(k − 126)``,
        column 0 what is smaller and zeros."""

    @torch.no_grad()
    def measure(self, parameters: Iterable[tuple[str, Tensor]], scale: float, step: int = 0) -> bool:
        """Replace the figures by those of these parameters' gradients, and return whether it could be done.

        A step whose gradients hold Inf or NaN, or that has no gradients, is left out. Under FSDP2 every process must
        call it.

        Args:
            parameters: Names and parameters with unscaled gradients; those without one are left out.
            scale: What the gradients were multiplied by in the backward.
            step: Applied steps so far.
        """
        grads = [(name, parameter.grad) for name, parameter in parameters if parameter.grad is not None]
        smallest = min(max(self._limits.smallest_normal / scale, _FLOAT32.tiny), _FLOAT32.max)
        counts, amax = _count([grad for _, grad in grads], smallest)
        if not grads or counts[:, NUM_BINS - 1].any():
            return False
        self.step, self.scale = step, scale
        # a few operations for all layers: one row of figures after the other would hold up the step of a large model
        layers: dict[str, int] = {}
        rows = torch.tensor([layers.setdefault(name.rpartition(".")[0] or name, len(layers)) for name, _ in grads])
        summed = counts.new_zeros(len(layers), counts.shape[1]).index_add_(0, rows, counts)
        largest = amax.new_zeros(len(layers)).scatter_reduce_(0, rows, amax, "amax")
        self.histograms = summed[:, :NUM_BINS].clone()
        columns = self.histograms.sum(1).tolist(), *summed[:, NUM_BINS:].t().tolist(), largest.tolist()
        self.layers = {name: Figures(*found) for name, *found in zip(layers, *columns, strict=True)}
        return True

    @property
    def total(self) -> Figures:
        """The counts of all layers together."""
        total = Figures()
        for figures in self.layers.values():
            total.add(figures)
        return total

    def figures(self) -> dict[str, float]:
        """Return the figures of all layers together; nothing before the first measurement."""
        if self.step is None:
            return {}
        shares = self.total.shares(self.scale, self._limits.max)
        return {f"loss_scale/{name}": value for name, value in shares.items() if value is not None}

    def report(self) -> dict[str, Any]:
        """Return the latest figures, total and by layer, and the histogram of log2 of the unscaled magnitudes."""
        if self.step is None:
            return {}
        largest = self._limits.max
        total = self.histograms.sum(0).tolist()
        return {
            "format": self.format,
            "measured_step": self.step,
            "measured_scale": self.scale,
            **self.total.shares(self.scale, largest),
            "layers": {name: figures.shares(self.scale, largest) for name, figures in self.layers.items()},
            "log2_histogram": {str(column - _BIAS): count for column, count in enumerate(total) if count and column},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the latest figures."""
        return {
            "step": self.step,
            "scale": self.scale,
            "layers": {name: [f.elements, f.zeros, f.subnormal, f.amax] for name, f in self.layers.items()},
            "histograms": self.histograms,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; an empty state changes nothing."""
        if state:
            self.step, self.scale = state["step"], state["scale"]
            self.layers = {name: Figures(*figures) for name, figures in state["layers"].items()}
            self.histograms = state["histograms"]


def _count(grads: list[Tensor], smallest: float) -> tuple[Tensor, Tensor]:
    """Return on CPU int64 ``[n, 256 + 2]``, the histogram, zeros and small ones, and float32 ``[n]``, the largest."""
    counts = torch.zeros(len(grads), NUM_BINS + 2, dtype=torch.int64)
    amax = torch.zeros(len(grads))
    groups: dict[tuple[torch.device, bool], list[int]] = {}
    for row, grad in enumerate(grads):
        groups.setdefault((grad.device, hasattr(grad, "to_local")), []).append(row)
    for (_, sharded), rows in groups.items():
        dense = [local_part(grads[row]) for row in rows]
        found = count_magnitudes([grad.coalesce().values() if grad.is_sparse else grad for grad in dense], smallest)
        part = torch.cat((found.histogram, found.zeros[:, None], found.small[:, None]), dim=1)
        largest = found.amax
        if sharded:
            part, largest = all_reduce_(part, "sum"), all_reduce_(largest.contiguous(), "max")
        counts[rows], amax[rows] = part.cpu(), largest.cpu()
    return counts, amax
