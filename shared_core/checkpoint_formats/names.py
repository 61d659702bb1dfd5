"""One set of names for ingredients of several formats: prefixes taken off, ties that a format cannot tell found."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from shared_core.checkpoint_formats import ADAPTER, DISTRIBUTED, Ingredient
from shared_core.checkpoint_formats.plain import is_made_by_model
from shared_core.modules.matching import plain_name

# What a layer's tensors were called by earlier versions of transformers and torch.
_EARLIER = {
    "gamma": "weight",
    "beta": "bias",
    "weight_g": "parametrizations.weight.original0",
    "weight_v": "parametrizations.weight.original1",
}


def present_name(name: str) -> str:
    """Return a tensor's name without the parts that wrappers insert, as present versions call it.

    Example:
        >>> present_name("module.encoder._orig_mod.LayerNorm.gamma")
        'encoder.LayerNorm.weight'
    """
    holder, dot, last = plain_name(name).rpartition(".")
    return f"{holder}{dot}{_EARLIER.get(last, last) if holder else last}"


def named_as(names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Return for each name the one of `wanted` that means the same tensor, or itself where none does.

    They may differ in what wrappers insert and earlier versions wrote, and in a prefix that all names of one side have:
    Lightning's start with the attribute that holds the model (``model.``), those of ``save_pretrained`` do not.

    Example:
        >>> named_as(["model.0._orig_mod.weight", "model.0.bias"], ["0.weight", "0.bias"])
        {'model.0._orig_mod.weight': '0.weight', 'model.0.bias': '0.bias'}
    """
    if not names or {*names} == {*wanted}:
        return {name: name for name in names}
    for call in (present_name, plain_name, str):
        theirs, mine = {call(name): name for name in names}, {call(name): name for name in wanted}
        found = {theirs[called]: mine.get(own, own) for called, own in _without_prefix(theirs, mine).items()}
        # Two names that become one are two tensors.
        if len({*found.values()}) == len(names) and len(mine) == len(wanted):
            break
    return found


def _without_prefix(names: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    # One name shows the prefix: all others must have it.
    unchanged = {name: name for name in names}
    mine = next((name for name in wanted if not is_made_by_model(name, ())), None)
    if mine is None or mine in names:
        return unchanged
    # Theirs has more in front (a wrapper's name): take it off.
    theirs = next((name for name in names if name.endswith(f".{mine}")), None)
    if theirs is not None:
        prefix = theirs.removesuffix(mine)
        if all(name.startswith(prefix) for name in names):
            return {name: name.removeprefix(prefix) for name in names}
    # Mine has more: put it in front of theirs.
    mine_ends = next((name for name in names if mine.endswith(f".{name}")), None)
    return unchanged if mine_ends is None else {name: mine.removesuffix(mine_ends) + name for name in names}


def under_same_names(ingredients: Sequence[Ingredient]) -> list[Ingredient]:
    """Return the ingredients under the names of the first, as far as only the names of ties, or `named_as`, differ.

    A safetensors folder holds a tied tensor once, a ``.ckpt`` under all names, a distributed checkpoint as copies.
    Buffers that a model makes by itself are those of the first, as files of other versions lack them or have more.
    """
    first, *others = ingredients
    # Adapters have PEFT's names everywhere.
    if any(item.kind == ADAPTER for item in ingredients):
        return list(ingredients)
    opened = [first, *(_with_buffers_of(first, _with_names_of(first, other)) for other in others)]
    if len({frozenset((*item.specs, *item.ties)) for item in opened}) == 1:
        return opened
    # A distributed checkpoint stores tied tensors as copies: ties show only by equal contents under names that others
    # lack.
    shared = set.intersection(*({*item.specs, *item.ties} for item in opened))
    opened = [_with_found_ties(item, shared) if item.kind == DISTRIBUTED else item for item in opened]
    return [opened[0], *(_with_ties_of(opened[0], other) for other in opened[1:])]


def _with_names_of(first: Ingredient, other: Ingredient) -> Ingredient:
    names = named_as([*other.specs, *other.ties], [*first.specs, *first.ties])
    if all(name == own for name, own in names.items()):
        return other
    return other.renamed(
        {names[name]: name for name in other.specs}, {names[tie]: names[owner] for tie, owner in other.ties.items()}
    )


def _with_buffers_of(first: Ingredient, other: Ingredient) -> Ingredient:
    made = {
        name: mine
        for mine, its in ((True, first), (False, other))
        for name, spec in its.specs.items()
        if is_made_by_model(name, spec.shape) and not (other if mine else first).has(name)
    }
    tied = {*other.ties.values()}
    left_out = {name for name, mine in made.items() if not mine and name not in tied}
    lent = {name: first.tensor(name).clone() for name, mine in made.items() if mine}
    first.close()
    return other.fitted(lent, left_out) if lent or left_out else other


def _with_found_ties(item: Ingredient, shared: set[str]) -> Ingredient:
    """Return an ingredient whose further copies of a tensor, under names that others lack, are ties."""
    ties = {}
    for name in (name for name in item.specs if name not in shared):
        twin = next(
            (key for key in item.specs if key in shared and item.spec(key) == item.spec(name)
             and torch.equal(item.tensor(key), item.tensor(name))), None,
        )  # fmt: skip
        if twin is not None:
            ties[name] = twin
    return item.renamed({name: name for name in item.specs if name not in ties}, {**item.ties, **ties})


def _with_ties_of(first: Ingredient, other: Ingredient) -> Ingredient:
    """Return `other` with the names that `first` has for its tied tensors, where one of them is its own."""
    names: dict[str, str] = {}
    ties: dict[str, str] = {}
    # The first's tensors, each with all its names.
    groups = {frozenset({name}) for name in first.specs if name not in first.ties.values()} | first.tied_groups
    for group in groups:
        held = sorted(name for name in group if other.has(name))
        owner = next((name for name in first.specs if name in group), "")
        # No name of the group, or names that are two tensors there: not the same ties.
        if not held or len({other.ties.get(name, name) for name in held}) > 1:
            return other  # of another model, or not tied: the check says which
        names[owner] = held[0]
        ties.update(dict.fromkeys(sorted(group - {owner}), owner))
    taken = {other.ties.get(name, name) for name in names.values()}
    # Every tensor of the other must be used, and once: else renaming would hide a difference.
    if len(taken) < len(names) or taken != set(other.specs):
        return other
    return other.renamed({name: names[name] for name in first.specs}, ties)
