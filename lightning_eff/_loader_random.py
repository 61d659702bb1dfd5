"""Random state with that of generators which data loaders have for themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shared_core.state_file import rng_state, set_rng_state


def random_state(loaders: Any) -> dict[str, Any]:
    """Return the state of every random generator that training draws from, those of these loaders included.

    Args:
        loaders: Nested as `train_dataloader` returns them, or a flat list.
    """
    return {**rng_state(), "loaders": [generator.get_state() for generator in _generators(loaders)]}


def set_random_state(state: Mapping[str, Any], loaders: Iterable[Any]) -> None:
    """Put generators back to where `random_state` found them; loaders without or with others keep theirs."""
    set_rng_state(state)
    for generator, saved in zip(_generators(loaders), state.get("loaders", ()), strict=False):
        generator.set_state(saved)


def _generators(loaders: Any) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for loader in tree_leaves(getattr(loaders, "flattened", loaders)):
        batches = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                found[id(generator)] = generator
    return list(found.values())
