"""The saved tensors of one forward: which of them share memory, and in which form each lies until backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shared_core.errors import TrainingError
from shared_core.saved_activations.config import ActivationsConfig
from shared_core.saved_activations.counts import NOTHING, WEIGHT, Counts
from shared_core.saved_activations.forms import Form, as_is, exact_form, sign_form
from shared_core.saved_activations.held import HeldMemory
from shared_core.saved_activations.host import HostMover, Moved
from shared_core.saved_activations.origin import is_own_result, is_region_input, is_weight
from shared_core.saved_activations.rounded import int8_form, narrow_form

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Memory:
    """Memory that autograd saved, once for all who saved it: as it is, in another form, or on the host."""

    __slots__ = ("__weakref__", "form", "moved", "sign_only", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # without its graph: a result that its own node holds would never be freed
        self.tensor: Tensor | None = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version
        self.storage: Any = None
        """Held weakly, so that its address stands for no other one while this object lives."""
        self.form: Form | None = None
        self.moved: Moved | None = None
        self.sign_only = False

    def flat(self) -> Tensor | None:
        """Return the values in one row, from wherever they are; None: the tensor itself is there."""
        if self.form is None:
            return None
        return self.form.rebuild(self.form.parts if self.moved is None else self.moved.parts())


class Handle:
    """What autograd keeps in a tensor's place: the memory, and how the tensor lay in it."""

    __slots__ = ("dense", "memory", "size", "stride")

    def __init__(self, memory: Memory, tensor: Tensor, dense: bool) -> None:
        self.memory, self.dense = memory, dense
        self.size, self.stride = tensor.size(), tensor.stride()


class Ledger:
    """Packs and unpacks for `torch.autograd.graph.saved_tensors_hooks` around one forward.

    Args:
        config: The options.
        counts: Added to.
        held: The memory of parameters and buffers.
        mover: Takes packed memory to the host; None: it stays.
        generator: The source of int8's rounding on a device; torch's global one if None.

    Example:
        >>> from torch.autograd.graph import saved_tensors_hooks
        >>> counts, x = Counts(), torch.ones(64, requires_grad=True)
        >>> ledger = Ledger(ActivationsConfig(pack="exact", min_size=1), counts)
        >>> with saved_tensors_hooks(ledger.pack, ledger.unpack):
        ...     loss = torch.where(x > 2, x, 2 * x).sum()
        >>> loss.backward()
        >>> x.grad[0], counts.kinds, counts.share_saved
        (tensor(2.), {'bits'}, 0.875)
    """

    def __init__(
        self,
        config: ActivationsConfig,
        counts: Counts,
        *,
        held: HeldMemory | None = None,
        mover: HostMover | None = None,
        generator: Callable[[torch.device], torch.Generator] | None = None,
    ) -> None:
        self._config, self._counts, self._held = config, counts, held
        self._mover, self._generator = mover, generator
        # weakly: what autograd lets go of during the forward is freed
        self._memories: dict[Any, weakref.ref[Memory]] = {}
        self._undecided: tuple[Any, Memory] | None = None
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
        key = place if dense else (*place, tensor.size(), tensor.stride())
        self._decide(key)
        known = self._memories.get(key)
        memory = known() if known is not None else None
        if memory is not None and not memory.sign_only:
            self._counts.shared += 1
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
        flat = kept.memory.flat()
        if flat is None:
            return _unchanged(kept.memory).as_strided(kept.size, kept.stride)
        if kept.dense:
            return flat.as_strided(kept.size, kept.stride, flat.storage_offset())
        # the same strides, since kernels may add up in another order for others
        return flat.new_empty_strided(kept.size, kept.stride).copy_(flat.view(kept.size))

    def close(self) -> None:
        """End of forward: decide what is open."""
        self._decide(None)

    def _why_not(self, tensor: Tensor) -> str | None:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not plain or tensor.is_quantized or tensor.is_meta or tensor.is_neg() or tensor.is_conj():
            return "of other kinds"
        if is_weight(tensor) if self._held is None else tensor in self._held:
            return WEIGHT
        if tensor.numel() < self._config.min_size:
            return "small"
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
            memory.sign_only = own != key
            self._store(memory, rounds=own[5])

    def _store(self, memory: Memory, rounds: bool) -> None:
        tensor = memory.tensor
        if tensor is None or tensor._version != memory.version:
            return  # backward will tell
        flat = tensor.as_strided((tensor.numel(),), (1,)) if _is_dense(tensor) else tensor.reshape(-1)
        form = self._form(flat, memory.sign_only, rounds)
        if form is None and self._mover is None:
            self._counts.leave(NOTHING, tensor.nbytes)
            return
        form = form or as_is(flat)
        memory.tensor, left = None, form.nbytes
        if self._mover is not None:
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
        return exact_form(flat, sparse=config.sparse, values=values) or values(flat)


class Packing(saved_tensors_hooks):
    """Surrounds a forward whose saved tensors go to a ledger, and closes it unless the forward failed."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger.pack, ledger.unpack)
        self._ledger = ledger

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        if raised[0] is None:
            self._ledger.close()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill a piece of memory without gaps and repetitions, in any order."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(tensor.size(), tensor.stride(), strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def _unchanged(memory: Memory) -> Tensor:
    # torch checks this only where no hook is
    if memory.tensor is None or memory.tensor._version != memory.version:
        raise TrainingError(
            "activations: a tensor that backward needs must not be modified in place after forward saved it, got one "
            f"saved at version {memory.version}; leave out the in-place operation"
        )
    return memory.tensor
