"""LoRA and QLoRA: low-rank adapters trained on frozen linear layers, in float or in 4 or 8 bits, merged at the end."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats.adapter import is_adapter_folder
from shared_core.distributed.sharded_tensors import fill_, is_sharded, reshard_, whole
from shared_core.engine.checks.claims import Claim, Gone, Same
from shared_core.engine.checks.optimizer_parameters import ids_of_held, layers_of_copies
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CheckpointError, CompatibilityError
from shared_core.libraries import optional
from shared_core.lora.adapters import (
    AdaptedStack,
    adapters,
    base_weight,
    inject,
    merged_weight,
    release_,
    restore_layer,
    select_layers,
    user_layers,
)
from shared_core.lora.config import LoraConfig
from shared_core.lora.peft_files import AdapterFiles, Layout, digest
from shared_core.lora.quantized_base import frozen_tensors, on_device, on_grid, on_qat_grid, restore_
from shared_core.lora.untrained import ZeroAdapters
from shared_core.modules.like_stock import class_of_user
from shared_core.modules.matching import UNHELD, StackedExperts, conv1d_kind, plain_name
from shared_core.modules.own_forward import Undo, fast_paths_off, fast_paths_on
from shared_core.modules.weight_views import as_rows, from_rows
from shared_core.numerics.rounding import relative_error, sqnr
from shared_core.printing import amount, counted, listed, share_text, size_text
from shared_core.quantization.fake_quant_layers import is_quantized


class Lora(Technique):
    """Trains ``y = Q⁻¹(Q(W))·x + alpha/rank·BAx + b`` in A and B alone; W is quantized once and frozen.

    While it is attached, state dicts hold ``weight = Q⁻¹(Q(W)) + alpha/rank·BA`` under the user's own keys, so every
    checkpoint is the plain model's. Codes, scales, A and B are saved beside it, and a resumed run goes on from these,
    bit for bit. A weight that is loaded alone becomes the base, with adapters that add nothing. `finish` merges in
    float and leaves the user's own layers.

    Source: Hu et al., 2021, arXiv:2106.09685; Dettmers et al., 2023, arXiv:2305.14314.

    Example:
        >>> from shared_core.engine.recipe import Recipe
        >>> from shared_core.engine.session import Session
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> session = Session(Recipe.from_dict({"lora": {"rank": 2, "base": "none"}}))
        >>> session.attach(model)
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['0.lora_A.default.weight', '0.lora_B.default.weight', '2.weight', '2.bias']
        >>> list(model.state_dict())
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> session.detach()
        >>> model[0]
        Linear(in_features=8, out_features=16, bias=True)
    """

    reaches_frozen: ClassVar[bool] = True
    config: LoraConfig

    def __init__(self, config: LoraConfig) -> None:
        super().__init__(config)
        self.layers: dict[str, Any] = {}
        self.left_out: dict[str, str] = {}
        self.whole: list[str] = []
        self._copied: set[str] = set()
        self._begun = False
        self._unmoved: ZeroAdapters | None = None
        self._undo: Undo = []
        self._required: list[tuple[nn.Module, str, bool]] = []
        self._entries: dict[str, dict[str, Any]] = {}
        self._stacks: list[str] = []
        self._parameters = {"trained_parameters": 0, "adapter_parameters": 0, "frozen_parameters": 0}
        self._device = torch.device("cpu")
        self._last: dict[str, Any] | None = None
        self._gathered: dict[str, Any] | None = None
        self._context: Context | None = None
        self._buffers: dict[str, Tensor] = {}

    # -- start

    def attach(self, context: Context) -> Touched:
        """Freeze the model, quantize the layers and put adapters on them."""
        model = context.model
        context.undo.callback(self._detach, context.model)
        optional("peft", "lora", "lora")
        if any(hasattr(module, "lora_A") for module in model.modules()) or hasattr(model, "peft_config"):
            raise CompatibilityError("lora", "the model already has PEFT adapters", "merge them, or drop lora")
        if any(map(is_sharded, model.parameters())):
            rule = "the model is already sharded, but adapters added now would not be"
            raise CompatibilityError("lora", rule, "attach before fully_shard, with strategy eff_fsdp in Lightning")
        layers, trained_whole, self.left_out = select_layers(model, self.config)
        self.whole = list(trained_whole)
        self._context = context
        self._buffers = {name: buffer.detach().clone() for name, buffer in _saved_buffers(model)}
        if self.config.save == "adapters":
            self._check_files(layers)
        # Of before: injecting adds parameters and freezes others.
        parameters = {parameter: parameter.requires_grad for parameter in model.parameters()}
        # by their place: FSDP2 puts others there
        self._required = [
            (module, name, parameter.requires_grad)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        counts = sum(parameter.numel() for parameter in parameters)
        self.layers = inject(model, layers, self.config, context.generator)
        holders = (one.module if isinstance(one, AdaptedStack) else one for one in self.layers.values())
        self._undo = fast_paths_off(model, tuple({type(holder) for holder in holders}))
        trained = {id(parameter) for module in trained_whole.values() for parameter in module.parameters()}
        # Trained whole, but only what the user had not frozen.
        trained &= {id(parameter) for parameter, required in parameters.items() if required}
        added = {id(matrix) for layer in self.layers.values() for matrix in adapters(layer)}
        # By identity, over the model as it is now, adapters included.
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained | added)
        in_adapters = sum(matrix.numel() for layer in self.layers.values() for matrix in adapters(layer))
        in_whole = sum(parameter.numel() for parameter in parameters if id(parameter) in trained)
        self._parameters = {
            "trained_parameters": in_adapters + in_whole,
            "adapter_parameters": in_adapters,
            "frozen_parameters": counts - in_whole,
        }
        self._entries = {name: self._measure(layer) for name, layer in self.layers.items()}
        stacks = self._stacks = [name for name, layer in self.layers.items() if isinstance(layer, AdaptedStack)]
        self._note_base(context)
        if stacks and self.config.base != "none":
            context.note(
                f"lora: base {self.config.base} applies to linear layers only; these keep their format under "
                f"their adapters: {', '.join(stacks[:3])}" + (f" and {len(stacks) - 3} more" if len(stacks) > 3 else "")
            )
        return self._touched()

    def _check_files(self, layers: Mapping[str, nn.Module]) -> None:
        """Refuse what files of adapters cannot hold, before anything is changed."""
        if stacks := [name for name, layer in layers.items() if isinstance(layer, StackedExperts)]:
            rule = f"PEFT's file format cannot hold adapters of stacked experts, got {stacks[0]}"
            remedy = "write --lora_save merged, or leave the experts frozen with --lora_skip '*.experts'"
            raise CompatibilityError("lora", rule, remedy)
        for name, layer in layers.items():
            kind = class_of_user(layer)
            if not issubclass(kind, nn.Linear) and conv1d_kind(kind) is None:
                rule = f"PEFT cannot load adapters of {name}, because {kind.__name__} does not derive from nn.Linear"
                raise CompatibilityError("lora", rule, f"write --lora_save merged, or --lora_skip {kind.__name__}")
        self._layout(layers)

    def _layout(self, layers: Collection[str]) -> Layout:
        """Return PEFT's names; modules whose buffers training has changed are saved whole too."""
        model = cast(Context, self._context).model
        changed = [
            name.rpartition(".")[0]
            for name, buffer in _saved_buffers(model)
            if name not in self._buffers or not torch.equal(buffer, self._buffers[name].to(buffer.device))
        ]
        return Layout(model, layers, [*self.whole, *changed], self.config)

    def _note_base(self, context: Context) -> None:
        ratios = [entry["base_sqnr_db"] for entry in self._entries.values() if entry["base_sqnr_db"] is not None]
        if self.config.base != "none" and ratios:
            context.note(
                f"lora: frozen weights are rounded to {self.config.base} (SQNR {min(ratios):.1f} dB or better); "
                "--lora_base none does not round them"
            )

    def _note_files(self, context: Context) -> None:
        if self.config.save == "merged":
            return
        if context.part_alone:
            text = "checkpoints and save_model hold adapters in PEFT's format; --lora_save merged saves whole models"
        else:
            text = (
                "checkpoints hold the whole model, with adapters merged; the adapters alone go to the folder "
                f"{AdapterFiles.name} next to the receipt, in PEFT's format"
            )
        if self._layout(self.layers).base is None:
            text += "; they load onto this base alone, and its config does not say where it came from: keep its weights"
        context.note(f"lora: {text}")

    def _measure(self, layer: Any) -> dict[str, Any]:
        weight = (layer if isinstance(layer, AdaptedStack) else layer.user_layer).weight.detach()
        ratio = sqnr(weight, base_weight(layer))
        return {
            "bytes_before": weight.nbytes,
            "bytes_after": sum(tensor.nbytes for tensor in frozen_tensors(layer.base_layer).values()),
            # without noise it is infinite, which JSON cannot hold
            "base_sqnr_db": round(ratio, 3) if math.isfinite(ratio) else None,
        }

    def _detach(self, model: nn.Module) -> None:
        """Restore the user's layers: untouched if training has not begun, else with what was trained merged in."""
        # Sharded ones are left with their base: the processes that hold the other parts may be gone.
        if self.layers:
            reshard_(model)
        for layer in self.layers.values():
            # A sharded layer's base cannot take a merged weight here: other processes need not be on the way.
            merges = self._begun and not is_sharded(layer.base_layer.weight)
            restore_layer(model, layer, merged_weight(layer) if merges else None)
        self.layers = {}
        for module, name, required in self._required:
            if (parameter := module._parameters[name]) is not None:
                parameter.requires_grad_(required)
        self._required = []
        fast_paths_on(self._undo)

    def plan(self, context: Context) -> Plan:
        """Return what happens before and after training; the layers must stay, and their weights frozen."""
        linear = {name: layer for name, layer in self.layers.items() if not isinstance(layer, AdaptedStack)}
        weights = {
            f"{name}.weight" if name in linear else name: layer.base_layer.weight for name, layer in self.layers.items()
        }
        events = [(0, f"base frozen in {self.config.base}, adapters train"), (None, "adapters are merged")]
        return Plan(events, guards=linear | weights, keeps_frozen=True)

    def _touched(self) -> Touched:
        """Return the layers that get adapters, without what those add; others are trained whole."""
        sizes = {name: layer.base_layer.weight.numel() for name, layer in self.layers.items()}
        return Touched(sizes, self.left_out, "layers", self.whole)

    def leave_unheld(self, context: Context) -> Touched:
        """Restore the user's layers where no optimizer holds the adapters, but in copies of what is trained."""
        model = context.model
        copied = layers_of_copies("lora", model, context.unheld, context.shapes)
        modules = {plain_name(name): module for name, module in model.named_modules()}
        for name in [*self.whole]:
            trained = [one for one in modules[name].parameters() if one in context.unheld]
            if trained:
                self.whole.remove(name)
                self.left_out[name] = UNHELD
                self._parameters["trained_parameters"] -= sum(parameter.numel() for parameter in trained)
        unheld = [name for name, one in self.layers.items() if any(m in context.unheld for m in adapters(one))]
        # of all: the optimizer was made before the adapters, which `begin` refuses
        if len(unheld) == len(self.layers):
            return self._touched()
        self._copied = {name for name in unheld if self.layers[name] in copied}
        for name in (name for name in unheld if name not in self._copied):
            layer = self.layers.pop(name)
            in_adapters = sum(matrix.numel() for matrix in adapters(layer))
            restore_layer(model, layer, None)
            del self._entries[name]
            self.left_out[name] = UNHELD
            for count in ("trained_parameters", "adapter_parameters"):
                self._parameters[count] -= in_adapters
        return self._touched()

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Drop the float weights of quantized layers, after a look at whether adapters will be trained at all."""
        reshard_(context.model)  # an evaluation may have come before
        if state is not None:
            self._restore(state)
        self._check_wrapping()
        held = ids_of_held(context.optimizers)
        for name, layer in self.layers.items() if context.optimizers else ():
            if name not in self._copied and not held.issuperset(id(matrix) for matrix in adapters(layer)):
                rule = f"the optimizer does not hold the adapters of {name}, because it was created before them"
                remedy = "let the trainer create the optimizer, or create it from the parameters after attach"
                raise CompatibilityError("lora", rule, remedy)
        first = next(iter(self.layers.values()))
        self._device = first.plain.device
        # One product in the chosen base: bitsandbytes finds out here, not in the first step, if its kernels load.
        if self.config.base != "none" and not isinstance(first, AdaptedStack):
            with on_device(self._device, self.config.base), torch.no_grad():
                first.base_layer(torch.zeros(1, adapters(first)[0].shape[1]).to(first.plain))
        self._note_files(context)
        # From here on the float weights are not needed: this is where memory falls.
        for layer in self.layers.values():
            release_(layer)
        self._begun = True
        # Shards of a matrix may be zero on one process alone.
        watched = bool(context.optimizers) and not self._is_sharded
        self._unmoved = ZeroAdapters([adapters(layer)[1] for layer in self.layers.values()]) if watched else None

    def _check_wrapping(self) -> None:
        for name, layer in self.layers.items():
            if isinstance(layer, AdaptedStack) and is_sharded(layer.weight):
                # its adapters would be gathered apart
                rule = f"{name} is sharded, which is not supported"
                raise CompatibilityError("lora", rule, "skip it, or train in DDP")
            if hasattr(layer, "set_reshard_after_forward"):
                # nothing of it would be gathered after the merging
                rule = f"{name} is sharded on its own, but must be sharded together with its block"
                raise CompatibilityError("lora", rule, "shard the block that contains it instead")

    @property
    def _is_sharded(self) -> bool:
        return any(is_sharded(layer.base_layer.weight) for layer in self.layers.values())

    def loading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Let sharded weights be loaded by the parameters' names, which torch looks for: those of the user's layers."""
        if self._is_sharded:
            return user_layers(model, self.layers.values())
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Hold what is kept in parts in whole, so that saving needs no other process."""
        if self._is_sharded and purpose == "checkpoint":
            self._gathered = self._state()
        try:
            yield
        finally:
            self._gathered = None

    # -- the first steps

    def after_step(self, context: Context, applied: bool) -> None:
        """Check that the optimizer moves the adapters."""
        if self._unmoved is None:
            return context.drop(self.after_step)
        if applied and self._unmoved.after_step(context.optimizers):
            self._unmoved = None
        return None

    # -- end

    def finish(self, context: Context) -> None:
        """Merge in float, round to the base's grid again if asked to, and leave the user's own layers."""
        # Those that qat quantizes it still does: it bakes the merged weight when its own turn comes.
        reshard_(context.model)
        self._note_loaded(context)
        self._last = self._state()  # a run that trains on goes on from here, not from a newly quantized base
        for name, layer in self.layers.items():
            # The merge in float64 is the measure of how large the adapters are, and of what rounding loses.
            merged, exact = merged_weight(layer), whole(merged_weight(layer, torch.float64))
            entry = self._entries[name]
            entry["adapter_size"] = relative_error(exact, whole(base_weight(layer)))
            entry["merge_error"] = relative_error(exact, whole(merged))
            if self.config.requantize and not isinstance(layer, AdaptedStack):
                # Rounding after training: no gradient has seen it, so its cost is told.
                merged = self._on_grid(layer, merged)
                entry |= _cost(exact, merged)
            elif is_quantized(layer.user_layer):
                entry |= _cost(exact, whole(on_qat_grid(layer.user_layer, merged)))
            restore_layer(context.model, layer, merged)
        self.layers = {}

    def _note_loaded(self, context: Context) -> None:
        ratios = [getattr(layer, "eff_loaded_db", None) for layer in self.layers.values()]
        if found := [ratio for ratio in ratios if ratio is not None]:
            context.note(
                f"lora: weights were loaded into {len(found)} layers before the end of training: they were rounded to "
                f"{self.config.base} again (from {min(found):.1f} dB) and their adapters were reset; load them after "
                "training to keep them unrounded"
            )

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return that merged weights stay what they are, and that no adapter is left."""
        claims: dict[str, Claim] = {}
        for name in self._entries:
            if name in self._stacks:
                module, _, stack = name.rpartition(".")
                claims[name] = Same()
                claims |= {f"{module}.lora_{stack}.{which}": Gone() for which in "AB"}
            else:
                claims[f"{name}.weight"] = Same()
                claims |= {f"{name}.lora_{which}.default.weight": Gone() for which in "AB"}
        if context.part_alone:  # the files hold these as they are now
            tops = tuple(f"{name}." for name in self.whole)
            names = (plain_name(name) for name, _ in context.model.named_parameters())
            claims |= {name: Same() for name in names if name.startswith(tops)}
        return claims

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict, whose weights are merged already, rounded to the base's grid if asked to."""
        if not self.config.requantize:
            return state_dict
        baked = dict(state_dict)
        for name, layer in self.layers.items():
            if not isinstance(layer, AdaptedStack):
                baked[f"{name}.weight"] = self._on_grid(layer, baked[f"{name}.weight"])
        return baked

    def _on_grid(self, layer: Any, weight: Tensor) -> Tensor:
        return from_rows(layer.user_layer, on_grid(as_rows(layer.user_layer, weight), self.config), weight)

    # -- files of adapters

    @property
    def saves_part(self) -> bool:
        """True if adapters are saved by themselves."""
        return self.config.save == "adapters"

    def part(self, context: Context) -> AdapterFiles | None:
        """Return the adapters as they are now; None if merged weights are saved, or if nothing was trained."""
        if not self.saves_part:
            return None
        matrices: dict[str, tuple[Tensor, Tensor]] = {name: adapters(layer) for name, layer in self.layers.items()}
        if not self.layers and self._last is not None:
            matrices = {name: tuple(saved["adapters"]) for name, saved in self._last["layers"].items()}  # type: ignore[misc]
        if not matrices:
            return None
        return self._layout(matrices).files(matrices, context.model.state_dict(), self._digests())

    def _digests(self) -> dict[str, str]:
        """Return digests of the user's weights under the adapters; none of rounded weights, which are other ones."""
        if self.config.base != "none" or self._is_sharded:
            return {}
        if self.layers:
            return {name: digest(layer.base_layer.weight) for name, layer in self.layers.items()}
        found = (self._last or {}).get("base", {}).get("digests", {})
        return {name: found[key] for name in self._entries if (key := f"{name}.base_layer.weight") in found}

    def load_part(self, context: Context, folder: Path) -> bool:
        """Load adapters and whole modules from a folder of PEFT's files."""
        if not is_adapter_folder(folder):
            return False
        saved, modules = self._layout(self.layers).read(folder)
        for name, layer in self.layers.items():
            for matrix, value in zip(adapters(layer), saved[name], strict=True):
                if matrix.shape != value.shape:
                    rule = f"adapters of {name} must have shape {tuple(matrix.shape)}, got {tuple(value.shape)}"
                    raise CheckpointError(folder, rule, "resume with the rank of the saved run")
                fill_(matrix, value)
        names = {plain_name(name): name for name in context.model.state_dict()}
        if unknown := next((name for name in modules if name not in names), None):
            raise CheckpointError(folder, f"weights must be those of this model, got {unknown}", "check the path")
        context.model.load_state_dict({names[name]: value for name, value in modules.items()}, strict=False)
        return True

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return A and B, and what they are added to: its codes and scales, its weight, or digests of the user's."""
        return self._last or self._gathered or self._state()

    def _state(self) -> dict[str, Any]:
        alone = self._context is not None and self._context.part_alone
        state: dict[str, Any] = {
            "layers": {
                name: {"adapters": [_copy(matrix) for matrix in adapters(layer)]} | ({} if alone else _frozen(layer))
                for name, layer in self.layers.items()
            }
        }
        return state | ({"base": self._base()} if alone else {})

    def _base(self) -> dict[str, Any]:
        """Return what the weights that no checkpoint holds are recognized by."""
        named = cast(Context, self._context).model.named_parameters()
        frozen = [(name, value) for name, value in named if not value.requires_grad]
        return {
            "device": frozen[0][1].device.type if frozen else "",
            "digests": {plain_name(name): digest(value) for name, value in frozen},
        }

    def _check_base(self, device: str, digests: Mapping[str, Any]) -> None:
        """Refuse to go on over other frozen weights than those that the adapters were trained on."""
        mine = self._base()
        # Another device may round a value near a tie to another code.
        if self.config.base != "none" and mine["device"] != device:
            return
        found = mine["digests"]
        if other := next((name for name in [*digests, *found] if digests.get(name) != found.get(name)), None):
            rule = f"frozen weights must be those that the adapters were trained on, but {other} differs"
            raise CheckpointError("lora", rule, "load the base model that the run began with")

    @torch.no_grad()
    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore what each layer's weight is made of."""
        try:
            saved = state["layers"]
            if odd := sorted(set(saved) ^ set(self.layers)):
                raise ValueError(f"layers differ in {', '.join(odd[:5])}")
            for name, layer in self.layers.items():
                if "frozen" in saved[name]:
                    restore_(layer.base_layer, saved[name]["frozen"])
                layer.eff_loaded_db = None
                for matrix, value in zip(adapters(layer), saved[name]["adapters"], strict=True):
                    if value.shape != matrix.shape:
                        raise ValueError(f"adapters of {name} have shape {tuple(value.shape)}")
                    fill_(matrix, value)
            base = dict(state["base"]) if "base" in state else None
            device, digests = (str(base["device"]), dict(base["digests"])) if base else ("", {})
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            rule = f"the saved state does not fit these layers, rank and base: {error!r}"
            remedy = "resume with the options of the saved run, or start from its plain weights"
            raise CheckpointError("lora", rule, remedy) from error
        if digests:
            self._check_base(device, digests)

    # -- figures

    def figures(self) -> dict[str, float]:
        """Return how many layers are adapted and how many parameters are trained."""
        return {"lora/layers": float(len(self._entries)), "lora/trained": float(self._parameters["trained_parameters"])}

    def report(self) -> dict[str, Any]:
        """Return what was frozen in how many bytes, what was trained, how good the base is, and by what."""
        per_layer = [{"name": name, **entry} for name, entry in self._entries.items()]
        before, after = (sum(entry[key] for entry in per_layer) for key in ("bytes_before", "bytes_after"))
        ratios = [entry["base_sqnr_db"] for entry in per_layer if entry["base_sqnr_db"] is not None]
        libraries = ["peft", *([] if self.config.base == "none" else ["bitsandbytes"])]
        return {
            "base": self.config.base,
            "backend": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries),
            "device": str(self._device),
            "layers": len(per_layer),
            **self._parameters,
            "trained_whole": list(self.whole),
            "bytes_before": before,
            "bytes_after": after,
            "worst_base_sqnr_db": min(ratios, default=None),
            "left_out": dict(self.left_out),
            "per_layer": per_layer,
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        trained, frozen = report["trained_parameters"], report["frozen_parameters"]
        share = share_text(trained / max(trained + frozen, 1))
        lines = [
            f"Trained {amount(trained)} parameters ({share}) with adapters on {counted(report['layers'], 'layer')}."
        ]
        if report["base"] != "none":
            worst = report["worst_base_sqnr_db"]
            noise = "" if worst is None else f", with a signal-to-noise ratio of {worst:.1f} dB or more"
            sizes = f"{size_text(report['bytes_after'])} instead of {size_text(report['bytes_before'])}"
            lines.append(f"The frozen base takes {sizes} in {report['base']}{noise}.")
        if report["trained_whole"]:
            lines.append(f"Trained in full: {listed(report['trained_whole'], 3)}.")
        return lines


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that state dicts hold, by plain name."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield plain_name(f"{path}.{name}" if path else name), buffer


def _frozen(layer: Any) -> dict[str, Any]:
    return {"frozen": {key: _copy(tensor) for key, tensor in frozen_tensors(layer.base_layer).items()}}


def _copy(tensor: Tensor) -> Tensor:
    return whole(tensor.detach()).cpu() if is_sharded(tensor) else tensor.detach().clone()


def _cost(exact: Tensor, rounded: Tensor) -> dict[str, Any]:
    ratio = sqnr(exact, rounded)
    return {
        "requantized_error": relative_error(exact, rounded),
        "requantized_sqnr_db": round(ratio, 3) if math.isfinite(ratio) else None,
        "requantized_largest_change": (exact - rounded.double()).abs().max().item(),
    }
