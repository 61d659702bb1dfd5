"""The masks of a run: how they are stored, chosen, applied and reported.

`MaskPolicy` is the default: pruned weights stay pruned. Subclasses implement RigL, weights that learn under their
masks, and whole units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from eff_kernels.masks import pack_bits, packed_size, unpack_bits
from eff_kernels.pruning import apply_mask_
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import is_sharded, part_of, whole
from shared_core.engine.checks.model_guards import with_wrapped
from shared_core.engine.plan import Touched
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.modules.matching import StackedExperts, matrices, matrix_names
from shared_core.numerics.deferred_checks import checked_together, read_together
from shared_core.printing import listed
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.patterns import block_scores
from shared_core.pruning.schedules import Schedule
from shared_core.pruning.scorers import Scorer, UnitSlices
from shared_core.pruning.scorers.scorer import SAME_RUN
from shared_core.pruning.selection import RankedScores, at_limit, count_kept, limit_notes, select_weights
from shared_core.pruning.targets import Targets, block_of


class MaskStore(Mapping[str, Tensor]):
    """The whole masks of named weights. Empty before the first update.

    For a weight sharded by FSDP2, the mask of the local part is applied, and the whole mask is stored packed (8 weights
    per byte), so that saving needs no other process.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._weights: Mapping[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        """Name → bool mask, True = keep, of the whole weight or of this process's part."""
        self._num_pruned: dict[str, int] | None = {}
        self._kept: list[Tensor] = []
        self._packed: dict[str, Tensor] = {}
        self._masked: list[Tensor] = []
        self._masks: list[Tensor] = []
        self.forgotten = False
        """True if the optimizers hold zero moments for every pruned weight."""
        self._versions: list[int] = []
        self._zeroed: list[tuple[Tensor, int]] = []
        self._is_clipping: bool | None = None

    @property
    def num_pruned(self) -> dict[str, int]:
        """Number of pruned elements of each whole weight. On a GPU, counts are read at the first access."""
        if self._num_pruned is None:
            kept = zip(self.parts, read_together(self._kept), strict=True)
            self._num_pruned = {name: self.weights[name].numel() - count for name, count in kept}
        return self._num_pruned

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights that the masks belong to."""
        return self._weights

    @weights.setter
    def weights(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        # Lists in a fixed order, built once: after every step all weights are masked in one multi-tensor call.
        self._masked = [weights[name] for name in self.parts]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._packed:
            weight = self.weights[name]
            return unpack_bits(self._packed[name].to(weight.device), weight.shape)
        return self.parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self.parts  # Mapping's default would unpack the mask

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def set(self, masks: Mapping[str, Tensor]) -> None:
        """Replace all masks by whole ones, equal on every process."""
        on_cpu = all(mask.is_cpu for mask in masks.values())
        counts = zip(masks, count_kept([*masks.values()]) if on_cpu else (), strict=on_cpu)
        self._num_pruned = {name: masks[name].numel() - count for name, count in counts} if on_cpu else None
        self._kept = [] if on_cpu else [mask.count_nonzero() for mask in masks.values()]
        sharded = {name: mask for name, mask in masks.items() if is_sharded(self.weights[name])}
        # The whole mask of each sharded weight, as bits on the CPU: 1/32 of the bytes of float32 weights.
        self._packed = {name: pack_bits(mask).cpu() for name, mask in sharded.items()}
        self.parts = {**masks, **{name: part_of(mask, self.weights[name]) for name, mask in sharded.items()}}
        self._masked, self._masks = [self.weights[name] for name in masks], [*self.parts.values()]
        self.forgotten, self._versions = False, []

    def packed(self) -> dict[str, Tensor]:
        """Return all masks packed (8 weights per byte), as they are saved."""
        return {name: pack_bits(mask).cpu() for name, mask in self.parts.items()} | self._packed

    def apply(self, values: Mapping[Tensor, Tensor] | None = None) -> None:
        """Set every pruned weight to exactly +0.0, in this process's part of the weights or in their `values`."""
        if values is None:
            apply_mask_(self._held(self._masked), self._masks)
            self._versions = [weight._version for weight in self._masked]
            return
        held = [name for name in self.parts if self.weights[name] in values]
        apply_mask_([values[self.weights[name]] for name in held], [self.parts[name] for name in held])

    def apply_to_gradients(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Set the gradient of every pruned weight to exactly +0.0, or to almost 0 where zeros are slow."""
        # Some weights may have no gradient (experts, frozen meanwhile), so the lists must be realigned.
        live, masks = [gradient for weight in self._masked if (gradient := weight.grad) is not None], self._masks
        if len(live) != len(masks):
            masks = [mask for mask, weight in zip(masks, self._masked, strict=True) if weight.grad is not None]
        try:
            apply_mask_(self._held(live), masks, _STAND_IN if all(map(is_slow_on_zeros, optimizers)) else 0.0)
        except RuntimeError:
            refuse_sparse(self._where, live)
            raise
        is_plain = not self._packed and len(live) == len(self._masked)
        self._zeroed = [(gradient, gradient._version) for gradient in live] if is_plain else []

    def forget_gradients(self) -> None:
        """Release the gradients after the step."""
        self._zeroed = []

    def is_held(self) -> bool:
        """Return True if every pruned weight in this process's part is zero."""
        return _all_zero(self._held(self._masked), self._masks)

    def hold(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Set every pruned weight to exactly +0.0 after a step, but skip the work if all are still zero.

        A fused Adam or AdamW turns a weight, gradient and moments of +0.0 into +0.0. So after `apply_to_gradients`
        nothing is left to do if nothing wrote to the weights since the last call, and only clipping wrote to the
        gradients. Torch counts in-place writes, but not a fused step.
        """
        zeroed, self._zeroed = self._zeroed, []
        if not (zeroed and all(map(keeps_zeros, optimizers)) and self._only_clipped(zeroed)):
            self.forgotten = False
        elif not self.forgotten:
            # Clear moments from earlier steps, in which the gradients of pruned weights were not zeroed.
            clear_moments_(optimizers, {name: self.weights[name] for name in self.parts}, self.parts)
            self.forgotten, self._versions = True, []
        if not self.forgotten or self._versions != [weight._version for weight in self._masked]:
            self.apply()

    def _only_clipped(self, zeroed: list[tuple[Tensor, int]]) -> bool:
        """Return True if nothing, or clipping alone, wrote to the gradients since `apply_to_gradients`.

        Clipping is one write that keeps zeros. The gradients are looked at after the first such write of the run.
        """
        writes = max(
            gradient._version - version if weight.grad is gradient else 2  # another gradient
            for weight, (gradient, version) in zip(self._masked, zeroed, strict=True)
        )
        if writes == 1 and self._is_clipping is None:
            self._is_clipping = _all_zero([gradient for gradient, _ in zeroed], self._masks)
        return writes == 0 or (writes == 1 and bool(self._is_clipping))

    def _held(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return this process's part of the weights or of their gradients."""
        return [*map(local_part, tensors)] if self._packed else tensors


def _all_zero(tensors: list[Tensor], masks: list[Tensor]) -> bool:
    """Return True if everything that the masks prune is zero."""
    others = [(tensor.ne(0) & ~mask).any() for tensor, mask in zip(tensors, masks, strict=True)]
    return not others or not bool(torch.stack(others).any())


def refuse_sparse(where: str, gradients: Iterable[Tensor]) -> None:
    """Refuse sparse gradients, whose single elements cannot be set."""
    if not {gradient.layout for gradient in gradients} <= {torch.strided}:
        raise CompatibilityError(where, "gradients must be dense, got a sparse one", "use sparse=False")


@contextlib.contextmanager
def naming_nan(where: str, weights: Mapping[str, Tensor], step: int) -> Iterator[None]:
    """Wrap code that ranks weights, so that an error names a weight that is NaN."""
    try:
        with checked_together():
            yield
    except (ConfigError, TrainingError) as error:
        name = next((name for name, weight in weights.items() if whole(weight.detach()).isnan().any()), None)
        if name is None:
            raise
        rule = f"weights must not be NaN, got NaN in {name} at step {step}"
        raise TrainingError(where, rule, "training has diverged: lower the learning rate, or clip gradients") from error


_STAND_IN = 2.0**-45
"""Replaces a gradient of 0: negligible in a norm, and its square is still a normal number in second moments."""


def is_slow_on_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer takes the square root of second moments with a kernel that is slow on zeros.

    That is Adam on a CPU without ``fused=True``: torch 2.13's ``sqrt`` takes five times as long on zeros and subnormal
    numbers. With masked gradients of a half pruned model a step then takes more than twice as long.
    """
    return isinstance(optimizer, torch.optim.Adam) and any(
        not group["fused"] and any(parameter.is_cpu for parameter in group["params"])
        for group in optimizer.param_groups
    )


def keeps_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if uncounted steps keep +0.0 where weight, gradient and moments are +0.0.

    ``0 - lr·λ·0 - lr·0 / (√0 + ε)`` with ε > 0, which ``fused=True`` adds in float32 for every weight type.
    """
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        group["fused"] and group["eps"] > _SMALLEST for group in optimizer.param_groups
    )


@runtime_checkable
class HidesMoments(Protocol):
    """An optimizer whose ``state`` does not hold the moments of its parameters as tensors of their shape."""

    def clear_moments_(self, parameter: Tensor, kept: Tensor) -> None:
        """Zero the state of the elements of a parameter where `kept`, a bool tensor of its shape, is False."""
        ...


WEIGHTS = frozenset({"z", "ax", "slow_params", "slow_buffer", "lookahead_slow_buff"})
"""Optimizer state that holds weights instead of moments: schedule-free averages, ASGD's, and Lookahead's slow weights
(pytorch_optimizer, Ranger, timm)."""


@torch.no_grad()
def clear_moments_(
    optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> None:
    """Zero, in place, the optimizer state of weights that are not kept.

    That covers every floating-point state tensor whose last dimensions are the weight's (moments, momentum, their
    maxima), and bitsandbytes' 8-bit codes. For those, zero is the position of 0.0 in the code book ``qmap<i>`` of
    ``state<i>`` (127 if signed, 0 if unsigned), and the block scales need not change. Optimizers that others wrap are
    included.
    """
    for optimizer in (one for given in optimizers for one in with_wrapped(given)):
        for name, weight in weights.items():
            if isinstance(optimizer, HidesMoments):
                optimizer.clear_moments_(weight, masks[name])
            if weight not in optimizer.state:
                continue
            state, mask = optimizer.state[weight], masks[name]
            for key, value in state.items():
                # Moments have the weight's shape, possibly after a history dimension. Step counts do not.
                if not isinstance(value, Tensor) or value.shape[-weight.ndim :] != weight.shape:
                    continue
                value = local_part(value)
                if type(value) is not Tensor:
                    continue
                if value.is_floating_point():
                    apply_mask_([value], [mask.to(value.device)])
                # bitsandbytes stores moments as codes of a table: use the code whose entry is nearest to 0.
                elif value.dtype == torch.uint8 and key.startswith("state") and key.replace("state", "qmap") in state:
                    zero = int(state[key.replace("state", "qmap")].abs().argmin())
                    value.masked_fill_(~mask.to(value.device), zero)


_SMALLEST = torch.finfo(torch.float32).tiny
NOTES = {
    "unstructured": "Unstructured sparsity makes compressed files smaller. Dense matrix products do not get faster.",
    "n_m": "2:4 is faster on GPUs with sparse tensor cores once converted. Other patterns make files smaller.",
    "layer": "Masked layers cost as much as before, and `eff shrink` keeps them: take them out of the model's code.",
    "block": "Blocks are faster in block-sparse kernels at high sparsity alone; dense matrix products are not.",
}
"""By granularity; of the others `UNITS_NOTE`."""
UNITS_NOTE = "Masked units cost as much as before. `eff shrink` removes them and makes the model smaller and faster."


class MaskPolicy:
    """Masks of single weights that stay pruned: +0.0 after every step, and scored below every live weight.

    A technique calls `begin`, then in every step `observe`, `shape_gradients`, `take` or `hold`, and `end_step`.
    `freeze` makes the masks final.
    """

    stays_pruned: ClassVar[bool] = True
    """True if a pruned weight stays pruned in every later mask."""

    why_short: ClassVar[str] = "hardly any prunable weights could be scored"
    """The likely reason where `is_short` is true."""

    def __init__(self, config: PruneConfig, targets: Targets, scorer: Scorer) -> None:
        self.config, self.targets, self.scorer = config, targets, scorer
        self.store = MaskStore(config.key)
        self.weights: Mapping[str, nn.Parameter] = {}
        self.schedule = Schedule(config)
        self.is_final = False
        """True if the masks no longer change."""

    def take_costs(self, costs: dict[str, float]) -> None:
        """Divide scores by costs from now on. More costs may be added later."""
        self.scorer.costs = costs

    def begin(self, model: nn.Module, schedule: Schedule) -> None:
        """Look up the parameters that the modules hold now."""
        self.weights = self.targets.weights()
        self.store.weights = self.maskable(model)
        self.schedule = schedule

    def maskable(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return every tensor that a mask may cover, by name."""
        return self.weights

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move saved masks to the weights' devices, and apply them."""
        weights, packed = self.store.weights, dict(state["masks"])
        odd = sorted(packed.keys() - weights.keys())
        if packed and not self.config.prunes_units:
            odd += sorted(self.weights.keys() - packed.keys())
        both = sorted(weights.keys() & packed.keys())
        odd += [name for name in both if not _fits(packed[name], weights[name])]
        if odd:
            rule = f"saved masks must match this model's weights, got a difference at {odd[0]}"
            raise CheckpointError("prune", rule, SAME_RUN)
        there = {name: mask.to(weights[name].device) for name, mask in packed.items()}  # packed, to copy fewer bytes
        self.store.set({name: unpack_bits(mask, weights[name].shape) for name, mask in there.items()})
        self.store.apply()
        if self.is_final:
            self.scorer.detach()

    def listen(self, model: nn.Module) -> None:
        """Watch the run until `freeze`, beyond the scorer's hooks."""

    def new_micro_batch(self) -> None:
        """Forget the previous micro-batch."""

    def observe(self, context: Context, gradients: Mapping[str, Tensor]) -> None:
        """Take in the complete gradients of a step before it is applied."""
        if self.scorer.needs:
            self.scorer.observe_step(self.weights, gradients)

    def shape_gradients(self, context: Context) -> None:
        """Zero the gradients of pruned weights if they would move live ones, through a norm or a mixing optimizer."""
        if self.store and context.gradients_mix:
            self.store.apply_to_gradients(context.optimizers)

    def hold(self, context: Context) -> None:
        """Call after an applied step without new masks: undo the effects on pruned weights."""
        self.store.hold(context.optimizers)

    def end_step(self) -> None:
        """Forget the step, whether it was applied or skipped."""
        self.scorer.discard_step()  # a probe may have run another backward through the hooks
        self.store.forget_gradients()

    @property
    def is_ready(self) -> bool:
        """True if masks can be made from the observations so far."""
        return self.scorer.ready and (not self.weights or any(map(self.scorer.has_seen, self.weights)))

    def next_masks(self, context: Context, sparsity: float, own: Mapping[str, float]) -> dict[str, Tensor]:
        """Return whole masks from the observations. Weights that no input has reached keep their mask."""
        self.scorer.reduce()
        self.lay_open()
        return self.choose(context, sparsity, own)

    def unseen(self) -> list[str]:
        """Return the names of weights that stay dense because no input has reached them, so they have no score."""
        return [name for name in self.weights if not self.scorer.has_seen(name)]

    def is_short(self, sparsity: float) -> bool:
        """Return True if far less is pruned than asked for, and neither a limit nor rounding explains it."""
        alone = self.own
        counts = {name: found for name, found in self.layers().items() if name not in alone}
        if not sparsity or (self.targets.own and not counts):
            return False
        gone = sum(lost for _, lost in counts.values())
        # Each layer may round by one and keeps its last weight.
        asked = sum(max(sparsity * size - 1, 0.0) for size, _ in counts.values())
        config = self.config
        is_limited = config.layers_differ and at_limit(config.most_of_a_layer, config.sparsity, counts)
        return not gone or (2 * gone < asked and not is_limited)

    def lay_open(self) -> None:
        """Prepare the weights for scoring: pruned ones score as 0, and start at 0 if they come back."""
        self.store.apply()

    def choose(self, context: Context, sparsity: float, own: Mapping[str, float]) -> dict[str, Tensor]:
        """Return whole masks from the current weights and statistics. See `next_masks` for the arguments."""
        store, unseen = self.store, self.unseen() if self.scorer.ready else []
        # Masks only grow, and enough is pruned already: ranking again would give the same masks.
        if store and self.stays_pruned and self.config.resolved_scope == "global":
            sizes = {name: weight.numel() for name, weight in self.weights.items()}
            count = round(sparsity * sum(size for name, size in sizes.items() if name not in own))
            if sum(store.num_pruned.values()) == count + sum(round(share * sizes[name]) for name, share in own.items()):
                return dict(store)
        # Weights that no input has reached have no score: they keep their mask, and the others make up for them.
        kept = {
            name: store[name] if name in store else torch.ones_like(self.weights[name], dtype=torch.bool)
            for name in unseen
        }
        scored = {name: weight for name, weight in self.weights.items() if name not in kept}
        # Pruned weights rank below all others, or they could swap places with live weights of 0.
        scores = RankedScores(scored, store if self.stays_pruned else {}, self.scorer)
        return kept | select_weights(self.config, self.targets.modules, scored, scores, sparsity, own)

    def take(self, context: Context, masks: Mapping[str, Tensor]) -> None:
        """Replace the masks."""
        before = dict(self.store.parts)
        forgotten = self.store.forgotten or not before
        self.store.set(masks)
        # Only where masks changed: moments that grew under older zeros affect no live weight, and AdamW's square root
        # is several times slower on zeros (torch 2.13, CPU). A weight that comes back starts without moments.
        for name, part in self.store.parts.items():  # one by one, to save memory
            live = before.pop(name).eq(part) if name in before else part
            clear_moments_(context.optimizers, {name: self.store.weights[name]}, {name: live})
        self.store.forgotten = forgotten
        self.store.apply()

    def freeze(self, context: Context) -> None:
        """Make the masks final: masked weights stop learning, and nothing is gathered."""
        self.is_final = True
        self.scorer.detach()

    def close(self) -> None:
        """Release the model."""
        self.scorer.detach()
        self.store.set({})
        self.weights, self.store.weights = {}, {}

    def gather(self) -> None:
        """Gather sharded data until `release`. Every process must call it."""
        self.scorer.gather()

    def release(self) -> None:
        """Undo `gather`."""
        self.scorer.release()

    def state_dict(self) -> dict[str, Any]:
        """Return the packed masks, the values under them, and the gathered statistics."""
        return {"masks": self.store.packed(), "hidden": {}, "scorer": self.scorer.state_dict(), "units": {}}

    @property
    def own(self) -> Mapping[str, float]:
        """Layer → its own sparsity at the end, for layers that have one."""
        modules = self.targets.modules
        return {
            matrix: share
            for name, share in self.targets.own.items()
            if name in self.weights  # empty before `begin`
            for matrix in matrix_names(name, modules[name], len(self.weights[name]))
        }

    def touched(self) -> Touched:
        """Return the weights that masks of this granularity cover."""
        return self.targets.touched()

    def layers(self) -> dict[str, tuple[int, int]]:
        """Return by layer the number of units that are pruned whole (weights, tiles), and how many are pruned."""
        if self.config.granularity != "block":
            return self._lost()
        tiles = {
            matrix: block_scores(mask.float(), block_of(self.config, self.targets.modules[name])) > 0
            for name, masks in self._matrices(self.store).items()
            for matrix, mask in masks.items()
        }
        return _lost_of(tiles)

    def _lost(self) -> dict[str, tuple[int, int]]:
        """Return by matrix the number of weights, and how many are pruned."""
        found: dict[str, tuple[int, int]] = {}
        for name in (name for name in self.store if name in self.targets.modules):
            if not isinstance(self.targets.modules[name], StackedExperts):
                found[name] = self.store.weights[name].numel(), self.store.num_pruned[name]
                continue
            found |= _lost_of(self._matrices([name])[name])
        return found

    def _matrices(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return by weight the masks of its matrices."""
        found = {}
        for name in names:
            module, mask = self.targets.modules[name], self.store[name]
            found[name] = dict(zip(matrix_names(name, module, len(mask)), matrices(module, mask), strict=True))
        return found

    def units(self) -> list[list[UnitSlices]]:
        """Return where the units of each group are. Empty if weights are pruned one by one."""
        return []

    def report(self) -> dict[str, Any]:
        """Return what the receipt reports about units."""
        return {}

    def layers_report(self) -> dict[str, Any]:
        """Return the scope, the layers at their limit, and notes for the user."""
        config = self.config
        capped: list[str] = []
        if config.layers_differ:
            alone = self.own
            others = {name: counts for name, counts in self.layers().items() if name not in alone}
            capped = at_limit(config.most_of_a_layer, config.sparsity, others)
        dense = unseen_note(config.key, self.unseen()) if self.store else []
        return {
            "scope": config.resolved_scope if config.layers_differ or config.granularity == "layer" else "local",
            "max_layer_sparsity": config.most_of_a_layer if config.layers_differ else None,
            "capped": capped,
            "overrides": dict(self.targets.sparsities),
            "notes": dense + limit_notes(config.key, config.most_of_a_layer, capped, self._lost()),
            "note": NOTES.get(config.granularity, UNITS_NOTE),
        }


def _fits(packed: Tensor, weight: Tensor) -> bool:
    return packed.dtype == torch.uint8 and packed.numel() == packed_size(weight.shape)


def unseen_note(where: str, names: Collection[str]) -> list[str]:
    """Return a note on weights that no input has reached, if there are any."""
    return [f"{where}: {listed([*names])} stay dense, because no input has reached them"] if names else []


def _lost_of(masks: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    counts = zip(masks.items(), count_kept([*masks.values()]), strict=True)
    return {name: (mask.numel(), mask.numel() - kept) for (name, mask), kept in counts}


def zeros_of_sharded(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return how many elements of each sharded weight are 0 on all processes. Each process must call it."""
    sharded = {name: whole(weight.detach()) for name, weight in weights.items() if is_sharded(weight)}
    return {name: weight.numel() - int(weight.count_nonzero()) for name, weight in sharded.items()}


def weights_report(targets: Targets, counted: Mapping[str, int]) -> dict[str, Any]:
    """Return how many weights are zero, per tensor (and per stacked expert) and in total, counted in the weights."""
    tensors: list[dict[str, Any]] = []
    for name, weight in targets.weights().items():
        pruned = counted.get(name, 0) if is_sharded(weight) else weight.numel() - int(weight.detach().count_nonzero())
        entry = {"name": name, "shape": list(weight.shape), "numel": weight.numel(), "pruned": pruned}
        if isinstance(targets.modules[name], StackedExperts) and not is_sharded(weight):
            entry["experts"] = [matrix.numel() - int(matrix.count_nonzero()) for matrix in weight.detach()]
        tensors.append({**entry, "sparsity": pruned / weight.numel()})
    numel, pruned = sum(entry["numel"] for entry in tensors), sum(entry["pruned"] for entry in tensors)
    return {"tensors": tensors, "numel": numel, "pruned": pruned, "sparsity": pruned / numel if numel else 0.0}
