"""Open the ingredients of a soup and refuse those that do not belong together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.soup.naming import under_same_names
from shared_core.soup.sources import ADAPTER, IN_MEMORY, Ingredient, averaged, open_ingredient
from shared_core.soup.sources.adapter import check_adapters, rank_dimension

Source = str | Path | Mapping[str, Tensor] | Ingredient

# These fields may differ between fine-tunings of one network without changing what its weights compute.
_FREE_CONFIG_FIELD = re.compile(r"^_|version|dtype|drop|use_cache|initializer|gradient_checkpointing|problem_type")


def open_ingredients(ingredients: Sequence[Source]) -> list[Ingredient]:
    """Return the ingredients opened and compared: same tensors, shapes, ties and configs.

    Raises:
        CheckpointError: If there is none, one cannot be read, or two do not belong together.
    """
    if isinstance(ingredients, str | Path | Mapping):
        raise CheckpointError(f"soup: ingredients must be a sequence of paths, got {type(ingredients).__name__}")
    opened: list[Ingredient] = []
    for number, given in enumerate(ingredients):
        if isinstance(given, Mapping):
            opened.append(Ingredient(f"ingredient {number}", IN_MEMORY, None, lambda given=given: given))  # type: ignore[misc]
        else:
            opened.append(given if isinstance(given, Ingredient) else open_ingredient(given))
    if not opened:
        raise CheckpointError("soup: ingredients must be at least one checkpoint, got none; give paths of checkpoints")
    opened = under_same_names(opened)
    for other in opened[1:]:
        _check_alike(opened[0], other)
    configured = [item for item in opened if item.config and item.kind != ADAPTER]
    for other in configured[1:]:
        _check_configs(configured[0], other)
    return opened


_REMEDY = "only checkpoints of one architecture can be averaged: leave one of them out"


def _check_alike(first: Ingredient, other: Ingredient) -> None:
    adapters = [item for item in (first, other) if item.kind == ADAPTER]
    if len(adapters) == 1:
        raise CheckpointError(
            f"soup: ingredients must be whole models or adapters, got {first.name} ({first.kind}) and {other.name} "
            f"({other.kind}); merge the adapter into its model (merge_and_unload) and save that"
        )
    if adapters:
        check_adapters(first, other)
    for one, two in ((first, other), (other, first)):
        missing = next((key for key in (*one.specs, *one.ties) if not two.has(key)), None)
        if missing is not None:
            raise CheckpointError(
                f"soup: ingredients must have the same tensors, got {missing!r} in {one.name} but not in {two.name}; "
                f"{_REMEDY}"
            )
    odd = first.tied_groups ^ other.tied_groups
    if odd:
        key = min(min(odd, key=sorted))
        tied, free = (first, other) if any(key in group for group in first.tied_groups) else (other, first)
        raise CheckpointError(
            f"soup: {key!r} must be tied in all ingredients or in none, got it tied in {tied.name} and not, or to "
            f"another tensor, in {free.name}; {_REMEDY}"
        )
    for key, spec in first.specs.items():
        its = other.spec(key)
        if _shape(spec.shape, key, first) != _shape(its.shape, key, other):
            raise CheckpointError(
                f"soup: {key!r} must have the same shape in all ingredients, got {spec.shape} in {first.name} and "
                f"{its.shape} in {other.name}; {_REMEDY}"
            )
        if averaged(spec.dtype) != averaged(its.dtype):
            raise CheckpointError(
                f"soup: {key!r} must be floating-point in all ingredients or in none, got {spec.dtype} in "
                f"{first.name} and {its.dtype} in {other.name}; {_REMEDY}"
            )


def _check_configs(first: Ingredient, other: Ingredient) -> None:
    ones, twos = dict(_bound(first.config)), dict(_bound(other.config))
    for field in sorted(ones.keys() | twos.keys()):
        one, two = ones.get(field), twos.get(field)
        if one != two:
            raise CheckpointError(
                f"soup: config field {field!r} must be the same in all ingredients, got {one!r} in {first.name} "
                f"and {two!r} in {other.name}; {_REMEDY}"
            )


def _bound(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields that must be alike, those of a tower's own config by their dotted names."""
    for field, value in config.items():
        if _FREE_CONFIG_FIELD.search(field):
            continue
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _bound(value, f"{prefix}{field}.")
        else:
            yield prefix + field, value


def _shape(shape: tuple[int, ...], key: str, ingredient: Ingredient) -> tuple[int, ...]:
    """Return the shape that must be alike: adapters may have different ranks."""
    rank = rank_dimension(key) if ingredient.kind == ADAPTER else None
    return shape if rank is None else (*shape[:rank], *shape[rank + 1 :])
