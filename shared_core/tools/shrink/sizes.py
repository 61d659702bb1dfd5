"""Cut a trained model to given config sizes, removing the least important layers and units (Minitron)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from shared_core.channel_graph.groups import ChannelGroup, Traced, trace
from shared_core.config.options import checked, coerce
from shared_core.errors import CompatibilityError, ConfigError, nearest, require
from shared_core.modules.calls import call_on_batch, evaluated
from shared_core.modules.matching import check_model
from shared_core.pruning.scorers import gather_units, group_scores
from shared_core.tools import measuring
from shared_core.tools.shrink import importance
from shared_core.tools.shrink import model_config as configured
from shared_core.tools.shrink.cutting import (
    Plan,
    Rescale,
    Selection,
    Work,
    check_eps,
    tied_names,
    tolerance_of,
    why_not_narrow,
)
from shared_core.tools.shrink.model_config import Path
from shared_core.tools.shrink.shrink import ShrinkResult, compared

Criterion = Literal["activations", "magnitude", "random"]
LayerCriterion = Literal["block_influence", "loss", "random"]
Loss = Callable[[nn.Module, Any], Any]


_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "attention_heads": ("num_attention_heads",),
    "key_value_heads": ("num_key_value_heads", "num_kv_heads"),
}
"""Names of a size in configs; models add more through their `attribute_map`."""


@dataclass
class CutResult(ShrinkResult):
    """The result of `shrink_to`.

    Attributes:
        chosen: By group, and for ``layers``, the numbers of the units that stayed.
        parameters: Before and after; tied tensors count once.
        loss: On the calibration batches, before and after; None if they have no loss.
    """

    chosen: dict[str, list[int]] = field(default_factory=dict)
    parameters: tuple[int, int] = (0, 0)
    loss: tuple[float, float] | None = None

    def __str__(self) -> str:
        lines = [super().__str__(), f"Parameters: {self.parameters[1]:,} instead of {self.parameters[0]:,}."]
        if self.loss is not None:
            lines.append(f"Loss on the calibration batches: {self.loss[1]:.4f}, was {self.loss[0]:.4f}.")
        return "\n".join(lines)


def shrink_to(
    model: nn.Module,
    sizes: Mapping[str, int],
    calibration: Sequence[Any],
    example_inputs: Any,
    *,
    criterion: str = "activations",
    layer_criterion: str = "block_influence",
    loss: Loss | None = None,
    seed: int = 0,
    latency_repeats: int = 5,
) -> CutResult:
    """Return a smaller model of the same class, without the layers and units that matter least on the batches.

    First layers are removed, then, without them, channels of the residual stream, neurons and heads. Every layer
    loses as many, so that the config can describe it and ``from_pretrained`` loads it. Tracing one forward pass
    (`find_groups`) shows what must be cut together. The result is compared with the masked model on the example. Train
    it afterwards, best by distillation from the original model.

    ``activations``: `UnitActivations`, for a channel after the norms of the residual stream, for a neuron
    or head at the input of the next layer. A norm over d channels of which d′ stay gets γ·√(d/d′) and ε·d/d′,
    which gives the masked model's output for a root-mean-square norm.

    Args:
        model: Built from its ``config``, as transformers models are. It is not changed.
        sizes: New config values: ``layers``, ``hidden_size``, ``intermediate_size``,
            ``attention_heads`` (query heads) and ``key_value_heads``; others stay. Without
            ``key_value_heads`` each of them keeps some of its query heads. If every query head has its own, both
            decrease together.
        calibration: Batches: tensors, tuples of arguments, mappings of keyword arguments, or what `loss` takes.
        example_inputs: A small batch for tracing and comparing.
        criterion: Score of units: ``activations``, ``magnitude`` (L2 norm of all weights of a unit) or ``random``.
        layer_criterion: ``block_influence``, ``loss`` (of the model without the layer) or ``random``.
        loss: ``loss(model, batch)`` returns the mean loss of a batch; by default the output's ``loss``, if there is
            one.
        seed: Seed of random choices.
        latency_repeats: Rounds of timing both models on the example; 0: not timed.

    Raises:
        ConfigError: If a size or a criterion breaks its rule, or the config rejects it.
        CompatibilityError: If the model cannot be traced to that size.
        TrainingError: If activations are not finite.

    Sources: Muralidharan et al. 2024, arXiv:2407.14679; Sreenivas et al. 2024, arXiv:2408.11796 (Minitron).
    """
    coerce(criterion, Criterion, "shrink", "criterion")
    coerce(layer_criterion, LayerCriterion, "shrink", "layer_criterion")
    check_model(model, "shrink")
    model = getattr(model, "_orig_mod", model)  # inside torch.compile's wrapper
    batches = list(calibration)
    require(batches, "shrink", "calibration must hold batches, got none")
    if not configured.is_configured(model):
        raise CompatibilityError("shrink", f"sizes need a model with a config, got {type(model).__name__}")
    cut = _Cut(model, batches, example_inputs, criterion, layer_criterion, loss, torch.Generator().manual_seed(seed))
    widths = values_of(model.config, sizes)
    if not widths:
        rule = f"sizes must be some of {', '.join(_NAMES)}, smaller than the model's, got {dict(sizes) or 'none'}"
        raise ConfigError("shrink", rule)
    before = cut.mean_loss(model)
    if (path := path_of(model.config, "layers")) in widths:
        cut.drop_layers(path, widths.pop(path))
    if widths:
        cut.narrow(widths)
    return cut.result(before, latency_repeats)


def path_of(config: Any, name: str) -> Path | None:
    """Return the path of a size in a config; None if it has none."""
    mapped = getattr(config, "attribute_map", {})
    found = [mapped.get(one, one) for one in _NAMES[name]]
    return next(((one,) for one in found if one in vars(config)), None)


def values_of(config: Any, sizes: Mapping[str, int]) -> dict[Path, int]:
    """Return the config's new numbers, without unchanged ones."""
    values: dict[Path, int] = {}
    for name, value in sizes.items():
        path = path_of(config, name) if name in _NAMES else None
        if path is None:
            rule = f"sizes must be numbers of {type(config).__name__}, got {name!r}{nearest(name, _NAMES)}"
            raise ConfigError("shrink", rule)
        now = configured.read(config, path)
        value = checked(value, int, "shrink", name, low=1, **({} if now is None else {"high": now}))
        if value != now:
            values[path] = value
    heads, of_keys = path_of(config, "attention_heads"), path_of(config, "key_value_heads")
    # if every query head has its own keys and values, they go together
    if (
        heads in values
        and of_keys
        and "key_value_heads" not in sizes
        and configured.read(config, of_keys) == configured.read(config, heads)
    ):
        values[of_keys] = values[heads]
    return values


@dataclass
class _Cut:
    """A model that becomes smaller step by step, with its report."""

    original: nn.Module
    batches: list[Any]
    example: Any
    criterion: str
    layer_criterion: str
    loss: Loss | None
    generator: torch.Generator
    chosen: dict[str, list[int]] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gap: float = 0.0

    def __post_init__(self) -> None:
        self.model = self.original

    def _run(self, batch: Any) -> Any:
        return call_on_batch(self.model, batch, self.loss, "shrink: calibration")

    def mean_loss(self, model: nn.Module) -> float | None:
        """Return the mean over batches, None if they have no loss."""
        total = 0.0
        with evaluated(model):
            for batch in self.batches:
                found = call_on_batch(model, batch, self.loss, "shrink: calibration")
                found = found if self.loss is not None else getattr(found, "loss", None)
                if found is None:
                    return None
                total += float(found)
        return total / len(self.batches)

    def drop_layers(self, path: Path, left: int) -> None:
        """Remove the least important blocks."""
        model: Any = self.model
        name, blocks = _stack(model, path, left)
        scores = torch.tensor(self._layer_scores(list(blocks)), dtype=torch.float64)
        chosen = _best(scores, left).tolist()
        values = {path: left, **_of_layers(model.config, len(blocks), chosen)}
        config = configured.changed_config(model.config, values)
        places = {f"{name}.{old}.": f"{name}.{new}." for new, old in enumerate(chosen)}
        state = {}
        for key, tensor in model.state_dict().items():
            prefix = next((place for place in places if key.startswith(place)), "")
            if prefix or not key.startswith(f"{name}."):
                state[places.get(prefix, "") + key.removeprefix(prefix)] = tensor
        shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
        if _shapes(model, config) != shapes:
            rule = f"layers must be alike, or of kinds that the configuration lists by layer, got others in {name}"
            raise CompatibilityError("shrink", rule, "leave layers out")
        smaller = configured.built(model, config, state)
        gone = [block for number, block in enumerate(blocks) if number not in chosen]
        with importance.bypassed(gone):
            self._accept(smaller, measuring.outputs(model, self.example))
        self.chosen["layers"], self.units["layers"] = chosen, len(blocks)

    def _layer_scores(self, blocks: Sequence[nn.Module]) -> list[float]:
        if self.layer_criterion == "random":
            return torch.rand(len(blocks), generator=self.generator).tolist()
        if self.layer_criterion == "block_influence":
            return importance.block_influence(self.model, blocks, self.batches, self._run)
        found = []
        for block in blocks:
            with importance.bypassed([block]):
                loss = self.mean_loss(self.model)
            if loss is None:
                rule = "layer_criterion loss must have batches with a loss, got none"
                raise ConfigError("shrink", rule, "add labels to the batches, or pass loss")
            found.append(loss)
        return found

    def narrow(self, values: dict[Path, int]) -> None:
        """Cut channels, neurons and heads."""
        model: Any = self.model
        traced = trace(model, self.example, constants=False)
        values, counts, groups = _described(model, traced, values)
        plan = self._plan(traced, groups, counts)
        unit_ids = {name: traced.unit_ids[name] for name in counts}
        for name, group in groups.items():
            if name in unit_ids and len(unit_ids[name]) != group.units:  # query heads, over which no norm goes
                unit_ids[name] = [np.empty(0, dtype=np.int64)] * group.units
        cut = dataclasses.replace(traced, unit_ids=unit_ids)
        work = Work(model, self.example, cut, Selection(groups, {}, {}), {}, 1)
        changed, norms = work.cut(plan)
        state = {**work.state, **changed}
        state = {name: state[work.ties.get(name, name)] for name in model.state_dict()}
        smaller = self._built(values, state, norms)
        if not all(norm.exact for norm in norms):
            self.notes.append(
                "layer norms use mean and variance of the remaining channels: outputs differ from the masked model"
            )
        self._accept(smaller, self._masked_outputs(smaller, groups, plan, norms))
        for name, units in plan.items():
            self.chosen[name], self.units[name] = np.flatnonzero(~units).tolist(), len(units)

    def _plan(self, traced: Traced, groups: Mapping[str, ChannelGroup], counts: Mapping[str, int]) -> Plan:
        places = {}
        if self.criterion == "activations":
            places = {name: importance.places_of(self.model, traced, groups[name]) for name in counts}
        seen = importance.UnitActivations(self.model, places)
        if places:
            seen.run(self.batches, self._run)
        state = self.model.state_dict()
        plan: Plan = {}
        for name, count in counts.items():
            group = groups[name]
            if places:
                scores = seen.scores(name)
            else:
                weights = [gather_units(state[part.tensor], part.axis, part.positions) for part in group.slices]
                kind = "l2_norm" if self.criterion == "magnitude" else "random"
                scores = group_scores(kind, weights, generator=self.generator).cpu()
            keys = len(traced.unit_ids[name])
            # query heads: equally many for each key-value head
            rows = scores.reshape(1 if group.units == keys else keys, -1)
            left = np.zeros(rows.shape, dtype=bool)
            for row, kept in zip(rows, left, strict=True):
                kept[_best(row, len(row) - count // len(rows)).numpy()] = True
            plan[name] = ~left.reshape(-1)
        return plan

    def _built(self, values: dict[Path, Any], state: dict[str, Tensor], norms: list[Rescale]) -> nn.Module:
        config: Any = self.model.config
        narrower = values | dict(configured.epsilons(config, norms))
        smaller = configured.built(self.model, configured.changed_config(config, narrower), state)
        try:
            check_eps(self.model, smaller, norms)
        except CompatibilityError:
            self.notes.append("norms keep their epsilon: the config has no separate one for them")
            smaller = configured.built(self.model, configured.changed_config(config, values), state)
        return smaller

    def _masked_outputs(
        self, smaller: nn.Module, groups: Mapping[str, ChannelGroup], plan: Plan, norms: list[Rescale]
    ) -> Any:
        """Return the model's outputs on the example with removed units zero, and norms over the others."""
        masked = copy.deepcopy(self.model)
        state = masked.state_dict()
        for name, units in plan.items():
            for part in groups[name].slices:
                if part.role == "in" or (part.role == "out" and groups[name].kind == "width"):
                    places = torch.from_numpy(part.positions[units].reshape(-1))
                    state[part.tensor].index_fill_(part.axis, places.to(state[part.tensor].device), 0)
        for norm in norms:
            narrow, kept = smaller.get_submodule(norm.module), torch.from_numpy(norm.kept)
            masked.get_submodule(norm.module).register_forward_hook(_narrowed(narrow, kept))
        return measuring.outputs(masked, self.example)

    def _accept(self, smaller: nn.Module, expected: Any) -> None:
        gap = measuring.difference(expected, measuring.outputs(smaller, self.example))
        if not gap <= tolerance_of(self.model):  # NaN as well
            rule = (
                f"the smaller {type(smaller).__name__} must compute what the masked one does, got outputs that differ"
            )
            why = f"by {gap:.1e}: its code depends on a size in another way"
            raise CompatibilityError("shrink", f"{rule} {why}", "leave that size out")
        self.gap, self.model = max(self.gap, gap), smaller

    def result(self, loss: float | None, repeats: int) -> CutResult:
        """Return the smaller model and its report."""
        old, new = self.original, self.model
        after = None if loss is None else self.mean_loss(new)
        return CutResult(
            model=new, removed={name: self.units[name] - len(left) for name, left in self.chosen.items()}, kept={},
            units=self.units, largest_difference=self.gap, notes=self.notes, chosen=self.chosen,
            parameters=(_num_parameters(old), _num_parameters(new)),
            loss=None if loss is None or after is None else (loss, after),
            **compared(old, new, self.example, repeats),
        )  # fmt: skip


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the highest scores, in order; of equal ones the first."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def _stack(model: nn.Module, path: Path, left: int) -> tuple[str, nn.ModuleList]:
    """Return the list of blocks whose length a config path sets."""
    now = configured.read(model.config, path)
    shapes = _shapes(
        model, configured.changed_config(model.config, {path: left, **_of_layers(model.config, now, range(left))})
    )
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == now
        and not any(key.startswith(f"{name}.{left}.") for key in shapes)
        and any(key.startswith(f"{name}.{left - 1}.") for key in shapes)
    ]
    if len(found) != 1:
        rule = f"{', '.join(name for name, _ in found) or 'none'} of {type(model).__name__}"
        raise CompatibilityError("shrink", f"layers must come from one list of blocks, got {rule}")
    return found[0]


def _of_layers(config: Any, count: int, chosen: Sequence[int]) -> dict[Path, Any]:
    """Return the new values of config lists with one entry per layer: `layer_types`, `no_rope_layers`."""
    return {
        (name,): [value[number] for number in chosen]
        for name, value in vars(config).items()
        if isinstance(value, list) and len(value) == count and "layer" in name
    }


def _shapes(model: nn.Module, config: Any) -> configured.Shapes:
    try:
        return configured.built_shapes(model, type(config).from_dict(config.to_dict()))
    except Exception as error:  # a config's checks and a model's code may raise anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1] if lines else type(error).__name__
        raise ConfigError("shrink", f"{type(config).__name__} does not allow these sizes: {reason}") from error


def _described(
    model: nn.Module, traced: Traced, values: Mapping[Path, int]
) -> tuple[dict[Path, Any], dict[str, int], dict[str, ChannelGroup]]:
    """Return all numbers that change, how many units of each group go, and the groups, also of query heads."""
    config: Any = model.config
    alone = _query_heads_alone(config, values)
    base = dict(configured.explicit_head_sizes(config))
    extras: list[dict[Path, Any]] = [{}]
    if not hasattr(config, "head_dim") and (size := configured.head_size(config)):
        extras.append({("head_dim",): size})  # for models that read it if it exists
    hidden = path_of(config, "hidden_size")
    if hidden is not None and hidden in values:
        # another number may have to equal the hidden size, as OPT's word_embed_proj_dim
        extras += [{path: values[hidden]} for path, value in configured.numbers(config) if value == config.hidden_size]
    groups = {group.name: group for group in traced.groups}
    ties = tied_names(model)
    first = {name for name in model.state_dict() if ties.get(name, name) == name}
    old = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in first}
    for extra in extras:
        numbers = {**base, **extra, **values}
        new = _shapes(model, configured.changed_config(config, numbers))
        new = {name: shape for name, shape in new.items() if name in first}
        found = groups | (_query_heads(groups, old, new, *alone) if alone else {})
        counts = configured.explained(old, new, found)
        if counts is not None:
            _check_free(model, traced, found, counts, query_heads=alone is not None)
            return numbers, counts, found
    names = ", ".join(".".join(map(str, path)) for path in values)
    rule = f"{names} must only remove channels, neurons or heads from {type(model).__name__}, but would change more"
    remedy = "where a head's size is hidden_size / attention_heads, change both; or leave a size out"
    raise CompatibilityError("shrink", rule, remedy)


def _query_heads_alone(config: Any, values: Mapping[Path, int]) -> tuple[int, int, int] | None:
    """Return the numbers of query heads, key-value heads and remaining query heads, if only query heads go."""
    of_heads, of_keys = path_of(config, "attention_heads"), path_of(config, "key_value_heads")
    if of_heads is None or of_keys is None or not configured.read(config, of_keys):
        return None
    heads, keys = int(configured.read(config, of_heads)), int(configured.read(config, of_keys))
    heads_left, keys_left = values.get(of_heads, heads), values.get(of_keys, keys)
    rest, alone = heads_left % keys_left, keys_left == keys != heads != heads_left
    if rest or not (alone or heads_left * keys == heads * keys_left):
        many = "a multiple of key_value_heads" if rest else f"{heads // keys} x key_value_heads, as they are"
        remedy = "cut key-value heads with all of their query heads first, then query heads alone"
        raise ConfigError("shrink", f"attention_heads must be {many}, got {heads_left} and {keys_left}", remedy)
    return (heads, keys, heads_left) if alone else None


def _query_heads(
    groups: Mapping[str, ChannelGroup],
    old: configured.Shapes,
    new: configured.Shapes,
    num_heads: int,
    num_keys: int,
    left: int,
) -> dict[str, ChannelGroup]:
    """Return for each group of key-value heads, by name, the group of its query heads."""
    found = {}
    for name, group in groups.items():
        if group.units != num_keys or group.kind not in ("head", "width"):
            continue
        slices = []
        for part in group.slices:
            size, rest = divmod(old[part.tensor][part.axis] - new[part.tensor][part.axis], num_heads - left)
            if size > 0 and not rest:
                # fused projections store a key-value head's queries before its keys and values
                queries = part.positions[:, : num_heads // num_keys * size]
                slices.append(dataclasses.replace(part, positions=queries.reshape(num_heads, size)))
        if slices:
            found[name] = dataclasses.replace(group, units=num_heads, slices=tuple(slices))
    return found


def _check_free(
    model: nn.Module, traced: Traced, groups: Mapping[str, ChannelGroup], counts: Mapping[str, int], query_heads: bool
) -> None:
    reasons = why_not_narrow(model, traced, allow_inexact=True)
    for name in counts:
        reason = reasons.get(name, groups[name].reason_kept)
        if reason is not None and not (query_heads and groups[name].kind == "head"):
            raise CompatibilityError("shrink", f"{name} cannot lose units: {reason}")


def _narrowed(norm: nn.Module, kept: Tensor) -> Callable[..., Tensor]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        index = kept.to(output.device)
        return torch.zeros_like(output).index_copy(-1, index, norm(args[0].index_select(-1, index)))

    return hook
