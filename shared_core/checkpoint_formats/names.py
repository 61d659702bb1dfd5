"""One set of names for ingredients of several formats: prefixes taken off, ties that a format cannot tell found."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shared_core.checkpoint_formats import ADAPTER, DISTRIBUTED, Ingredient


def under_same_names(ingredients: Sequence[Ingredient]) -> list[Ingredient]:
    """Return the ingredients under the names of the first, as far as only a prefix or the names of ties differ.

    Lightning's names start with the attribute that holds the model (``model.``), those of ``save_pretrained`` do not;
    a safetensors folder holds a tied tensor once, a ``.ckpt`` under all names, a distributed checkpoint as copies.
    """
    first, *others = ingredients
    # Adapters have PEFT's names everywhere.
    if any(item.kind == ADAPTER for item in ingredients):
        return list(ingredients)
    opened = [first, *(_without_prefix(other, first) for other in others)]
    if len({frozenset((*item.specs, *item.ties)) for item in opened}) == 1:
        return opened
    # A distributed checkpoint stores tied tensors as copies: ties show only by equal contents under names that others
    # lack.
    shared = set.intersection(*({*item.specs, *item.ties} for item in opened))
    opened = [_with_found_ties(item, shared) if item.kind == DISTRIBUTED else item for item in opened]
    return [opened[0], *(_with_ties_of(opened[0], other) for other in opened[1:])]


def _without_prefix(other: Ingredient, first: Ingredient) -> Ingredient:
    # One name tells the prefix: all others must then have it.
    mine, names = next(iter(first.specs)), [*other.specs, *other.ties]
    if mine in names:
        return other
    # Theirs has more in front (a wrapper's name): take it off.
    theirs = next((name for name in names if name.endswith(f".{mine}")), None)
    if theirs is not None:
        prefix = theirs.removesuffix(mine)
        if all(name.startswith(prefix) for name in names):
            return other.renamed(
                {name.removeprefix(prefix): name for name in other.specs},
                {name.removeprefix(prefix): owner.removeprefix(prefix) for name, owner in other.ties.items()},
            )
    # Mine has more: put it in front of theirs.
    mine_ends = next((name for name in names if mine.endswith(f".{name}")), None)
    if mine_ends is None:
        return other
    prefix = mine.removesuffix(mine_ends)
    return other.renamed(
        {prefix + name: name for name in other.specs},
        {prefix + name: prefix + owner for name, owner in other.ties.items()},
    )


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
