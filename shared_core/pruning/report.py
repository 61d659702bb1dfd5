"""What pruning tells in the receipt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

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
