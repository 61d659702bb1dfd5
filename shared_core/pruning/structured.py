"""Pruning whole output units: found once, scored over all their tensors, masked together.

A unit is a neuron, channel, head, filter or layer, with its part of every tensor. Its Shapley value measures how much
it contributes to preserving the outputs of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from eff_kernels.pruning import apply_mask_
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.channel_graph.groups import UNREAD, ChannelGroup, Kind, Slice, find_groups
from shared_core.distributed.collectives import any_rank, broadcast_, from_main
from shared_core.distributed.sharded_tensors import whole
from shared_core.engine.plan import Touched
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.modules.calls import ExampleCalls, evaluated
from shared_core.modules.matching import plain_name, stock_layers
from shared_core.modules.weight_views import output_axis
from shared_core.numerics.deferred_checks import copied_to_cpu
from shared_core.pruning.config import RELATIVE, TRACED, PruneConfig
from shared_core.pruning.masks import MaskPolicy, unseen_note
from shared_core.pruning.scorers import (
    GroupTaylor,
    NeuronTaylor,
    Scorer,
    UnitSlices,
    gather_units,
    group_scores,
    relative_scores,
    shapley_values,
)
from shared_core.pruning.scorers.scorer import all_finite
from shared_core.pruning.selection import select_units
from shared_core.pruning.targets import Targets, refuse_nothing

# Weights that read a unit (role "in") keep their values: their inputs are zero, and `eff shrink` removes them.
_MASKED = ("out", "norm")


def layer_groups(modules: Mapping[str, nn.Module], kind: Kind) -> list[ChannelGroup]:
    """Return one group per layer: of its output units (weight row and bias), or of the layer as one unit."""
    return [_layer_group(name, module, kind) for name, module in modules.items()]


def _layer_group(name: str, module: nn.Module, kind: Kind) -> ChannelGroup:
    weight = cast("Tensor", module.weight)
    axis = output_axis(module)
    outputs: NDArray[np.int64] = np.arange(weight.shape[axis])
    units = 1 if kind == "layer" else len(outputs)
    slices = [Slice(name, axis, outputs.reshape(units, -1), "out")]
    bias = module._parameters.get("bias")
    if bias is not None:
        # A grouped transposed convolution has one group's outputs in the weight, but all of them in the bias.
        of_bias = np.arange(bias.numel()).reshape(-1, len(outputs)).T.reshape(units, -1)
        slices.append(Slice(f"{name.removesuffix('weight')}bias", 0, of_bias, "out"))
    return ChannelGroup(name=name, kind=kind, units=units, slices=tuple(slices))


def prunable_groups(groups: Iterable[ChannelGroup], granularity: str, chosen: Iterable[str]) -> Iterator[ChannelGroup]:
    """Yield the groups of a granularity whose weights are all within reach."""
    reach = set(chosen)
    for group in groups:
        weights = {part.tensor for part in group.slices if part.role == "out" and not part.tensor.endswith("bias")}
        if group.kind == granularity and group.reason_kept is None and group.units > 1 and weights and weights <= reach:
            yield group


def masked_slices(group: ChannelGroup) -> list[Slice]:
    """Return the parts of a group to set to zero: outputs, their biases, and the scales and shifts of their norms."""
    return [part for part in group.slices if part.role in _MASKED]


@torch.no_grad()
def masks_of_units(
    groups: Iterable[ChannelGroup], keeps: Iterable[Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the mask of each tensor, given which units of each group are kept."""
    masks: dict[str, Tensor] = {}
    for group, keep in zip(groups, keeps, strict=True):
        # positions[gone]: (pruned units, positions each), flattened for index_fill_.
        gone = (~keep).cpu().numpy()
        for part in masked_slices(group):
            if part.tensor not in tensors:
                continue
            tensor = tensors[part.tensor]
            if part.tensor not in masks:
                masks[part.tensor] = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
            places = torch.from_numpy(np.asarray(part.positions)[gone].reshape(-1))
            places = places.to(tensor.device, non_blocking=True)
            masks[part.tensor].index_fill_(part.axis, places, False)
    return masks


@torch.no_grad()
def kept_units(groups: Sequence[ChannelGroup], masks: Mapping[str, Tensor]) -> list[Tensor]:
    """Return which units of each group the masks keep, on the CPU. A unit is kept if any of its elements is."""
    parts = [[part for part in masked_slices(group) if part.tensor in masks] for group in groups]
    axes = {(part.tensor, part.axis): masks[part.tensor].movedim(part.axis, 0) for each in parts for part in each}
    kept = dict(zip(axes, copied_to_cpu(mask.reshape(len(mask), -1).any(1) for mask in axes.values()), strict=True))
    keeps = [torch.zeros(group.units, dtype=torch.bool) for group in groups]
    # Masks of units are all or nothing, so one kept element in any tensor is enough.
    for keep, each in zip(keeps, parts, strict=True):
        for part in each:
            keep |= kept[part.tensor, part.axis][torch.from_numpy(np.asarray(part.positions))].any(1)
    return keeps


VALUE = "minus the squared change of the model's outputs on one micro-batch, relative to their square"


@torch.no_grad()
def shapley_of_units(
    model: nn.Module,
    groups: Sequence[ChannelGroup],
    live: Sequence[Tensor],
    tensors: Mapping[str, Tensor],
    replay: Callable[[], Any],
    *,
    permutations: int,
    generator: torch.Generator,
) -> list[Tensor]:
    """Return a vector of scores per group, one score per unit, and 0 for units that are not live.

    The value of a set of units is ``-Σ(y - y_all)² / Σ y_all²``, with y the floating-point outputs in eval mode when
    all other units are masked. A set that changes nothing has value 0. With several processes, rank 0's micro-batch
    decides.
    """
    sizes = [group.units for group in groups]
    # Players are the live units. A coalition's value is minus the change of the outputs when only it is kept.
    players = torch.cat(list(live)).nonzero().view(-1)
    with evaluated(model):
        reference = _outputs(replay())
        # Relative to the square of the outputs, so that values of different models are comparable.
        square = sum(float(output.double().square().sum()) for output in reference) or 1.0

        def value(kept: Tensor) -> float:
            keep = torch.cat(list(live))
            keep[players] = kept
            masks = masks_of_units(groups, torch.split(keep, sizes), tensors)
            # Save only the tensors that a group covers: each coalition changes the model temporarily.
            before = {name: tensors[name].detach().clone() for name in masks}
            try:
                apply_mask_([tensors[name] for name in masks], list(masks.values()))
                found = _outputs(replay())
            finally:
                for name, saved in before.items():
                    tensors[name].detach().copy_(saved)
            pairs = zip(found, reference, strict=True)
            return -sum(float((output.double() - whole.double()).square().sum()) for output, whole in pairs) / square

        values, _ = shapley_values(value, len(players), permutations=permutations, generator=generator)
    scores = torch.zeros(sum(sizes), dtype=torch.float64)
    scores[players] = values
    # Use rank 0's values: batches differ between processes, but masks must not.
    return list(torch.split(broadcast_(scores), sizes))


def _outputs(out: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, or only the logits of a mapping that has them."""
    if isinstance(out, list) and out and all(hasattr(each, "logits") for each in out):
        out = [each.logits for each in out]
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


_NAMED = 3


class UnitPruning(MaskPolicy):
    """Masks that prune whole units of one granularity, with their biases and norm parameters.

    Filters and layers are known from the start. Neurons, channels and heads are found by tracing the user's first
    micro-batch, so that everything that depends on a unit is masked with it, and `shrink` can remove it.
    """

    replays: ClassVar[bool] = False
    """True if a micro-batch is run again at each update."""
    why_short: ClassVar[str] = "no units were found or scored, because no training forward of their layers was seen"

    def __init__(self, config: PruneConfig, targets: Targets, scorer: Scorer) -> None:
        super().__init__(config, targets, scorer)
        self._modules = targets.modules
        self._calls: ExampleCalls | None = None
        self._shown: Callable[[], Any] | None = None
        self._tensors: dict[str, Tensor] = {}
        self._taylor: GroupTaylor | None = None
        self._saved_taylor: Mapping[str, Any] = {}
        self._costs: Mapping[str, float] | None = None
        self._uncalled: list[str] = []
        self.left_out: dict[str, str] = {}
        """Group that cannot be pruned → why."""
        self.groups: list[ChannelGroup] = []
        self.found = not config.is_traced
        if self.found:
            self._take(layer_groups(self._modules, cast("Kind", config.granularity)))

    def touched(self) -> Touched:
        """Return the weights that hold units, once the units are known."""
        found = self.targets.touched()
        if not self.found:
            return found
        held = {part.tensor for group in self.groups for part in masked_slices(group)}
        reason = f"no {self.config.granularity} of it can be pruned"
        out = {name: reason for name in found.tensors if name not in held}
        return dataclasses.replace(
            found,
            tensors={name: size for name, size in found.tensors.items() if name in held},
            left_out={**found.left_out, **out},
        )

    def take_costs(self, costs: dict[str, float]) -> None:
        """Divide the score of a unit by the cost of all its weights."""
        # Not passed to the scorer of single weights: that would count costs twice.
        self._costs = costs

    def maskable(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return every parameter: masks cover weights, biases, and the scales and shifts of norms."""
        self._tensors = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        return self._tensors

    def listen(self, model: nn.Module) -> None:
        """Record the arguments of the next micro-batch if it is needed to find or score units."""
        self._stop_listening()
        if not self.found or self.replays:
            self._calls = ExampleCalls(model, set(self._modules.values()))

    def show(self, model: nn.Module, replay: Callable[[], Any]) -> None:
        """Use a micro-batch that `replay` runs, instead of a recorded one."""
        self._shown = replay
        if not self.found:
            self._trace(model, replay)

    def _trace(self, model: nn.Module, replay: Callable[[], Any]) -> None:
        granularity = self.config.granularity
        with stock_layers(model):  # quantized layers round over whole tensors, which does not change the units
            traced = [_plainly_named(group) for group in find_groups(model, replay, cuts=False)]
        if not self.replays:
            self._stop_listening()
        groups = list(prunable_groups(traced, granularity, self._modules))
        self.left_out = {
            group.name: group.reason_kept or "another granularity, or left out by include, skip, overrides or min_size"
            for group in traced
            if group not in groups
        }
        if not groups:
            raise MatchError(_found_none(traced, granularity, self._modules))
        used = {part.tensor for group in traced if group.reason_kept != UNREAD for part in group.slices}
        self._uncalled = [name for name in self._modules if name not in used]
        # Compare everything the masks depend on, except arrays, with rank 0's as text.
        found = repr([(group.name, group.units, [part.tensor for part in masked_slices(group)]) for group in groups])
        # Checked on every process, since one that raises alone would leave the others waiting in the next collective.
        if any_rank(from_main(found) != found, next(iter(self._tensors.values())).device):
            rule = f"every process must find the same {granularity}s, but first micro-batches took different paths"
            raise CompatibilityError("prune", rule, "use granularity filter")
        self._take(groups)

    def _take(self, groups: list[ChannelGroup]) -> None:
        own = self._shares(groups, self.targets.own)
        refuse_nothing(self.config, {group.name: group.units for group in groups}, f"{self.config.granularity}s", own)
        self.groups, self.found = groups, True
        if self.config.criterion == "taylor":
            self._taylor = GroupTaylor(dict(zip((group.name for group in groups), self.units(), strict=True)))
            if self._saved_taylor:
                self._taylor.load_state_dict(self._saved_taylor)

    def units(self) -> list[list[UnitSlices]]:
        """Return where the units of each group are. Empty before they are found."""
        return [
            [UnitSlices(part.tensor, part.axis, part.positions) for part in masked_slices(group)]
            for group in self.groups
        ]

    def _shares(self, groups: Sequence[ChannelGroup], shares: Mapping[str, float]) -> dict[str, float]:
        """Return each group's own sparsity, given those of weights."""
        found: dict[str, float] = {}
        lost = set(shares)
        for group in groups:
            weights = [part.tensor for part in masked_slices(group) if part.tensor in self._modules]
            lost -= set(weights)
            asked = {shares.get(weight) for weight in weights}
            if len(asked) > 1:
                each = ", ".join(f"{weight} {shares.get(weight, 'none')}" for weight in dict.fromkeys(weights))
                rule = f"overrides must give one sparsity to layers that lose {group.kind}s together, got {each}"
                raise ConfigError("prune", rule, "name all of them")
            if (share := asked.pop()) is not None:
                found[group.name] = share
        if lost:
            got = ", ".join(sorted(lost))
            rule = f"overrides must name layers with {self.config.granularity}s that can be pruned, got {got}"
            raise MatchError("prune", rule, "leave them out of overrides")
        return found

    def new_micro_batch(self) -> None:
        """Let a later update use a later micro-batch."""
        if self._calls and self.found:
            self._calls.expire()

    def end_step(self) -> None:
        """Also forget the micro-batch."""
        super().end_step()
        self.new_micro_batch()

    def observe(self, context: Context, gradients: Mapping[str, Tensor]) -> None:
        """Trace the recorded micro-batch, then take in the gradients."""
        if not self.found and self._calls is not None and self._calls.calls:
            self._trace(context.model, self._calls.replay)
            for line in unseen_note("prune", self._uncalled):
                context.note(line)
        super().observe(context, gradients)
        self.observe_units()

    @property
    def is_ready(self) -> bool:
        """True if units are also found, and there is a micro-batch or a gradient to score them with."""
        if not self.found:
            return False
        return super().is_ready if self._taylor is None else self._taylor.num_observed > 0

    def observe_units(self) -> None:
        """Take in the gradients of one complete step, if the criterion scores units by gradients."""
        if self._taylor is None:
            return
        gradients = {name: tensor.grad for name, tensor in self._tensors.items() if tensor.grad is not None}
        if gradients and all_finite(gradients.values()):
            self._taylor.observe_step(self._tensors, gradients)

    def unseen(self) -> list[str]:
        """Return weights that the traced forward did not use, and those of groups without gathered statistics."""
        groups = [group for group in self.groups if not self._has_seen(group)] if self.store else []
        dense = {part.tensor for group in groups for part in masked_slices(group)}
        return [name for name in self._modules if name in dense or name in self._uncalled]

    def _has_seen(self, group: ChannelGroup) -> bool:
        if self._taylor:
            return self._taylor.has_seen(group.name)
        return any(self.scorer.has_seen(part.tensor) for part in masked_slices(group) if part.tensor in self._modules)

    def choose(self, context: Context, sparsity: float, own: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the masks of every tensor that a group covers. Pruned units stay pruned."""
        before = dict(self.store)
        everything = [torch.ones(group.units, dtype=torch.bool) for group in self.groups]
        live = kept_units(self.groups, before) if before else everything
        scores = self._scores_of_all(context, live)
        if self.config.layers_differ and self.config.criterion in RELATIVE:
            # Norms of weights depend on the layer's width. Divided by their mean, layers become comparable.
            scores = [relative_scores(found, kept) for found, kept in zip(scores, live, strict=True)]
        # Score per cost: the value of a unit per FLOP, byte or joule.
        scores = [found / self._cost(group) for group, found in zip(self.groups, scores, strict=True)]
        for found, kept in zip(scores, live, strict=True):
            # Pruned units rank below all: they stay pruned.
            found[~kept] = -torch.inf
        shares = self._shares(self.groups, own)
        # A group without gathered statistics keeps its mask, and the others make up for it.
        seen = [*map(self._has_seen, self.groups)]
        scored = [found for found, is_seen in zip(scores, seen, strict=True) if is_seen]
        alone = [shares.get(group.name) for group, is_seen in zip(self.groups, seen, strict=True) if is_seen]
        chosen = iter(select_units(self.config, scored, sparsity, alone) if scored else ())
        keeps = [next(chosen) if is_seen else kept for is_seen, kept in zip(seen, live, strict=True)]
        if self._taylor:
            self._taylor.reset()
        return masks_of_units(self.groups, keeps, self._tensors)

    def _scores_of_all(self, context: Context, live: list[Tensor]) -> list[Tensor]:
        return list(copied_to_cpu(self._scores(group).float() for group in self.groups))

    def _scores(self, group: ChannelGroup) -> Tensor:
        criterion, scorer = self.config.criterion, self.scorer
        if criterion == "random":
            return scorer.scores(f"group {self.groups.index(group)}", torch.zeros(group.units))
        if self._taylor:
            return self._taylor.scores(group.name)
        if isinstance(scorer, NeuronTaylor):
            return self._added(group, lambda part: scorer.unit_scores(part.tensor, self._tensors[part.tensor]), 0)
        if criterion == "fisher":
            return self._added(group, lambda part: scorer.scores(part.tensor, self._tensors[part.tensor]), None)
        parts = self._scored_by_size(group)
        if criterion == "bn_scale" and not parts:
            rule = f"criterion bn_scale must find a norm's scale in every group, got none in {group.name}"
            raise MatchError("prune", rule, "use another criterion, or skip its layers")
        weights = [
            gather_units(whole(self._tensors[part.tensor].detach()), part.axis, part.positions) for part in parts
        ]
        return group_scores(criterion, weights)

    def _scored_by_size(self, group: ChannelGroup) -> list[Slice]:
        """Return the parts of a group that its size score uses."""
        # magnitude covers all weights of a unit: those that produce it, scale it in a norm, and read it.
        roles = {"magnitude": ("out", "norm", "in"), "bn_scale": ("norm",)}.get(self.config.criterion, ("out",))
        parts = [part for part in group.slices if part.tensor in self._tensors and part.role in roles]
        if self.config.criterion == "bn_scale":
            return [part for part in parts if part.tensor.endswith("weight")]
        return [part for part in parts if not part.tensor.endswith("bias")]

    def _added(self, group: ChannelGroup, scores: Callable[[Slice], Tensor], axis: int | None) -> Tensor:
        parts = [part for part in masked_slices(group) if part.tensor in self._modules]
        # Scores have the layout of outputs (axis 0) or of the weight. Each row of `gather_units` is one unit.
        rows = [gather_units(scores(part), part.axis if axis is None else axis, part.positions) for part in parts]
        return torch.stack([row.sum(1).to(rows[0].device) for row in rows]).sum(0)

    def _cost(self, group: ChannelGroup) -> float:
        """Return the cost of one unit, summed over its weights, or 1 without costs."""
        # A layer not reached yet (an expert) has no cost, so units that lie only in such layers are pruned last.
        if self._costs is None:
            return 1.0
        cost = 0.0
        for part in masked_slices(group):
            if part.tensor in self._modules:
                tensor = self._tensors[part.tensor]
                size = tensor.numel() // tensor.shape[part.axis]
                cost += size * (self._costs.get(part.tensor, 0.0) * part.positions.shape[1])
        return cost or 1e-30

    def freeze(self, context: Context) -> None:
        """Also stop recording."""
        super().freeze(context)
        self._stop_listening()

    def close(self) -> None:
        """Also release the micro-batch."""
        super().close()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._calls:
            self._calls.close()
            self._calls = None

    def state_dict(self) -> dict[str, Any]:
        """Add the traced units and their statistics."""
        traced = self.config.is_traced and self.found
        found = {"groups": list(map(_saved, self.groups)), "left_out": dict(self.left_out)} if traced else {}
        found |= {"uncalled": list(self._uncalled)} if traced else {}
        return super().state_dict() | {"units": found | ({"taylor": self._taylor.state_dict()} if self._taylor else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Also restore units, because another micro-batch may give others, unless options have changed."""
        super().restore(state)
        state = state.get("units", {})
        self._saved_taylor = state.get("taylor", {})
        try:
            saved, left_out = [*map(_restored, state.get("groups", ()))], dict(state.get("left_out", {}))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError("prune", f"state does not hold units that prune saved: {error!r}") from error
        groups = [*prunable_groups(saved, self.config.granularity, self._modules)]
        if groups and len(groups) == len(saved):
            self.left_out, self._uncalled = left_out, [*state.get("uncalled", ())]
            self._take(groups)
        elif self._taylor:
            self._taylor.reset()
            if self._saved_taylor:
                self._taylor.load_state_dict(self._saved_taylor)

    @property
    def own(self) -> Mapping[str, float]:
        """Group → its own sparsity at the end, for groups that have one."""
        return self._shares(self.groups, self.targets.own) if self.found else {}

    def layers(self) -> dict[str, tuple[int, int]]:
        """Return by group the number of units, and how many are pruned."""
        masks = dict(self.store)
        if not masks:
            return {group.name: (group.units, 0) for group in self.groups}
        keeps = zip(self.groups, kept_units(self.groups, masks), strict=True)
        return {group.name: (group.units, group.units - int(keep.sum())) for group, keep in keeps}

    def report(self) -> dict[str, Any]:
        """Return how many units each group lost, and the groups that could not be pruned."""
        units = [
            {"group": group.name, "kind": group.kind, "units": group.units, "pruned": pruned}
            for group, (_, pruned) in zip(self.groups, self.layers().values(), strict=True)
        ]
        return {"units": units, "groups_left_out": dict(self.left_out)}


class ShapleyPruning(UnitPruning):
    """Prunes the units whose removal changes the outputs of a micro-batch least, by running it many times."""

    replays: ClassVar[bool] = True

    @property
    def is_ready(self) -> bool:
        """True if units are found, and there is a micro-batch to score them with."""
        return self.found and (self._shown is not None or bool(self._calls and self._calls.calls))

    def _has_seen(self, group: ChannelGroup) -> bool:
        return True

    def _scores_of_all(self, context: Context, live: list[Tensor]) -> list[Tensor]:
        replay = self._shown or (self._calls.replay if self._calls and self._calls.calls else None)
        if replay is None:
            rule = "a micro-batch must have run since the last step, got none"
            raise TrainingError("prune shapley", rule, "choose an end at which the run still trains")
        found = shapley_of_units(
            context.model, self.groups, live, self._tensors, replay,
            permutations=self.config.permutations, generator=context.generator,
        )  # fmt: skip
        return [scores.float() for scores in found]

    def report(self) -> dict[str, Any]:
        """Also return how units were scored."""
        return {**super().report(), "shapley": {"value": VALUE, "permutations": self.config.permutations}}


def _plainly_named(group: ChannelGroup) -> ChannelGroup:
    """Return a group with names as weights have them here, without wrapper prefixes."""
    slices = tuple(dataclasses.replace(part, tensor=plain_name(part.tensor)) for part in group.slices)
    return dataclasses.replace(group, name=plain_name(group.name), slices=slices)


def _saved(group: ChannelGroup) -> dict[str, Any]:
    parts = [{**vars(part), "positions": torch.from_numpy(part.positions)} for part in group.slices]
    return {"name": group.name, "kind": group.kind, "units": group.units, "slices": parts}


def _restored(saved: Mapping[str, Any]) -> ChannelGroup:
    slices = (Slice(**{**part, "positions": part["positions"].numpy()}) for part in saved["slices"])
    return ChannelGroup(**{**saved, "slices": tuple(slices)})


def _found_none(traced: list[ChannelGroup], granularity: str, modules: Mapping[str, nn.Module]) -> str:
    able = [other for other in TRACED if any(prunable_groups(traced, other, modules))]
    found = f"units within reach have granularity {' and '.join(able)}" if able else "none are within reach"
    kept = [f"{group.name}: {group.reason_kept}" for group in traced if group.reason_kept and group.kind == granularity]
    more = [f"{len(kept) - _NAMED} more"] if len(kept) > _NAMED else []
    why = f" ({'; '.join(kept[:_NAMED] + more)})" if kept else ""
    return (
        f"prune: must find at least one {granularity} to prune, got none: {found}{why}; use another granularity "
        "(filter prunes the outputs of any layer)"
    )
