"""Segments of blocks whose activations are recomputed in backward, without changes to the model's forward.

A region is a sequence of block calls that drop their saved tensors in forward. When backward needs the first of them,
all calls of the region run again with the random state, autocast and running statistics of their forward. The selective
policy keeps the outputs of matrix products and recomputes the rest.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shared_core.errors import CompatibilityError, MatchError, TrainingError, nearest
from shared_core.modules.matching import plain_name

Buffer = tuple[nn.Module, str]
_UNCOUNTED = ("running_mean", "running_var")  # norm kernels write them without autograd's knowledge


class Snapshot:
    """Copies of the buffers that a block is about to change.

    Buffers that changed in an earlier forward are copied, or all if the block has not run yet. One that first changes
    later is not changed twice, but cannot be rewound.
    """

    def __init__(self, block: nn.Module, moving: set[Buffer] | None) -> None:
        # The first forward copies every buffer, later ones only those that changed before.
        self._now = {
            (module, name): (
                buffer,
                buffer._version,
                buffer.clone() if moving is None or (module, name) in moving else None,
            )
            for module in block.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self.before: dict[Buffer, Tensor | None] = {}
        """Buffers that changed, with their earlier value (None if unknown); filled by `close`."""

    def close(self) -> None:
        """Record the changed buffers after the forward."""
        self.before = {
            (module, name): clone
            for (module, name), (buffer, version, clone) in self._now.items()
            # Changed means replaced, written in place (version), or written by a norm's kernel without autograd.
            if name in _UNCOUNTED or module._buffers.get(name) is not buffer or buffer._version != version
        }
        self._now = {}

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Run a forward again on copies of the earlier buffers, then restore the current ones."""
        now = {(module, name): module._buffers[name] for module, name in self.before}
        try:
            for (module, name), before in self.before.items():
                # None: it changed for the first time, so run on a copy of the current value.
                source = now[module, name] if before is None else before
                module._buffers[name] = None if source is None else source.clone()
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer


# The work of a block, without eager attention's T × T products (Korthikanti et al. 2022, arXiv:2205.05198).
_NAMES = (
    "mm", "addmm", "_scaled_mm", "_grouped_mm", "_int_mm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math",
)  # fmt: skip
SAVED_OPS = [getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name)]


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and its recomputation, as ``context_fn`` of torch's `checkpoint` does."""
    forward, recompute = create_selective_checkpoint_contexts(SAVED_OPS)  # type: ignore[no-untyped-call]
    return forward, recompute


class KeptBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that `selective_contexts` keeps of one forward. Enter it outside of them."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        output = func(*args, **(kwargs or {}))
        if func in SAVED_OPS:
            self.num_bytes += sum(value.nbytes for value in tree_leaves(output) if isinstance(value, Tensor))
        return output


class ForwardState:
    """The random state and the autocast settings of a forward."""

    def __init__(self, values: list[Any]) -> None:
        # Without the forward's random state and autocast, dropout masks and dtypes would differ in the
        # recomputation.
        devices = {value.device for value in values if isinstance(value, Tensor)}
        self._devices = sorted({d for d in devices if d.type not in ("cpu", "meta")}, key=str)
        self._cpu = torch.get_rng_state()
        self._states = [torch.get_device_module(device).get_rng_state(device) for device in self._devices]
        cached = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cached)
            for kind in sorted({"cpu", *(device.type for device in self._devices)})
            if torch.amp.is_autocast_available(kind)
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set the saved state inside the context, then restore the current one."""
        with contextlib.ExitStack() as stack:
            kind = self._devices[0].type if self._devices else "cuda"
            stack.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._states, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            for settings in self._autocast:
                stack.enter_context(torch.autocast(*settings))
            yield


@dataclass
class Tally:
    """Counts of recomputations for the receipt."""

    recomputations: int = 0
    """Number of times that backward ran a region again."""
    blocks: Counter[str] = field(default_factory=Counter)
    """Number of times that each block ran again."""
    saved_bytes: int = 0
    """Bytes freed, as seen by the first backward: what autograd would have held, minus what was held instead. Outputs
    of a region are not counted, because later code may hold them."""
    reached: bool = False
    """True if a block ran with gradients on, in train mode or not."""
    compiled: bool = False
    """True if torch.compile traced a block; it recomputes in its own backward, which is not counted."""
    uncompiled: bool = False
    """True if torch.compile met a segment of several blocks. It cannot trace these, so they run eagerly."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user, without duplicates."""
    first_backward: int | None = None
    """The backward whose bytes were counted."""

    def note(self, text: str) -> None:
        """Add a message, once."""
        if text not in self.notes:
            self.notes.append(text)

    def recomputed(self, names: list[str], num_bytes: int) -> None:
        """Count one recomputation of a region."""
        self.recomputations += 1
        self.blocks.update(names)
        # The id is the same within one backward. Bytes are counted only for the first backward.
        backward = torch._C._current_graph_task_id()
        if self.first_backward is None:
            self.first_backward = backward
        if self.first_backward == backward:
            self.saved_bytes += num_bytes


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns contexts for the forward and its recomputation, like `create_selective_checkpoint_contexts`."""


class _Done(BaseException):
    """Raised once all tensors for backward are computed. A BaseException, so that no model's `except` catches it."""


class _Slot:
    """The graph's placeholder for a dropped tensor."""

    __slots__ = ("__weakref__", "value", "version")

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.version = 0


class _Input:
    """A tensor from outside the region, detached because its graph would keep it alive through the region."""

    def __init__(self, tensor: Tensor) -> None:
        # Stored separately: the detached tensor has lost requires_grad, but the recomputed graph needs it.
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
    """One block's forward, with everything needed to run it again."""

    name: str
    block: nn.Module
    run: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    buffers: Snapshot
    recompute_context: AbstractContextManager[Any]
    weights: int
    state: ForwardState


class Region:
    """Connected calls that run again together when backward needs the first of their saved tensors.

    It works like non-reentrant `torch.utils.checkpoint`, but for several calls in the model's own loop. Hooks are
    active only inside the calls, so tensors that the loop saves in between are kept as usual.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.calls: list[_Call] = []
        self._slots: list[tuple[weakref.ref[_Slot], tuple[Any, ...]]] = []
        self._outputs: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], int, _Output]] = {}
        self._last = _Output(-1, -1)
        self._kept_elsewhere = 0
        # Weak references, because addresses are reused.
        self._packed: list[StorageWeakRef] | None = None if tally.first_backward is not None else []
        self._handed_on: set[int] = set()

    # A tensor counts as this region's output only if its memory and version have not changed since.
    def _source(self, value: Tensor) -> _Output | None:
        """Return where in this region a tensor was computed; None if elsewhere or if it has changed since."""
        # By memory, because FSDP2 passes blocks another tensor on the same memory.
        reference, version, output = self._outputs.get(_place(value), (None, 0, None))
        computed = reference() if reference is not None else None
        same = computed is not None and computed.requires_grad == value.requires_grad and version == version_of(value)
        return output if same else None

    def feeds(self, args: Any) -> bool:
        """Return True if the last call's first tensor is among these arguments, unchanged."""
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
        """Return ``run(*args, **kwargs)``, the forward of `block`, and store what is needed to run it again."""
        # Arguments as a flat list. Tensors become references to inputs of the region or outputs of its earlier
        # calls.
        values, spec = tree_flatten((args, kwargs))
        inputs: dict[int, _Input] = {}  # one per tensor: attention checks whether query `is` key
        computed: dict[_Output, Tensor] = {}

        def leaf_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            source = self._source(value)
            # Two arguments that are the same tensor must be the same object again.
            if source is not None and computed.setdefault(source, value) is value:
                return source
            return inputs.setdefault(id(value), _Input(value))

        leaves = [leaf_of(value) for value in values]
        forward_context, recompute_context = contexts() if contexts else (contextlib.nullcontext(),) * 2
        call = _Call(
            name, block, run, leaves, spec, snapshot, recompute_context, _weights_version(block), ForwardState(values)
        )
        kept = KeptBytes() if contexts else None  # type: ignore[no-untyped-call]
        # Every tensor that autograd would save becomes an empty slot in the graph, which frees the memory.
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with hooks, kept or contextlib.nullcontext(), forward_context:
            output = run(*args, **kwargs)
        snapshot.close()
        self._kept_elsewhere += kept.num_bytes if kept else 0
        # A changed input would give other values in backward. Raise now, while the block's name is known.
        if any(kept_input.is_changed() for kept_input in inputs.values()):
            raise _changed(name, "its input must not be changed in place inside it", "try inplace=False, or ")
        found = [(leaf, value) for leaf, value in enumerate(tree_flatten(output)[0]) if isinstance(value, Tensor)]
        for leaf, value in found:
            self._outputs[_place(value)] = weakref.ref(value), version_of(value), _Output(len(self.calls), leaf)
        # Later code keeps outputs alive, so checkpointing does not free them.
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
            # The first tensor that backward needs runs the whole region again and fills all slots.
            self._recompute()
        value, slot.value = slot.value, None  # a second backward over a retained graph recomputes again
        if value is None or version_of(value) != slot.version:
            raise _changed(self.calls[0].name, "a tensor needed for its gradient must not be changed in place")
        return value

    def _recompute(self) -> None:
        for call in self.calls:
            if isinstance(call.block, FSDPModule):
                call.block.unshard()  # backward gathers only the last block's weights
            if any(isinstance(leaf, _Input) and leaf.is_changed() for leaf in call.leaves):
                raise _changed(
                    call.name, "its input must not be changed in place before backward", "copy it first, or "
                )
            if _weights_version(call.block) != call.weights:
                rule = "its weights must not be changed between forward and backward"
                raise _changed(call.name, rule, "step afterwards, or ")
        kept: list[Tensor] = []

        # The n-th tensor saved now corresponds to the n-th of the forward.
        def keep(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            reference, looks = self._slots[len(kept)]
            if looks != _looks(tensor):
                raise _differs(self.calls[0].name, f"{_looks(tensor)} instead of {looks}")
            # A slot without references belongs to a deleted part of the graph and needs no value.
            if (slot := reference()) is not None:
                slot.value, slot.version = tensor, version_of(tensor)
            kept.append(tensor)
            # Computation after the forward's last saved tensor is not needed.
            if len(kept) == len(self._slots):
                raise _Done
            return tensor

        names = []
        try:
            # The inner hooks see the saved tensors. Tensors that only the recomputed graph holds are freed with it.
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
                outputs: list[list[Any]] = []
                for call in self.calls:
                    names.append(call.name)
                    outputs.append(_again(call, outputs))
            raise _differs(self.calls[0].name, f"{len(kept)} saved tensors instead of {len(self._slots)}")
        except _Done:
            self.tally.recomputed(names, self._dropped_bytes(kept))
            self._packed = None

    def _dropped_bytes(self, recomputed: list[Tensor]) -> int:
        if self._packed is None:
            return 0
        # The recomputed storages without weights and living outputs, minus the inputs held instead.
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
    """Return a call's outputs, recomputed under its forward's state."""
    inputs: dict[int, Tensor] = {}

    def value(leaf: Any) -> Any:
        if isinstance(leaf, _Output):
            return outputs[leaf.call][leaf.leaf]
        if isinstance(leaf, _Input):
            return inputs.setdefault(id(leaf), leaf.tensor.detach().requires_grad_(leaf.requires_grad))
        return leaf

    args, kwargs = tree_unflatten([value(leaf) for leaf in call.leaves], call.spec)
    try:
        with call.state.restored(), call.buffers.rewound(), call.recompute_context:
            return tree_flatten(call.run(*args, **kwargs))[0]
    except RuntimeError as error:
        # messages of torch 2.13
        if "Trying to backward an extra time" in str(error):
            rule = "with selective, backward must run only once and a Function must read ctx.saved_tensors only once"
            found = "a second run (retain_graph?)"
        elif "selective activation checkpoint has been mutated" in str(error):
            rule, found = "with selective, outputs of layers must not be changed in place", "an in-place change"
        else:
            raise
        raise TrainingError("checkpointing", f"{call.name}: {rule}, got {found}", "use policy block") from error


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if autograd does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _weights_version(block: nn.Module) -> int:
    # Sharded weights are replaced at each gather, so their versions would show false changes.
    if any(hasattr(module, "unshard") for module in block.modules()):
        return 0  # gathered and sharded weights of FSDP2 have separate versions
    return sum(version_of(parameter) for parameter in block.parameters())


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device


# The address alone is not enough: a view, or another tensor at freed memory, is not the output.
def _place(tensor: Tensor) -> tuple[Any, ...]:
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, type(tensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(name: str, rule: str, remedy: str = "") -> TrainingError:
    message = f"{name}: {rule}, because recomputed values would differ"
    return TrainingError("checkpointing", message, f"{remedy}leave the block out")


def _differs(name: str, found: str) -> TrainingError:
    return TrainingError(
        "checkpointing",
        f"{name}: recomputing in backward must give the tensors of the forward, got {found}",
        "a block that keeps its own state or reads outside state cannot be checkpointed: leave it out",
    )


class Handle:
    """The wrapped blocks, counts of what ran, and `remove`.

    Attributes:
        segments: Names of the blocks of each segment.
        tally: Counts of what ran.
    """

    def __init__(self, segments: tuple[tuple[str, ...], ...], tally: Tally, wrapped: list[_Checkpointed]) -> None:
        self.segments, self.tally, self._wrapped = segments, tally, wrapped

    @property
    def names(self) -> list[str]:
        """Names of the wrapped blocks."""
        return [name for segment in self.segments for name in segment]

    @property
    def blocks(self) -> dict[str, nn.Module]:
        """The wrapped blocks by name; empty after `remove`."""
        return {wrapped.name: wrapped.block for wrapped in self._wrapped}

    def remove(self) -> None:
        """Restore the blocks' own forward. A second call does nothing."""
        for wrapped in self._wrapped:
            wrapped.remove()
        self._wrapped = []


def apply_segments(model: nn.Module, segments: Sequence[Sequence[str]], *, contexts: Contexts | None = None) -> Handle:
    """Make segments drop activations in forward and recompute them in backward; return a handle to undo it.

    A segment keeps only its input, and blocks outside segments keep their activations. Gradients stay bit-equal: random
    state, autocast and buffers are restored for the recomputation. A segment is split where a block's input is not
    the unchanged output of the previous block. Evaluation, and forwards without gradients, do not change.

    Args:
        model: Changed in place: its blocks get a new forward. Parameters, buffers and classes do not change.
        segments: Names of consecutive blocks, as in ``named_modules()``.
        contexts: Returns contexts for a block's forward and recomputation; only for segments of one block.

    Raises:
        MatchError: If no block is named, or a name is unknown.
        CompatibilityError: If a block is already checkpointed, named twice, or inside another.
        TrainingError: In training, if a block changes its inputs or weights, or does not compute the same again.

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
    unknown = (f"{name!r}{nearest(name, modules)}" for name in names if name not in modules)
    if wrong := next(unknown, "" if names else "none"):
        raise MatchError("checkpointing", f"segments must name at least one module, got {wrong}")
    blocks = {name: modules[name] for name in names}
    inside = [id(module) for block in blocks.values() for module in block.modules()]
    if len(blocks) < len(names) or len(set(inside)) < len(inside):
        raise CompatibilityError(
            "checkpointing",
            "segments must name each block only once and no block inside another, got "
            f"{', '.join(_overlapping(names, blocks))}",
            "it would be recomputed twice",
        )
    for name, module in model.named_modules():
        own = "forward" in vars(module) and isinstance(vars(module)["forward"], _Checkpointed)
        if own or getattr(module, "gradient_checkpointing", False) or type(module).__name__ == "CheckpointWrapper":
            raise CompatibilityError(
                "checkpointing",
                f"{plain_name(name) or type(model).__name__} is already checkpointed by the trainer, the "
                "model or an earlier call, so it would be recomputed twice",
                "switch off one of the two",
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
    """State shared by a segment's blocks: the region that is being recorded."""

    def __init__(self, length: int, tally: Tally, contexts: Contexts | None) -> None:
        self.length, self.tally, self.contexts = length, tally, contexts
        self._open: weakref.ref[Region] | None = None  # owned by the graph: without saved tensors nothing is recomputed
        self._last = -1

    def region(self, place: int, args: Any) -> Region:
        """Return the region of a call: the open one if the call continues from its last output."""
        # A weak reference, so that regions whose graph is gone are not extended.
        region = self._open() if self._open is not None else None
        # A call of an earlier block, or with other inputs, starts a new region.
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
        """Run the block's own forward, from its current class, which another technique may have swapped."""
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
        # torch.compile can trace the checkpoint of one block, but not a region over several calls.
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
            self.segment.tally.note("segments of several blocks run uncompiled; use a policy of single blocks")
        region = self.segment.region(self.place, (args, kwargs))
        snapshot = Snapshot(self.block, self.moving)
        output = region.call(self.name, self.block, self.run, args, kwargs, snapshot, self.segment.contexts)
        # Buffers that changed are copied before each later forward.
        self.moving = (self.moving or set()) | set(snapshot.before)
        return output

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Remove a generation cache, as transformers does under checkpointing, since a second run would extend it."""
        if getattr(self.block, "_can_checkpoint_with_cache", False):  # it only reads the cache
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
                "checkpointing",
                f"{self.name}: the generation cache must be empty in training, got a filled one",
                "it would be read and written twice; leave the block out",
            )
        self.segment.tally.note("generation caches are off in checkpointed blocks while training")
        return True
