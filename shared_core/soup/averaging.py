"""The running mean of a soup, written into one state dict for every candidate.

Running statistics of batch norms are averaged or re-estimated. In soups of pruned checkpoints the newest mask applies
to every candidate, and checkpoints from before the end of pruning are skipped.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from eff_kernels.masks import packed_size, unpack_bits
from torch import Tensor, nn

from shared_core.checkpoint_formats import (
    DISTRIBUTED,
    HF_FOLDER,
    LIGHTNING,
    Ingredient,
    TensorSpec,
    averaged,
    storage_key,
)
from shared_core.distributed.collectives import all_reduce_, broadcast_
from shared_core.engine.saving.state_file import sessions_at
from shared_core.errors import CheckpointError, MatchError, TrainingError

# Elements per piece: temporaries stay in cache, and memory does not grow with the largest tensor.
CHUNK = 1 << 16
ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch's allocator


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield matching flat pieces of tensors of equal size."""
    # `reshape` copies non-contiguous tensors, so `mean_with_` and `copy_finite_` don't pass those as targets.
    return zip(*(torch.split(tensor.reshape(-1), CHUNK) for tensor in tensors), strict=True)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a mean of this dtype is accumulated: float32, or the dtype itself if it is wider."""
    # float8 is missing in torch's table of promotions, so promote_types raises for it.
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def mean_with_(out: Tensor, mean: Tensor, tensor: Tensor, weight: float = 1.0, total: float = 2.0) -> Tensor:
    r"""Overwrite `out` with the mean after one more member and return it: ``m + (x - m) * weight / total``.

    Computed as ``m - (m - x) * share`` in the mean's dtype, and rounded to `out`'s at the end. Where x equals m, m
    keeps its bits (the other order would turn -0.0 into 0.0), so the mean of equal members is bit-equal.

    Args:
        out: Where to write. May be `mean` itself.
        mean: The mean so far, in the accumulator dtype.
        tensor: The new member, any dtype and device.
        weight: Weight of the new member.
        total: Weight of all members, including the new one. For plain means the number of members.
    """
    # Writes to pieces of a strided tensor would be lost, because the pieces are copies. Use a buffer, and copy it last.
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    # With equal dtype and device, write pieces directly. Otherwise round or move each once.
    direct = target.dtype == mean.dtype and target.device == mean.device
    share = weight / total
    for goal, so_far, member in chunks(target, mean, tensor):
        into, member = (goal if direct else torch.empty_like(so_far)), member.to(so_far)
        # lerp(start, end, t) is end - (end - start)(1 - t) for t >= 0.5: here m - (m - x) * share.
        if share <= 0.5:
            torch.lerp(member, so_far, 1 - share, out=into)  # in one pass, because here lerp starts from so_far
        else:
            torch.sub(so_far, torch.sub(so_far, member), alpha=share, out=into)
        if not direct:
            goal.copy_(into)
    return out if target is out else out.copy_(target)


@torch.no_grad()
def copy_finite_(out: Tensor | None, tensor: Tensor) -> bool:
    """Copy `tensor` into `out`, if given. Return True if all its numbers are finite."""
    if not averaged(tensor.dtype):
        if out is not None:
            out.copy_(tensor)
        return True
    target = out
    if out is not None and not out.is_contiguous():
        target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    finite = True
    for chunk, *goal in chunks(tensor, *([] if target is None else [target])):
        for part in goal:
            part.copy_(chunk)
        finite = finite and _is_finite(chunk)
    if out is not None and target is not None and target is not out:
        out.copy_(target)
    return finite


def _is_finite(chunk: Tensor) -> bool:
    wide = chunk.to(accumulator_dtype(chunk.dtype))
    # NaN or infinity shows in the sum, at a fiftieth of the cost. But a sum may also overflow by itself.
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())


def non_finite_tensor(ingredient: Ingredient) -> str | None:
    """Return the name of the first tensor that contains NaN or infinity, or None."""
    bad = next((key for key in ingredient.specs if not copy_finite_(None, ingredient.tensor(key))), None)
    ingredient.close()
    return _first_of_all(bad, ingredient)


def _first_of_all(bad: str | None, ingredient: Ingredient) -> str | None:
    """Return the first finding over all processes. Processes with different results would deadlock."""
    if ingredient.parts_on is None:
        return bad
    names = list(ingredient.specs)
    # With the smallest index over all processes, all name the same tensor, and all leave the ingredient out.
    place = torch.tensor(len(names) if bad is None else names.index(bad), device=ingredient.parts_on)
    first = int(all_reduce_(place, "min"))
    return names[first] if first < len(names) else None


class Candidate:
    """The state dict into which every average is written, with the running mean that it comes from.

    Memory: this state dict, and the mean in a file. Ingredients are read tensor by tensor, for any number of them.
    """

    def __init__(
        self,
        like: Ingredient,
        into: dict[str, Tensor] | None = None,
        after_average: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> None:
        self._after = after_average
        self._owned = into is None
        self.state_dict: dict[str, Tensor] = {} if into is None else into
        self._mean: dict[str, Tensor] = {}
        self._total = 0.0
        self._best: Ingredient | None = None
        # For each tensor of the ingredients, its keys in the state dict. A tied one has several.
        self._names = {key: [key] for key in like.specs}
        if into is None:
            for alias, owner in like.ties.items():
                self._names[owner].append(alias)
        else:
            self._names = _names_in(into, like)

    def write_single(self, ingredient: Ingredient) -> str | None:
        """Write one ingredient. Return the name of a tensor with NaN or infinity, if any."""
        bad = None
        for key in self._names:
            tensor = ingredient.tensor(key)
            if not copy_finite_(self._slot(key, tensor.shape, tensor.dtype), tensor):
                bad = bad or key
        ingredient.close()
        self._written()
        return _first_of_all(bad, ingredient)

    def begin_mean(self, best: Ingredient, weight: float = 1.0) -> None:
        """Start the running mean from the best ingredient, which also determines integers, booleans and dtypes."""
        self._best, self._total = best, weight
        # In separate memory, because `into` may be the model's tensors, which candidates overwrite.
        self._mean = _in_a_file({key: best.spec(key) for key in self._names if averaged(best.spec(key).dtype)})
        for key, mean in self._mean.items():
            mean.copy_(best.tensor(key))
        best.close()

    def write_mean(self) -> None:
        """Write the mean of the members accepted so far."""
        for key, slot in self._best_slots():
            slot.copy_(self._mean[key])
        self._written()

    def write_values(self, best: Ingredient, values: Callable[[str], Tensor]) -> None:
        """Write what `values` returns for each tensor. Integers, booleans and dtypes come from `best`."""
        self._best = best
        for key, slot in self._best_slots():
            slot.copy_(values(key))
        self._written()

    def write_average(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Write the mean with one more member, without changing the mean itself."""
        for key, slot in self._best_slots():
            # The mean itself does not change, so a rejected candidate leaves no rounding errors.
            mean_with_(slot, self._mean[key], ingredient.tensor(key), weight, self._total + weight)
        ingredient.close()
        self._written()

    def accept(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Make an ingredient a member: ``m += (x - m) / (k + 1)``."""
        self._total += weight
        for key, mean in self._mean.items():
            mean_with_(mean, mean, ingredient.tensor(key), weight, self._total)
        ingredient.close()

    def _best_slots(self) -> Iterator[tuple[str, Tensor]]:
        best = cast(Ingredient, self._best)
        for key in self._names:
            # A mean of step counters or masks is meaningless.
            spec = best.spec(key)
            slot = self._slot(key, spec.shape, spec.dtype)
            if averaged(spec.dtype):
                yield key, slot
            else:
                slot.copy_(best.tensor(key))
        best.close()

    def _slot(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        names = self._names[key]
        # Allocated at the first candidate and reused, so memory is one model for any number of candidates.
        slot = self.state_dict.get(names[0])
        # An owned slot takes the dtype of a single ingredient. A model's tensor keeps its own.
        if slot is None or (self._owned and slot.dtype != dtype):
            slot = torch.empty(shape, dtype=dtype)
            self.state_dict.update(dict.fromkeys(names, slot))
        return slot

    def _written(self) -> None:
        if self._after is not None:
            self._after(self.state_dict)


def _in_a_file(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return tensors for the means of these tensors, in a mapped temporary file without a name."""
    # Unlike other memory, the system can write its pages to disk and drop them.
    sizes = [math.prod(spec.shape) * accumulator_dtype(spec.dtype).itemsize for spec in specs.values()]
    places = list(itertools.accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
    with tempfile.NamedTemporaryFile(prefix="eff-soup-") as file:
        try:
            # Allocated now: on a full disk, the first write to a page without a block would kill the process.
            os.posix_fallocate(file.fileno(), 0, places[-1])
            memory = torch.from_file(file.name, shared=True, size=places[-1], dtype=torch.uint8)
        except (AttributeError, OSError, RuntimeError):  # macOS, no space, or nothing to map
            memory = torch.empty(places[-1], dtype=torch.uint8)
    return {
        key: memory[place : place + size].view(accumulator_dtype(spec.dtype)).view(spec.shape)
        for (key, spec), place, size in zip(specs.items(), places, sizes, strict=False)
    }


def _names_in(into: dict[str, Tensor], like: Ingredient) -> dict[str, list[str]]:
    """Return, for each tensor of a model, its name in ingredients → its names in the model."""
    groups: dict[object, list[str]] = {}
    # Tied tensors share storage. One without storage (meta, fake) is on its own.
    for name, tensor in into.items():
        groups.setdefault(storage_key(tensor) or name, []).append(name)
    names: dict[str, list[str]] = {}
    for group in groups.values():
        key = next((name for name in group if like.has(name)), None)
        if key is None:
            raise _stranger(like, f"checkpoint must hold all tensors of the model, but has no {group[0]!r}")
        shape = like.spec(key).shape
        if shape != tuple(into[key].shape):
            raise _stranger(like, f"{key!r} must have the model's shape {tuple(into[key].shape)}, got {shape}")
        names[key] = group
    extra = next((key for key in (*like.specs, *like.ties) if key not in into), None)
    if extra is not None:
        raise _stranger(like, f"checkpoint must hold only tensors of the model, got {extra!r}")
    return names


def _stranger(ingredient: Ingredient, rule: str) -> CheckpointError:
    return CheckpointError(ingredient.name, rule, "it belongs to another model")


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(model: nn.Module) -> list[Any]:
    """Return the batch norms of a model that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, _NORMS) and module.track_running_stats]


def refuse_no_norms(where: str, bn_batches: int, model: nn.Module) -> None:
    """Refuse `bn_batches` for a model without running statistics."""
    if bn_batches and not batch_norms(model):
        raise MatchError(where, f"bn_batches must be 0 for a model without BatchNorm, got {bn_batches}", "remove it")


def estimate_norms_(model: nn.Module, calibrate: Callable[[int], None], num_batches: int) -> None:
    """Set all running statistics to the plain mean over batches, equal on every process. All must call it.

    Other buffers, and norms that no batch reached, are not changed.
    """
    norms = batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
    # With momentum None, BatchNorm updates by 1 / num_batches_tracked, so that each of n batches counts 1 / n.
    try:
        calibrate(num_batches)
        if not any(int(norm.num_batches_tracked) for norm in norms):
            rule = f"training data must give batches to estimate statistics on, got none of {num_batches}"
            remedy = "use data that can be iterated again, or leave bn_batches at 0"
            raise TrainingError("bn_batches", rule, remedy)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        # Restore everything else that a training forward changes, and statistics that no batch reached.
        fresh = {id(buffer) for norm in norms if int(norm.num_batches_tracked) for buffer in norm.buffers()}
        for name, buffer in model.named_buffers():
            if id(buffer) not in fresh and name in before:
                buffer.copy_(before[name])
    # Use rank 0's statistics: a mean of variances would ignore the spread of the means.
    for norm in norms:
        for buffer in (norm.running_mean, norm.running_var, norm.num_batches_tracked):
            broadcast_(cast(Tensor, buffer))


@dataclass
class _Pruned:
    step: int
    masks: dict[str, Tensor]
    """Packed, 8 weights per byte, as the technique saves them."""
    complete: bool


def masked_ingredients(
    ingredients: Sequence[Ingredient], *, keep_unpruned: bool = False
) -> tuple[list[Ingredient], Callable[[dict[str, Tensor]], None] | None, list[str]]:
    """Return the usable ingredients, a function that re-applies the newest mask to an average, and notes for the user.

    Without pruned ingredients all are used and nothing is re-applied.
    """
    states = [_pruning_state(item) for item in ingredients]
    found = [state for state in states if state is not None and state.masks]
    if not found:
        return list(ingredients), None, []
    # Of equal steps the later file wins. Reversed, because max keeps the first of equals.
    newest = max(reversed(found), key=lambda state: state.step)
    masks = {name: _unpack(packed, name, ingredients[0]) for name, packed in newest.masks.items()}
    usable, notes = [], []
    for item, state in zip(ingredients, states, strict=True):
        # A weights-only file does not record how far its pruning was. It counts as complete if it fits the newest mask.
        complete = state.complete if state is not None else _obeys(item, masks)
        if complete or keep_unpruned:
            usable.append(item)
        else:
            notes.append(f"left out: {item.name}, from before its pruning ended (--unpruned includes it)")
    if not usable:
        rule = "no checkpoint was saved after pruning ended"
        raise CheckpointError("eff soup", rule, "pass later ones, or use --unpruned")
    notes.append(f"pruned: the newest mask (step {newest.step}) is applied to every candidate")
    return usable, functools.partial(_remask, masks), notes  # picklable, so other processes can re-apply masks


@torch.no_grad()
def _remask(masks: Mapping[str, Tensor], state_dict: dict[str, Tensor]) -> None:
    for name, mask in masks.items():
        state_dict[name].masked_fill_(~mask, 0)


def _pruning_state(ingredient: Ingredient) -> _Pruned | None:
    if ingredient.path is None:
        return None
    if ingredient.kind not in (HF_FOLDER, DISTRIBUTED, LIGHTNING):
        return None
    for state in sessions_at(ingredient.path):
        prune = state["techniques"].get("prune")
        if isinstance(prune, Mapping) and isinstance(prune.get("masks"), Mapping):
            asked = state.get("recipe", {}).get("prune", {}).get("sparsity", 0.0)
            # A gradual schedule is complete when it has reached the recipe's sparsity.
            complete = bool(prune["masks"]) and float(prune.get("sparsity", 0.0)) >= float(asked)
            return _Pruned(int(state.get("step", 0)), dict(prune["masks"]), complete)
    return None


def _unpack(packed: Tensor, name: str, ingredient: Ingredient) -> Tensor:
    shape = ingredient.spec(name).shape if ingredient.has(name) else None
    if shape is None or packed.numel() != packed_size(shape):
        size = "no such tensor" if shape is None else f"{packed.numel()} bytes for {math.prod(shape)} bits"
        raise _stranger(ingredient, f"checkpoint must hold {name!r} and a mask of its size, got {size}")
    return unpack_bits(packed, shape)


def _obeys(ingredient: Ingredient, masks: Mapping[str, Tensor]) -> bool:
    """Return True if a checkpoint without a state file is zero wherever the mask is, like a pruned model."""
    obeys = all(not ingredient.tensor(name)[~mask].any() for name, mask in masks.items())
    ingredient.close()
    return obeys
