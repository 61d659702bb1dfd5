"""Segments of blocks whose activations are computed again in backward, in a model whose forward stays as it is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_core.activation_checkpointing.blocks import find_blocks as find_blocks
from shared_core.activation_checkpointing.moving_buffers import Buffer, Snapshot
from shared_core.activation_checkpointing.regions import Contexts, Region
from shared_core.activation_checkpointing.tally import Tally
from shared_core.errors import CompatibilityError, MatchError, TrainingError, nearest
from shared_core.module_match import plain_name


class Handle:
    """What was wrapped, what ran since, and the way back.

    Attributes:
        segments: Names of the blocks of each segment.
        tally: Counts of what ran.
    """

    def __init__(self, segments: tuple[tuple[str, ...], ...], tally: Tally, wrapped: list[_Checkpointed]) -> None:
        self.segments, self.tally, self._wrapped = segments, tally, wrapped

    @property
    def names(self) -> list[str]:
        """The wrapped blocks, by name."""
        return [name for segment in self.segments for name in segment]

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The wrapped blocks themselves; none once they are removed."""
        return {wrapped.name: wrapped.block for wrapped in self._wrapped}

    def remove(self) -> None:
        """Give the blocks their own forward back; a second call does nothing."""
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped = []


def apply_segments(model: nn.Module, segments: Sequence[Sequence[str]], *, contexts: Contexts | None = None) -> Handle:
    """Return the handle of a model whose segments drop their activations in forward and recompute them in backward.

    Of a segment only its input is kept; blocks in no segment keep their activations. Gradients are bit-equal to those
    without: random state, autocast and buffers are as they were. Where a block's input is not the output of the one
    before, as it is, the segment is cut there. Evaluation, and forwards without gradients, are left alone.

    Args:
        model: Changed in place: its blocks get a forward of their own; parameters, buffers and classes stay.
        segments: Names of blocks, as in ``named_modules()``, that run one after another.
        contexts: What forward and recomputation of a block run in; for segments of one block.

    Raises:
        MatchError: If nothing is named, or a name is unknown.
        CompatibilityError: If a block is checkpointed already, by anyone, or named twice, or lies inside another.
        TrainingError: In training, if a block changes what it must not.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)))
        >>> handle = apply_segments(net, [["0", "1"], ["2"]])
        >>> net(torch.ones(2, 4)).sum().backward()
        >>> handle.tally.recomputations, dict(handle.tally.blocks)
        (2, {'2': 1, '0': 1, '1': 1})
        >>> handle.remove()
    """
    chosen = tuple(tuple(segment) for segment in segments if segment)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    blocks = _checked(model, modules, chosen)
    tally = Tally()
    wrapped: list[_Checkpointed] = []
    for segment in chosen:
        shared = _Segment(len(segment), tally, contexts)
        wrapped += [_Checkpointed(name, blocks[name], shared, place) for place, name in enumerate(segment)]
    return Handle(chosen, tally, wrapped)


def _checked(
    model: nn.Module, modules: dict[str, nn.Module], segments: tuple[tuple[str, ...], ...]
) -> dict[str, nn.Module]:
    names = [name for segment in segments for name in segment]
    if not names:
        raise MatchError("checkpointing: segments must name at least one block, got none")
    for name in names:
        if name not in modules:
            raise MatchError(f"checkpointing: segments must name modules, got {name!r}{nearest(name, modules)}")
    blocks = {name: modules[name] for name in names}
    inside = [id(module) for block in blocks.values() for module in block.modules()]
    if len(blocks) < len(names) or len(set(inside)) < len(inside):
        raise CompatibilityError(
            "checkpointing: segments must name every block once and none inside another, got "
            f"{', '.join(_overlapping(names, blocks))}; it would be recomputed twice"
        )
    for name, module in model.named_modules():
        own = "forward" in vars(module) and isinstance(vars(module)["forward"], _Checkpointed)
        if own or getattr(module, "gradient_checkpointing", False) or type(module).__name__ == "CheckpointWrapper":
            raise CompatibilityError(
                f"checkpointing: {plain_name(name) or type(model).__name__} must not be checkpointed already, by the "
                "trainer, the model or an earlier call; it would be recomputed twice; leave out one of them"
            )
    return blocks


def _overlapping(names: list[str], blocks: dict[str, nn.Module]) -> list[str]:
    seen: set[int] = set()
    found = []
    for name in sorted(names, key=len):
        parts = {id(module) for module in blocks[name].modules()}
        if parts & seen or names.count(name) > 1:
            found.append(name)
        seen |= parts
    return sorted(set(found))


class _Segment:
    """What the blocks of a segment share: the region that is being recorded."""

    def __init__(self, length: int, tally: Tally, contexts: Contexts | None) -> None:
        self.length, self.tally, self.contexts = length, tally, contexts
        self._open: weakref.ref[Region] | None = None  # the graph owns it: without saved tensors nothing is recomputed
        self._last = -1

    def region(self, place: int, args: Any) -> Region:
        """Return the region that a call belongs to: the open one if the call goes on from its last output."""
        region = self._open() if self._open is not None else None
        if region is None or place <= self._last or not region.feeds(args):
            region = Region(self.tally)
        self._open = weakref.ref(region) if place + 1 < self.length else None
        self._last = place
        return region

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": None}


class _Checkpointed:
    """The forward of a checkpointed block. An instance, so that models can be copied and pickled."""

    def __init__(self, name: str, block: nn.Module, segment: _Segment, place: int) -> None:
        self.name, self.block, self.segment, self.place = name, block, segment, place
        self.moving: set[Buffer] | None = None
        self.before = vars(block).get("forward")
        block.forward = self  # type: ignore[method-assign]

    def remove(self) -> None:
        if vars(self.block).get("forward") is self:
            del self.block.forward
            if self.before is not None:
                self.block.forward = self.before

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward: that of its class now, which another technique may have swapped."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        self.segment.tally.reached = True
        if not self.block.training:
            return self.run(*args, **kwargs)
        args, kwargs = self._without_cache(args, kwargs)
        if torch.compiler.is_compiling() and self.segment.length > 1:
            self.segment.tally.uncompiled = True
        elif torch.compiler.is_compiling():
            self.segment.tally.compiled = True
            if self.segment.contexts is None:
                return checkpoint(self.run, *args, use_reentrant=False, **kwargs)
            return checkpoint(self.run, *args, use_reentrant=False, context_fn=self.segment.contexts, **kwargs)
        return self._record(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.segment.tally.uncompiled:
            self.segment.tally.note("segments of several blocks run uncompiled; take a policy of single blocks")
        region = self.segment.region(self.place, (args, kwargs))
        snapshot = Snapshot(self.block, self.moving)
        output = region.call(self.name, self.block, self.run, args, kwargs, snapshot, self.segment.contexts)
        self.moving = (self.moving or set()) | set(snapshot.before)
        return output

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Leave out a generation cache, as transformers does under checkpointing: run again, it would grow twice."""
        if getattr(self.block, "_can_checkpoint_with_cache", False):  # it only reads
            return args, kwargs
        kwargs = {name: None if self._is_cache(value) else value for name, value in kwargs.items()}
        if kwargs.get("use_cache") is True:
            kwargs["use_cache"] = False
        return tuple([None if self._is_cache(value) else value for value in args]), kwargs

    def _is_cache(self, value: Any) -> bool:
        if not hasattr(value, "get_seq_length"):
            return False
        numbers = [number for part in self.block.modules() if (number := getattr(part, "layer_idx", None)) is not None]
        if value.get_seq_length(*numbers[:1]) > 0:
            raise TrainingError(
                f"checkpointing: {self.name}: past_key_values must be empty in training, got a filled cache; it would "
                "be read and written twice; leave the block out"
            )
        self.segment.tally.note("generation caches are off in checkpointed blocks while training")
        return True
