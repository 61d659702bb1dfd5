"""What pruning tells in the receipt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shared_core.pruning.blocks import block_scores
from shared_core.pruning.config import PruneConfig
from shared_core.pruning.layer_limits import at_limit, limit_notes
from shared_core.pruning.mask_store import MaskStore
from shared_core.pruning.masks import count_kept
from shared_core.pruning.unit_pruning import UnitPruning

NOTES = {
    "unstructured": "Unstructured sparsity makes compressed files smaller; dense matrix products do not get faster.",
    "n_m": "2:4 is faster on GPUs with sparse tensor cores once converted; other patterns make files smaller.",
    "layer": "Masked layers cost as much as before, and `eff shrink` keeps them: take them out of the model's code.",
    "block": "Blocks are faster in block-sparse kernels at high sparsity alone; dense matrix products are not.",
}
"""By granularity; of the others `UNITS_NOTE`."""
UNITS_NOTE = "Masked units cost as much as before; `eff shrink` removes them, and makes the model smaller and faster."


def weights_report(weights: Mapping[str, Tensor], counted: Mapping[str, int]) -> dict[str, Any]:
    """Return how many weights are zero, of each tensor and in all, counted in the weights.

    Args:
        weights: By name.
        counted: By name the zeros of sharded weights as they were last counted: gathering needs every process, and a
            receipt is written by one.
    """
    tensors: list[dict[str, Any]] = []
    for name, weight in weights.items():
        sharded = hasattr(weight, "device_mesh")
        pruned = counted.get(name, 0) if sharded else weight.numel() - int(weight.detach().count_nonzero())
        entry = {"name": name, "shape": list(weight.shape), "numel": weight.numel(), "pruned": pruned}
        tensors.append({**entry, "sparsity": pruned / weight.numel()})
    numel, pruned = sum(entry["numel"] for entry in tensors), sum(entry["pruned"] for entry in tensors)
    return {"tensors": tensors, "numel": numel, "pruned": pruned, "sparsity": pruned / numel if numel else 0.0}


def layers_report(
    config: PruneConfig, weights: Mapping[str, Tensor], store: MaskStore, units: UnitPruning | None
) -> dict[str, Any]:
    """Return by which scope layers lost what they did, which of them could not give more, and what a user should know.

    Args:
        config: Granularity and scope.
        weights: Those within reach, by name.
        store: The masks.
        units: What is pruned where that is no weight.
    """
    capped: list[str] = []
    if config.layers_differ:
        layers = units.pruned(dict(store)) if units else {name: _pruned(config, store, name) for name in store}
        capped = at_limit(config.most_of_a_layer, config.sparsity, layers)
    counts = {name: (weights[name].numel(), store.num_pruned[name]) for name in store if name in weights}
    return {
        "scope": config.resolved_scope if config.layers_differ or config.granularity == "layer" else "local",
        "max_layer_sparsity": config.most_of_a_layer if config.layers_differ else None,
        "capped": capped,
        "notes": limit_notes(config.key, config.most_of_a_layer, capped, counts),
    }


def _pruned(config: PruneConfig, store: MaskStore, name: str) -> tuple[int, int]:
    """Return how many of what is pruned whole a weight has, and how many of them are gone."""
    if config.granularity != "block":
        return store.weights[name].numel(), store.num_pruned[name]
    tiles = block_scores(store[name].float(), config.block_size) > 0
    return tiles.numel(), tiles.numel() - count_kept(tiles)
