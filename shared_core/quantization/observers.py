"""Ranges of activations: a window inside a step, a moving average over steps, one tensor for all layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from eff_kernels import quantization as kernels
from torch import Tensor

from shared_core.ranks import all_reduce_


class RangeBank:
    """The ranges of all layers of one model, one row a layer: a step costs one collective and a few ops.

    A forward only widens the window. `take_window` joins the ranks and empties it; `commit` moves the average
    ``r ← r + c·(w − r)`` by that window once the optimizer step was applied, and a window that is never
    committed leaves no trace. So micro-batches, recomputation and skipped steps all do no harm.

    Plain attributes, not buffers: DDP would overwrite the other ranks' windows with those of rank 0.

    Args:
        num_layers: Rows.
        weight_bits: Width of weight codes.
        activation_bits: Width of activation codes.
        rounded_gate: Gate gradients on the rounded code.
    """

    def __init__(
        self, num_layers: int, *, weight_bits: int = 8, activation_bits: int = 8, rounded_gate: bool = False
    ) -> None:
        self.weight_bits, self.activation_bits = weight_bits, activation_bits
        self.weight_qmax = 2 ** (weight_bits - 1) - 1
        self.qmin, self.qmax = -(2 ** (activation_bits - 1)), 2 ** (activation_bits - 1) - 1
        self.rounded_gate = rounded_gate
        self.observing = False
        self.quantize_weights = False
        self.quantize_activations = False
        self.num_updates = 0
        self.window = torch.full((num_layers, 2), math.inf)  # (min, -max): both are reduced by a minimum
        self.ranges = torch.zeros(num_layers, 2)  # (min, max)
        self.known = torch.zeros(num_layers, dtype=torch.bool)
        self.non_finite = torch.zeros(num_layers, dtype=torch.int64)
        self.scale = torch.ones(num_layers)
        self.zero_point = torch.zeros(num_layers, dtype=torch.int32)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.window.device

    def move_(self, device: torch.device) -> None:
        """Move all rows; float32 stays float32 whatever the model is cast to."""
        if device != self.device and device.type != "meta":
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(self, name, value.to(device))

    def take_window(self) -> Tensor:
        """Return the window of all ranks and start a new one; every rank must call it."""
        window = all_reduce_(self.window.clone(), "min")
        self.window.fill_(math.inf)
        return window

    def commit(self, window: Tensor, ema_constant: float) -> None:
        """Move the averages by one window; a layer's first window is its first range.

        A layer that saw nothing keeps its range, and so does one that saw NaN or infinity, which is counted.
        """
        seen = ~(window == math.inf).all(1)
        finite = torch.isfinite(window).all(1)
        new = torch.stack([window[:, 0], -window[:, 1]], 1)
        moved = torch.where(self.known[:, None], self.ranges + ema_constant * (new - self.ranges), new)
        self.set_ranges(torch.where(finite[:, None], moved, self.ranges), self.known | finite)
        self.non_finite += seen & ~finite
        self.num_updates += 1

    def set_ranges(self, ranges: Tensor, known: Tensor) -> None:
        """Take ranges (layers, 2), valid where `known`, and derive scales and zero points, in place."""
        self.ranges.copy_(ranges)
        self.known.copy_(known)
        scale, zero_point = kernels.affine_qparams(self.ranges[:, 0], self.ranges[:, 1], self.qmin, self.qmax)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)


class LayerQuantizer:
    """What a fake-quantising layer needs: its rows of the bank, as views.

    Args:
        bank: The ranges of all layers.
        index: This layer's row.
    """

    def __init__(self, bank: RangeBank, index: int) -> None:
        self.bank, self.index = bank, index
        self.has_range = False  # a host-side copy of bank.known, so that a forward reads nothing from the device
        self._bind()

    def _bind(self) -> None:
        self.window = self.bank.window[self.index]
        self.scale = self.bank.scale[self.index]
        self.zero_point = self.bank.zero_point[self.index]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the views out: a pickled view would come back as storage of its own."""
        return {"bank": self.bank, "index": self.index, "has_range": self.has_range}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._bind()

    def quantize_input(self, x: Tensor, training: bool) -> Tensor:
        """Observe `x` in training; return it fake-quantised once that is switched on and a range exists."""
        bank = self.bank
        if x.device != self.scale.device:
            bank.move_(x.device)
            self._bind()
        if training and bank.observing and x.numel():
            low, high = torch.aminmax(x.detach())
            # minimum hands NaN on, so that a bad batch is found when the window is read
            self.window.copy_(torch.minimum(self.window, torch.stack([low, -high]).to(self.window.dtype)))
        if bank.quantize_activations and self.has_range:
            return kernels.fake_quantize(x, self.scale, self.zero_point, bank.qmin, bank.qmax, bank.rounded_gate)
        return x

    def quantize_weight(self, weight: Tensor) -> Tensor:
        """Return `weight` fake-quantised per output channel once that is switched on."""
        if self.bank.quantize_weights:
            return kernels.fake_quantize_symmetric(weight, 0, self.bank.weight_qmax)
        return weight
