"""The tensors that autograd saves in one forward: which share memory, and how and where each is stored.

A saved tensor may be a weight, an operation's own result, or the input of a checkpointed region. Memory that the model
holds anyway is not compressed. Offloaded tensors are in pinned host memory, copied in parallel to the computation and
fetched before backward needs them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shared_core.activation_compression.config import ActivationsConfig
from shared_core.activation_compression.encodings import Form, as_is, exact_form, int8_form, narrow_form, sign_form
from shared_core.errors import TrainingError

Parts = tuple[Tensor, ...]
_IN_FLIGHT = 4
_AHEAD = 2


class CudaLane:
    """A separate stream on a CUDA device, where copies run in parallel to the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_like(self, part: Tensor) -> Tensor:
        """Return pinned memory, which can be copied without waiting. torch keeps and reuses it."""
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True)

    def run(self, copy: Callable[[], None]) -> Any:
        """Start a copy after all computation started so far; return its event."""
        # The values to copy may still be in computation on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Make the computation wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(event)


class Moved:
    """Tensors on the host. `parts` returns them on the device and can be called repeatedly."""

    def __init__(self, mover: HostMover, parts: Parts, before: weakref.ref[Moved] | None) -> None:
        self._mover, self._device = mover, parts[0].device
        self._before = before
        self.host = tuple(mover.lane.host_like(part) for part in parts)
        self.source: Parts | None = parts
        """Tensors being copied, kept until then because the allocator does not track this stream."""
        # Versions count in-place writes: backward must get what forward saved.
        self._versions = [part._version for part in parts]
        self._was_changed = False
        self._fetched: tuple[Parts, Any] | None = None

    def release(self) -> None:
        """Make the computation wait for the copy, so that later changes to the source do not matter."""
        self._check_source()
        self.source = None

    def _check_source(self) -> None:
        self._was_changed |= [part._version for part in self.source or ()] != self._versions

    def __del__(self) -> None:
        # The allocator must not reuse memory that a copy is still writing.
        if self._fetched is not None:
            self._mover.lane.wait(self._fetched[1])

    def fetch(self) -> None:
        """Start copying back, unless the source still exists."""
        if self.source is not None or self._fetched is not None:
            # The device's tensor is still held, so there is nothing to fetch.
            return
        # Allocated on the computation's stream, which waits for the copy before it uses or frees them.
        parts = tuple(torch.empty_like(part, device=self._device) for part in self.host)
        # Started as early as possible, to run in parallel to the backward of later layers.
        self._fetched = parts, self._mover.lane.run(lambda: _copy(self.host, parts))

    def parts(self) -> Parts:
        """Return the tensors on their device, and start fetching those that backward needs next."""
        if self.source is not None:
            self._check_source()
        _refuse_changed(self._was_changed, "modified while it was copied to the host")
        self.fetch()
        # Backward goes from the last to the first, so the tensor saved before this one is needed next.
        earlier: Moved | None = self
        for _ in range(_AHEAD):
            earlier = earlier._before() if earlier is not None and earlier._before is not None else None
            if earlier is not None:
                earlier.fetch()
        if self._fetched is None:
            return self.source or ()
        # Cleared, so that __del__ does not wait again.
        (parts, event), self._fetched = self._fetched, None
        self._mover.lane.wait(event)
        return parts


class HostMover:
    """Moves tensors to the host while forward continues.

    At most four copies run at a time: the computation waits for the oldest before a fifth starts. Backward needs the
    tensors in reverse order, so each request starts the copies of the two tensors before it.
    """

    def __init__(self, lane: CudaLane) -> None:
        self.lane = lane
        # Weak references, so that memory is freed once backward has used it.
        self._under_way: deque[tuple[weakref.ref[Moved], Any]] = deque()
        self._latest: weakref.ref[Moved] | None = None

    def out(self, parts: Parts) -> Moved:
        """Start copying tensors to the host."""
        moved = Moved(self, parts, self._latest)
        self._latest = weakref.ref(moved)
        self._under_way.append((weakref.ref(moved), self.lane.run(lambda: _copy(parts, moved.host))))
        # Limits how many copies hold their source. Otherwise device memory would grow as without offload.
        if len(self._under_way) > _IN_FLIGHT:
            self._settle()
        return moved

    def start(self) -> None:
        """Start a forward: drop all prefetching and references of the previous one."""
        self._latest = None
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        reference, event = self._under_way.popleft()
        if (moved := reference()) is not None:
            # Only the stream waits, so the host continues to launch the forward.
            self.lane.wait(event)
            moved.release()


def _copy(sources: Parts, targets: Parts) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


WEIGHT, NOTHING = "weights", "nothing to leave out"


class Counts:
    """Number of tensors stored in each form, their bytes before and after, and why others were not packed."""

    def __init__(self) -> None:
        self.forwards = self.shared = 0
        self._stored: dict[str, Counter[str]] = {}
        self._left: dict[str, Counter[str]] = {}

    def store(self, kind: str, before: int, after: int) -> None:
        """Count memory in another form or place; `after` is the number of bytes that the device still holds."""
        self._stored.setdefault(kind, Counter()).update(tensors=1, bytes_before=before, bytes_after=after)

    def leave(self, why: str, nbytes: int) -> None:
        """Count a tensor that autograd keeps unchanged."""
        self._left.setdefault(why, Counter()).update(tensors=1, bytes=nbytes)

    @property
    def kinds(self) -> set[str]:
        """The forms that were used."""
        return set(self._stored)

    def _total(self, figure: str) -> int:
        stored = sum(counter[figure] for counter in self._stored.values())
        return stored + sum(counter["bytes"] for why, counter in self._left.items() if why != WEIGHT)

    @property
    def share_saved(self) -> float:
        """Share of the activations' bytes that the device no longer holds, without weights."""
        before = self._total("bytes_before")
        return 1 - self._total("bytes_after") / before if before else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return all counts."""
        stored = {kind: dict(counter) for kind, counter in self._stored.items()}
        left = {why: dict(counter) for why, counter in self._left.items()}
        return {"forwards": self.forwards, "shared": self.shared, "stored": stored, "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.forwards, self.shared = int(state["forwards"]), int(state["shared"])
        self._stored = {kind: Counter(counter) for kind, counter in state["stored"].items()}
        self._left = {why: Counter(counter) for why, counter in state["left"].items()}

    def left_alone(self) -> str:
        """Return in words which tensors were not packed."""
        return ", ".join(f"{counter['tensors']} {why}" for why, counter in sorted(self._left.items())) or "none"

    def report(self) -> dict[str, Any]:
        """Return the means per forward, and the totals by kind."""
        forwards = max(self.forwards, 1)
        return {
            "forwards": self.forwards,
            "bytes_before": self._total("bytes_before") // forwards,
            "bytes_after": self._total("bytes_after") // forwards,
            "share_saved": round(self.share_saved, 4),
            "saved_again": self.shared,
            "kinds": {kind: dict(counter) for kind, counter in sorted(self._stored.items())},
            "left_alone": {why: dict(counter) for why, counter in sorted(self._left.items())},
        }


# Operations between a parameter and the form that a product saves: autocast's copy, a transposed view.
_STILL_A_WEIGHT = ("ToCopyBackward", "TBackward", "TransposeBackward", "ViewBackward", "PermuteBackward")
_MAX_FRAMES = 8


def is_weight(tensor: Tensor) -> bool:
    """Return True if a tensor is a parameter, a view of one, or its copy in another dtype."""
    # A view of a parameter has it as _base, even without a graph (frozen weights).
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    # Autocast casts a weight once per forward, but each use would store the cast again.
    while node is not None and node.name().startswith(_STILL_A_WEIGHT):
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def is_own_result(tensor: Tensor, operation: str) -> bool:
    """Return True if `operation` is saving its own result, not another operation its input.

    Autograd sets a tensor's node before it saves the result in it, so the node's field is still empty. Reading this
    field unpacks nothing (`SavedTensor.data` of torch 2.13; without it the result is always False).
    """
    node: Any = tensor.grad_fn
    return node is not None and node.name() == operation and getattr(node._raw_saved_result, "data", node) is None


def is_region_input() -> bool:
    """Return True if activation checkpointing is saving the input of a region that it will recompute."""
    # The only sign is that checkpointing calls the hook from its own file, a few frames up.
    frame: Any = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


_PLAIN = (torch.Tensor, nn.Parameter)  # FSDP2's sharded tensors have no own storage


class HeldMemory:
    """The memory of a model's parameters and buffers.

    Collecting all storages takes longer than the rest of a forward's setup. So they are cached, and collected again
    when a saved parameter has an unknown storage, because it was replaced or moved. Buffers are collected in every
    forward, as modules may replace them.
    """

    def __init__(self, model: nn.Module) -> None:
        parts = [*model.modules()]
        self._owned = [owned for part in parts for owned in (part._parameters, part._buffers)]
        self._buffers = [part._buffers for part in parts if part._buffers]
        self._known: dict[int, Any] = {}
        self._of_buffers: set[int] = set()
        self._look()
        self.start()

    def start(self) -> None:
        """Start a forward."""
        self._has_looked = False
        # Some modules replace buffers in every forward. Parameters rarely change, so they are collected on
        # demand.
        if self._buffers:
            self._of_buffers = {buffer.untyped_storage()._cdata for buffer in _plain(self._buffers)}

    def __contains__(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a weight, or uses the memory of a parameter or buffer."""
        # The storage's address identifies all views of a weight.
        address = tensor.untyped_storage()._cdata
        if address in self._known or address in self._of_buffers:
            return True
        if not is_weight(tensor):
            return False
        # Autocast makes new copies of weights each time.
        if not self._has_looked and isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            self._look()
        return True

    def _look(self) -> None:
        self._has_looked = True
        storages = map(Tensor.untyped_storage, _plain(self._owned))
        # Weak references, so that a freed storage's address does not match another one.
        self._known = {storage._cdata: StorageWeakRef(storage) for storage in storages}  # type: ignore[no-untyped-call]


def _plain(owned: Iterable[dict[str, Any]]) -> list[Tensor]:
    held = chain.from_iterable(map(methodcaller("values"), owned))
    return [tensor for tensor in held if type(tensor) in _PLAIN]


_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Memory:
    """Memory that autograd saved, shared by all its users: unchanged, in another form, or on the host."""

    __slots__ = ("__weakref__", "form", "moved", "shared", "sign_only", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached: a result held by its own node would never be freed.
        self.tensor: Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version
        self.storage: Any = None
        """A weak reference, so that its address is not reused while this object exists."""
        self.form: Form | None = None
        self.moved: Moved | None = None
        self.sign_only = self.shared = False

    def flat(self) -> Tensor | None:
        """Return the values in one row, from wherever they are; None if the tensor itself was kept."""
        if self.form is None:
            return None
        return self.form.rebuild(self.form.parts if self.moved is None else self.moved.parts())


class Handle:
    """The object that autograd keeps instead of a tensor: the memory, and the tensor's layout in it."""

    __slots__ = ("dense", "memory", "size", "stride")

    def __init__(self, memory: Memory, tensor: Tensor, dense: bool) -> None:
        self.memory, self.dense = memory, dense
        self.size, self.stride = tensor.size(), tensor.stride()


class Ledger:
    """Packs and unpacks for `torch.autograd.graph.saved_tensors_hooks` around one forward; adds to `counts`.

    A `mover` moves packed memory to the host. `generator` returns a device's generator for int8's rounding; default:
    torch's own.
    """

    def __init__(
        self, config: ActivationsConfig, counts: Counts, *, held: HeldMemory | None = None,
        mover: HostMover | None = None, generator: Callable[[torch.device], torch.Generator] | None = None,
    ) -> None:  # fmt: skip
        self._config, self._counts, self._held = config, counts, held
        self._mover, self._generator = mover, generator
        # Weak references, so that memory released by autograd during the forward is freed.
        self._memories: dict[Any, weakref.ref[Memory]] = {}
        self._undecided: tuple[Any, Memory] | None = None
        self._latest: tuple[Memory, Tensor, int] | None = None
        counts.forwards += 1

    def pack(self, tensor: Tensor) -> Memory | Handle:
        """Return the object that autograd keeps instead of a tensor."""
        if (why := self._why_not(tensor)) is not None:
            self._counts.leave(why, tensor.nbytes if tensor.layout is torch.strided else 0)
            return Memory(tensor)
        rounds, dense = self._may_round(tensor), _is_dense(tensor)
        storage = tensor.untyped_storage()
        # A region's input must stay exact, even if another user stores it rounded.
        place = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version, rounds)
        # One memory per key. Dense tensors are keyed by their extent, so that x and x.t() are stored once.
        key = place if dense else (*place, tensor.size(), tensor.stride())
        # How to store a ReLU's result is decided when the next tensor is saved, which often is the same one.
        self._decide(key)
        # Handles are held weakly, so memory that autograd has released is not found again.
        known = self._memories.get(key)
        memory = known() if known is not None else None
        # If only signs were kept, another user of the values stores them again.
        if memory is not None and not memory.sign_only:
            self._counts.shared += 1
            memory.shared = True
            return Handle(memory, tensor, dense)
        memory = Memory(tensor)
        self._memories[key] = weakref.ref(memory)
        memory.storage = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if self._config.pack != "none" and is_own_result(tensor, "ReluBackward0"):
            self._undecided = key, memory
        else:
            self._store(memory, rounds)
        return Handle(memory, tensor, dense)

    def unpack(self, kept: Memory | Handle) -> Tensor:
        """Return the saved tensor; for a ReLU's result only what its backward needs."""
        if isinstance(kept, Memory):
            return _unchanged(kept)
        flat = self._flat(kept.memory)
        if flat is None:
            return _unchanged(kept.memory).as_strided(kept.size, kept.stride)
        if kept.dense:
            # In the memory's own order; size and stride restore the axes.
            return flat.as_strided(kept.size, kept.stride, flat.storage_offset())
        # The same strides, because with others kernels may sum in another order.
        return flat.new_empty_strided(kept.size, kept.stride).copy_(flat.view(kept.size))

    def _flat(self, memory: Memory) -> Tensor | None:
        # The latest one is cached, because its next user often follows directly in backward.
        if self._latest is not None and self._latest[0] is memory and self._latest[1]._version == self._latest[2]:
            return self._latest[1]
        self._latest = None
        flat = memory.flat()
        if flat is not None and memory.shared:
            self._latest = memory, flat, flat._version
        return flat

    def close(self) -> None:
        """End the forward: store the tensors that are still undecided."""
        self._decide(None)

    def _why_not(self, tensor: Tensor) -> str | None:
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        # Lazy negation and conjugation are flags of the tensor, not visible in its memory.
        if not plain or tensor.is_quantized or tensor.is_meta or tensor.is_neg() or tensor.is_conj():
            return "of other kinds"
        if is_weight(tensor) if self._held is None else tensor in self._held:
            return WEIGHT
        if tensor.numel() < self._config.min_size:
            return "small"
        # An expanded tensor repeats its memory and would become larger.
        repeats = any(step == 0 and size > 1 for size, step in zip(tensor.size(), tensor.stride(), strict=True))
        return "expanded" if repeats else None

    def _may_round(self, tensor: Tensor) -> bool:
        # Norm statistics and a batch's inputs have no history. log_softmax is exponentiated, so errors would grow.
        kinds = (torch.float32, torch.float16, torch.bfloat16) if self._config.pack == "int8" else (torch.float32,)
        if not self._config.rounds or tensor.dtype not in kinds or tensor.grad_fn is None:
            return False
        return tensor.grad_fn.name() != "LogSoftmaxBackward0" and not is_region_input()

    def _decide(self, key: Any) -> None:
        # A ReLU's backward needs only the sign, unless the next operation saves the whole result anyway.
        if self._undecided is not None:
            (own, memory), self._undecided = self._undecided, None
            # own[5] is `rounds` of the key.
            memory.sign_only = own != key
            self._store(memory, rounds=own[5])

    def _store(self, memory: Memory, rounds: bool) -> None:
        tensor = memory.tensor
        # Changed in place since it was saved: `unpack` compares versions and raises.
        if tensor is None or tensor._version != memory.version:
            return  # backward raises
        # Dense in any order of axes: one row of its memory, without a copy.
        flat = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.reshape(-1)
        form = self._form(flat, memory.sign_only, rounds)
        if form is None and self._mover is None:
            self._counts.leave(NOTHING, tensor.nbytes)
            return
        form = form or as_is(flat)
        memory.tensor, left = None, form.nbytes
        if self._mover is not None:
            # After the copy the device no longer holds it.
            memory.moved, left = self._mover.out(form.parts), 0
            form = form._replace(parts=())
        memory.form = form
        self._counts.store(form.kind, tensor.nbytes, left)

    def _form(self, flat: Tensor, sign_only: bool, rounds: bool) -> Form | None:
        config = self._config
        if config.pack == "none":
            return None
        if sign_only:
            return sign_form(flat)
        if not rounds:
            return exact_form(flat, sparse=config.sparse)
        if config.pack == "int8":
            generator = self._generator(flat.device) if self._generator else None
            values: Callable[[Tensor], Form] = partial(int8_form, group_size=config.group_size, generator=generator)
        else:
            values = partial(narrow_form, dtype=_NARROW[config.pack])
        # Rounding applies to the values left without zeros, or to all values if no exact form helps.
        return exact_form(flat, sparse=config.sparse, values=values) or values(flat)


class Packing(saved_tensors_hooks):
    """Context around a forward that sends saved tensors to a ledger, and closes it unless the forward failed."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger.pack, ledger.unpack)
        self._ledger = ledger

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        # After an error the undecided ReLU result is not needed.
        if raised[0] is None:
            self._ledger.close()


def _is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor's elements fill their memory without gaps or repetitions, in any order."""
    expected = 1
    # Sorted by stride: without gaps, each stride is the product of the sizes before it.
    for step, size in sorted((step, size) for size, step in zip(tensor.size(), tensor.stride(), strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _unchanged(memory: Memory) -> Tensor:
    # torch does not check this for tensors with hooks.
    changed = memory.tensor is None or memory.tensor._version != memory.version
    _refuse_changed(changed, f"saved at version {memory.version}")
    return cast("Tensor", memory.tensor)


def _refuse_changed(is_changed: bool, found: str) -> None:
    if is_changed:
        rule = "a tensor that backward needs must not be modified in place after forward saved it, got one"
        raise TrainingError("activations", f"{rule} {found}", "remove the in-place operation")
