"""The state of a fake-quantizing layer: its scheme, its row in the range bank, and its own scales.

Most layers have a `LayerQuantizer`. The subclasses add clipped, learned and saved ranges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from eff_kernels.quantization import affine as kernels
from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import apply_in_parts, is_sharded
from shared_core.errors import TrainingError
from shared_core.modules.weight_views import as_rows, output_axis
from shared_core.quantization.batch_norm import folded_weight, unfolded_weight
from shared_core.quantization.low_bit import fp8_fake_quantize_in_range, fp8_limits, fp8_scale
from shared_core.quantization.ranges.kept_scales import KeptScale
from shared_core.quantization.ranges.learned_scales import InputRange, WeightScale, stay_in_graph
from shared_core.quantization.ranges.observers import RangeBank
from shared_core.quantization.recomputed_weights import recomputing
from shared_core.quantization.rounding import output_scale, quantize_input, quantize_weight
from shared_core.quantization.schemes import LayerScheme

if TYPE_CHECKING:
    from shared_core.quantization.ranges.gelu import GeluInputs


class LayerQuantizer:
    """Quantize a layer's weight by its values, and its input by its values or by the observed range."""

    baked = False
    """True if the weight already holds quantized values. Quantizing again could change one by an ulp."""

    def __init__(self, bank: RangeBank, index: int | None, scheme: LayerScheme, *, number: int = 0) -> None:
        self.bank, self.index, self.scheme, self.number = bank, index, scheme, number
        self.output_index: int | None = None
        """Row of the output's range in the bank; None: outputs are not observed."""
        self.has_range = False  # a copy of bank.known on the host, so that a forward does not wait for the device
        self.batch_norm: str | None = None
        """Relative name of the batch norm folded into the layer, or None."""
        self.weight_scale: WeightScale | KeptScale | None = None
        """Learned or kept scales of the weight; None: computed from the weight."""

    def input(self, module: nn.Module, x: Tensor) -> Tensor:
        """Observe `x` in training, and return it fake-quantized once quantization is on and a range exists."""
        bank = self.bank
        if is_sharded(x):  # the scale is shared by all elements, or by all features of a token
            return apply_in_parts(
                functools.partial(self.input, module), x, () if self.index is not None else (x.dim() - 1,)
            )
        if self.index is None:
            return quantize_input(module, x, self.scheme) if bank.quantizing else x
        if x.device != bank.device:
            bank.move_(x.device)
        if self._observes(module) and x.numel():
            self.observe(self.index, x)
        if self.bank.quantizing and self.has_range and module.training and self.bank.counts:
            self.bank.count(self.index, x.detach(), self.limits(module, self.index))
        return self.in_range(module, self.index, x)

    def observe(self, index: int, x: Tensor) -> None:
        """Widen the window of the range by an input."""
        self.bank.observe(index, x)

    def output_scale(self, module: nn.Module, x: Tensor) -> Tensor | None:
        """Return what the layer's output is multiplied by, before the bias, once quantization is on; None: nothing."""
        return output_scale(module, x, self.scheme) if self.bank.quantizing else None

    def output(self, module: nn.Module, y: Tensor) -> Tensor:
        """Observe an output in training, for engines that compute on its codes, and return it unchanged."""
        if self.output_index is not None and self._observes(module) and y.numel():
            self.bank.observe(self.output_index, y, mean=False)  # only scales of inputs start from one
        return y

    def _observes(self, module: nn.Module) -> bool:
        return self.bank.observing and (module.training or self.bank.observes_in_eval)

    def in_range(self, module: nn.Module, index: int, x: Tensor) -> Tensor:
        """Return an input fake-quantized with the layer's range, once quantization is on and a range exists."""
        bank = self.bank
        if not (bank.quantizing and self.has_range):
            return x
        if self.scheme.input == "fp8_static":
            return fp8_fake_quantize_in_range(x, bank.ranges[index].abs().amax())
        qmin, qmax = self.scheme.input_range
        return kernels.fake_quantize(x, bank.scale[index], bank.zero_point[index], qmin, qmax, bank.rounded_gate)

    def limits(self, module: nn.Module, index: int) -> Tensor:
        """Return the two values beyond which inputs are clipped."""
        if self.scheme.input == "fp8_static":
            return fp8_limits(self.bank.ranges[index].abs().amax())
        return self.bank.limits(index)

    def weight(self, module: nn.Module, weight: Tensor, name: str = "weight") -> Tensor:
        """Return the layer's weight of this name, fake-quantized once that is switched on."""
        if not self.bank.quantizing:
            return weight
        if is_sharded(weight):
            in_part = functools.partial(self.weight, module, name=name)
            return apply_in_parts(in_part, weight, self._whole_axes(module, weight))
        return self.rounded(module, weight, name, self.bank.noise(weight, self.number) if module.training else None)

    def weights(
        self, module: nn.Module, latent: Mapping[str, Tensor], *, in_autocast: bool = False
    ) -> tuple[dict[str, Tensor], contextlib.AbstractContextManager[Any]]:
        """Return the rounded weights by name, and a context for the computation with them.

        In it, backward saves no rounded weight if the bank recomputes them. A compiled graph decides this by itself.

        Args:
            module: The layer.
            latent: Its weights by name.
            in_autocast: True if the computation is one that autocast runs in its own dtype.
        """
        rounded = {name: self.weight(module, weight, name) for name, weight in latent.items()}
        bank = self.bank
        if not (bank.recomputes and bank.quantizing and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return rounded, contextlib.nullcontext()
        if any(map(is_sharded, rounded.values())):  # a DTensor's parts are saved, which no name leads to
            return rounded, contextlib.nullcontext()
        if in_autocast:  # cast here, because the copy that autocast makes is the one saved
            rounded = {name: _autocast(weight) for name, weight in rounded.items()}
        dtypes = {name: weight.dtype for name, weight in rounded.items()}
        exact = {name: (weight.detach(), weight._version) for name, weight in latent.items()}
        draws = module.training

        def again(name: str) -> Tensor:
            weight, version = exact[name]
            if weight._version != version:
                rule = "weights must not change between forward and backward with recompute_weights"
                raise TrainingError("qat", rule, "leave recompute_weights out")
            with torch.no_grad():
                noise = bank.noise(weight, self.number) if draws else None
                return self.rounded(module, weight, name, noise).to(dtypes[name])

        return rounded, recomputing(rounded, again)

    def _whole_axes(self, module: nn.Module, weight: Tensor) -> set[int]:
        """Return the axes of a weight along which parts cannot be quantized separately."""
        axes = {*range(weight.dim())}
        by_row = self.weight_scale is None and self.bank.noise_seed is None and not self.scheme.spans_rows
        return axes - {output_axis(module)} if by_row else axes

    def rounded(self, module: nn.Module, weight: Tensor, name: str = "weight", noise: Tensor | None = None) -> Tensor:
        """Return the (folded) weight rounded to its grid, to nearest without noise."""
        if self.weight_scale is not None:
            return self.weight_scale.quantize(module, weight, name, noise)
        return quantize_weight(module, weight, self.scheme, noise)

    @torch.no_grad()
    def baked_weight(self, module: nn.Module, weight: Tensor, name: str = "weight") -> Tensor:
        """Return the weight with which a plain layer computes the quantized result, rounded to nearest."""
        if self.baked:
            return weight
        if self.batch_norm is not None:
            return unfolded_weight(module, self.rounded(module, folded_weight(module, weight)), weight)
        return self.rounded(module, weight, name)

    def qparams(self, module: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Return (scale, zero point) of the input's range, in signed codes; None if there is none."""
        if self.index is None or not self.has_range:
            return None
        scale, zero_point = self.bank.scale[self.index].clone(), self.bank.zero_point[self.index].clone()
        if self.scheme.input == "fp8_static":
            return fp8_scale(self.bank.ranges[self.index].abs().amax()), zero_point.zero_()
        return scale, zero_point

    def entry(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the layer's scheme and range as plain values, scales of groups as tensors; None without a range."""
        entry = dataclasses.asdict(self.scheme)
        if isinstance(self.weight_scale, KeptScale) and self.scheme.weight == "group":
            entry["weight_grids"] = self.weight_scale.plain()
        elif self.weight_scale is not None and self.scheme.weight == "channel" and hasattr(module, "weight"):
            entry["weight_scale"] = self.weight_scale.scale(module).tolist()
        elif self.batch_norm is not None:
            rows = as_rows(module, folded_weight(module, module.weight.detach()))  # type: ignore[operator, union-attr]
            entry["weight_scale"] = kernels.symmetric_scale(rows, 0, self.scheme.weight_qmax).tolist()
        if self.batch_norm is not None:
            entry["batch_norm"] = self.batch_norm
        if self.output_index is not None and bool(self.bank.known[self.output_index]):
            entry["output"] = dict(zip(("min", "max"), self.bank.ranges[self.output_index].tolist(), strict=True))
        if self.index is None:
            return entry
        return {**entry, **self.input_entry(module, self.index)} if self.has_range else None

    def input_entry(self, module: nn.Module, index: int) -> dict[str, Any]:
        """Return the input's range as plain values."""
        minimum, maximum = self.bank.ranges[index].tolist()
        return {"min": minimum, "max": maximum}


def _autocast(weight: Tensor) -> Tensor:
    device = weight.device.type
    lowers = torch.is_autocast_enabled(device) and weight.is_floating_point() and weight.dtype != torch.float64
    return weight.to(torch.get_autocast_dtype(device)) if lowers else weight


class LearnedQuantizer(LayerQuantizer):
    """Quantize with scales that the layer learns. `register` sets which."""

    learned_input: InputRange | None = None

    def observe(self, index: int, x: Tensor) -> None:
        """Widen the window of the range by an input, until the learned range replaces it."""
        if self.learned_input is None or not self.learned_input.learns:
            super().observe(index, x)

    def in_range(self, module: nn.Module, index: int, x: Tensor) -> Tensor:
        """Return an input on the learned grid, or on the observed grid if none is learned."""
        learned = self.learned_input
        if learned is None:
            return super().in_range(module, index, x)
        if learned.learns and self.bank.quantizing and self.has_range:
            return learned.quantize(module, x)
        return stay_in_graph(super().in_range(module, index, x), *learned.parameters(module))

    def limits(self, module: nn.Module, index: int) -> Tensor:
        """Return the two values beyond which inputs are clipped."""
        learned = self.learned_input
        return super().limits(module, index) if learned is None or not learned.learns else learned.limits(module)

    def weight(self, module: nn.Module, weight: Tensor, name: str = "weight") -> Tensor:
        """Return the layer's weight of this name, fake-quantized once that is switched on."""
        if isinstance(self.weight_scale, WeightScale) and not self.bank.quantizing:
            return stay_in_graph(weight, module.weight_magnitude)
        return super().weight(module, weight, name)

    def qparams(self, module: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Return (scale, zero point) of the input's range, in signed codes; None if there is none."""
        found = super().qparams(module)
        if found is None or self.learned_input is None or not self.learned_input.learns:
            return found
        entry = self.learned_input.entry(module)
        return torch.tensor(entry["scale"]), torch.tensor(entry["zero_point"], dtype=torch.int32)

    def input_entry(self, module: nn.Module, index: int) -> dict[str, Any]:
        """Return the input's range as plain values."""
        if self.learned_input is None or not self.learned_input.learns:
            return super().input_entry(module, index)
        return self.learned_input.entry(module)


class ClippedQuantizer(LayerQuantizer):
    """Observe the input clipped if it is the output of a GELU."""

    clip: float | None = None
    """Largest value to observe; None: no limit."""
    gelu_inputs: GeluInputs | None = None
    """Checks whether the input is the output of a GELU, until this is known."""

    def observe(self, index: int, x: Tensor) -> None:
        """Widen the window of the range by an input."""
        if self.gelu_inputs is not None:
            self.gelu_inputs.look(self, x)
        super().observe(index, x if self.clip is None else x.detach().clamp(max=self.clip))


class ClippedLearnedQuantizer(LearnedQuantizer, ClippedQuantizer):
    """Learn scales (PACT). Until they are learned, observe a GELU's output clipped."""


class SavedQuantizer(LayerQuantizer):
    """Quantize a layer that was restored from saved ranges."""

    def __init__(
        self,
        bank: RangeBank,
        index: int | None,
        scheme: LayerScheme,
        saved: dict[str, Any] | None,
        weight_scale: KeptScale | None = None,
    ) -> None:
        super().__init__(bank, index, scheme)
        self.saved, self.weight_scale = saved, weight_scale
        self.has_range, self.baked = saved is not None, weight_scale is None

    def weight(self, module: nn.Module, weight: Tensor, name: str = "weight") -> Tensor:
        """Return the weight on its saved grid. A baked weight already lies on it."""
        return weight if self.baked else self.rounded(module, weight, name)

    def entry(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the saved entry; None if the layer has no range."""
        return None if self.saved is None else {**dataclasses.asdict(self.scheme), **self.saved}
