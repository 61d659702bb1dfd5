"""The options of pruning."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shared_core.config.environments import NO_WHOLE_WEIGHTS, RUN_ENVIRONMENTS
from shared_core.config.options import Figure, OverridableConfig, coerce, option
from shared_core.config.training_time import Position

GATHERED = ("taylor", "movement", "fisher", "wanda", "sparsegpt", "neuron_taylor", "shapley")
"""Criteria that need gradients or activations, so at least one step must run before the first update."""
RELATIVE = ("magnitude", "l1_norm", "l2_norm", "geometric_median")
"""Criteria based on the size of weights. Units of different layers are compared only after dividing by the mean of
their group. Other criteria estimate the effect on loss or output, are trained to be comparable (bn_scale), or are
random."""
UNITS = ("neuron", "channel", "filter", "head", "layer")
"""Granularities that prune whole output units."""
TRACED = ("neuron", "channel", "head")
"""Granularities that prune a unit throughout the network, found by tracing one micro-batch."""
MOST_OF_WEIGHTS, MOST_OF_STRUCTURES = 0.98, 0.9
"""Default limits for the share pruned from one layer, unless `sparsity` is higher."""
DURING_TRAINING = (
    "schedule", "initial_sparsity", "begin", "end", "every", "dynamic", "drop_share", "sr_ste", "regularizer",
    "regularizer_strength",
)  # fmt: skip
"""Options that only matter while a model trains."""
_GROWING = ("linear", "cubic", "cosine", "exponential", "iterative")
_WEIGHTS = ("unstructured", "n_m", "block")
_BESIDE_OTHERS = ("neuron", "channel", "filter", "head")
_ROWS = ("unstructured", "n_m")
_CRITERIA: dict[str, dict[str, tuple[str, ...]]] = {
    "threshold": {"granularity": ("unstructured",)},
    # Scores build up until end.
    "movement": {"granularity": _WEIGHTS, "schedule": _GROWING, "dynamic": ("none", "recompute")},
    # Compares the weights within one output, and prunes every output by the same share.
    "wanda": {"granularity": _ROWS, "scope": ("auto", "global", "local")},
    # Solves one layer at a time.
    "sparsegpt": {"granularity": _ROWS, "scope": ("auto", "local")},
    "l1_norm": {"granularity": UNITS},
    "l2_norm": {"granularity": UNITS},
    "geometric_median": {"granularity": _BESIDE_OTHERS},
    # Needs the batch norms that tracing finds.
    "bn_scale": {"granularity": TRACED},
    "neuron_taylor": {"granularity": _BESIDE_OTHERS},
    "shapley": {"granularity": UNITS},
}
"""Other options that a criterion requires."""
_OF_WEIGHTS = {"granularity": ("unstructured", "block")}


@dataclass(frozen=True, kw_only=True)
class PruneConfig(OverridableConfig):
    """Sets weights, blocks, channels or heads to zero.

    Example:
        >>> PruneConfig(sparsity=0.8, begin=0.1, end=0.6).schedule
        'cubic'
    """

    about: ClassVar[str] = "Sets weights, blocks, channels or heads to zero."
    key: ClassVar[str] = "prune"
    switch: ClassVar[str] = "sparsity"

    finishes_after: ClassVar[tuple[str, ...]] = ("average",)
    conflicts: ClassVar[Mapping[str, str]] = NO_WHOLE_WEIGHTS
    works_in: ClassVar[tuple[str, ...]] = ("tensor_parallel",)
    figures: ClassVar[Mapping[str, Figure]] = {
        "sparsity": Figure("share of the prunable weights that is masked", in_bar=True)
    }
    overridable: ClassVar[tuple[str, ...]] = ("sparsity",)
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"regularizer_strength": ("regularizer",)}
    conditions: ClassVar[Mapping[str, str]] = {
        "layers_compete": "a threshold across layers (not scope local, granularity n_m, criterion wanda or sparsegpt)",
        "layers_differ": "sparsity that differs by layer (not scope local, which auto is for structures, granularity "
        "n_m or layer, or criterion wanda)",
    }

    sparsity: float = option(help="Share of weights that are zero at the end, in [0, 1).", low=0, below=1)
    criterion: Literal[
        "magnitude", "threshold", "random", "taylor", "movement", "fisher", "wanda", "sparsegpt", "l1_norm", "l2_norm",
        "geometric_median", "bn_scale", "neuron_taylor", "shapley",
    ] = option(
        "magnitude",
        help="How to score weights or units. The lowest are pruned. sparsegpt: only after training (eff prune).",
        each=_CRITERIA,
    )  # fmt: skip
    threshold: float | None = option(
        None,
        help="Prune weights with |w| below this, up to sparsity.",
        above=0,
        only_with={"criterion": ("threshold",)},
        required=True,
    )
    permutations: int = option(
        10,
        help="Random orders of the units. Each runs one micro-batch per unit.",
        low=2,
        only_with={"criterion": ("shapley",)},
    )
    cost: Literal["none", "flops", "bytes", "energy"] = option(
        "none",
        help="Divide scores by the layer's cost per weight, to prune expensive layers first.",
        only_with={"layers_compete": (True,)},
    )
    granularity: Literal["unstructured", "n_m", "block", "neuron", "channel", "filter", "head", "layer"] = option(
        "unstructured",
        help="What to prune: single weights, n:m groups of inputs, tiles, hidden neurons, channels with everything "
        "that depends on them, single filters, attention heads, or layers.",
        each={"n_m": {"schedule": ("one_shot",)}, "layer": {"scope": ("auto", "global")}},
    )
    n_m: str = option("2:4", help="Keep n of every m neighbors along the input.", only_with={"granularity": ("n_m",)})
    block: str = option("4x4", help="Tile size, outputs x inputs.", only_with={"granularity": ("block",)})
    schedule: Literal["one_shot", "linear", "cubic", "cosine", "exponential", "iterative"] = option(
        "cubic", help="How sparsity grows from begin to end; one_shot prunes once, at begin."
    )
    initial_sparsity: float = option(
        0.0,
        help="Sparsity at begin, or before it with iterative.",
        low=0,
        below=1,
        at_most="sparsity",
        only_with={"schedule": _GROWING},
    )
    begin: Position = option(0.0, help="First update: a fraction of the run (0.1), a step (500) or epochs (2ep).")
    end: Position = option(0.5, help="Last update, at full sparsity; one_shot prunes only at begin.")
    every: int = option(10, help="Optimizer steps between updates. The last update is always at end.", low=1)
    scope: Literal["auto", "global", "tower", "local", "erdos_renyi", "erdos_renyi_kernel"] = option(
        "auto",
        help="How layers share the sparsity. global: one threshold for all layers; tower: one per top-level module "
        "(vision and text encoder); local: the same sparsity for every tensor; erdos_renyi: more sparsity for large "
        "tensors, by layer sizes (kernel: also by kernel sizes); auto: local for structures without a cost, else "
        "global.",
        each={"tower": _OF_WEIGHTS, "erdos_renyi": _OF_WEIGHTS, "erdos_renyi_kernel": _OF_WEIGHTS},
    )
    max_layer_sparsity: float | None = option(
        None,
        help="Largest share to prune from one layer; other layers make up for the rest. Default: 0.98 (structures: "
        "0.9), or sparsity if higher.",
        above=0,
        high=1,
        at_least="sparsity",
        only_with={"layers_differ": (True,)},
    )
    dynamic: Literal["none", "recompute", "rigl"] = option(
        "none",
        help="What happens to pruned weights. none: they stay zero; recompute: they keep training and may return until "
        "end; rigl: from begin to end, those with large gradients replace weak weights.",
        each={
            "rigl": {"granularity": ("unstructured",), "schedule": ("one_shot",)},
            "recompute": {"granularity": _WEIGHTS},
        },
    )
    drop_share: float = option(
        0.3,
        help="Share of a tensor's remaining weights to replace at first.",
        above=0,
        below=1,
        only_with={"dynamic": ("rigl",)},
    )
    sr_ste: float = option(
        0.0,
        help="Decay of masked weights, which keep training (SR-STE); set every=1.",
        low=0,
        only_with={"granularity": ("n_m",)},
    )
    regularizer: Literal["none", "l1", "group_lasso", "bn_l1", "weight_decay"] = option(
        "none",
        help="Penalty on prunable weights until end. bn_l1 acts on batch norm scales; group_lasso on tiles, layers, "
        "neurons, channels or heads, else on each output's weights.",
    )
    regularizer_strength: float = option(1e-4, help="Penalty factor.", above=0)
    include: tuple[str, ...] = option(
        (), help="Modules to include: name globs, types, first, last. Default: all. Frozen ones must be named."
    )
    skip: tuple[str, ...] = option((), help="Modules to skip: name globs, types, first, last.")
    min_size: int = option(0, help="Leave tensors with fewer weights than this dense.", low=0)
    overrides: tuple[str, ...] = option(
        (),
        help="Sparsity of single modules (0: dense): PATTERN:sparsity=VALUE, such as head:sparsity=0.5, or a mapping "
        "in YAML. The last match counts. sparsity applies to the others.",
    )

    def validate(self) -> None:
        """Raise `ConfigError` if n_m, block or an override is invalid."""
        kept, of = self.kept_of
        if self.granularity == "n_m" and not abs(self.sparsity - (1 - kept / of)) < 1e-6:
            raise self._error("sparsity", f"must be {1 - kept / of:g} with n_m = {self.n_m}")
        _ = self.block_size
        whole = {"n_m": f"n_m = {self.n_m} fixes it", "layer": "layers are pruned whole"}.get(self.granularity)
        for pattern, _, value in self.override_options():
            asked = coerce(value, float, "prune.overrides")
            if not 0 <= asked < 1 or (asked and whole):
                rule = f"0 with granularity {self.granularity}, as {whole}" if whole else "in [0, 1)"
                raise self._error("overrides", f"must give {pattern} a sparsity {rule}")

    @property
    def resolved_scope(self) -> str:
        """The scope, with ``auto`` resolved."""
        if self.scope != "auto":
            return self.scope
        alike = self.prunes_units and self.granularity != "layer" and self.cost == "none"
        return "local" if alike or self.criterion == "sparsegpt" else "global"

    @property
    def layers_compete(self) -> bool:
        """True if layers with lower scores lose more weights."""
        return self.resolved_scope in ("global", "tower") and self.granularity != "n_m" and self.criterion != "wanda"

    @property
    def layers_differ(self) -> bool:
        """True if one layer may lose a larger share than another."""
        return self.resolved_scope != "local" and self.granularity not in ("n_m", "layer") and self.criterion != "wanda"

    @property
    def most_of_a_layer(self) -> float:
        """The largest share of one layer that may be pruned."""
        if self.max_layer_sparsity is not None:
            return self.max_layer_sparsity
        return max(self.sparsity, MOST_OF_STRUCTURES if self.prunes_units else MOST_OF_WEIGHTS)

    @property
    def straight_through(self) -> bool:
        """True if masks act only in forward and backward, so that weights under them keep learning until end."""
        return self.criterion == "movement" or self.dynamic == "recompute" or self.sr_ste > 0

    @property
    def updates_until_end(self) -> bool:
        """True if masks change from begin to end, even at constant sparsity."""
        return self.schedule != "one_shot" or self.straight_through or self.dynamic == "rigl"

    @property
    def needs_batches(self) -> str:
        """The option that needs to see a batch, such as ``criterion wanda``; empty if none does."""
        if self.criterion in GATHERED:
            return f"criterion {self.criterion}"
        if self.is_traced:
            return f"granularity {self.granularity}"
        return f"cost {self.cost}" if self.counts_calls else ""

    @property
    def prunes_units(self) -> bool:
        """True if whole output units are pruned instead of weights or tiles."""
        return self.granularity in UNITS

    @property
    def is_traced(self) -> bool:
        """True if units are found by tracing a micro-batch."""
        return self.granularity in TRACED

    @property
    def counts_calls(self) -> bool:
        """True if costs depend on the inputs of each layer."""
        return self.cost in ("flops", "energy")

    @property
    def acts_on_gradients(self) -> bool:
        """True if scores come from gradients, or pruning changes the optimizer's step."""
        return (
            self.straight_through
            or self.dynamic == "rigl"
            or self.regularizer != "none"
            or self.criterion in ("taylor", "movement", "fisher", "neuron_taylor")
        )

    @property
    def watches_layers(self) -> bool:
        """True if layers must be called as modules, so that hooks see their inputs and outputs."""
        return self.gathers_at_layers or self.counts_calls

    @property
    def gathers_at_layers(self) -> bool:
        """True if scores come from the inputs or outputs of each layer."""
        return self.criterion == "sparsegpt" or self.weight_criterion in ("fisher", "wanda", "neuron_taylor")

    @property
    def why_not_sharded(self) -> str | None:
        """Why these options need more than one whole weight at a time, which FSDP2 does not allow."""
        if self.is_traced:
            return (
                f"granularity {self.granularity} is found by tracing a forward pass, in which FSDP2 replaces the "
                "parameters by gathered tensors. Use filter, layer or weights, or DDP"
            )
        return {
            "fisher": "criterion fisher keeps as much as the whole model on every process; use taylor, or DDP",
            "sparsegpt": "criterion sparsegpt needs whole weights. Prune the saved model instead",
            "shapley": "criterion shapley masks units in whole weights; use l2_norm, or DDP",
        }.get(self.criterion)

    @property
    def sees_weights_alone(self) -> bool:
        """True if only weight values decide, without gradients, activations or an extra loss term."""
        plain = self.criterion in ("magnitude", "threshold", "random") and not self.prunes_units
        return plain and self.dynamic == "none" and not self.sr_ste and self.regularizer == "none"

    @property
    def weight_criterion(self) -> str:
        """The scorer of single weights that the criterion uses."""
        if self.criterion in ("random", "movement", "fisher", "wanda", "neuron_taylor"):
            return self.criterion
        return "taylor" if self.criterion == "taylor" and not self.prunes_units else "magnitude"

    @property
    def kept_of(self) -> tuple[int, int]:
        """`n_m` as numbers: how many are kept, out of how many."""
        return self._pair("n_m", ":", "n:m with 1 <= n < m, such as 2:4")

    @property
    def block_size(self) -> tuple[int, int]:
        """`block` as numbers: outputs, inputs."""
        return self._pair("block", "x", "outputs x inputs, such as 4x4")

    def _pair(self, name: str, mark: str, rule: str) -> tuple[int, int]:
        found = re.fullmatch(rf"([1-9]\d*){mark}([1-9]\d*)", getattr(self, name))
        if not found or (mark == ":" and int(found[1]) >= int(found[2])):
            raise self._error(name, f"must be {rule}")
        return int(found[1]), int(found[2])

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a message for each combination that these options rule out."""
        for way in ("fsdp2", "tensor_parallel"):
            if way in environment and self.why_not_sharded:
                yield f"prune cannot be combined with {RUN_ENVIRONMENTS[way]}: {self.why_not_sharded}"
        if "tensor_parallel" in environment and self.criterion in ("wanda", "neuron_taylor"):
            yield (
                f"prune with criterion {self.criterion} cannot be combined with {RUN_ENVIRONMENTS['tensor_parallel']}: "
                "each process sees only part of some layers' inputs or outputs; use taylor or magnitude"
            )
        if self.straight_through and "primary_weights" in recipe:
            yield (
                "prune with movement, recompute or sr_ste cannot be combined with primary_weights: both keep their own "
                "copy of the weights for the optimizer. Load the model in float32"
            )
        if self.criterion == "wanda" and "average" in recipe and recipe["average"].bn_batches:
            yield (
                "prune with criterion wanda cannot be combined with bn_batches of average: wanda would count their "
                "batches too. Leave bn_batches at 0, which averages the statistics"
            )
