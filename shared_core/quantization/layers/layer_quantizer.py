"""What a fake-quantising layer holds: its scheme, its row of the bank of ranges, and what it learns."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from eff_kernels.quantization import affine as kernels
from torch import Tensor, nn

from shared_core.modules.weight_views import as_rows
from shared_core.quantization.batch_norm import folded_weight, unfolded_weight
from shared_core.quantization.functional.quantizers import on_grid, quantize_input, quantize_weight
from shared_core.quantization.ranges.learned_scales import InputRange, WeightScale, stay_in_graph
from shared_core.quantization.ranges.observers import RangeBank
from shared_core.quantization.schemes import LayerScheme

if TYPE_CHECKING:
    from shared_core.quantization.ranges.gelu import GeluInputs


class LayerQuantizer:
    """Quantises the weight and the input of one layer.

    Args:
        bank: The ranges of all layers, and the switches.
        index: This layer's row; None if its input has no range.
        scheme: How it is quantised.
        number: This layer's place among all of them.
        baked: The weight holds the values of its codes: quantising it again could move one by an ulp.
    """

    def __init__(
        self, bank: RangeBank, index: int | None, scheme: LayerScheme, *, number: int = 0, baked: bool = False
    ) -> None:
        self.bank, self.index, self.scheme, self.number, self.baked = bank, index, scheme, number, baked
        self.has_range = False  # a host-side copy of bank.known, so that a forward reads nothing from the device
        self.saved: dict[str, Any] | None = None
        """What `entry` returns for a layer that was put back together from it: learned scales are not derived anew."""
        self.batch_norm: str | None = None
        """The batch norm that the layer computes, seen from it; None if there is none."""
        self.fixed_scale: Tensor | None = None
        """Saved scales of the folded weight, one a channel; None: those that the weight gives."""
        self.clip: float | None = None
        """Largest value that is observed: of the output of a GELU."""
        self.gelu_inputs: GeluInputs | None = None
        """Looks at the input, as long as it is not known whether that is the output of a GELU."""
        self.learned_input: InputRange | None = None
        self.learned_weight: WeightScale | None = None

    def input(self, module: nn.Module, x: Tensor) -> Tensor:
        """Observe `x` in training; return it fake-quantised once that is switched on and a range exists."""
        bank, index = self.bank, self.index
        if index is None:
            return quantize_input(module, x, self.scheme) if bank.quantizing else x
        if x.device != bank.device:
            bank.move_(x.device)
        learned = self.learned_input
        if (
            bank.observing
            and (module.training or bank.observes_in_eval)
            and x.numel()
            and (learned is None or not learned.learns)
        ):
            if self.gelu_inputs is not None:
                self.gelu_inputs.look(self, x)
            bank.observe(index, x if self.clip is None else x.detach().clamp(max=self.clip))
        if not (bank.quantizing and self.has_range):
            return x if learned is None else stay_in_graph(x, *learned.parameters(module))
        if learned is not None and learned.learns:
            return learned.quantize(module, x)
        qmin, qmax = self.scheme.input_range
        y = kernels.fake_quantize(x, bank.scale[index], bank.zero_point[index], qmin, qmax, bank.rounded_gate)
        return y if learned is None else stay_in_graph(y, *learned.parameters(module))

    def weight(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Return one of the layer's weights, fake-quantised once that is switched on."""
        if self.baked:
            return weight
        if self.fixed_scale is not None:
            return on_grid(module, weight, self.fixed_scale)
        if not self.bank.quantizing:
            return weight if self.learned_weight is None else stay_in_graph(weight, module.weight_magnitude)
        if self.learned_weight is not None:
            return self.learned_weight.quantize(module, weight)
        noise = self.bank.noise(weight, self.number) if module.training else None
        return quantize_weight(module, weight, self.scheme, noise)

    @torch.no_grad()
    def baked_weight(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Return the weight that a plain layer needs to compute with codes, rounded to nearest."""
        if self.batch_norm is not None:
            return unfolded_weight(module, self.rounded(module, folded_weight(module, weight)), weight)
        return self.rounded(module, weight)

    def rounded(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Return `weight`, folded if the layer is, as its codes can hold it, rounded to nearest."""
        if self.fixed_scale is not None:
            return on_grid(module, weight, self.fixed_scale)
        if self.learned_weight is not None:
            return self.learned_weight.quantize(module, weight)
        return quantize_weight(module, weight, self.scheme)

    def entry(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the layer's scheme and range as plain values; None if it should have a range and has none."""
        entry = dataclasses.asdict(self.scheme)
        if self.saved is not None:
            return {**entry, **self.saved}
        if self.learned_weight is not None:
            entry["weight_scale"] = self.learned_weight.scale(module).tolist()
        elif self.batch_norm is not None:
            rows = as_rows(module, folded_weight(module, module.weight.detach()))  # type: ignore[operator, union-attr]
            entry["weight_scale"] = kernels.symmetric_scale(rows, 0, self.scheme.weight_qmax).tolist()
        if self.batch_norm is not None:
            entry["batch_norm"] = self.batch_norm
        if self.index is None:
            return entry
        if not self.has_range:
            return None
        if self.learned_input is not None and self.learned_input.learns:
            return {**entry, **self.learned_input.entry(module)}
        minimum, maximum = self.bank.ranges[self.index].tolist()
        return {**entry, "min": minimum, "max": maximum}
