"""The running mean of a soup, and the one state dict that every candidate is written into."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.ranks import all_reduce_
from shared_core.soup.sources import Ingredient, averaged, storage_key

# Elements at a time: temporaries stay in the cache, and memory does not grow with the largest tensor.
CHUNK = 1 << 16


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor.reshape(-1), CHUNK) for tensor in tensors), strict=True)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a mean over this dtype is held in: float32, or the dtype itself if it is wider.

    Example:
        >>> accumulator_dtype(torch.bfloat16), accumulator_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


@torch.no_grad()
def mean_with_(out: Tensor, mean: Tensor, tensor: Tensor, weight: float = 1.0, total: float = 2.0) -> Tensor:
    r"""Overwrite `out` with the mean after one more member and return it: ``m + (x - m) * weight / total``.

    Computed as ``m - (m - x) * share`` in the mean's dtype and rounded to `out`'s at the end: where x equals m, m keeps
    its bits (the other order would turn -0.0 into 0.0), so that equal members have a mean of equal bits.

    Args:
        out: Where to write; may be `mean` itself.
        mean: The mean so far, in the accumulator dtype.
        tensor: The new member, any dtype and device.
        weight: Weight of the new member.
        total: Weight of all members, the new one included; for plain means the number of members.

    Returns:
        `out`.

    Example:
        >>> mean_with_(torch.empty(2), torch.tensor([1.0, 2.0]), torch.tensor([4.0, 2.0]), total=3)
        tensor([2., 2.])
    """
    target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    direct = target.dtype == mean.dtype and target.device == mean.device
    share = weight / total
    for goal, so_far, member in _chunks(target, mean, tensor):
        into, member = (goal if direct else torch.empty_like(so_far)), member.to(so_far)
        if share <= 0.5:
            torch.lerp(member, so_far, 1 - share, out=into)  # the same in one pass: torch starts at so_far then
        else:
            torch.sub(so_far, torch.sub(so_far, member), alpha=share, out=into)
        if not direct:
            goal.copy_(into)
    return out if target is out else out.copy_(target)


@torch.no_grad()
def copy_finite_(out: Tensor | None, tensor: Tensor) -> bool:
    """Copy `tensor` into `out`, if given, and return whether all its numbers are finite."""
    if not averaged(tensor.dtype):
        if out is not None:
            out.copy_(tensor)
        return True
    target = out
    if out is not None and not out.is_contiguous():
        target = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    finite = True
    for chunk, *goal in _chunks(tensor, *([] if target is None else [target])):
        for part in goal:
            part.copy_(chunk)
        finite = finite and _is_finite(chunk)
    if out is not None and target is not None and target is not out:
        out.copy_(target)
    return finite


def _is_finite(chunk: Tensor) -> bool:
    wide = chunk.to(accumulator_dtype(chunk.dtype))
    # a NaN or an infinity shows in the sum, at a fiftieth of the cost; a sum may also overflow by itself
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())


def non_finite_tensor(ingredient: Ingredient) -> str | None:
    """Return the name of the first tensor with a NaN or an infinity in it, None if there is none."""
    bad = next((key for key in ingredient.specs if not copy_finite_(None, ingredient.tensor(key))), None)
    ingredient.close()
    return _first_of_all(bad, ingredient)


def _first_of_all(bad: str | None, ingredient: Ingredient) -> str | None:
    """Return what the first process found that found anything; processes that decide otherwise would not meet again."""
    if ingredient.parts_on is None:
        return bad
    names = list(ingredient.specs)
    place = torch.tensor(len(names) if bad is None else names.index(bad), device=ingredient.parts_on)
    first = int(all_reduce_(place, "min"))
    return names[first] if first < len(names) else None


class Candidate:
    """The one state dict that every average is written into, beside the running mean it is made from.

    Memory: the mean and this state dict, whatever the number of ingredients; these are read tensor by tensor.

    Args:
        like: An ingredient: names, shapes and ties of the state dict.
        into: Write into these tensors (a model's ``state_dict()``) instead of new ones; they keep their dtypes.
        after_average: Called with the state dict each time that it was written, to re-apply masks for example.
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
        self._names = {key: [key] for key in like.specs}
        if into is None:
            for alias, owner in like.ties.items():
                self._names[owner].append(alias)
        else:
            self._names = _names_in(into, like)

    def write_single(self, ingredient: Ingredient) -> str | None:
        """Write one ingredient; return the name of a tensor with a NaN or an infinity, if there is one."""
        bad = None
        for key in self._names:
            tensor = ingredient.tensor(key)
            if not copy_finite_(self._slot(key, tensor.shape, tensor.dtype), tensor):
                bad = bad or key
        ingredient.close()
        self._written()
        return _first_of_all(bad, ingredient)

    def begin_mean(self, best: Ingredient, weight: float = 1.0) -> None:
        """Start the running mean from the best ingredient, whose integers, booleans and dtypes the soup takes."""
        self._best, self._total = best, weight
        for key in self._names:
            if averaged(best.spec(key).dtype):
                tensor = best.tensor(key)
                self._mean[key] = tensor.to("cpu", accumulator_dtype(tensor.dtype), copy=True).contiguous()
        best.close()

    def write_mean(self) -> None:
        """Write the mean of the members accepted so far."""
        for key, slot in self._best_slots():
            slot.copy_(self._mean[key])
        self._written()

    def write_average(self, ingredient: Ingredient, weight: float = 1.0) -> None:
        """Write what the mean would be with one more member; the mean itself stays as it is."""
        for key, slot in self._best_slots():
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
        best = self._best
        if best is None:
            raise RuntimeError("begin_mean comes first")
        for key in self._names:
            spec = best.spec(key)
            slot = self._slot(key, spec.shape, spec.dtype)
            if key in self._mean:
                yield key, slot
            else:
                slot.copy_(best.tensor(key))
        best.close()

    def _slot(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        names = self._names[key]
        slot = self.state_dict.get(names[0])
        if slot is None or (self._owned and slot.dtype != dtype):
            slot = torch.empty(shape, dtype=dtype)
            self.state_dict.update(dict.fromkeys(names, slot))
        return slot

    def _written(self) -> None:
        if self._after is not None:
            self._after(self.state_dict)


def _names_in(into: dict[str, Tensor], like: Ingredient) -> dict[str, list[str]]:
    """Return, for each tensor of a model, the name that ingredients have it under and its names in the model."""
    groups: dict[object, list[str]] = {}
    for name, tensor in into.items():
        groups.setdefault(storage_key(tensor) or name, []).append(name)
    names: dict[str, list[str]] = {}
    for group in groups.values():
        key = next((name for name in group if like.has(name)), None)
        if key is None:
            raise CheckpointError(
                f"{like.name}: checkpoint must hold all tensors of the model, got none named {group[0]!r}; it is of "
                "another model"
            )
        shape = like.spec(key).shape
        if shape != tuple(into[key].shape):
            raise CheckpointError(
                f"{like.name}: {key!r} must have the model's shape {tuple(into[key].shape)}, got {shape}; it is of "
                "another model"
            )
        names[key] = group
    extra = next((key for key in (*like.specs, *like.ties) if key not in into), None)
    if extra is not None:
        raise CheckpointError(
            f"{like.name}: checkpoint must hold only tensors of the model, got {extra!r}; it is of another model"
        )
    return names
