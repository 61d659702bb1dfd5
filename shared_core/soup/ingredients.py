"""Open the ingredients of a soup and refuse those that do not match.

At the end of a run these are its checkpoints and its final weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.checkpoint_formats import (
    ADAPTER,
    IN_MEMORY,
    Ingredient,
    TensorSpec,
    averaged,
    open_ingredient,
    storage_key,
)
from shared_core.checkpoint_formats.adapter import check_adapters, rank_dimension
from shared_core.checkpoint_formats.files import LazyTensors
from shared_core.checkpoint_formats.opening import under_same_names
from shared_core.distributed.collectives import any_rank, local_part
from shared_core.distributed.sharded_tensors import is_sharded, place_of, reshard_
from shared_core.engine.services import SavedCheckpoint
from shared_core.engine.technique import Context
from shared_core.errors import CheckpointError, ConfigError
from shared_core.soup.adapters import PeftAdapter

Source = str | Path | Mapping[str, Tensor] | Ingredient

# These fields may differ between fine-tunings of one network without changing its computation.
_FREE_CONFIG_FIELD = re.compile(r"^_|version|dtype|drop|use_cache|initializer|gradient_checkpointing|problem_type")


def open_ingredients(ingredients: Sequence[Source]) -> list[Ingredient]:
    """Open ingredients and check that they have the same tensors, shapes, ties and configs."""
    if isinstance(ingredients, str | Path | Mapping) or not ingredients:
        got = type(ingredients).__name__ if ingredients else "none"
        rule = f"ingredients must be a sequence of paths of at least one checkpoint, got {got}"
        raise CheckpointError("soup", rule)
    opened: list[Ingredient] = []
    for number, given in enumerate(ingredients):
        if isinstance(given, Mapping):
            # given=given binds now. A plain closure would read the loop's last value.
            opened.append(Ingredient(f"ingredient {number}", IN_MEMORY, None, lambda given=given: given))  # type: ignore[misc]
        else:
            opened.append(given if isinstance(given, Ingredient) else open_ingredient(given))
    opened = under_same_names(opened)
    configured = [item for item in opened if item.config and item.kind != ADAPTER]
    for check, items in ((_differences, opened), (_config_differences, configured)):
        for other in items[1:]:
            if (found := next(check(items[0], other), None)) is not None:
                remedy = "only checkpoints of one architecture can be averaged: leave one of them out"
                if ADAPTER in (items[0].kind, other.kind):
                    remedy += ", or merge an adapter into its model (merge_and_unload) and save that"
                raise CheckpointError("soup", found, remedy)
    return opened


def check_number_of(what: str, given: Sequence[Any] | None, count: int) -> None:
    """Raise `ConfigError` unless `given` is None or has one entry for each of `count` ingredients."""
    if given is not None and len(given) != count:
        raise ConfigError("soup", f"{what} must be one for each of {count} ingredients, got {len(given)}")


def check_able(able: Sized, least: int, what: str, left_out: Mapping[str, str]) -> None:
    """Raise `CheckpointError` if fewer than `least` ingredients have finite weights and `what`."""
    if len(able) < least:
        reasons = "; ".join(f"{name} {reason}" for name, reason in left_out.items()) or "none"
        needed = "two ingredients" if least > 1 else "one ingredient"
        raise CheckpointError("soup", f"at least {needed} must have finite weights and {what}, got {reasons}")


def _differences(first: Ingredient, other: Ingredient) -> Iterator[str]:
    """Yield reasons why two ingredients cannot be averaged."""
    adapters = [item for item in (first, other) if item.kind == ADAPTER]
    if len(adapters) == 1:
        yield (
            f"ingredients must be whole models or adapters, got {first.name} ({first.kind}) and {other.name} "
            f"({other.kind})"
        )
    if adapters:
        check_adapters(first, other)
    # In both directions, so that missing tensors of either are named. A tied name counts, since files may omit it.
    for one, two in ((first, other), (other, first)):
        missing = next((key for key in (*one.specs, *one.ties) if not two.has(key)), None)
        if missing is not None:
            yield f"ingredients must have the same tensors, got {missing!r} in {one.name} but not in {two.name}"
    # Ties must agree: a tied tensor cannot be averaged with two separate ones.
    if odd := first.tied_groups ^ other.tied_groups:
        key = min(min(odd, key=sorted))
        tied, free = (first, other) if any(key in group for group in first.tied_groups) else (other, first)
        yield (
            f"{key!r} must be tied in all ingredients or in none, got it tied in {tied.name} but untied, or tied to "
            f"another tensor, in {free.name}"
        )
    for key, spec in first.specs.items():
        its = other.spec(key)
        both = f"got {{}} in {first.name} and {{}} in {other.name}"
        if _shape(spec.shape, key, first) != _shape(its.shape, key, other):
            yield f"{key!r} must have the same shape in all ingredients, {both.format(spec.shape, its.shape)}"
        # Dtypes may differ (bf16 and fp32), but a float cannot be averaged with an integer, which is copied unchanged.
        if averaged(spec.dtype) != averaged(its.dtype):
            yield f"{key!r} must be floating-point in all ingredients or in none, {both.format(spec.dtype, its.dtype)}"


def _config_differences(first: Ingredient, other: Ingredient) -> Iterator[str]:
    ones, twos = dict(_bound(first.config)), dict(_bound(other.config))
    for field in sorted(ones.keys() | twos.keys()):
        if (one := ones.get(field)) != (two := twos.get(field)):
            yield (
                f"config field {field!r} must be the same in all ingredients, got {one!r} in {first.name} and {two!r} "
                f"in {other.name}"
            )


def _bound(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields that must be equal. Fields of a sub-model's own config have dotted names."""
    for field, value in config.items():
        if _FREE_CONFIG_FIELD.search(field):
            continue
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _bound(value, f"{prefix}{field}.")
        else:
            yield prefix + field, value


def _shape(shape: tuple[int, ...], key: str, ingredient: Ingredient) -> tuple[int, ...]:
    """Return the shape that must be equal. Adapters may have different ranks."""
    # (r, in) and (out, r) of different ranks can be averaged, because ranks add up.
    rank = rank_dimension(key) if ingredient.kind == ADAPTER else None
    return shape if rank is None else (*shape[:rank], *shape[rank + 1 :])


class RunIngredients:
    """Opens a run's checkpoints under the names of its model."""

    def __init__(self, model: nn.Module, context: Context, adapter: PeftAdapter | None) -> None:
        self._context, self._adapter = context, adapter
        self.into: dict[str, Tensor] | None = None
        """The model's own tensors, to write averages into. None for adapters, whose ranks change.

        If sharded, this process's parts. Ingredients are then the same parts of checkpoints.
        """
        self._whole: dict[str, Tensor] = {}
        if adapter is None:
            # FSDP2 may keep parameters gathered after the last forward, but state_dict must return the sharded ones.
            reshard_(model)
            state = model.state_dict()
            self._whole = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
            # detach shares memory, so writes to `into` change the model.
            self.into = {name: local_part(value) for name, value in self._whole.items()}
        sharded = next((value for value in self._whole.values() if is_sharded(value)), None)
        self._parts_on = None if sharded is None else sharded.device
        self.logged: dict[str, float | None] = {}
        """The metric logged with each checkpoint."""

    def opened(self, last: int | None) -> tuple[list[Ingredient], Ingredient] | None:
        """Return the newest `last` usable checkpoints, oldest first, with the final weights added if none holds them.

        None if the run saved no usable checkpoint. Then nothing can be averaged, which a note reports.
        """
        usable = self._usable()
        if not usable:
            return None
        usable = usable if last is None else usable[-last:]
        found = [self._checkpoint(saved) for saved in usable]
        self.logged = {item.name: saved.metric for item, saved in zip(found, usable, strict=True)}
        weights = self.into if self._adapter is None else self._adapter.weights(like=found[-1])
        # Also check older ones, because the trainer may have loaded the best.
        held = next((item for item in reversed(found) if self._holds(item, weights or {})), None)
        if held is not None:
            return found, held
        name, copies = f"final weights (step {self._context.step})", _copied(weights or {})
        if self._adapter is None:
            final = Ingredient(name, IN_MEMORY, None, lambda: copies, **self._parts())
        else:
            final = Ingredient(name, ADAPTER, None, lambda: copies, self._adapter.fields())
        return [*found, final], final

    def ranked(self, ingredients: list[Ingredient], sign: float) -> list[Ingredient]:
        """Return the ingredients, best first by the logged metric times `sign`. Those without one come last."""

        def key(item: Ingredient) -> float:
            # Unlogged and NaN metrics sort last. Comparisons with NaN are always false.
            metric = self.logged.get(item.name)
            return -math.inf if metric is None or not math.isfinite(metric) else sign * metric

        # Reversed, then a stable sort: of equal metrics the newest comes first.
        return sorted(reversed(ingredients), key=key, reverse=True)

    def _usable(self) -> list[SavedCheckpoint]:
        context = self._context
        saved = sorted(context.services.checkpoints(), key=lambda checkpoint: checkpoint.step)
        first = context.first_usable_step
        # Averages with earlier weights, dense or unquantized, would undo what the recipe trained for.
        usable = [checkpoint for checkpoint in saved if checkpoint.step >= first]
        if usable and len(usable) < len(saved):
            context.services.say(
                f"efftrain: soup: {len(saved) - len(usable)} checkpoints from before step {first} are left out, "
                "because their weights were not yet pruned or quantized like the final ones"
            )
        # Not an error: it would lose the whole training, and early stopping is a normal end.
        if not saved:
            self._not_made(
                "the run saved no checkpoint",
                "Save some during training (save_steps or save_strategy, ModelCheckpoint) and keep them "
                "(save_total_limit, save_top_k)",
            )
        elif not usable:
            self._not_made(
                f"the run saved no checkpoint at or after step {first}, when pruning or quantization is complete, and "
                f"the last at step {saved[-1].step}",
                "Save later ones or end the schedule earlier",
            )
        return usable

    def _not_made(self, why: str, remedy: str) -> None:
        step = self._context.step
        self._context.note(f"The soup was not made: {why}. The model keeps its weights of step {step}. {remedy}")

    def _checkpoint(self, saved: SavedCheckpoint) -> Ingredient:
        services = self._context.services
        if self._adapter is not None:
            return self._adapter.ingredient(saved.path, lambda: services.load_weights(saved.path))
        groups: dict[Any, list[str]] = {}
        for name, tensor in self._whole.items():
            groups.setdefault(storage_key(tensor) or name, []).append(name)

        def load() -> Mapping[str, Tensor]:
            # Shards: each tensor is read when its part is needed, so that no process holds a whole model.
            if self._parts_on is not None:
                return _parts(services.load_weights(saved.path), self._whole, groups.values(), saved.path)
            loaded = services.load_weights(saved.path)
            weights = {name: value for name, value in loaded.items() if isinstance(value, Tensor)}  # no extra state
            for names in groups.values():  # a file may hold a tied tensor once, or as two copies
                held = next((weights[name] for name in names if name in weights), None)
                if held is not None:
                    weights.update(dict.fromkeys(names, held))
            return weights

        return Ingredient(str(saved.path), "checkpoint of this run", saved.path, load, **self._parts())

    def _parts(self) -> dict[str, Any]:
        if self._parts_on is None:
            return {}
        specs = {name: TensorSpec(tuple(part.shape), part.dtype) for name, part in (self.into or {}).items()}
        return {"specs": specs, "parts_on": self._parts_on}

    def _holds(self, ingredient: Ingredient, weights: dict[str, Tensor]) -> bool:
        """Return True if a checkpoint is bit-equal to these weights."""
        same = all(
            key in weights
            # In the model's dtype, because the checkpoint may hold a cast copy.
            and torch.equal(ingredient.tensor(key).to(weights[key].device, weights[key].dtype), weights[key])
            for key in ingredient.specs
        )
        ingredient.close()
        # Every process must give the same answer, or they would average different ingredients.
        return same if self._parts_on is None else not any_rank(not same, self._parts_on)


def _parts(
    weights: Mapping[str, Tensor], model: Mapping[str, Tensor], tied: Iterable[list[str]], path: Path
) -> LazyTensors:
    """Return this process's part of each tensor of a checkpoint."""
    saved = set(weights)
    # Tied tensors may be in the file under any of their names.
    saved_as = {name: next((n for n in names if n in saved), None) for names in tied for name in names}

    def read(name: str) -> Tensor:
        source, like = saved_as[name], model[name]
        tensor = None if source is None else weights[source]
        if tensor is None or tensor.shape != like.shape:
            got = "none" if tensor is None else tuple(tensor.shape)
            rule = f"{name!r} must have the model's shape {tuple(like.shape)}, got {got}"
            raise CheckpointError(path, rule, "it belongs to another model")
        # The same rows as in this process's shard of the model.
        return tensor[place_of(like)]

    return LazyTensors({name: name for name in model}, read)


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    copies: dict[int, Tensor] = {}  # tied tensors stay tied
    return {
        # data_ptr is 0 for empty tensors, which are not tied to each other.
        key: copies.setdefault(value.data_ptr() or id(value), value.to("cpu", copy=True))
        for key, value in weights.items()
    }
