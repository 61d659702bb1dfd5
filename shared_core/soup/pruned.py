"""Soups of pruned checkpoints: the newest mask holds for every candidate, unfinished ones are left out."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.packed_masks import packed_size, unpack_mask
from shared_core.plain_checkpoint import LIGHTNING_META
from shared_core.soup.sources import DISTRIBUTED, HF_FOLDER, LIGHTNING, Ingredient, load_torch_file
from shared_core.state_file import STATE_FILE, load_state


@dataclass
class _Pruned:
    step: int
    masks: dict[str, Tensor]
    """Packed, eight weights to a byte, as the technique saves them."""
    complete: bool


def masked_ingredients(
    ingredients: Sequence[Ingredient], *, keep_unpruned: bool = False
) -> tuple[list[Ingredient], Callable[[dict[str, Tensor]], None] | None, list[str]]:
    """Return the ingredients to use, what re-applies the newest mask to an average, and lines to tell the user.

    Without pruned ingredients all are used and nothing is re-applied.

    Args:
        ingredients: Checkpoints; those that pruning wrote carry their masks beside them.
        keep_unpruned: Also use checkpoints from before their pruning schedule ended.

    Raises:
        CheckpointError: If none is left, or a mask does not fit.
    """
    states = [_pruning_state(item) for item in ingredients]
    found = [state for state in states if state is not None and state.masks]
    if not found:
        return list(ingredients), None, []
    newest = max(reversed(found), key=lambda state: state.step)
    masks = {name: _unpack(packed, name, ingredients[0]) for name, packed in newest.masks.items()}
    usable, notes = [], []
    for item, state in zip(ingredients, states, strict=True):
        complete = state.complete if state is not None else _obeys(item, masks)
        if complete or keep_unpruned:
            usable.append(item)
        else:
            notes.append(f"left out: {item.name}, from before its pruning ended (--unpruned takes it in)")
    if not usable:
        raise CheckpointError(
            "eff soup: at least one checkpoint must be from after its pruning ended, got none; give later ones, or "
            "pass --unpruned"
        )
    notes.append(f"pruned: the newest mask (step {newest.step}) is applied to every candidate")

    return usable, functools.partial(_remask, masks), notes  # it pickles: processes re-apply masks too


@torch.no_grad()
def _remask(masks: Mapping[str, Tensor], state_dict: dict[str, Tensor]) -> None:
    for name, mask in masks.items():
        state_dict[name].masked_fill_(~mask, 0)


def _pruning_state(ingredient: Ingredient) -> _Pruned | None:
    if ingredient.path is None:
        return None
    if ingredient.kind in (HF_FOLDER, DISTRIBUTED) and (ingredient.path / STATE_FILE).exists():
        saved: Any = load_state(ingredient.path)
    elif ingredient.kind == LIGHTNING:
        saved = load_torch_file(ingredient.path).get("callbacks")
    elif ingredient.kind == DISTRIBUTED and (ingredient.path / LIGHTNING_META).exists():
        saved = load_torch_file(ingredient.path / LIGHTNING_META).get("callbacks")
    else:
        return None
    for state in _mappings(saved):
        techniques = state.get("techniques")
        prune = techniques.get("prune") if isinstance(techniques, Mapping) else None
        if isinstance(prune, Mapping) and isinstance(prune.get("masks"), Mapping):
            asked = state.get("recipe", {}).get("prune", {}).get("sparsity", 0.0)
            complete = bool(prune["masks"]) and float(prune.get("sparsity", 0.0)) >= float(asked)
            return _Pruned(int(state.get("step", 0)), dict(prune["masks"]), complete)
    return None


def _mappings(value: Any, depth: int = 4) -> list[Mapping[str, Any]]:
    """Return a mapping and the mappings in it: a callback's state lies under a key that the trainer chose."""
    if not isinstance(value, Mapping) or depth == 0:
        return []
    return [value, *(found for item in value.values() for found in _mappings(item, depth - 1))]


def _unpack(packed: Tensor, name: str, ingredient: Ingredient) -> Tensor:
    if not ingredient.has(name):
        raise CheckpointError(
            f"{ingredient.name}: checkpoint must hold {name!r}, which its mask is for, got no such tensor"
        )
    shape = ingredient.spec(name).shape
    if packed.numel() != packed_size(shape):
        raise CheckpointError(
            f"{ingredient.name}: mask of {name!r} must have {math.prod(shape)} bits, got {packed.numel()} bytes; its "
            "state file is of another model"
        )
    return unpack_mask(packed, shape)


def _obeys(ingredient: Ingredient, masks: Mapping[str, Tensor]) -> bool:
    """Return whether a checkpoint without a state file is zero wherever the mask is, as a pruned model is."""
    obeys = all(not ingredient.tensor(name)[~mask].any() for name, mask in masks.items())
    ingredient.close()
    return obeys
