"""Which segments a named policy makes of a model's blocks."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from shared_core.activation_checkpointing.config import BUDGET, check_policy
from shared_core.activation_checkpointing.memory_budget import plan_segments
from shared_core.activation_checkpointing.model_blocks import find_blocks
from shared_core.activation_checkpointing.segments import Handle, apply_segments, selective_contexts
from shared_core.errors import ConfigError, MatchError, nearest
from shared_core.modules.matching import own_class, plain_name


def apply_policy(
    model: nn.Module, policy: str, example_inputs: Any = None, *, k: int = 2, include: Iterable[str] = ()
) -> Handle:
    """Return the handle of a model that recomputes activations in backward, chosen by name.

    Gradients are bit-equal to those without; see `apply_segments`. Call it before ``fully_shard``, DDP and
    ``torch.compile``. With N blocks:

    - ``block``: each is recomputed from its input.
    - ``sublayer``: of each only attention, whose memory grows fastest; its largest part where it has none.
    - ``sqrt``: √N segments of consecutive blocks are recomputed from their inputs (Chen et al. 2016, arXiv:1604.06174).
    - ``stage``: a segment for each resolution of a CNN; it begins at the block that down-samples.
    - ``every_k``: every k-th block, the first one included, as ``every_n_layers`` of transformers.
    - ``selective``: each block, but outputs of its matrix products are kept (Korthikanti et al. 2022,
      arXiv:2205.05198).
    - ``budget:...``: planned from a profile of one step on `example_inputs`, see `parse_budget`.

    Args:
        model: Changed in place: its blocks get a forward of their own; parameters, buffers and classes stay.
        policy: A name of `POLICIES`, or ``budget:...``.
        example_inputs: One micro-batch, ``(args, kwargs)``; for a budget alone.
        k: Of ``every_k``, at least 1.
        include: Names or classes of the blocks, with wildcards, in place of those that `find_blocks` finds. Of modules
            inside each other the outermost are meant.

    Returns:
        What was wrapped, what ran since, and ``remove()``.

    Raises:
        ConfigError: If there is no such policy, or a budget has no example.
        MatchError: If it matches nothing.
        CompatibilityError: If the model is checkpointed already.

    Example:
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9)))
        >>> handle = apply_policy(net, "sqrt")
        >>> handle.segments
        (('0', '1', '2'), ('3', '4', '5'), ('6', '7', '8'))
        >>> handle.remove()
        >>> apply_policy(net, "every_k", k=4).names
        ['0', '4', '8']
    """
    check_policy(policy)
    blocks = chosen_blocks(model, include)
    if policy.startswith(BUDGET):
        if example_inputs is None:
            raise ConfigError(
                "checkpointing",
                f"example_inputs must be one micro-batch for policy {policy}, got None",
                "pass (args, kwargs)",
            )
        return apply_segments(model, plan_segments(model, policy, example_inputs, names=blocks).segments)
    contexts = selective_contexts if policy == "selective" else None
    return apply_segments(model, _segments(model, policy, blocks, k), contexts=contexts)


def chosen_blocks(model: nn.Module, include: Iterable[str] = ()) -> list[str]:
    """Return the names of the blocks that are meant: those of `include`, or those that `find_blocks` finds."""
    return _included(model, tuple(include)) if include else find_blocks(model)


def _segments(model: nn.Module, policy: str, blocks: Sequence[str], k: int) -> list[list[str]]:
    if policy == "sqrt":
        # √n segments of about √n blocks: n inputs become √n, plus one segment's activations (Chen et al. 2016,
        # arXiv:1604.06174).
        number = round(math.sqrt(len(blocks)))
        edges = [round(place * len(blocks) / number) for place in range(number + 1)]
        return [list(blocks[low:high]) for low, high in itertools.pairwise(edges)]
    if policy == "stage":
        return _stages(model, blocks)
    if policy == "sublayer":
        modules = {plain_name(name): module for name, module in model.named_modules()}
        return [[name] for block in blocks for name in _sublayers(block, modules[block])]
    return [[name] for name in blocks[:: k if policy == "every_k" else 1]]


def _sublayers(name: str, block: nn.Module) -> list[str]:
    """Return the outermost attention layers of a block, or else its part with most parameters."""
    found: list[str] = []
    for part, module in block.named_modules():
        is_attention = part and "attention" in type(module).__name__.lower().replace("attn", "attention")
        if is_attention and not any(part.startswith(f"{outer}.") for outer in found):
            found.append(part)
    sizes = {
        part: sum(parameter.numel() for parameter in child.parameters())
        for part, child in block.named_children()
        if _runs(child) and next(child.children(), None) is not None
    }
    if not found and not any(sizes.values()):
        raise MatchError(
            "checkpointing",
            f"sublayer: {name} must have attention or another part made of several modules, got none",
            "take block",
        )
    return [f"{name}.{part}" for part in found or [max(sizes, key=sizes.__getitem__)]]


def _runs(module: nn.Module) -> bool:
    """Return True if a module has a forward: lists and dicts of modules, LoRA's among them, have none."""
    # static: a scripted module's class computes its attributes
    return inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _stages(model: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    """Return the blocks by resolution: a list of the model, or a stride, begins a new one."""
    segments: list[list[str]] = []
    for name in blocks:
        # A new resolution has activations of another size: a segment of one size holds only its first input.
        is_next = not segments or segments[-1][-1].rpartition(".")[0] != name.rpartition(".")[0]
        if is_next or _down_samples(model.get_submodule(name)):
            segments.append([])
        segments[-1].append(name)
    if len(segments) == 1:
        raise MatchError(
            "checkpointing",
            "stage: blocks must change the resolution somewhere, got one stage with all of them",
            "take sqrt",
        )
    return segments


def _down_samples(block: nn.Module) -> bool:
    strides = (
        getattr(module, "stride", 1)
        for module in block.modules()
        if not isinstance(module, nn.modules.conv._ConvTransposeNd)
    )
    return any(max(stride) > 1 if isinstance(stride, tuple) else stride not in (None, 1) for stride in strides)


def _included(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    modules = {plain_name(name): module for name, module in model.named_modules() if name}

    def hits(name: str, pattern: str) -> bool:
        return fnmatch.fnmatchcase(name, pattern) or own_class(modules[name]).__name__ == pattern

    for pattern in patterns:
        if not any(hits(name, pattern) for name in modules):
            known = {*modules, *(own_class(module).__name__ for module in modules.values())}
            raise MatchError("checkpointing", f"include pattern {pattern!r} matches no module{nearest(pattern, known)}")
    chosen: list[str] = []
    lists: list[str] = []
    for name in modules:  # a module before what it is made of: the outermost are meant
        # of a list that is named its modules are meant
        is_named = any(hits(name, pattern) for pattern in patterns) or name.rpartition(".")[0] in lists
        if is_named and not any(name.startswith(f"{o}.") for o in chosen):
            (chosen if _runs(modules[name]) else lists).append(name)
    return chosen
