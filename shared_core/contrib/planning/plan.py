"""The memory of a run of a model that is there, counted on its parameters as techniques left them.

The sum of what a run needs: weights, gradients, moments, activations, traffic, and each technique's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from shared_core.config.options import TechniqueConfig
from shared_core.contrib.planning.costs import memory_costs, reshaped, resized
from shared_core.contrib.planning.sizes import Attention, Cost, ModelShape, PlannedRun, SharedSizes
from shared_core.engine.registry import in_order
from shared_core.errors import ConfigError
from shared_core.modules.calls import call


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
    # Moments in the weights' own bytes, and what an optimizer keeps beside them in fixed bytes an element.
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
        sizes = _shared_sizes(recipe, shape, run)
        scores = " + 3·c·T·L·s·heads" if run.attention == "eager" else ""
        why = f"a·T·L·h{scores} of {run.tokens:,} tokens; logits T·V·(c + 8)"
        during = sizes.activations + sizes.logits
        costs.append(Cost("activations and logits", during=during, host=sizes.on_host, why=why))
    else:
        why = "not told: return (model, example_inputs) from the function, or give a folder of a language model"
        costs.append(Cost("activations", why=why))
    number = sum(parameter.numel() for parameter in parameters)
    for key, config in recipe.items():
        # Formulas go by layers and hidden size; for a model that is there, one layer of all its parameters gives the
        # count, and what a technique does not touch goes as embeddings, which its formulas leave alone.
        rest = max(number - touched.get(key, 0), 0)
        own = ModelShape(params=number, layers=1, hidden=1, vocab=rest, embeddings=rest)
        # logits go by the model's vocabulary, and not by the parameters that the technique touches
        costs += memory_costs(config, shape if key == "distill" and shape is not None else own, run)
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
    # Parameters and buffers are there anyway. Their storages, so that views of them are known.
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}  # storages are held, so that no other takes the address of one that was released

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    # Train mode: dropout masks are kept, too.
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        call(model.train(), inputs)
    return sum(storage.nbytes() for storage in kept.values())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclass(frozen=True)
class Plan:
    """The memory of each device, its worst moment, and the bytes that it sends in an optimizer step."""

    costs: tuple[Cost, ...]

    @property
    def held(self) -> float:
        """Bytes that stay from step to step."""
        return sum(cost.held for cost in self.costs)

    @property
    def peak(self) -> float:
        """Bytes at the worst moment: all that is held, and all that lives within a step at once, which is a bound."""
        return self.held + sum(cost.during for cost in self.costs)

    @property
    def host(self) -> float:
        """Bytes that stay in the host's memory, a rank."""
        return sum(cost.host for cost in self.costs)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in an optimizer step."""
        return sum(cost.sent for cost in self.costs)


def plan(shape: ModelShape, run: PlannedRun, recipe: Mapping[str, TechniqueConfig] | None = None) -> Plan:
    """Return what a run needs of each device.

    With P parameters in w bytes, N = R ranks that cut under FSDP2 (else 1), T tokens a forward, L blocks of width h,
    V tokens in the vocabulary, c bytes a computed value, A micro-batches a step:

    - held: ``P·w/N`` weights, ``P·m/N`` moments, and DDP's buckets ``P·w``;
    - within a step: ``P·w/N`` gradients, ``a·T·L·h`` activations (a = 42 in 16 bit, 54 mixed, 79 in fp32: measured
      on Llama), with ``3·c·T·L·s·heads`` scores of s tokens where attention is eager, ``T·V·(c + 8)`` logits; under
      FSDP2 two gathered blocks with one's gradients, embeddings and head; in mixed precision without FSDP2 16-bit
      copies of the blocks' weights;
    - sent: DDP ``2·(R-1)/R·P·w``; FSDP2 ``(R-1)/R·c`` bytes a parameter gathered in forward, again in backward for what
      lies in blocks, and reduced, A times.

    Args:
        shape: The model.
        run: How it is trained.
        recipe: Techniques by key.

    Raises:
        ConfigError: If attention is eager, and `shape` has no heads.

    Source: Korthikanti et al., 2022, arXiv:2205.05198, equation 2 for activations; Rajbhandari et al., 2020,
    arXiv:1910.02054, section 7 for traffic.

    Example:
        >>> run = PlannedRun(ranks=64, strategy="fsdp2", seq_len=4096)
        >>> needs = plan(ModelShape.of_params(70e9), run)
        >>> round(needs.held / 2**30, 1), round(needs.peak / 2**30), round(needs.sent / 1e9)
        (12.2, 156, 412)
    """
    if run.attention == "eager" and not shape.heads:
        raise ConfigError("plan", "heads must be given with eager attention, got 0", "say how many ModelShape has")
    recipe = recipe or {}
    for config in recipe.values():
        shape = reshaped(config, shape)
    own = [cost for config in recipe.values() for cost in memory_costs(config, shape, run)]
    return Plan((*_base(shape, run, _shared_sizes(recipe, shape, run)), *own))


def _shared_sizes(recipe: Mapping[str, TechniqueConfig], shape: ModelShape, run: PlannedRun) -> SharedSizes:
    sizes = SharedSizes.of(shape, run)
    for key in in_order(recipe):
        sizes = resized(recipe[key], sizes, shape, run)
    return sizes


def _base(shape: ModelShape, run: PlannedRun, sizes: SharedSizes) -> list[Cost]:
    learned, computed = sizes.trained, run.compute_bytes
    gradients = learned * run.weight_bytes
    scores = " + 3·c·T·L·s·heads, attention is eager" if run.attention == "eager" else ""
    costs = [
        Cost("weights", held=sizes.weights / run.parts, why="P·w/N"),
        Cost(f"moments of {run.optimizer}", held=learned * run.moment_bytes / run.parts, why="P·m/N"),
        Cost("gradients", during=gradients / run.parts, why="P·w/N"),
        Cost("activations", during=sizes.activations, host=sizes.on_host, why=f"a·T·L·h{scores}"),
    ]
    if sizes.logits:
        costs.append(Cost("logits", during=sizes.logits, why="T·V·(c + 8)"))
    if run.strategy == "ddp":
        # DDP's buckets are a copy of all gradients.
        sent, why = 2 * run.ring(gradients), "buckets P·w; all-reduced once a step, 2·(R-1)/R·P·w"
        costs.append(Cost("DDP", held=gradients, sent=sent, why=why))
    if run.strategy == "fsdp2":
        # While one block is computed the next is gathered, and one block's gradients wait to be reduced.
        around = computed * (3 * shape.block + shape.embeddings)
        # Forward and backward gather blocks once each; what lies outside blocks stays gathered; gradients are
        # scattered once.
        passes = computed * (2 * shape.matrices + shape.embeddings + learned)
        why = "two gathered blocks, gradients of one, what lies outside blocks; (R-1)/R·c·(2·P_blocks + P_rest + P)·A"
        costs.append(Cost("FSDP2", during=around, sent=run.accumulate * run.ring(passes), why=why))
    elif run.precision == "mixed":
        costs.append(Cost("autocast", during=2.0 * shape.matrices, why="16-bit copies of the blocks' weights"))
    return costs
