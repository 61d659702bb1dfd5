"""Measure the bytes and time of each block while a training step runs, on any device."""

from __future__ import annotations

import contextlib
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared_core.activation_checkpointing.budget_planner import BlockCost, StepCost
from shared_core.distributed.collectives import local_part
from shared_core.errors import TrainingError
from shared_core.modules.matching import own_class, plain_name

MOST_EMPTY = 10
"""Consecutive steps without a forward that are allowed before this counts as an error."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the storages that operations allocate while it is active, and when they are freed.

    Each storage on this device type counts once with its full size, even if many tensors share it. Temporary memory
    inside kernels does not count.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.events: list[tuple[int, int]] = []
        """Allocated bytes (negative when freed) and the number of the storage, in order."""
        self.sizes: list[int] = []
        """Bytes of each storage, by number."""
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record what it allocated."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # sharded or quantized: called again for the plain tensors inside
        output = func(*args, **(kwargs or {}))
        given = {_address(value) for value in _plain_tensors((args, kwargs))}
        for value in _plain_tensors(output):
            # Views and in-place results are not new memory.
            if _address(value) not in given:
                self._note(value)
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # `_cdata` is the storage's address in C++, the same for all its views.
        if storage._cdata in self._numbers or tensor.device.type != self._device_type or not storage.nbytes():
            return
        number = len(self.sizes)
        self._numbers[storage._cdata] = number
        self.sizes.append(storage.nbytes())
        self.events.append((storage.nbytes(), number))
        # By the storage, which all views share. With atexit False nothing runs at the end of the process.
        weakref.finalize(storage, self._released, storage._cdata).atexit = False

    def _released(self, address: int) -> None:
        number = self._numbers.pop(address)
        self.events.append((-self.sizes[number], number))

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, None if it existed before or is unknown."""
        return self._numbers.get(_address(local_part(tensor)))

    def numbers(self, tensors: Iterable[Any]) -> set[int]:
        """Return the numbers of these tensors' storages that were allocated here."""
        found = (self.number(tensor) for tensor in _plain_tensors([*tensors]))
        return {number for number in found if number is not None}

    def lasting(self) -> dict[int, int]:
        """Return the number of each storage that still exists, and the number of events before its allocation."""
        there = set(self._numbers.values())
        return {number: i for i, (size, number) in enumerate(self.events) if size > 0 and number in there}

    def held(self, without: Collection[int] = ()) -> list[int]:
        """Return the bytes held after each event, without the given storages."""
        last = {number: i for i, (_, number) in enumerate(self.events)}
        changes, released = [0] * (len(self.events) + 1), set()
        # Addresses may be reused, so storages have numbers. The last event may be `keep_until_now`.
        for i, (size, number) in enumerate(self.events):
            if number in without:
                continue
            if size < 0:
                released.add(number)
            changes[i + 1] += max(size, 0)
            if last[number] == i and number in released:
                changes[i + 1] -= self.sizes[number]
        return list(accumulate(changes))

    def keep_until_now(self, number: int) -> None:
        """Count a storage as held until now, even if it was freed because its values were moved to the CPU."""
        self.events.append((0, number))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next(model.parameters()).device


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Run compiled code eagerly, since torch.compile never compiles what it first sees under `LiveBytes` (2.13)."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class PeakBytes:
    """The result of `measure_peak`."""

    activations = 0
    """Peak bytes of the step without parameters and their gradients."""


@contextlib.contextmanager
def measure_peak(model: nn.Module) -> Iterator[PeakBytes]:
    """Measure the peak memory allocated in a training step: activations, masks, gradients of activations.

    It does not read or reset the allocator, so it works the same on all devices and does not affect other statistics.
    Temporary memory inside kernels is not included.

    Args:
        model: The gradients of its parameters do not count.

    Returns:
        A context whose value holds the peak in bytes after the context ends.

    Example:
        >>> net = nn.Linear(256, 256)
        >>> with measure_peak(net) as peak:
        ...     net(torch.ones(64, 256)).square().sum().backward()
        >>> peak.activations >= 2 * 64 * 256 * 4
        True
    """
    peak, live = PeakBytes(), LiveBytes(device_of(model).type)
    with uncompiled(), live:
        yield peak
    peak.activations = max(live.held(live.numbers(parameter.grad for parameter in model.parameters())))


def _plain_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Mark = float | torch.cuda.Event


class StepProfile:
    """Records one or more training steps, forward and backward, and returns the cost of the blocks.

    Each storage that autograd saves inside a block counts once. Weights, and tensors from before the step, do not
    count. On CUDA, saved tensors are kept in CPU memory, as with `torch.autograd.graph.save_on_cpu`, so that models fit
    that otherwise need checkpointing. Such a step is slow. Its results stay bit-equal.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        modules = {plain_name(name): module for name, module in model.named_modules()}
        self._model, self._modules = model, {name: modules[name] for name in names}
        self._device_type = device_of(model).type
        self._open: ExitStack | None = None
        self._step = _Step(LiveBytes(self._device_type))
        self._costs: list[StepCost] = []
        self._empty = 0  # steps in a row without a forward

    @property
    def num_steps(self) -> int:
        """Number of recorded steps."""
        return len(self._costs)

    def start(self) -> None:
        """Start recording, before the model's forward."""
        self.cancel()
        self._step, self._open = _Step(LiveBytes(self._device_type)), ExitStack()
        for name, module in self._modules.items():
            before = module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True)
            after = module.register_forward_hook(partial(self._after, name), always_call=True)
            self._open.callback(before.remove)
            self._open.callback(after.remove)
        self._open.enter_context(uncompiled())
        self._open.enter_context(self._step.live)

    def cancel(self) -> None:
        """Stop recording and forget the current step, if any."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def stop(self) -> None:
        """End the step after its backward. A step without forward or backward is forgotten."""
        self.cancel()
        step = self._step
        if not step.calls and self._empty < MOST_EMPTY:
            self._empty += 1
            return
        self._empty = 0
        remedy = "leave it out, or use a policy without a budget"
        if missing := [name for name in self._modules if name not in step.calls]:
            rule = f"every block must run in a training step, but {missing[0]} did not"
        elif step.again is not None:
            rule = f"{step.again} must run only once per step with a budget, got a second call"
        elif not any(call.saved for call in step.calls.values()):
            rule = "the blocks save nothing for backward: they are frozen, or checkpointed elsewhere"
            remedy = "name other blocks in include, or leave checkpointing out"
        elif self._costs and [block.name for block in self._costs[0].blocks] != list(step.calls):
            rule = "with a budget, blocks must run in the same order in every step, but the order changed"
        else:
            rule = ""
        if rule:
            raise TrainingError("checkpointing", rule, remedy)
        if all(call.backward is None for call in step.calls.values()):
            return
        # Parameter gradients exist with and without checkpointing.
        gradients = step.live.numbers(parameter.grad for parameter in self._model.parameters())
        self._costs.append(step.cost(gradients))

    def cost(self) -> StepCost:
        """Return the largest bytes and the shortest times of all recorded steps.

        Blocks of the same class and bytes all get the median of their times, because the first block that runs in a
        process is slow and should not affect the plan.
        """
        merged = _merged(self._costs)
        alike: dict[Hashable, list[BlockCost]] = {}

        def kind(block: BlockCost) -> Hashable:
            return own_class(self._modules[block.name]), block.saved

        # Blocks of one class that save equally much do the same work, and the median is more stable than single times.
        for block in merged.blocks:
            alike.setdefault(kind(block), []).append(block)
        blocks = (
            replace(
                block,
                seconds=statistics.median(other.seconds for other in alike[kind(block)]),
                tail=statistics.median(other.tail for other in alike[kind(block)]),
            )
            for block in merged.blocks
        )
        return replace(merged, blocks=tuple(blocks))

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        step = self._step
        # A second call of a block does not fit into a chain.
        if name in step.calls:
            step.again = name
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        call = step.calls[name] = _Call(
            input=step.live.number(tensors[0]) if tensors else None,
            arguments=step.live.numbers(tensors),
            follows=bool(tensors) and step.last_output() is tensors[0],
            begun=len(step.live.events),
            weights=step.live.numbers([*module.parameters(), *module.buffers()]),
            hooks=saved_tensors_hooks(partial(self._pack, name), self._unpack),
        )
        call.hooks.__enter__()
        call.marks.append(self._mark())

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        step, call = self._step, self._step.calls[name]
        if step.again is not None:
            return
        call.marks.append(self._mark())
        call.hooks.__exit__()
        tensor = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        call.output = None if tensor is None else step.live.number(tensor)
        call.trains = tensor is None or tensor.requires_grad
        # Segments start where gradients do. Before that, keeping an input would be useless.
        step.last_output = (lambda: None) if tensor is None or not call.trains else weakref.ref(tensor)
        step.last_event = len(step.live.events)

    def _pack(self, name: str, tensor: Tensor) -> Any:
        call = self._step.calls[name]
        call.marks.append(self._mark())
        number = self._step.live.number(tensor)
        made_here = number is not None and number not in call.weights
        # While profiling, saved tensors go to the CPU, because the model may not fit into memory without
        # checkpointing.
        packed = _Packed(self._away(tensor) if made_here else tensor, tensor.device, tensor.stride(), call)
        if number is not None and made_here:
            call.saved.add(number)
            # Its values are on the CPU, but without the profile it would be held until backward, so count it.
            weakref.finalize(packed, self._step.live.keep_until_now, number).atexit = False
        call.marks.append(self._mark())
        return packed

    def _unpack(self, packed: _Packed) -> Tensor:
        live = self._step.live
        if packed.call.backward is None:
            packed.call.backward = len(live.events)
        tensor = packed.back()
        # Tensors copied back for backward are not activations of the step.
        if tensor is not packed.tensor:
            self._step.copies |= live.numbers([tensor])
        return tensor

    @staticmethod
    def _away(tensor: Tensor) -> Tensor:
        return tensor.to("cpu") if tensor.is_cuda else tensor

    def _mark(self) -> Mark:
        if self._device_type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass
class _Call:
    """A block's forward: numbers of storages, and times."""

    input: int | None
    arguments: set[int]
    follows: bool
    weights: set[int]
    hooks: Any
    begun: int
    """Events before it."""
    output: int | None = None
    trains: bool = True
    """True if gradients reach it, unlike frozen layers at the beginning."""
    backward: int | None = None
    """Events before its backward."""
    saved: set[Any] = field(default_factory=set)
    marks: list[Mark] = field(default_factory=list)

    def times(self) -> list[float]:
        """Return the seconds between saved tensors, the first from the start, the last to the end."""
        return [_seconds(start, end) for start, end in zip(self.marks[::2], self.marks[1::2], strict=True)]


@dataclass(eq=False)
class _Packed:
    """The graph's entry instead of a tensor."""

    tensor: Tensor
    device: torch.device
    strides: tuple[int, ...]
    call: _Call

    def back(self) -> Tensor:
        """Return the tensor on its device in its original layout. Another layout could use a kernel that rounds."""
        if self.tensor.device == self.device or 0 in self.strides:
            return self.tensor.to(self.device)
        back = torch.empty_strided(self.tensor.shape, self.strides, dtype=self.tensor.dtype, device=self.device)
        return back.copy_(self.tensor)


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return float(end) - start
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


@dataclass
class _Step:
    """The record of one step."""

    live: LiveBytes
    calls: dict[str, _Call] = field(default_factory=dict)
    last_output: Callable[[], Any] = lambda: None
    again: str | None = None
    """A block that ran a second time."""
    last_event: int = 0
    copies: set[int] = field(default_factory=set)
    """Storages that were copied back from the CPU."""

    def cost(self, gradients: set[int]) -> StepCost:
        """Return the step's cost. A storage belongs to the block whose input it is, or else that first saves it."""
        calls = list(self.calls.items())
        uses = Counter(number for _, call in calls for number in call.arguments)
        # Masks and position embeddings are held for all blocks in any case; an output belongs to what follows.
        counted = {number for number, count in uses.items() if count > 1}
        counted |= {number for _, call in calls for number in (call.input, call.output) if number is not None}
        blocks = []
        for name, call in calls:
            times = call.times()
            blocks.append(
                BlockCost(
                    name=name,
                    input=self._size(call.input) if call.trains else 0,
                    saved=sum(map(self._size, call.saved - counted)),
                    seconds=sum(times),
                    tail=times[-1] if len(times) > 1 else 0.0,
                    follows=call.follows,
                )
            )
            counted |= call.saved
        kept = list(accumulate(block.input + block.saved for block in blocks))
        held, head = self._held_beside([call for _, call in calls], kept, gradients | self.copies)
        inner = (replace(block, inner=most) for block, most in zip(blocks, held, strict=True))
        return StepCost(blocks=tuple(inner), head=head)

    def _held_beside(self, calls: Sequence[_Call], kept: Sequence[int], without: set[int]) -> tuple[list[int], int]:
        """Return the peak bytes besides those `kept` while each block runs, and between forward and backward."""
        # inner(i) = max(held(e) - kept(i)) over the events e of block i's forward and of its backward, which ends when
        # the previous block's begins. The chain's backward begins with the first block that unpacks anything.
        backward = min(call.backward for call in calls if call.backward is not None)
        # Memory that outlives the step is not an activation (DDP's buckets, cached tables), except the output.
        lasting = self.live.lasting().items()
        without = without | {number for number, made in lasting if not calls[0].begun <= made < backward}
        held = self.live.held(without)
        ends = [*(call.begun for call in calls[1:]), self.last_event]
        # Besides what the chain holds by then: the block's own intermediate results.
        inner = [max(held[call.begun : end + 1]) - own for call, end, own in zip(calls, ends, kept, strict=True)]
        end = len(held)
        # Backward runs the blocks in reverse. Each one's part ends where the previous block's begins.
        for i, call in enumerate(calls):
            if call.backward is not None:
                inner[i], end = max(inner[i], max(held[call.backward : end + 1]) - kept[i]), call.backward
        return [max(most, 0) for most in inner], max(held[self.last_event : end + 1]) - kept[-1]

    def _size(self, number: int | None) -> int:
        return 0 if number is None else self.live.sizes[number]


def _merged(costs: Sequence[StepCost]) -> StepCost:
    """Return the largest bytes and the shortest times of several steps."""
    # The shortest times, since one-time work slows the first step, but the largest bytes.
    blocks = tuple(
        BlockCost(
            name=same[0].name,
            **{figure: max(getattr(block, figure) for block in same) for figure in ("input", "saved", "inner")},
            **{figure: min(getattr(block, figure) for block in same) for figure in ("seconds", "tail", "follows")},
        )
        for same in zip(*(cost.blocks for cost in costs), strict=True)
    )
    return StepCost(blocks=blocks, head=max(cost.head for cost in costs))
