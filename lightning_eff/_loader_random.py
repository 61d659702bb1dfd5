"""Random state with that of generators which data loaders have for themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shared_core.state_file import rng_state, set_rng_state


def random_state(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the state of every random generator that training draws from, those of these loaders included."""
    return {**rng_state(), "loaders": generator_states(loaders)}


def set_random_state(state: Mapping[str, Any], loaders: Iterable[Any]) -> None:
    """Put generators back to where `random_state` found them; loaders without or with others keep theirs."""
    set_rng_state(state)
    for generator, saved in zip(_generators(loaders), state.get("loaders", ()), strict=False):
        generator.set_state(saved)


def generator_states(loaders: Any) -> list[torch.Tensor]:
    """Return the states of loaders' own generators; `loaders` may be nested, as `train_dataloader` returns them."""
    return [generator.get_state() for generator in _generators(loaders)]


def _generators(loaders: Any) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for loader in tree_leaves(getattr(loaders, "flattened", loaders)):
        batches = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                found[id(generator)] = generator
    return list(found.values())
