"""The tensors that autograd saves in one forward: which share memory, how each is stored and where, what was saved.

A tensor that is about to be saved may be a weight, an operation's own result, or the input of a region. Memory that the
model holds anyway is not compressed. Offloaded ones lie in pinned host memory, copied beside the computation and
fetched ahead of backward.
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
    """A stream of its own on a CUDA device, where copies run beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_like(self, part: Tensor) -> Tensor:
        """Return pinned memory, which alone is copied without waiting; torch keeps and reuses it."""
        return torch.empty(part.shape, dtype=part.dtype, pin_memory=True)

    def run(self, copy: Callable[[], None]) -> Any:
        """Start a copy after everything the computation has started so far; return its event."""
        # The values that are to be copied may still be in computation on the present stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Let the computation go on only after the copy."""
        torch.cuda.current_stream(self._device).wait_event(event)


class Moved:
    """Tensors on the host; `parts` brings them back, as often as it is called."""

    def __init__(self, mover: HostMover, parts: Parts, before: weakref.ref[Moved] | None) -> None:
        self._mover, self._device = mover, parts[0].device
        self._before = before
        self.host = tuple(mover.lane.host_like(part) for part in parts)
        self.source: Parts | None = parts
        """Tensors that are being copied: kept until that is done, as the allocator knows nothing of the stream."""
        # A version counts in-place writes: what backward gets must be what forward saved.
        self._versions = [part._version for part in parts]
        self._was_changed = False
        self._fetched: tuple[Parts, Any] | None = None

    def release(self) -> None:
        """The computation waits for the copy from here on: what it does to the source later changes nothing."""
        self._check_source()
        self.source = None

    def _check_source(self) -> None:
        self._was_changed |= [part._version for part in self.source or ()] != self._versions

    def __del__(self) -> None:
        # the allocator must not give memory away that a copy is still writing
        if self._fetched is not None:
            self._mover.lane.wait(self._fetched[1])

    def fetch(self) -> None:
        """Start copying back, unless the source is still there."""
        if self.source is not None or self._fetched is not None:
            # The device's tensor is still held: nothing to fetch.
            return
        # allocated where the computation runs, which waits for the copy before it uses or frees them
        parts = tuple(torch.empty_like(part, device=self._device) for part in self.host)
        # Started as early as possible: the copy runs beside the backward of later layers.
        self._fetched = parts, self._mover.lane.run(lambda: _copy(self.host, parts))

    def parts(self) -> Parts:
        """Return the tensors on their device, and start fetching those that backward will want next."""
        if self.source is not None:
            self._check_source()
        _refuse_changed(self._was_changed, "modified while it was copied to the host")
        self.fetch()
        # Backward goes from the last to the first: what was saved before this one is wanted next.
        earlier: Moved | None = self
        for _ in range(_AHEAD):
            earlier = earlier._before() if earlier is not None and earlier._before is not None else None
            if earlier is not None:
                earlier.fetch()
        if self._fetched is None:
            return self.source or ()
        # Handed over, so that __del__ does not wait again.
        (parts, event), self._fetched = self._fetched, None
        self._mover.lane.wait(event)
        return parts


class HostMover:
    """Takes tensors to the host while forward goes on.

    At most four copies are under way: the computation waits for the oldest one before a fifth begins. Backward wants
    them in reverse order, so that each one that it asks for starts the copies of the two before it.
    """

    def __init__(self, lane: CudaLane) -> None:
        self.lane = lane
        # weakly: once backward is through with one, its copy is of no interest, and its memory is
        self._under_way: deque[tuple[weakref.ref[Moved], Any]] = deque()
        self._latest: weakref.ref[Moved] | None = None

    def out(self, parts: Parts) -> Moved:
        """Start copying tensors to the host."""
        moved = Moved(self, parts, self._latest)
        self._latest = weakref.ref(moved)
        self._under_way.append((weakref.ref(moved), self.lane.run(lambda: _copy(parts, moved.host))))
        # At most so many copies at once hold their source: else the device's memory would grow as without offload.
        if len(self._under_way) > _IN_FLIGHT:
            self._settle()
        return moved

    def start(self) -> None:
        """A forward begins: nothing of the one before is prefetched or held."""
        self._latest = None
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        reference, event = self._under_way.popleft()
        if (moved := reference()) is not None:
            # The stream waits, not the host: forward goes on being launched.
            self.lane.wait(event)
            moved.release()


def _copy(sources: Parts, targets: Parts) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


WEIGHT, NOTHING = "weights", "nothing to leave out"


class Counts:
    """Number of tensors stored in each form, their bytes before and after, and why others were left alone."""

    def __init__(self) -> None:
        self.forwards = self.shared = 0
        self._stored: dict[str, Counter[str]] = {}
        self._left: dict[str, Counter[str]] = {}

    def store(self, kind: str, before: int, after: int) -> None:
        """Count memory that lies in another form or place; `after` are the bytes that the device still holds."""
        self._stored.setdefault(kind, Counter()).update(tensors=1, bytes_before=before, bytes_after=after)

    def leave(self, why: str, nbytes: int) -> None:
        """Count a tensor that autograd keeps as ever."""
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
        """Share of the activations' bytes that the device does not hold; weights, which it holds anyway, left out."""
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
        """Return in words what was left alone."""
        return ", ".join(f"{counter['tensors']} {why}" for why, counter in sorted(self._left.items())) or "none"

    def report(self) -> dict[str, Any]:
        """Return the means of a forward, and the totals by kind."""
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


# what may lie between a parameter and the form of it that a product saves: autocast's copy, a transposed view
_STILL_A_WEIGHT = ("ToCopyBackward", "TBackward", "TransposeBackward", "ViewBackward", "PermuteBackward")
_MAX_FRAMES = 8


def is_weight(tensor: Tensor) -> bool:
    """Return True if a tensor is a parameter, a view of one, or its copy in another type."""
    # A view of a parameter has it as _base, also without a graph (frozen weights).
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    # Autocast saves the cast it made once a forward: each use would store it again.
    while node is not None and node.name().startswith(_STILL_A_WEIGHT):
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), nn.Parameter)


def is_own_result(tensor: Tensor, operation: str) -> bool:
    """Return True if `operation` is just saving its own result, rather than another one its input.

    Autograd notes who made a tensor before it saves the result there, so the place is still empty. Asking for it
    unpacks nothing (`SavedTensor.data` of torch 2.13; without it no result counts as its own).
    """
    node: Any = tensor.grad_fn
    return node is not None and node.name() == operation and getattr(node._raw_saved_result, "data", node) is None


def is_region_input() -> bool:
    """Return True if activation checkpointing is saving the input of a region that it will compute again."""
    # Checkpointing calls the hook from its own file, a few frames up: there is no other sign of it.
    frame: Any = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


_PLAIN = (torch.Tensor, nn.Parameter)  # what FSDP2 shards has no storage of its own


class HeldMemory:
    """The memory of a model's parameters and buffers.

    To go through all of them takes longer than all else that a forward begins with. So their storages are remembered,
    and looked up again when a parameter is saved that lies in another one: it was replaced, or moved. Buffers, which
    modules replace as they compute, are looked up for every forward.
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
        """A forward begins."""
        self._has_looked = False
        # Buffers are replaced by some modules in every forward; parameters seldom, so these are looked up when one is
        # met.
        if self._buffers:
            self._of_buffers = {buffer.untyped_storage()._cdata for buffer in _plain(self._buffers)}

    def __contains__(self, tensor: Tensor) -> bool:
        """Return True if a tensor is a weight, or lies in the memory of a parameter or buffer."""
        # The storage's address, so that all views of a weight are known by it.
        address = tensor.untyped_storage()._cdata
        if address in self._known or address in self._of_buffers:
            return True
        if not is_weight(tensor):
            return False
        # the copies that autocast makes of weights are new ones each time
        if not self._has_looked and isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter):
            self._look()
        return True

    def _look(self) -> None:
        self._has_looked = True
        storages = map(Tensor.untyped_storage, _plain(self._owned))
        # held weakly, so that the address of one that is freed stands for no other
        self._known = {storage._cdata: StorageWeakRef(storage) for storage in storages}  # type: ignore[no-untyped-call]


def _plain(owned: Iterable[dict[str, Any]]) -> list[Tensor]:
    held = chain.from_iterable(map(methodcaller("values"), owned))
    return [tensor for tensor in held if type(tensor) in _PLAIN]


_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Memory:
    """Memory that autograd saved, once for all who saved it: as it is, in another form, or on the host."""

    __slots__ = ("__weakref__", "form", "moved", "shared", "sign_only", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # without its graph: a result that its own node holds would never be freed
        self.tensor: Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version
        self.storage: Any = None
        """Held weakly, so that its address stands for no other one while this object lives."""
        self.form: Form | None = None
        self.moved: Moved | None = None
        self.sign_only = self.shared = False

    def flat(self) -> Tensor | None:
        """Return the values in one row, from wherever they are; None: the tensor itself is there."""
        if self.form is None:
            return None
        return self.form.rebuild(self.form.parts if self.moved is None else self.moved.parts())


class Handle:
    """The object that autograd keeps in a tensor's place: the memory, and how the tensor lay in it."""

    __slots__ = ("dense", "memory", "size", "stride")

    def __init__(self, memory: Memory, tensor: Tensor, dense: bool) -> None:
        self.memory, self.dense = memory, dense
        self.size, self.stride = tensor.size(), tensor.stride()


class Ledger:
    """Packs and unpacks for `torch.autograd.graph.saved_tensors_hooks` around one forward; adds to `counts`.

    A `mover` takes packed memory to the host. The `generator` of a device draws int8's rounding, else torch's own.
    """

    def __init__(
        self, config: ActivationsConfig, counts: Counts, *, held: HeldMemory | None = None,
        mover: HostMover | None = None, generator: Callable[[torch.device], torch.Generator] | None = None,
    ) -> None:  # fmt: skip
        self._config, self._counts, self._held = config, counts, held
        self._mover, self._generator = mover, generator
        # weakly: what autograd releases during the forward is freed
        self._memories: dict[Any, weakref.ref[Memory]] = {}
        self._undecided: tuple[Any, Memory] | None = None
        self._latest: tuple[Memory, Tensor, int] | None = None
        counts.forwards += 1

    def pack(self, tensor: Tensor) -> Memory | Handle:
        """Return what autograd keeps in a tensor's place."""
        if (why := self._why_not(tensor)) is not None:
            self._counts.leave(why, tensor.nbytes if tensor.layout is torch.strided else 0)
            return Memory(tensor)
        rounds, dense = self._may_round(tensor), _is_dense(tensor)
        storage = tensor.untyped_storage()
        # a region's input must stay exact, also where someone else has it rounded
        place = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version, rounds)
        # One key, one memory. Dense tensors count by their extent, so that x and x.t() are stored once.
        key = place if dense else (*place, tensor.size(), tensor.stride())
        # A ReLU's result is decided when the next tensor is saved, which often is the same one.
        self._decide(key)
        # A handle refers weakly: memory that autograd has let go is not found again.
        known = self._memories.get(key)
        memory = known() if known is not None else None
        # With signs alone the values are gone: who needs them stores them anew.
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
        """Return the tensor that was saved; of a ReLU's result, what its backward needs of it."""
        if isinstance(kept, Memory):
            return _unchanged(kept)
        flat = self._flat(kept.memory)
        if flat is None:
            return _unchanged(kept.memory).as_strided(kept.size, kept.stride)
        if kept.dense:
            # In the memory's own order; size and stride then put the axes back.
            return flat.as_strided(kept.size, kept.stride, flat.storage_offset())
        # the same strides, since kernels may add up in another order for others
        return flat.new_empty_strided(kept.size, kept.stride).copy_(flat.view(kept.size))

    def _flat(self, memory: Memory) -> Tensor | None:
        # The latest is kept until another is asked for: who saved the same memory often comes next in backward.
        if self._latest is not None and self._latest[0] is memory and self._latest[1]._version == self._latest[2]:
            return self._latest[1]
        self._latest = None
        flat = memory.flat()
        if flat is not None and memory.shared:
            self._latest = memory, flat, flat._version
        return flat

    def close(self) -> None:
        """End of forward: decide what is open."""
        self._decide(None)

    def _why_not(self, tensor: Tensor) -> str | None:
        plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
        # Lazy negation and conjugation are flags of the tensor, which its memory does not show.
        if not plain or tensor.is_quantized or tensor.is_meta or tensor.is_neg() or tensor.is_conj():
            return "of other kinds"
        if is_weight(tensor) if self._held is None else tensor in self._held:
            return WEIGHT
        if tensor.numel() < self._config.min_size:
            return "small"
        # An expanded tensor repeats its memory: written out it would be larger.
        repeats = any(step == 0 and size > 1 for size, step in zip(tensor.size(), tensor.stride(), strict=True))
        return "expanded" if repeats else None

    def _may_round(self, tensor: Tensor) -> bool:
        # Statistics of norms and a batch's inputs have no history. The loss is the exponential of log_softmax.
        kinds = (torch.float32, torch.float16, torch.bfloat16) if self._config.pack == "int8" else (torch.float32,)
        if not self._config.rounds or tensor.dtype not in kinds or tensor.grad_fn is None:
            return False
        return tensor.grad_fn.name() != "LogSoftmaxBackward0" and not is_region_input()

    def _decide(self, key: Any) -> None:
        # A ReLU's sign will do for its backward, unless the next to save saves all of its result anyway.
        if self._undecided is not None:
            (own, memory), self._undecided = self._undecided, None
            # own[5] is `rounds` of the key.
            memory.sign_only = own != key
            self._store(memory, rounds=own[5])

    def _store(self, memory: Memory, rounds: bool) -> None:
        tensor = memory.tensor
        # Written in place since it was saved: `unpack` compares versions and says so.
        if tensor is None or tensor._version != memory.version:
            return  # backward will tell
        # Dense in any order of axes: one row of its memory, without a copy.
        flat = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.reshape(-1)
        form = self._form(flat, memory.sign_only, rounds)
        if form is None and self._mover is None:
            self._counts.leave(NOTHING, tensor.nbytes)
            return
        form = form or as_is(flat)
        memory.tensor, left = None, form.nbytes
        if self._mover is not None:
            # The device holds nothing of it from here on, once the copy is done.
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
        # Rounding applies to what is left without zeros; if nothing exact helps, to all values.
        return exact_form(flat, sparse=config.sparse, values=values) or values(flat)


class Packing(saved_tensors_hooks):
    """Surrounds a forward whose saved tensors go to a ledger, and closes it unless the forward failed."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger.pack, ledger.unpack)
        self._ledger = ledger

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        # After an error the open ReLU result is never needed.
        if raised[0] is None:
            self._ledger.close()


def _is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor's elements fill a piece of memory without gaps and repetitions, in any order."""
    expected = 1
    # Sorted by stride: without gaps, each step is the product of the sizes before it.
    for step, size in sorted((step, size) for size, step in zip(tensor.size(), tensor.stride(), strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _unchanged(memory: Memory) -> Tensor:
    # torch checks this only where no hook is
    changed = memory.tensor is None or memory.tensor._version != memory.version
    _refuse_changed(changed, f"saved at version {memory.version}")
    return cast("Tensor", memory.tensor)


def _refuse_changed(is_changed: bool, found: str) -> None:
    if is_changed:
        rule = "a tensor that backward needs must not be modified in place after forward saved it, got one"
        raise TrainingError("activations", f"{rule} {found}", "leave out the in-place operation")
