"""The memory of a run of a model that is there, counted on its parameters as techniques left them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from shared_core.config import TechniqueConfig
from shared_core.model_calls import call
from shared_core.scale.cost import Cost
from shared_core.scale.run import Attention, PlannedRun
from shared_core.scale.shape import ModelShape
from shared_core.scale.techniques import COSTS, activation_bytes


def counted_costs(
    model: nn.Module,
    run: PlannedRun,
    recipe: Mapping[str, TechniqueConfig],
    *,
    touched: Mapping[str, int],
    shape: ModelShape | None = None,
    activations: int | str | None = None,
) -> list[Cost]:
    """Return what a run needs of one device: weights, gradients and moments counted, techniques by formula.

    Args:
        model: As techniques attached to it, on any device.
        run: One process's; its precision decides activations alone, weights have the type that they have.
        recipe: Techniques by key.
        touched: Elements that each technique acts on.
        shape: Of a transformer, which tells activations and logits.
        activations: Bytes that autograd keeps, as `saved_bytes` counted, or why nobody knows; wins over `shape`.

    Example:
        >>> costs = counted_costs(nn.Linear(8, 4, bias=False), PlannedRun(), {}, touched={}, activations=64)
        >>> {cost.what: cost.held + cost.during for cost in costs}
        {'weights': 128.0, 'moments of adamw': 256.0, 'gradients': 128.0, 'activations': 64.0}
    """
    parameters = list(model.parameters())
    learned = [parameter for parameter in parameters if parameter.requires_grad]
    beside = run.moment_bytes - run.moments * run.weight_bytes
    moments = sum(run.moments * parameter.nbytes + beside * parameter.numel() for parameter in learned)
    costs = [
        Cost("weights", held=float(_bytes([*parameters, *model.buffers()])), why="counted, buffers too"),
        Cost(f"moments of {run.optimizer}", held=moments, why="of what has a gradient"),
        Cost("gradients", during=float(_bytes(learned)), why="counted"),
    ]
    if isinstance(activations, str):
        costs.append(Cost("activations", why=f"not told: {activations}"))
    elif activations is not None:
        costs.append(Cost("activations", during=float(activations), why="what autograd keeps of the example inputs"))
    elif shape is not None:
        run = replace(run, attention=attention_of(model))
        during, host = activation_bytes(recipe, shape, run)
        logits = run.tokens * shape.vocab * (run.compute_bytes + 8.0)
        scores = " + 3·c·T·L·s·heads" if run.attention == "eager" else ""
        why = f"a·T·L·h{scores} of {run.tokens:,} tokens; logits T·V·(c + 8)"
        costs.append(Cost("activations and logits", during=during + logits, host=host, why=why))
    else:
        why = "not told: return (model, example_inputs) from the function, or give a folder of a language model"
        costs.append(Cost("activations", why=why))
    number = sum(parameter.numel() for parameter in parameters)
    for key, config in recipe.items():
        rest = max(number - touched.get(key, 0), 0)
        own = ModelShape(params=number, layers=1, hidden=1, vocab=rest, embeddings=rest)
        costs += COSTS[key](config, shape if key == "distill" and shape is not None else own, run)
    return costs


def attention_of(model: nn.Module) -> Attention:
    """Return whether a model's attention is ``eager``, by what transformers notes in its config, or else ``fused``."""
    return "eager" if getattr(getattr(model, "config", None), "_attn_implementation", None) == "eager" else "fused"


def saved_bytes(model: nn.Module, example_inputs: Any) -> int:
    """Return the bytes that autograd keeps between forward and backward, parameters and buffers left out.

    Example:
        >>> saved_bytes(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.ones(2, 8))
        96
    """
    device = next(model.parameters()).device
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), example_inputs)
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}  # storages are held, so that no other takes the address of one that was let go

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        call(model.train(), inputs)
    return sum(storage.nbytes() for storage in kept.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
