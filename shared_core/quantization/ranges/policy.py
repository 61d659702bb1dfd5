"""The range policy of a run: how input ranges and weight scales are found during training.

`make_policy` chooses a policy and the technique drives it: `ObservedRanges` for observed ranges, `_LearnedRanges` for
LSQ, LSQ+ and PACT, each with a variant that clips the outputs of GELU.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import fill_, is_sharded, whole
from shared_core.errors import CheckpointError, CompatibilityError, TrainingError
from shared_core.modules.matching import StackedExperts
from shared_core.modules.weight_views import PACKED, weights_of
from shared_core.numerics.deferred_checks import checked_together
from shared_core.quantization.batch_norm import LEARNED
from shared_core.quantization.config import QatConfig
from shared_core.quantization.layer_quantizer import (
    ClippedLearnedQuantizer,
    ClippedQuantizer,
    LayerQuantizer,
    LearnedQuantizer,
)
from shared_core.quantization.ranges.gelu import GeluInputs
from shared_core.quantization.ranges.kept_scales import KeptScale, kept_from_state
from shared_core.quantization.ranges.learned_scales import SMALLEST_MAGNITUDE, InputRange, WeightScale, learned_value
from shared_core.quantization.ranges.observers import EstimatorBank, RangeBank
from shared_core.quantization.schemes import LayerScheme


class ObservedRanges:
    """Ranges from the layers' inputs: a moving average, the extrema, or histograms of all steps."""

    quantizer_class: ClassVar[type[LayerQuantizer]] = LayerQuantizer
    observes_means: ClassVar[bool] = False

    def __init__(
        self, config: QatConfig, schemes: Mapping[str, LayerScheme], with_output: Collection[str] = ()
    ) -> None:
        self.config, self.schemes = config, schemes
        self.static = [name for name, scheme in schemes.items() if scheme.has_range]
        """Layers with a range of the input, in the order of the bank's first rows."""
        self.with_output = [name for name in self.static if name in with_output]
        """Layers with a range of the output too, in the order of its other rows."""
        self.bank = self._make_bank()
        self.quantizers = {
            name: self.quantizer_class(
                self.bank, self.static.index(name) if scheme.has_range else None, scheme, number=number
            )
            for number, (name, scheme) in enumerate(schemes.items())
        }
        self._number_outputs()
        self.kept: dict[str, KeptScale] = {}
        """Layer → the scales of its weights, where they are kept."""
        self._pending: Tensor | None = None
        self._counts: Tensor | None = None
        self._window_restored = False

    def _number_outputs(self) -> None:
        for row, name in enumerate(self.with_output, len(self.static)):
            self.quantizers[name].output_index = row

    @property
    def rows(self) -> list[str]:
        """The names of the bank's rows."""
        return [*self.static, *(f"{name} (output)" for name in self.with_output)]

    def _make_bank(self) -> RangeBank:
        codes = [self.schemes[name].input_range for name in self.static]
        # An output has codes only between integer kernels, which are uint8 whatever the width of the layers' inputs.
        codes += [(0, 255)] * len(self.with_output)
        config, rounded = self.config, self.config.gate == "rounded"
        symmetric = [self.schemes[name].symmetric for name in self.static]
        if config.range in ("percentile", "kl", "mse"):
            return EstimatorBank(
                config.range, codes, percentile=config.percentile, rounded_gate=rounded, symmetric=symmetric
            )
        constant = None if config.range == "minmax" else config.ema_constant
        return RangeBank(
            codes, ema_constant=constant, rounded_gate=rounded, symmetric=symmetric, means=self.observes_means
        )

    @property
    def ranged(self) -> list[LayerQuantizer]:
        """The quantizers with a range, in the order of the bank's rows."""
        return [self.quantizers[name] for name in self.static]

    def attach(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        """Register what the swapped layers need. Called after they have their quantizers."""

    def keep(self, kept: Mapping[str, KeptScale]) -> None:
        """Round the weights of these layers with given scales."""
        self.kept = dict(kept)
        for name, scale in kept.items():
            self.quantizers[name].weight_scale = scale

    def start_from(self, ranges: Mapping[str, tuple[float, float]]) -> None:
        """Start the observers from known ranges of inputs. An average treats them as that of many steps."""
        if not ranges:
            return
        bank = self.bank
        found, known = bank.ranges.clone(), bank.known.clone()
        for row, name in enumerate(self.static):
            if name in ranges:
                found[row] = found.new_tensor(ranges[name])
                known[row] = True
                bank.averaged[row] = 2**31
        bank.set_ranges(found, known)
        self._set_known()

    def leave_out(self, names: Collection[str]) -> None:
        """Drop layers before anything was observed. The others stay registered."""
        self.kept = {name: scale for name, scale in self.kept.items() if name not in names}
        self.schemes = {name: scheme for name, scheme in self.schemes.items() if name not in names}
        self.quantizers = {name: quantizer for name, quantizer in self.quantizers.items() if name not in names}
        self.static = [name for name in self.static if name not in names]
        self.with_output = [name for name in self.with_output if name not in names]
        self.bank = self._make_bank()
        for quantizer in self.quantizers.values():
            quantizer.bank = self.bank
        for row, name in enumerate(self.static):
            self.quantizers[name].index = row
        self._number_outputs()

    def begin(self, device: torch.device, seed: int) -> None:
        """Begin or resume a run, after the optimizer is created."""
        self.bank.move_(device)
        # A run resumed within an accumulation window continues with its observations.
        if not self._window_restored:
            self.bank.clear_window()
        if self.config.rounding == "stochastic":
            self.bank.noise_seed = seed
        self.bank.quantizing = False  # the best checkpoint may be from before quantization started
        self.bank.counts_clipped = bool(self.static)
        self.bank.recomputes = self.config.recompute_weights

    def start(self) -> None:
        """Called when fake quantization starts."""

    def set_step(self, step: int, *, observing: bool, quantizing: bool, counting: bool) -> None:
        """Set the switches for the next step. Ranges that freeze are derived from all observations."""
        bank = self.bank
        if bank.observing and not observing:
            bank.refresh()
        bank.observing = observing and bool(self.static)
        bank.step.fill_(step)
        bank.counts_this_step = counting
        bank.quantizing = bank.quantizing or quantizing

    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take the window of this step. A window still pending belongs to a skipped step and is dropped."""
        # Taken before the step and committed after it, so that a skipped step (overflow) has no effect.
        self._pending = self.bank.take_window() if self.bank.observing else None
        self._counts = self.bank.take_counts()

    def after_step(self) -> None:
        """Update the ranges with the pending window after an applied step."""
        if self._pending is not None:
            self.bank.commit(self._pending)
            self._pending = None
            self.read_known()
        if self._counts is not None:
            self.bank.commit_counts(self._counts)
            self._counts = None

    def read_known(self) -> None:
        """Mark the layers that now have a range."""
        # read from the device only until every layer has a range
        if not all(quantizer.has_range for quantizer in self.ranged):
            self._set_known()

    def _set_known(self) -> None:
        for quantizer, known in zip(self.ranged, self.bank.known.tolist(), strict=False):  # the inputs come first
            quantizer.has_range = known

    def reestimate(self, calibrate: Callable[[], None]) -> bool:
        """Re-estimate the ranges from the batches that `calibrate` runs. Return True if there were any before."""
        bank = self.bank
        if not any(quantizer.has_range for quantizer in self.ranged):
            return False
        # The estimation must not change window and switches.
        before, observing = bank.state_dict(), bank.observing
        for quantizer in self.ranged:
            quantizer.has_range = False
        bank.forget()
        bank.observing = True
        try:
            calibrate()
            bank.commit(bank.take_window())
            # Batches that miss a layer would leave it without its range, so this is undone and raises an error.
            lost = (before["known"].cpu() & ~bank.known.cpu()).tolist()
            if names := [name for name, is_lost in zip(self.rows, lost, strict=True) if is_lost]:
                raise TrainingError(
                    "qat",
                    f"calibration batches gave no finite input to {', '.join(names[:5])}",
                    "raise qat.calibration_batches, or check the batches for NaN",
                )
            bank.refresh()
        except BaseException:
            bank.load_state_dict(before, torch.arange(len(self.rows)))
            raise
        finally:
            bank.window.copy_(before["window"])
            bank.observing = observing
            self.read_known()
        return True

    def calibrating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context for forwards that are observed without training."""
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Agree with the other ranks on how to read the observations. Every rank must call it."""

    def gather(self) -> None:
        """Gather sharded values until `release`. Every process must call it."""

    def release(self) -> None:
        """Undo `gather`."""

    def close(self) -> None:
        """Release the layers before they become stock again."""

    def report(self, name: str) -> dict[str, Any]:
        """Return a layer's ranges for the receipt; empty if its scheme has none."""
        if name not in self.static:
            return {}
        bank, row = self.bank, self.static.index(name)
        if not bool(bank.known[row]):
            return dict.fromkeys(("min", "max", "scale", "zero_point"))
        minimum, maximum = bank.ranges[row].tolist()
        found = {
            "min": minimum,
            "max": maximum,
            "scale": bank.scale[row].item(),
            "zero_point": int(bank.zero_point[row]),
            **dict(zip(("clipped", "values"), bank.clipped[row].tolist(), strict=True)),
        }
        if (output := self.quantizers[name].output_index) is not None:
            found["output_min"], found["output_max"] = bank.ranges[output].tolist()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return ranges, the current window and learned state."""
        kept = {name: scale.state_dict() for name, scale in self.kept.items()}
        return {"layers": self.rows, **self.bank.state_dict(), "learned": {}, "gelu_inputs": None, "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved ranges by layer name."""
        names = list(state["layers"])
        if set(names) != set(self.rows):
            odd = ", ".join(sorted(set(names) ^ set(self.rows))[:5])
            raise CheckpointError(
                "qat",
                f"saved ranges and the layers quantized now differ in {odd}",
                "resume with the scheme, include and skip of the saved run",
            )
        rows = torch.tensor([names.index(name) for name in self.rows], dtype=torch.int64)
        self.bank.load_state_dict(state, rows)
        self._window_restored = True
        self._set_known()
        saved = state.get("kept", {})
        if others := sorted(saved.keys() ^ self.kept.keys()):
            rule = f"saved weight scales and those kept now differ in {', '.join(others[:5])}"
            raise CheckpointError("qat", rule, "resume with the scheme, init and skip of the saved run")
        self.keep({name: kept_from_state(one, self.schemes[name]) for name, one in saved.items()})


class _ClippedRanges(ObservedRanges):
    """Observed ranges, limited to `clip_gelu` for the output of a GELU."""

    quantizer_class = ClippedQuantizer

    def __init__(
        self, config: QatConfig, schemes: Mapping[str, LayerScheme], with_output: Collection[str] = ()
    ) -> None:
        super().__init__(config, schemes, with_output)
        quantizers = {name: cast("ClippedQuantizer", self.quantizers[name]) for name in self.static}
        self.gelu_inputs = GeluInputs(quantizers, cast("float", config.clip_gelu))

    def attach(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().attach(model, layers)
        self.gelu_inputs.watch(model)

    def leave_out(self, names: Collection[str]) -> None:
        super().leave_out(names)
        self.gelu_inputs.leave_out(names, self.bank)

    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.settle()
        super().before_step(optimizers)

    def calibrating(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return self.gelu_inputs.gradients(model)

    def settle(self) -> None:
        if self.bank.observing and self.gelu_inputs.settle(self.bank.device):
            # Layers found late were observed unclipped in this step.
            self.bank.clear_window()

    def close(self) -> None:
        super().close()
        self.gelu_inputs.close()

    def report(self, name: str) -> dict[str, Any]:
        found = super().report(name)
        return {**found, "clip_gelu": name in self.gelu_inputs.found} if found else {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "gelu_inputs": self.gelu_inputs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if state.get("gelu_inputs") is not None:
            self.gelu_inputs.load_state_dict(state["gelu_inputs"])


# these subtract lr·decay·p from the parameter; all others add decay·p to its gradient
_DECOUPLED = ("AdamW", "Lion", "Adafactor", "Muon")


def _is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    flag = group.get("decoupled_weight_decay")
    return bool(flag) if flag is not None else any(name in type(optimizer).__name__ for name in _DECOUPLED)


class NoDecay:
    """Undo weight decay of some parameters in every step.

    A separate parameter group would be simpler, but learning-rate schedulers and saved optimizer states depend on the
    groups that the user created.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._taken: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []

    @torch.no_grad()
    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Subtract a coupled decay from the gradient; remember what a decoupled one will subtract."""
        self._taken = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                decay = float(group.get("weight_decay") or 0.0)
                if not decay:
                    continue
                spared = [p for p in group["params"] if id(p) in self._ids and p.grad is not None]
                if spared and _is_decoupled(optimizer, group):
                    # it multiplies by (1 - lr λ), so lr λ p, with p before the step, is added back
                    values = [local_part(parameter.detach()) for parameter in spared]
                    self._taken.append((values, torch._foreach_mul(values, float(group["lr"]) * decay)))
                    continue
                for parameter in spared:
                    # The optimizer adds a coupled decay λp to the gradient. Subtracting it first cancels it.
                    parameter.grad.add_(parameter, alpha=-decay)

    @torch.no_grad()
    def after_step(self) -> None:
        """Add back what a decoupled decay subtracted."""
        for values, taken in self._taken:
            torch._foreach_add_(values, taken)
        self._taken = []


OWN_SCALES: tuple[type[nn.Module], ...] = (nn.Embedding, *PACKED, StackedExperts)
"""Layers whose weight scales are computed from the weight, neither learned nor searched."""


class _LearnedRanges(ObservedRanges):
    """Scales are parameters that layers learn with their weights (LSQ, LSQ+, PACT), started from an observed range.

    Embeddings, attention, recurrent layers and stacked experts keep scales computed from their weights: a step sees few
    rows of an embedding, and the others have several weights. So do layers that share a weight, which is baked once for
    all.
    """

    quantizer_class = LearnedQuantizer
    observes_means = True

    def __init__(
        self, config: QatConfig, schemes: Mapping[str, LayerScheme], with_output: Collection[str] = ()
    ) -> None:
        super().__init__(config, schemes, with_output)
        self.layers: dict[str, nn.Module] = {}
        self._closed: dict[str, Any] | None = None
        self._decay, self._positive = NoDecay([]), list[nn.Parameter]()

    def attach(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().attach(model, layers)
        self.layers = dict(layers)
        kind = self.config.range
        if any(map(is_sharded, (weight for layer in layers.values() for weight in weights_of(layer).values()))):
            raise CompatibilityError(
                "qat",
                f"range {kind} adds learned scales as parameters, but the model is already sharded and FSDP2 "
                "accepts no new parameters",
                "use an observed range such as ema, DDP, or strategy eff_fsdp or the HF Trainer, which shard later",
            )
        rounded = self.config.gate == "rounded"
        owners = Counter(id(weight) for layer in layers.values() for weight in weights_of(layer).values())
        for layer, quantizer in self._learning():
            scheme = quantizer.scheme
            if quantizer.index is not None:
                quantizer.learned_input = InputRange(layer, kind, scheme, rounded)
            # Two layers that share a weight would learn two scales for it, so its scale is computed from the weight.
            alone = all(owners[id(weight)] == 1 for weight in weights_of(layer).values())
            learnable = scheme.weight == "channel" and alone and not isinstance(layer, OWN_SCALES)
            if kind != "pact" and learnable:
                quantizer.weight_scale = WeightScale(layer, scheme, kind == "lsq_plus", rounded)

    def leave_out(self, names: Collection[str]) -> None:
        super().leave_out(names)
        self.layers = {name: layer for name, layer in self.layers.items() if name not in names}

    def _learning(self) -> Iterable[tuple[nn.Module, LearnedQuantizer]]:
        return ((layer, cast("LearnedQuantizer", self.quantizers[name])) for name, layer in self.layers.items())

    def _parameters(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [(layer, name, value) for layer in self.layers.values() for name, value in _parameters(layer)]

    def begin(self, device: torch.device, seed: int) -> None:
        """Begin or resume a run, after FSDP2 replaced the registered parameters by its own."""
        super().begin(device, seed)
        for name, layer in self.layers.items():
            _refuse_other_dtypes(name, layer)
        found = self._parameters()
        # PACT's clip should decay (Choi et al. 2018, section 3.1)
        self._decay = NoDecay(value for _, name, value in found if name != "input_clip")
        self._positive = [value for _, name, value in found if name != "input_offset"]

    def start(self) -> None:
        with checked_together():
            for layer, quantizer in self._learning():
                if isinstance(quantizer.weight_scale, WeightScale):
                    quantizer.weight_scale.start(layer)

    def set_step(self, step: int, *, observing: bool, quantizing: bool, counting: bool) -> None:
        super().set_step(step, observing=observing, quantizing=quantizing, counting=counting)
        self._start_inputs()

    def _start_inputs(self) -> None:
        bank, starting = self.bank, []
        for layer, quantizer in self._learning() if bank.quantizing else ():
            learned = quantizer.learned_input
            if learned is not None and not learned.started and quantizer.has_range and quantizer.index is not None:
                starting.append((layer, learned, quantizer.index))
        if starting:
            rows = torch.cat((bank.ranges.double(), bank.mean[:, None]), 1).tolist()  # one read for all layers
            for layer, learned, index in starting:
                learned.start(layer, *rows[index])

    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        super().before_step(optimizers)
        self._decay.before_step(optimizers)

    @torch.no_grad()
    def after_step(self) -> None:
        super().after_step()
        self._decay.after_step()
        # A scale must stay positive. From below the bound it would take many steps to return.
        torch._foreach_clamp_min_([local_part(value) for value in self._positive], SMALLEST_MAGNITUDE)

    def reestimate(self, calibrate: Callable[[], None]) -> bool:
        if not super().reestimate(calibrate):
            return False
        for _, quantizer in self._learning():
            if quantizer.learned_input is not None:
                # The input parameters start again from the new ranges.
                quantizer.learned_input.started = False
        if self.bank.quantizing:
            self.start()
        self._start_inputs()
        return True

    def gather(self) -> None:
        for layer in self.layers.values():
            layer.gathered = {key: whole(value.detach()) for key, value in _parameters(layer) if is_sharded(value)}  # type: ignore[assignment]

    def release(self) -> None:
        for layer in self.layers.values():
            vars(layer).pop("gathered", None)

    def close(self) -> None:
        super().close()
        if self._closed is None:
            whole_here = all(
                name in vars(layer).get("gathered", {}) or not is_sharded(value)
                for layer, name, value in self._parameters()
            )
            self._closed = self._learned() if whole_here else {}  # interrupted: the other processes may be gone
        self.release()
        self.layers = {}

    def _learned(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for name, (layer, quantizer) in zip(self.layers, self._learning(), strict=True):
            values = {key: learned_value(layer, key).detach().clone() for key, _ in _parameters(layer)}
            learned = quantizer.learned_input
            state[name] = {"parameters": values, "input": None if learned is None else learned.state_dict()}
        return state

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "learned": self._learned() if self._closed is None else self._closed}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, layer in self.layers.items():
            for key, value in state["learned"][name]["parameters"].items():
                fill_(cast("Tensor", layer._parameters[key]), value)
            learned = cast("LearnedQuantizer", self.quantizers[name]).learned_input
            if learned is not None:
                learned.load_state_dict(state["learned"][name]["input"])


class _ClippedLearnedRanges(_LearnedRanges, _ClippedRanges):
    """Learned scales (PACT) that start from clipped ranges for the output of a GELU."""

    quantizer_class = ClippedLearnedQuantizer


def make_policy(
    config: QatConfig, schemes: Mapping[str, LayerScheme], with_output: Collection[str] = ()
) -> ObservedRanges:
    """Return the range policy of a config for layers with these schemes, some with a range of their output."""
    learns, clips = config.learns_ranges, config.clip_gelu is not None
    kinds = {
        (False, False): ObservedRanges,
        (False, True): _ClippedRanges,
        (True, False): _LearnedRanges,
        (True, True): _ClippedLearnedRanges,
    }
    return kinds[learns, clips](config, schemes, with_output)


def _refuse_other_dtypes(name: str, layer: nn.Module) -> None:
    learned = {value.dtype for _, value in _parameters(layer) if is_sharded(value)}
    other = {weight.dtype for weight in weights_of(layer).values() if weight.requires_grad} - learned
    if learned and other:
        raise CompatibilityError(
            "qat",
            f"FSDP2 needs one dtype per group of parameters, but {name} is in {other.pop()} "
            f"and its learned scales are in {learned.pop()}",
            "use an observed range such as ema, or load the model in float32 and let FSDP2 compute in 16 bits",
        )


def _parameters(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name in LEARNED if (value := layer._parameters.get(name)) is not None]
