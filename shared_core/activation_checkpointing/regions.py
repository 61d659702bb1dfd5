"""A region: calls of blocks whose saved tensors are dropped in forward and computed again in backward."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shared_core.activation_checkpointing.moving_buffers import Snapshot
from shared_core.activation_checkpointing.selective import KeptBytes
from shared_core.activation_checkpointing.surroundings import Surroundings
from shared_core.activation_checkpointing.tally import Tally
from shared_core.errors import TrainingError

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns what the forward and its recomputation run in, as `create_selective_checkpoint_contexts` does."""


class _Done(BaseException):
    """Everything that backward needs was computed; no `except Exception` of a model may catch it."""


class _Slot:
    """Stands in the graph for a tensor that was dropped."""

    __slots__ = ("__weakref__", "value", "version")

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.version = 0


class _Input:
    """A tensor from outside the region. Detached: with its graph it would keep itself alive through the region."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.requires_grad, self.version = tensor.detach(), tensor.requires_grad, version_of(tensor)

    def is_changed(self) -> bool:
        return version_of(self.tensor) != self.version


@dataclass(frozen=True)
class _Output:
    """The `leaf`-th value that the `call`-th call of the region returned."""

    call: int
    leaf: int


@dataclass
class _Call:
    """One block's forward, as it must be run again."""

    name: str
    block: nn.Module
    run: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    buffers: Snapshot
    recompute_context: AbstractContextManager[Any]
    weights: int
    surroundings: Surroundings


class Region:
    """Calls that feed each other, run again together by the first of their saved tensors that backward asks for.

    What non-reentrant `torch.utils.checkpoint` does for one function, for several calls made by somebody else's loop:
    hooks are active inside the calls only, so what the loop itself does in between is kept as ever.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.calls: list[_Call] = []
        self._slots: list[tuple[weakref.ref[_Slot], tuple[Any, ...]]] = []
        self._outputs: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], int, _Output]] = {}
        self._last = _Output(-1, -1)
        self._kept_elsewhere = 0
        # by weak references, as an address can be that of another tensor soon
        self._packed: list[StorageWeakRef] | None = None if tally.has_measured else []
        self._handed_on: set[int] = set()

    def _source(self, value: Tensor) -> _Output | None:
        """Return where in this region a tensor was computed, None if elsewhere or if it was changed since.

        By its memory, as FSDP2 hands a block another tensor over the same.
        """
        reference, version, output = self._outputs.get(_place(value), (None, 0, None))
        computed = reference() if reference is not None else None
        same = computed is not None and computed.requires_grad == value.requires_grad and version == version_of(value)
        return output if same else None

    def feeds(self, args: Any) -> bool:
        """Return whether the last call's first tensor is among these arguments, unchanged."""
        return any(self._source(value) == self._last for value in tree_flatten(args)[0] if isinstance(value, Tensor))

    def call(
        self,
        name: str,
        block: nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        snapshot: Snapshot,
        contexts: Contexts | None = None,
    ) -> Any:
        """Return ``run(*args, **kwargs)``, the forward of `block`, and keep what is needed to run it again."""
        values, spec = tree_flatten((args, kwargs))
        inputs: dict[int, _Input] = {}  # one for each tensor: attention asks whether query `is` key
        computed: dict[_Output, Tensor] = {}

        def leaf_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            source = self._source(value)
            if source is not None and computed.setdefault(source, value) is value:
                return source
            return inputs.setdefault(id(value), _Input(value))

        leaves = [leaf_of(value) for value in values]
        forward_context, recompute_context = contexts() if contexts else (contextlib.nullcontext(),) * 2
        call = _Call(
            name, block, run, leaves, spec, snapshot, recompute_context, _weights_version(block), Surroundings(values)
        )
        kept = KeptBytes() if contexts else None  # type: ignore[no-untyped-call]
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, kept or contextlib.nullcontext(), forward_context:
            output = run(*args, **kwargs)
        snapshot.close()
        self._kept_elsewhere += kept.num_bytes if kept else 0
        for kept_input in inputs.values():
            if kept_input.is_changed():
                raise _changed(name, "its input must not be changed in place inside it", "inplace=False helps")
        found = [(leaf, value) for leaf, value in enumerate(tree_flatten(output)[0]) if isinstance(value, Tensor)]
        for leaf, value in found:
            self._outputs[_place(value)] = weakref.ref(value), version_of(value), _Output(len(self.calls), leaf)
        self._handed_on = {_storage(value) for _, value in found}
        self._last = _Output(len(self.calls), found[0][0] if found else -1)
        self.calls.append(call)
        return output

    def _pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot()
        self._slots.append((weakref.ref(slot), _looks(tensor)))
        if self._packed is not None:
            self._packed.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        return slot

    def _unpack(self, slot: _Slot) -> Tensor:
        if slot.value is None:
            self._recompute()
        value, slot.value = slot.value, None  # a second backward over a retained graph recomputes again
        if value is None or version_of(value) != slot.version:
            raise _changed(self.calls[0].name, "a tensor needed for its gradient must not be changed in place", "")
        return value

    def _recompute(self) -> None:
        for call in self.calls:
            if isinstance(call.block, FSDPModule):
                call.block.unshard()  # backward gathers the last block's weights alone
            if any(isinstance(leaf, _Input) and leaf.is_changed() for leaf in call.leaves):
                raise _changed(call.name, "its input must not be changed in place before backward", "copy it first")
            if _weights_version(call.block) != call.weights:
                raise _changed(
                    call.name, "its weights must not be changed between forward and backward", "step afterwards"
                )
        kept: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            reference, looks = self._slots[len(kept)]
            if looks != _looks(tensor):
                raise _differs(self.calls[0].name, f"{_looks(tensor)} in place of {looks}")
            if (slot := reference()) is not None:
                slot.value, slot.version = tensor, version_of(tensor)
            kept.append(tensor)
            if len(kept) == len(self._slots):
                raise _Done
            return tensor

        names = []
        try:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
                outputs: list[list[Any]] = []
                for call in self.calls:
                    names.append(call.name)
                    outputs.append(_again(call, outputs))
            raise _differs(self.calls[0].name, f"{len(kept)} saved tensors in place of {len(self._slots)}")
        except _Done:
            self.tally.recomputed(names, self._dropped_bytes(kept))
            self._packed = None

    def _dropped_bytes(self, recomputed: list[Tensor]) -> int:
        if self._packed is None:
            return 0
        inputs = [leaf.tensor for call in self.calls for leaf in call.leaves if isinstance(leaf, _Input)]
        held = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in inputs}
        elsewhere = {_storage(weight) for call in self.calls for weight in call.block.parameters()}
        elsewhere |= {
            _storage(tensor)
            for tensor, packed in zip(recomputed, self._packed, strict=True)
            if packed.cdata in self._handed_on and _storage(tensor) not in held
        }
        dropped = {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in recomputed}
        gross = sum(size for storage, size in dropped.items() if storage not in elsewhere)
        return gross - sum(held.values()) - self._kept_elsewhere


def _again(call: _Call, outputs: list[list[Any]]) -> list[Any]:
    """Return the values that a call returned, computed again as it ran in forward."""
    inputs: dict[int, Tensor] = {}

    def value(leaf: Any) -> Any:
        if isinstance(leaf, _Output):
            return outputs[leaf.call][leaf.leaf]
        if isinstance(leaf, _Input):
            return inputs.setdefault(id(leaf), leaf.tensor.detach().requires_grad_(leaf.requires_grad))
        return leaf

    args, kwargs = tree_unflatten([value(leaf) for leaf in call.leaves], call.spec)
    try:
        with call.surroundings.restored(), call.buffers.rewound(), call.recompute_context:
            return tree_flatten(call.run(*args, **kwargs))[0]
    except RuntimeError as error:
        if "selective activation checkpoint has been mutated" not in str(error):  # torch's words (2.13)
            raise
        rule = "what selective keeps, outputs of layers, must not be changed in place"
        raise _changed(call.name, rule, "take block") from error


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 where autograd does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _weights_version(block: nn.Module) -> int:
    if any(hasattr(module, "unshard") for module in block.modules()):
        return 0  # FSDP2 puts gathered weights in place of sharded ones and back, whose versions are their own
    return sum(version_of(parameter) for parameter in block.parameters())


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, type(tensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(name: str, rule: str, remedy: str) -> TrainingError:
    return TrainingError(
        f"checkpointing: {name}: {rule}, got a change; recomputed values would be others"
        + (f"; {remedy}, or leave the block out" if remedy else "; leave the block out")
    )


def _differs(name: str, found: str) -> TrainingError:
    return TrainingError(
        f"checkpointing: {name}: must compute in backward what it computed in forward, got {found}; a block that keeps "
        "state of its own or looks at the outside cannot be checkpointed: leave it out"
    )
