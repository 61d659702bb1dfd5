"""Quantization-aware training: swap layers, update ranges once per step, bake the weights at the end."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.released import Grid
from shared_core.config.training_time import parse_position
from shared_core.distributed.sharded_tensors import cut, is_sharded, is_tensor_parallel, reshard_, whole
from shared_core.engine.checks.claims import Claim
from shared_core.engine.checks.optimizer_parameters import layers_of_copies, named_parts
from shared_core.engine.observers.progress import not_finite_note
from shared_core.engine.plan import Event, Plan, Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.modules.matching import UNHELD, StackedExperts, own_class, plain_name
from shared_core.modules.own_forward import Undo, fast_paths_off, fast_paths_on
from shared_core.modules.weight_views import weights_of
from shared_core.printing import counted, listed
from shared_core.quantization.batch_norm import STOCK as STOCK_OF_FOLDED
from shared_core.quantization.batch_norm import find_folds, own_parameters, relative
from shared_core.quantization.config import QatConfig
from shared_core.quantization.fake_quant_layers import (
    STOCK,
    bake_,
    fold_and_swap,
    grid_of,
    layer_entry,
    recomputable,
    restore,
    swap,
    weight_report,
)
from shared_core.quantization.ranges.kept_scales import kept_from_state
from shared_core.quantization.ranges.observers import RangeBank
from shared_core.quantization.ranges.policy import ObservedRanges, make_policy
from shared_core.quantization.schemes import WITH_RANGE, LayerScheme
from shared_core.quantization.selection import BASE, layer_schemes, select_layers
from shared_core.quantization.starting import Start, find_start, kept_scales

_COUNT_EVERY = 10
"""Clipped values are counted in one of these steps, and from the last planned one on."""
_WORTH_TELLING = 0.001


class QuantizationAwareTraining(Technique):
    """Train with fake-quantized weights and activations, so that the weights tolerate quantization.

    Args:
        config: The options, already checked.
        trains: True before a training run; False to quantize a trained model.
    """

    reaches_frozen: ClassVar[bool] = True
    config: QatConfig

    def __init__(self, config: QatConfig, *, trains: bool = True) -> None:
        super().__init__(config)
        self._asked = config
        self._start = Start(config)
        self.layers: dict[str, nn.Module] = {}
        self.left_out: dict[str, str] = {}
        self.schemes: dict[str, LayerScheme] = {}
        """Layer name → its scheme."""
        self._weight_keys: dict[str, str] = {}  # key in the state dict → layer
        self._unfolded: dict[str, str] = {}  # batch norm → why it is not folded
        self._undo: Undo = []
        self._folds: list[Any] = []
        self._trains = trains
        self._begin = self._freeze = self._freeze_bn = 0
        self._began_at: int | None = None
        self._total_steps: int | None = None
        self._final: list[dict[str, Any]] | None = None
        self.policy = ObservedRanges(config, {})

    @property
    def bank(self) -> RangeBank:
        """The ranges of all layers, and the switches."""
        return self.policy.bank

    def attach(self, context: Context) -> Touched:
        """Swap the classes of the layers to quantize. Nothing is observed yet."""
        model = context.model
        context.undo.callback(self._detach)
        asked = self._asked
        self._start = find_start(asked, model, context.resumed.get(self.key, {}).get("start"))
        self.config = config = self._start.config
        self.layers, self.left_out = select_layers(
            model, config.include, config.skip, config.min_size, trains=self._trains, may_skip=asked.is_open
        )
        self.schemes = layer_schemes(config, self.layers)
        self.policy = make_policy(config, self.schemes, self._between_layers())
        kept, notes = kept_scales(self._start, model, self.layers, self.schemes)
        if self._start.saved:
            saved = context.resumed[self.key]["kept"]
            kept = {name: kept_from_state(one, self.schemes[name]) for name, one in saved.items()}
        self.policy.keep(kept)
        for note in (*notes, *self._equal_teacher(context)):
            context.note(note)
        modules = {plain_name(name): module for name, module in model.named_modules()}
        folds = self._find_folds(model)
        for name, module in self.layers.items():
            vars(module).pop("quantized_range", None)  # of an earlier run
            quantizer = self.policy.quantizers[name]
            if name in folds:
                _refuse_shards(name, module)
                quantizer.batch_norm = relative(name, folds[name])
                fold_and_swap(module, modules[folds[name]], quantizer)
            else:
                swap(module, quantizer)
        adapted = any(hasattr(module, "get_base_layer") for module in model.modules())  # the base layers are quantized
        if self._trains and not adapted and (frozen := self._frozen(model)):
            context.note(
                f"qat: frozen layers are also quantized: {frozen}. Name them in skip if they are not part of the "
                "model that you deploy"
            )
        if floats := self.float_inputs:
            named = ", ".join(floats[:5])
            context.note(f"qat: only the weights of {named} are quantized: inputs of these experts stay in float")
        if any(name.endswith(BASE) for name in self.layers):
            context.note(
                "qat: PEFT saves only the adapters, not the rounded base they were trained on. Also save "
                "model.unload() after training, or use lora instead of PEFT's adapters: it merges them"
            )
        if self._trains and not config.keep and any(scheme.has_binary_inputs for scheme in self.schemes.values()):
            context.note(
                "qat: the final model reads float inputs, with which it computes something else: set keep, or call "
                "apply_ranges on it, to evaluate it with binary inputs"
            )
        if config.recompute_weights:
            context.note(self._recomputed(model))
        self.policy.attach(model, self.layers)
        self._undo = fast_paths_off(model, tuple(STOCK))
        # Every key of a tied module leads to the layer whose quantizer knows the grid.
        names = {id(module): name for name, module in self.layers.items()}
        # a module with two names has two keys in the state dict
        self._weight_keys = {
            f"{plain_name(name)}.{weight}".lstrip("."): names[id(module)]
            for name, module in model.named_modules(remove_duplicate=False)
            if id(module) in names
            for weight in weights_of(module)
        }
        # the state dict of a layer with lora adapters has the merged weight, under the layer's own name
        self._weight_keys |= {f"{name}.{weight}": name for name, m in self.layers.items() for weight in weights_of(m)}
        return self._touched()

    def _recomputed(self, model: nn.Module) -> str:
        """Say how much memory `recompute_weights` saves at most; raise an error if it cannot save any."""
        if is_tensor_parallel(model):
            raise CompatibilityError("qat", "recompute_weights does not work with tensor parallelism", "leave it out")
        found = [module for module in self.layers.values() if recomputable(module)]
        if not found:
            kinds = "linear layers, convolutions without a folded batch norm, or stacked experts"
            raise MatchError("qat", f"recompute_weights needs {kinds}, but the model has none", "leave it out")
        size = sum(weight.nbytes for module in found for weight in weights_of(module).values()) / 2**20
        layers = counted(len(found), "layer")
        return f"qat: backward rounds the weights of {layers} again, so that up to {size:,.1f} MiB are not kept"

    def _equal_teacher(self, context: Context) -> Iterator[str]:
        """Yield a note if the student starts as its own teacher: released weights lie on their grid already."""
        distill: Any = context.techniques.get("distill")
        if self._asked.scheme != "released" or distill is None or distill.config.has_task:
            return
        if distill.config.teaching == "self" and {scheme.input for scheme in self.schemes.values()} == {"none"}:
            yield (
                "qat: released weights lie on their grid, so the student starts equal to teacher self and learns "
                "nothing from it. Set alpha above 0, or name a teacher in 16 bits"
            )

    def _between_layers(self) -> list[str]:
        """Return the layers whose outputs an engine needs as codes: it sums a convolution in integers only then."""
        return [
            name
            for name, module in self.layers.items()
            if isinstance(module, nn.modules.conv._ConvNd)
            and self.schemes[name].input == "static"
            and not self.schemes[name].has_wide_inputs
        ]

    def leave_unheld(self, context: Context) -> Touched:
        """Leave in float the layers whose weights no optimizer holds.

        Raises:
            MatchError: If no layer is left.
            CompatibilityError: If scales are learned, and the layers are a copy that pairs parameters by order.
        """
        out = {
            name: module
            for name, module in self.layers.items()
            if all(weight in context.unheld for weight in weights_of(module).values())
        }
        if len(out) == len(self.layers):
            raise MatchError("qat", "no optimizer holds the weights of any layer to quantize")
        learns = self.config.learns_ranges
        copied = layers_of_copies("qat", context.model, context.unheld, context.shapes) if learns else ()
        if name := next((name for name, module in out.items() if module in copied), None):
            raise CompatibilityError(
                "qat",
                f"range {self.config.range} adds parameters to the model that its copy {name} would lack, since no "
                f"optimizer holds the copy",
                "use an observed range, such as ema, or let average keep the moving average",
            )
        for name, module in out.items():
            restore(module)
            del self.layers[name], self.schemes[name]
        self._undo += fast_paths_off(context.model, tuple(STOCK))
        self.left_out |= dict.fromkeys(out, UNHELD)
        self._weight_keys = {key: name for key, name in self._weight_keys.items() if name not in out}
        self.policy.leave_out(out)
        return self._touched()

    @property
    def float_inputs(self) -> list[str]:
        """Stacked experts whose inputs stay in float although the scheme quantizes inputs."""
        asked = self.config.layer_scheme.input != "none"
        found = (name for name, module in self.layers.items() if asked and isinstance(module, StackedExperts))
        return [name for name in found if self.schemes[name].input == "none"]

    def _frozen(self, model: nn.Module) -> str:
        """Return the names of quantized frozen parts, if other quantized layers train; else an empty string."""
        keys = {
            value: f"{name}.{own}" for name, layer in self.layers.items() for own, value in layer.named_parameters()
        }
        frozen = {value: name for value, name in keys.items() if not value.requires_grad}
        return named_parts(model, frozen) if 0 < len(frozen) < len(keys) else ""

    def _find_folds(self, model: nn.Module) -> dict[str, str]:
        if not self.config.fold_batch_norm:
            return {}
        found, self._unfolded = find_folds(model, "qat")
        folds = {plain_name(layer): plain_name(norm) for layer, norm in found.items()}
        return {
            layer: norm
            for layer, norm in folds.items()
            if layer in self.layers and self.schemes[layer].weight == "channel"
        }

    def _detach(self) -> None:
        """Restore the stock classes of the layers."""
        if self._final is not None and self.config.keep:
            return
        self.policy.close()
        for module in self.layers.values():
            restore(module)
        fast_paths_on(self._undo)

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Resolve positions and start to observe."""
        if state is not None:
            self.policy.load_state_dict(state)
            self._began_at = state["began_at"]
        folded = {name: module for name, module in self.layers.items() if "fold" in vars(module)}
        for name, module in folded.items():
            _refuse_shards(name, module)
        self._folds = [vars(module)["fold"] for module in folded.values()]
        self._binary = [module for name, module in self.layers.items() if self.schemes[name].weight == "binary"]
        self.plan(context)
        device = next(iter(weights_of(next(iter(self.layers.values()))).values())).device
        self.policy.begin(device, context.generator.initial_seed() % 2**31)
        if state is None and not self.bank.num_updates:
            self.policy.start_from(self._start.ranges())
        self._set_switches(context.step)

    def plan(self, context: Context) -> Plan:
        """Return when quantization starts and when ranges and batch norms freeze. The layers must stay in the model."""
        self._total_steps = context.total_steps
        moments = self._begin, self._freeze, self._freeze_bn = resolve_moments(self.config, context)
        return Plan(
            planned_events(self.config, moments, context.total_steps),
            missing=self._missing(context),
            guards=self.layers,
            acts_on_gradients=self.config.learns_ranges,  # learned ranges get no weight decay
            looks_at_batches=bool(self.policy.static),  # input ranges are re-estimated for replaced weights
        )

    def _missing(self, context: Context) -> str:
        """Say if layers still compute in float, or if ranges still move that freeze before the end."""
        if not self.bank.quantizing:
            return f"fake quantization is not on yet: it starts at step {self._begin}"
        if self.bank.observing and context.total_steps is not None and self._freeze < context.total_steps:
            return f"ranges still change: they freeze at step {self._freeze}"
        return ""

    def _touched(self) -> Touched:
        """Return the layers to quantize."""
        return Touched.modules(self.layers, self.left_out)

    def _set_switches(self, step: int) -> None:
        for fold in self._folds:
            fold.frozen = step >= self._freeze_bn
        quantizing = step >= self._begin
        if quantizing and self._began_at is None:
            self.policy.start()
            self._began_at = step
        may_be_last = self._total_steps is not None and step + 1 >= self._total_steps
        counting = may_be_last or step % _COUNT_EVERY == _COUNT_EVERY - 1
        self.policy.set_step(step, observing=step < self._freeze, quantizing=quantizing, counting=counting)

    def before_step(self, context: Context) -> None:
        """Collect what this step observed."""
        self.policy.before_step(context.optimizers)

    def after_step(self, context: Context, applied: bool) -> None:
        """Update the ranges and the switches that are due."""
        if not applied:
            return
        self.policy.after_step()
        if self.bank.quantizing:
            self._clip_binary_weights()
        if context.step == context.total_steps and self.bank.observing:
            self.bank.refresh()  # a checkpoint of the last planned step has the ranges of all steps
        self._set_switches(context.step)

    @torch.no_grad()
    def _clip_binary_weights(self) -> None:
        """Clip trained binary weights to [-1, 1], outside of which they would get no gradient again."""
        for module in self._binary:
            for weight in weights_of(module).values():
                if weight.requires_grad:
                    weight.clamp_(-1, 1)

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Stop observing during validation. For a file, gather learned scales that are sharded."""
        is_file = purpose != "evaluate"
        if is_file:
            self.policy.gather()
        else:
            # also in a validation that puts layers into training mode
            self.bank.observing = self.bank.counts_clipped = False
        try:
            yield
        finally:
            if is_file:
                self.policy.release()
            else:
                self.bank.counts_clipped = bool(self.policy.static)
                self.bank.observing = self.bank.counts_clipped and context.step < self._freeze

    def loading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Let plain weights be loaded by parameter name. Learned scales are part of the technique's state."""
        return own_parameters(model)

    def weights_replaced(self, context: Context) -> None:
        """Re-estimate the ranges from training batches, because they belong to the old weights."""
        self._freeze_norms(context)
        try:
            changed = self.policy.reestimate(lambda: context.calibrate(self.config.calibration_batches))
        except TrainingError as error:
            if not (note := not_finite_note(context.model)):
                raise
            raise TrainingError("qat", note, "lower the learning rate, or clip the gradients") from error
        context.unvalidated |= changed

    def _freeze_norms(self, context: Context) -> None:
        """Use running statistics after the planned steps, because batches run now are not training."""
        is_over = context.total_steps is not None and context.step >= context.total_steps
        for fold in self._folds if is_over else ():
            fold.frozen = True

    def finish(self, context: Context) -> None:
        """Bake the quantized weights in place, and restore stock layers that carry their range."""
        # A run that ended before `begin` leaves its layers in float, because no step trained them quantized. A trained
        # model given to be quantized has no steps.
        bank = self.bank
        bank.quantizing = bank.quantizing or not self._trains
        if bank.quantizing and self._began_at is None:
            self._began_at = context.step
        # Ranges that were never frozen include all steps.
        if bank.observing:
            bank.refresh()
        bank.observing = bank.counts_clipped = False
        bank.clear_window()
        bank.count_window.zero_()  # forwards after the last step count in no step
        self._freeze_norms(context)
        reshard_(context.model)
        self.policy.gather()
        self._final = self._layer_reports(gather=True)
        if self.config.keep:
            return
        # A shared weight is baked once. A second time it would be rounded again.
        baked: set[int] = set()
        for module in self.layers.values() if bank.quantizing else ():
            entry = layer_entry(module)  # before baking: scales belong to the latent weight
            bake_(module, baked)
            if entry is not None:
                module.quantized_range = entry  # type: ignore[assignment]
        self._detach()

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy in which quantized layers hold their quantized weights, once quantization has begun."""
        if not self.bank.quantizing or (self._final is not None and not self.config.keep):
            return state_dict
        baked = dict(state_dict)
        with torch.no_grad():
            for key, value in state_dict.items():
                name = self._weight_keys.get(plain_name(key))
                if name is not None:
                    layer: Any = self.layers[name]
                    own = plain_name(key).rpartition(".")[2]
                    baked[key] = cut(layer.quantizer.baked_weight(layer, whole(value.detach()), own), value)
        return baked

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return for each baked weight the grid on which it lies."""
        if not self.bank.quantizing or self.config.keep:
            return {}
        entries, there = self.ranges(), context.model.state_dict()
        found = {key: self._weight_keys[key] for key in map(plain_name, there) if key in self._weight_keys}
        return {
            key: grid_of(self.layers[name], self.schemes[name], entries.get(name, {}), self._kept_grid(key, name))
            for key, name in found.items()
        }

    def _kept_grid(self, key: str, layer: str) -> Grid | None:
        kept = self.policy.kept.get(layer)
        return None if kept is None else kept.grids[key.rpartition(".")[2]]

    def ranges(self) -> dict[str, dict[str, Any]]:
        """Return every layer's scheme and range as plain values, for `apply_ranges` and `convert`."""
        found = {name: layer_entry(module) for name, module in self.layers.items()}
        return {name: entry for name, entry in found.items() if entry is not None}

    def deployment(self) -> dict[str, Any]:
        """Return the activation ranges, which with the baked weights reproduce the trained model."""
        return {"ranges": self.ranges()} | ({"kept_from": self._start.folder} if self.policy.kept else {})

    def state_dict(self) -> dict[str, Any]:
        """Return ranges, the current window, counts and switches."""
        return {**self.policy.state_dict(), "began_at": self._began_at, "start": self._start.state_dict()}

    def figures(self) -> dict[str, float]:
        """Return 1 if quantization is on, else 0, and the numbers of layers and range updates."""
        return {
            "qat/active": float(self.bank.quantizing),
            "qat/layers": float(len(self.layers)),
            "qat/range_updates": float(self.bank.num_updates),
        }

    def report(self) -> dict[str, Any]:
        """Return the scheme and error of each layer, and the layers left out with reasons."""
        layers = self._final if self._final is not None else self._layer_reports()
        return {
            "layers": len(layers),
            "scheme": self.config.preset_or_formats,
            "formats": dict(Counter(str(self.schemes[entry["name"]]) for entry in layers).most_common()),
            "began_at_step": self._began_at,
            "range_updates": self.bank.num_updates,
            "non_finite_windows": int(self.bank.non_finite[: len(self.policy.static)].sum()),  # of inputs
            "without_range": [
                entry["name"] for entry in layers if entry["input"] in WITH_RANGE and entry["scale"] is None
            ],
            "clipped": self._clipped(layers),
            "kept_scales": self._kept(layers),
            "smallest_sqnr_db": min((entry["sqnr_db"] for entry in layers if "sqnr_db" in entry), default=None),
            "left_out": dict(self.left_out),
            "float_inputs": self.float_inputs,
            "batch_norms_beside": dict(self._unfolded),
            "per_layer": layers,
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        if report["began_at_step"] is None:
            return [f"Trained no layer with {report['scheme']} yet: the run ended before it began."]
        layers = [f"{counted(number, 'layer')} with {formats}" for formats, number in report["formats"].items()]
        lines = [f"Trained since step {report['began_at_step']:,}: {'; '.join(layers)}."]
        if (worst := report["smallest_sqnr_db"]) is not None:
            lines.append(f"Rounding keeps a signal-to-noise ratio of {worst:.1f} dB or more in each layer's weights.")
        if (clipped := report["clipped"]) is not None and clipped["largest"] >= _WORTH_TELLING:
            lines.append(
                f"In step {clipped['step']:,}, {100 * clipped['share']:.1f} % of the layers' input values lay outside "
                f"their ranges and were clipped, up to {100 * clipped['largest']:.1f} % in {clipped['layer']}."
            )
        if (kept := report.get("kept_scales")) is not None:
            share = "" if kept["clipped"] is None else f"; {100 * kept['clipped']:.2g} % of the values were clipped"
            lines.append(f"Weight scales of {counted(kept['layers'], 'layer')}: kept from {kept['from']}{share}.")
        if report["left_out"]:
            lines.append(f"Left in float: {listed(report['left_out'], 3)}.")
        if report["without_range"]:
            lines.append(f"No input was seen by {listed(report['without_range'], 3)}.")
        if windows := report["non_finite_windows"]:
            lines.append(f"Inputs were not finite in {counted(windows, 'range update')}.")
        return lines

    def _clipped(self, layers: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return the share of clipped input values in the last counted step, and the layer with the largest share."""
        counts = {entry["name"]: (entry["clipped"], entry["values"]) for entry in layers if entry.get("values")}
        if not counts:
            return None
        layer = max(counts, key=lambda name: counts[name][0] / counts[name][1])
        clipped, values = (sum(column) for column in zip(*counts.values(), strict=True))
        largest = counts[layer][0] / counts[layer][1]
        return {"step": self.bank.counted_step, "share": clipped / values, "largest": largest, "layer": layer}

    def _kept(self, layers: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return the folder of kept weight scales, and the share of these weights that are clipped."""
        if not (kept := self.policy.kept):
            return None
        counts = [(one["weights_clipped"], one["weights"]) for one in layers if "weights_clipped" in one]
        clipped, values = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        share = clipped / values if values else None  # sharded weights are gathered only at the end
        return {"from": self._start.folder, "layers": len(kept), "clipped": share}

    def _layer_reports(self, *, gather: bool = False) -> list[dict[str, Any]]:
        reports = []
        for name, module in self.layers.items():
            scheme = self.schemes[name]
            kind = own_class(module)
            stock = STOCK_OF_FOLDED.get(kind) or STOCK.get(kind, kind)
            report: dict[str, Any] = {"name": name, "type": stock.__name__}
            if "fold" in vars(module):
                report["batch_norm"] = module.quantizer.batch_norm  # type: ignore[union-attr]
            report |= {"weight": scheme.weight, "weight_bits": scheme.weight_bits, "input": scheme.input}
            if scheme.group_size:
                report["group_size"] = scheme.group_size
            if scheme.input != "none":
                report["activation_bits"] = scheme.activation_bits
            report |= self.policy.report(name)
            reports.append({**report, **weight_report(module, gather=gather)})
        return reports


def _refuse_shards(name: str, folded: nn.Module) -> None:
    if any(map(is_sharded, folded.parameters(recurse=False))):
        raise CompatibilityError(
            "qat",
            f"fold_batch_norm must be False under FSDP2, because {name} is followed by a batch norm: each "
            "process has its own running statistics, and shards folded with them would not fit together",
            "set it to False, or use DDP",
        )


def resolve_moments(config: QatConfig, context: Context) -> tuple[int, int, int]:
    """Return the steps of begin, freeze_observers and freeze_bn; `sys.maxsize` means never."""
    begin, freeze, freeze_bn = (_resolve(config, name, context) for name in ("begin", "freeze_observers", "freeze_bn"))
    if freeze < 1:
        raise ConfigError(
            "qat",
            f"freeze_observers must be step 1 or later, got {config.freeze_observers!r}",
            "the first step finds the first ranges",
        )
    return begin, freeze, freeze_bn


def planned_events(config: QatConfig, moments: tuple[int, int, int], total_steps: int | None) -> list[Event]:
    """Return the events at the steps of `resolve_moments`, without those at the end of the run."""
    begin, freeze, freeze_bn = moments
    lines: list[tuple[int, str]] = [(0, "ranges are observed, layers compute in float")] if begin else []
    lines += [(begin, f"fake quantization on: {config.formats}"), (freeze, "ranges freeze")]
    lines += [(freeze_bn, "folded batch norms switch to running statistics")] if config.fold_batch_norm else []
    return [event for event in lines if event[0] < (sys.maxsize if total_steps is None else total_steps)]


def _resolve(config: QatConfig, name: str, context: Context) -> int:
    value = getattr(config, name)
    position = parse_position(value)
    if position.unit == "fraction" and position.value == 1.0 and (name != "begin" or context.total_steps is None):
        return sys.maxsize  # the end of the run, even if more steps than planned follow
    return context.resolve(value, f"qat.{name}")
