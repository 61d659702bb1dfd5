"""Low-rank training: layers are factorized before a run, trained as two, and optionally multiplied at the end."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import broadcast_
from shared_core.engine.checks.claims import Claim, Gone, Rank, Shape, Where
from shared_core.engine.checks.optimizer_parameters import ids_of_held, layers_of_copies
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.low_rank.config import LowRankConfig
from shared_core.low_rank.factorize import apply, errors, plan_ranks
from shared_core.low_rank.layers import (
    InputStatistics,
    LowRankLayer,
    as_matrix,
    decompose,
    factorized,
    put_in_,
    structure_of,
)
from shared_core.low_rank.rank_selection import select
from shared_core.modules.matching import UNHELD, plain_name, replaced
from shared_core.modules.own_forward import Undo, fast_paths_off, fast_paths_on
from shared_core.printing import amount, counted, listed, share_text


class LowRank(Technique):
    """Trains ``y = B A x + b`` in A and B, which start as the best approximation of the user's weight.

    This changes the model's structure: from `attach` on each layer is two plain layers, for the trainer and in
    checkpoints. At the end they stay (`shared_core.low_rank.load` loads them). With `merge` the user's own layers are
    restored, with low rank and at full cost.

    Example:
        >>> from shared_core.engine.recipe import Recipe
        >>> from shared_core.engine.session import Session
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        >>> session = Session(Recipe.from_dict({"low_rank": {"rank": 8}}))
        >>> session.attach(model)
        >>> [(name, tuple(value.shape)) for name, value in model.state_dict().items()][:2]
        [('0.first.weight', (8, 64)), ('0.second.weight', (64, 8))]
        >>> session.detach()
        >>> model[0]
        Linear(in_features=64, out_features=64, bias=True)
    """

    reaches_frozen: ClassVar[bool] = True
    config: LowRankConfig

    def __init__(self, config: LowRankConfig) -> None:
        super().__init__(config)
        self.layers: dict[str, LowRankLayer] = {}
        self.left_out: dict[str, str] = {}
        self._structure: dict[str, dict[str, Any]] = {}
        self._per_layer: list[dict[str, Any]] = []
        self._undo: Undo = []
        self._stays = self._is_fresh = self._is_checked = False
        self._looked_at = 0
        self._of_name: dict[str, LowRankLayer] = {}
        self._parameters = (0, 0)
        self._context: Context | None = None

    # -- start

    def attach(self, context: Context) -> Touched:
        """Factorize the model as the options say, or as the checkpoint to resume from needs it."""
        model = context.model
        context.undo.callback(self._detach, context.model)
        config, before = self.config, sum(parameter.numel() for parameter in model.parameters())
        resumed = context.resumed.get(self.key)
        self.layers = factorized(model)
        if self.layers:
            self._stays = True
            context.services.say(
                f"efftrain: low_rank: {len(self.layers)} layers are already factorized and stay as they are"
            )
        elif resumed is not None:
            self.layers = self._as_saved(model, resumed)
        else:
            if config.rule.kind == "sensitivity":
                rule = f"rank must not need the loss of a whole model in training, got {config.rank!r}"
                remedy = "run eff low-rank with this rank, and pass its report (eff_low_rank.json) as the rank"
                raise ConfigError("low_rank", rule, remedy)
            chosen, left_out = select(model, config)
            plan, kept_out = plan_ranks(config, chosen, {})
            self._per_layer, self.left_out = apply(model, plan, {}), left_out | kept_out
            self.layers, self._is_fresh = factorized(model), True
        self._structure = structure_of(self.layers)
        every_name = model.named_modules(remove_duplicate=False)  # a layer used twice has two names
        self._of_name = {name: layer for name, layer in every_name if isinstance(layer, LowRankLayer)}
        self._undo = fast_paths_off(model, (LowRankLayer,))
        self._parameters = (before, sum(parameter.numel() for parameter in model.parameters()))
        if not config.merge:
            context.restructured()
        return self._touched()

    def _as_saved(self, model: nn.Module, saved: Mapping[str, Any]) -> dict[str, LowRankLayer]:
        try:
            return put_in_(model, saved["layers"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            rule = f"checkpoint must hold layers of this {type(model).__name__}, got {error!r}"
            raise CheckpointError("low_rank", rule, "build the model that the checkpoint was saved from") from error

    def _detach(self, model: nn.Module) -> None:
        """Restore the user's layers: with their own weights before training has begun, otherwise with the products."""
        layers, self.layers = self.layers, {}
        if self._stays or self._is_complete or any(hasattr(p, "device_mesh") for p in model.parameters()):
            return
        for layer in layers.values():
            dense = layer.dense
            untouched = not dense.weight.is_meta
            replaced(model, {layer: dense.to(layer.first.weight.device) if untouched else layer.merged()})
        fast_paths_on(self._undo)

    @property
    def _is_complete(self) -> bool:
        context = self._context
        total = None if context is None else context.total_steps
        return not self.config.merge and context is not None and total is not None and context.step >= total

    def leave_unheld(self, context: Context) -> Touched:
        """Restore the user's layers whose factors no optimizer holds, except copies of trained layers."""
        model = context.model
        copied = layers_of_copies("low_rank", model, context.unheld, context.shapes)
        out = {
            name: layer
            for name, layer in self.layers.items()
            if layer not in copied and any(part.weight in context.unheld for part in (layer.first, layer.second))
        }
        # If that is all layers, the optimizer was made before the factors, which `prepare_optimizers` refuses.
        if not self._is_fresh or not out or len(out) == len(self.layers):
            return self._touched()
        for name, layer in out.items():
            replaced(model, {layer: layer.dense.to(layer.first.weight)})
            del self.layers[name]
        self.left_out |= dict.fromkeys(out, UNHELD)
        self._per_layer = [entry for entry in self._per_layer if entry["name"] not in out]
        self._structure = structure_of(self.layers)
        self._of_name = {name: layer for name, layer in self._of_name.items() if layer not in out.values()}
        self._parameters = (self._parameters[0], sum(parameter.numel() for parameter in model.parameters()))
        if not self.config.merge:
            context.restructured()
        return self._touched()

    def prepare_optimizers(self, context: Context) -> None:
        """Check that the factors will be trained, before other techniques give the optimizer copies."""
        self._is_checked = True
        held = ids_of_held(context.optimizers)
        unheld = {id(parameter) for parameter in context.unheld}
        if all(id(layer.first.weight) in unheld for layer in self.layers.values()):
            unheld = set()
        for name, layer in self.layers.items():
            wanted = {id(part.weight) for part in (layer.first, layer.second) if part.weight.requires_grad}
            if context.optimizers and not held | unheld >= wanted:
                rule = f"the optimizer does not hold the factors of {name}, because it was created before them"
                remedy = "let the trainer create the optimizer, or create it from the parameters after attach"
                raise CompatibilityError("low_rank", rule, remedy)

    def plan(self, context: Context) -> Plan:
        """Return what happens before and after training. The layers must stay."""
        after = [(None, "factors are multiplied")] if self.config.merge else []
        return Plan([(0, "layers are factorized"), *after], guards=self.layers)

    def _touched(self) -> Touched:
        """Return the factorized layers, with the sizes of their factors."""
        return Touched.modules(self.layers, self.left_out, "factorized layers")

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Calibrate on inputs if the decomposition needs them, then release the user's weights."""
        if state is not None:
            self._restore(state)
        self._context = context
        if not self._is_checked:
            self.prepare_optimizers(context)
        if self._is_fresh and self.config.needs_batches:
            self._calibrate(context)
        self._is_fresh = False
        for layer in self.layers.values():
            layer.release()

    @torch.no_grad()
    def _calibrate(self, context: Context) -> None:
        """Fit the factors to the inputs of the user's own layers."""
        names = {layer: name for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.dense.to(layer.first.weight)  # the trainer may have moved the model
        moments = InputStatistics(
            {name: (layer.dense, (layer.scheme,)) for name, layer in self.layers.items()},
            diagonal=self.config.decomposition == "scaled",
        )

        def observe(layer: LowRankLayer, x: Tensor) -> Tensor:
            moments.see(names[layer], x)
            # FSDP2 casts inputs to the dtype of its gathered weights, and these weights are not among them.
            weights = {name: value.to(x.dtype) for name, value in layer.dense.named_parameters()}
            out: Tensor = torch.func.functional_call(layer.dense, weights, (x,))
            return out

        try:
            for layer in self.layers.values():
                layer.observer = observe
            with torch.compiler.set_stance("force_eager"):
                context.calibrate(self.config.calibration_batches)
        finally:
            for layer in self.layers.values():
                layer.observer = None
        found = moments.read()
        report = {entry["name"]: entry for entry in self._per_layer}
        for name, layer in self.layers.items():
            moment = found[name, layer.scheme]
            spectrum = decompose(as_matrix(layer.dense.weight, layer.scheme, layer.transposed), moment)
            # Processes may round the decomposition differently.
            layer.set_factors_(*(broadcast_(factor.contiguous()) for factor in spectrum.factors(layer.rank)))
            report[name] |= errors(layer, moment) | {"energy": round(float(spectrum.energy()[layer.rank - 1]), 6)}
        self._looked_at = self.config.calibration_batches

    # -- end

    def finish(self, context: Context) -> None:
        """Record that the factors stay, unless they are to be multiplied."""
        self._stays = not self.config.merge

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return the claims that factors keep their shapes, or that products have their rank and no factor is left."""
        said: dict[str, Claim] = {}
        for name, layer in self._of_name.items():
            factors = {f"{plain_name(name)}.{part}.weight": getattr(layer, part).weight for part in ("first", "second")}
            if not self.config.merge:
                said |= {key: Shape(tuple(factor.shape), holds=Where.TRAINED) for key, factor in factors.items()}
                continue
            matrix = functools.partial(as_matrix, scheme=layer.scheme, transposed=layer.transposed)
            said[f"{plain_name(name)}.weight"] = Rank(matrix, layer.rank, holds=Where.SAVED)
            said |= {key: Gone(holds=Where.SAVED) for key in factors}
        return said

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict with the products under the user's names, if factors are to be multiplied."""
        if not self.config.merge:
            return state_dict
        baked: dict[str, Tensor] = {}
        for name, value in state_dict.items():
            layer = self._of_name.get(".".join(name.split(".")[:-2]))
            if layer is None:
                baked[name] = value
                continue
            prefix, part, kind = name.rsplit(".", 2)
            if kind == "bias":
                baked[f"{prefix}.bias"] = value
            elif part == "first":
                with torch.no_grad():
                    baked[f"{prefix}.weight"] = layer.weight_of(value, state_dict[f"{prefix}.second.weight"])
        return baked

    def deployment(self) -> dict[str, Any]:
        """Return the structure of the saved weights, or nothing if they are the plain model's."""
        return {} if self.config.merge else {"layers": self._structure}

    # -- saved state

    def state_dict(self) -> dict[str, Any]:
        """Return rank and scheme of each layer, and how they were found, for the receipt."""
        found = {"batches": self._looked_at, "per_layer": self._per_layer, "left_out": dict(self.left_out)}
        return {"layers": self._structure, "found": found}

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return True if the model has the saved layers."""
        return bool(state.get("layers") == self._structure)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Check that the model has the saved structure."""
        if not self.fits(state):
            # Sharded weights are loaded before this is known.
            rule = "checkpoint must have the same layers and ranks, got others"
            raise CheckpointError("low_rank", rule, "start from the same model with the same options")
        self._is_fresh = False
        if found := state.get("found"):
            self._looked_at, self.left_out = int(found["batches"]), dict(found["left_out"])
            self._per_layer = [dict(entry) for entry in found["per_layer"]]

    # -- figures

    def figures(self) -> dict[str, float]:
        """Return how many layers are factorized, and the share of the model's parameters that remains."""
        before, after = self._parameters
        return {"low_rank/layers": float(len(self._structure)), "low_rank/parameters": after / before}

    def report(self) -> dict[str, Any]:
        """Return which layers were factorized to which rank, what that saved and lost, and what was left unchanged."""
        return {
            "decomposition": self.config.decomposition,
            "calibration_batches": self._looked_at,
            "layers": len(self._structure),
            "parameters_before": self._parameters[0],
            "parameters_after": self._parameters[1],
            "left_out": dict(self.left_out),
            "merged": self.config.merge,
            "structure": self._structure,
            "per_layer": self._per_layer,
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        before, after = report["parameters_before"], report["parameters_after"]
        text = (
            f"Factorized {counted(report['layers'], 'layer')}: {amount(after)} parameters instead of {amount(before)}"
        )
        share = f" ({share_text(after / before)})" if before else ""
        merged = "The factors were multiplied again, so the weights have their old shapes."
        left = report["left_out"]
        return [
            f"{text}{share}.",
            *([merged] if report["merged"] else []),
            *([f"Left whole: {listed(left, 3)}."] if left else []),
        ]
