"""What each block of a model costs in a step of training, seen while the step runs on any device: bytes and time."""

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
"""Steps in a row that a script may leave out, before it counts as one whose blocks do not run."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operations make while it is entered, and when they are released.

    Each storage of a device type counts once, whole, however many tensors see it. What a kernel takes for the moment
    does not count.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self.events: list[tuple[int, int]] = []
        """Bytes made, negative when released, and the number of the storage, in order."""
        self.sizes: list[int] = []
        """Bytes of each storage, by number."""
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note what it made."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # sharded, quantised: comes again for the plain tensors inside
        output = func(*args, **(kwargs or {}))
        given = {_address(value) for value in _plain_tensors((args, kwargs))}
        for value in _plain_tensors(output):
            # a view, or what was written in place, is no new memory
            if _address(value) not in given:
                self._note(value)
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        # `_cdata` is the storage's address in C++: the same for all views of it.
        if storage._cdata in self._numbers or tensor.device.type != self._device_type or not storage.nbytes():
            return
        number = len(self.sizes)
        self._numbers[storage._cdata] = number
        self.sizes.append(storage.nbytes())
        self.events.append((storage.nbytes(), number))
        # By the storage, which all views share. atexit False: at the end of the process nobody asks.
        weakref.finalize(storage, self._released, storage._cdata).atexit = False

    def _released(self, address: int) -> None:
        number = self._numbers.pop(address)
        self.events.append((-self.sizes[number], number))

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, None if it was there before or nothing is known of it."""
        return self._numbers.get(_address(local_part(tensor)))

    def numbers(self, tensors: Iterable[Any]) -> set[int]:
        """Return the numbers of those tensors' storages that were made here."""
        found = (self.number(tensor) for tensor in _plain_tensors([*tensors]))
        return {number for number in found if number is not None}

    def lasting(self) -> dict[int, int]:
        """Return the number of every storage that is still there, with the number of events before it was made."""
        there = set(self._numbers.values())
        return {number: i for i, (size, number) in enumerate(self.events) if size > 0 and number in there}

    def held(self, without: Collection[int] = ()) -> list[int]:
        """Return the bytes held after each event, each storage from its first to its last, some left out."""
        last = {number: i for i, (_, number) in enumerate(self.events)}
        changes, released = [0] * (len(self.events) + 1), set()
        # An address may be used again, so storages have numbers; the last event may be `keep_until_now`.
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
        """Count a storage as held until now, though it may have been released before: its values were elsewhere."""
        self.events.append((0, number))


def device_of(model: nn.Module) -> torch.device:
    """Return where a model's first parameter is."""
    return next(model.parameters()).device


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Run what is compiled eagerly: what torch.compile meets under `LiveBytes` stays eager for good (torch 2.13)."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class PeakBytes:
    """The result of `measure_peak`."""

    activations = 0
    """Bytes that the step held at most, parameters and their gradients left out."""


@contextlib.contextmanager
def measure_peak(model: nn.Module) -> Iterator[PeakBytes]:
    """Measure the peak of what is made while a step of training runs: activations, masks, gradients of activations.

    Nothing of the allocator is asked or reset, so it is the same on every device and disturbs nobody else's figures;
    what kernels take for the moment is not in it.

    Args:
        model: Whose parameters' gradients do not count.

    Returns:
        A context that gives the peak, in bytes; it is filled in when the context ends.

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
    """Sees one or several steps of training, forward and backward, and tells what the blocks cost.

    Of the tensors that autograd saves inside a block each storage counts once; weights, and what was there before the
    step, do not count. On CUDA what is saved is kept in the memory of the CPU meanwhile, as by
    `torch.autograd.graph.save_on_cpu`, so that a model fits that would not without checkpointing: such a step is slow.
    The step computes what it always does, to the bit.
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
        """Number of steps that it saw."""
        return len(self._costs)

    def start(self) -> None:
        """Look on from here; before the model's forward."""
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
        """Stop looking on and forget the step that was begun, if any."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def stop(self) -> None:
        """The step's backward is over. A step without one, or without a forward, is forgotten."""
        self.cancel()
        step = self._step
        if not step.calls and self._empty < MOST_EMPTY:
            self._empty += 1
            return
        self._empty = 0
        remedy = "leave it out, or use a policy without a budget"
        if missing := [name for name in self._modules if name not in step.calls]:
            rule = f"every block must run in a step of training, got none of {missing[0]}"
        elif step.again is not None:
            rule = f"{step.again} must run once in a step to keep a budget, got a second call"
        elif not any(call.saved for call in step.calls.values()):
            rule = "blocks must save something for backward, got nothing: they are frozen, or checkpointed elsewhere"
            remedy = "name others with include, or drop it"
        elif self._costs and [block.name for block in self._costs[0].blocks] != list(step.calls):
            rule = "blocks must run in one order in every step to keep a budget, got another"
        else:
            rule = ""
        if rule:
            raise TrainingError("checkpointing", rule, remedy)
        if all(call.backward is None for call in step.calls.values()):
            return
        # Parameter gradients are there with and without checkpointing.
        gradients = step.live.numbers(parameter.grad for parameter in self._model.parameters())
        self._costs.append(step.cost(gradients))

    def cost(self) -> StepCost:
        """Return the most bytes and the least times of all the steps seen.

        Blocks of one class that hold the same bytes have the same times, the median of theirs: the first block that
        runs in a process is slow, and no plan should hang on it.
        """
        merged = _merged(self._costs)
        alike: dict[Hashable, list[BlockCost]] = {}

        def kind(block: BlockCost) -> Hashable:
            return own_class(self._modules[block.name]), block.saved

        # Blocks of one class that save as much do the same work: the median is steadier than one block's own clock.
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
        # A second call of one block has no place in a chain.
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
        # no segment can begin before the gradients do: it would hold its input for nothing
        step.last_output = (lambda: None) if tensor is None or not call.trains else weakref.ref(tensor)
        step.last_event = len(step.live.events)

    def _pack(self, name: str, tensor: Tensor) -> Any:
        call = self._step.calls[name]
        call.marks.append(self._mark())
        number = self._step.live.number(tensor)
        made_here = number is not None and number not in call.weights
        # A saved tensor goes to the CPU while profiling: the profile of a model that does not fit must run in little
        # memory.
        packed = _Packed(self._away(tensor) if made_here else tensor, tensor.device, tensor.stride(), call)
        if number is not None and made_here:
            call.saved.add(number)
            # Its values are away, but without the profile it would be held until backward: counted so.
            weakref.finalize(packed, self._step.live.keep_until_now, number).atexit = False
        call.marks.append(self._mark())
        return packed

    def _unpack(self, packed: _Packed) -> Tensor:
        live = self._step.live
        if packed.call.backward is None:
            packed.call.backward = len(live.events)
        tensor = packed.back()
        # What comes back for backward is no activation of the step.
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
    """A block's forward: numbers of storages, and the clock."""

    input: int | None
    arguments: set[int]
    follows: bool
    weights: set[int]
    hooks: Any
    begun: int
    """Events before it."""
    output: int | None = None
    trains: bool = True
    """True if gradients come back to it: not to frozen layers at the beginning."""
    backward: int | None = None
    """Events before its backward."""
    saved: set[Any] = field(default_factory=set)
    marks: list[Mark] = field(default_factory=list)

    def times(self) -> list[float]:
        """Return the seconds from one tensor saved to the next, the first from the start, the last to the end."""
        return [_seconds(start, end) for start, end in zip(self.marks[::2], self.marks[1::2], strict=True)]


@dataclass(eq=False)
class _Packed:
    """The entry of the graph in the place of a tensor."""

    tensor: Tensor
    device: torch.device
    strides: tuple[int, ...]
    call: _Call

    def back(self) -> Tensor:
        """Return the tensor on its device, in its own layout: another one could take another kernel, which rounds."""
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
        """Return what the step cost; a storage belongs to the block whose input it is, else that first saves it."""
        calls = list(self.calls.items())
        uses = Counter(number for _, call in calls for number in call.arguments)
        # masks and position embeddings are there for all blocks, checkpointed or not; an output is for what follows
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
        """Return the most bytes beside those `kept` up to each block while it runs, and between the chain's passes."""
        # inner(i) = max(held(e) - kept(i)) over the events e of its forward and of its backward, which goes on until
        # that of the block before begins. The chain's backward begins with the first block that unpacks anything.
        backward = min(call.backward for call in calls if call.backward is not None)
        # what a step leaves behind is no activation: buckets of DDP, tables that are kept; but for the output
        lasting = self.live.lasting().items()
        without = without | {number for number, made in lasting if not calls[0].begun <= made < backward}
        held = self.live.held(without)
        ends = [*(call.begun for call in calls[1:]), self.last_event]
        # Beside what the chain holds by then: the block's own intermediate results.
        inner = [max(held[call.begun : end + 1]) - own for call, end, own in zip(calls, ends, kept, strict=True)]
        end = len(held)
        # Backward runs the blocks in reverse; each one's part ends where the one before it began.
        for i, call in enumerate(calls):
            if call.backward is not None:
                inner[i], end = max(inner[i], max(held[call.backward : end + 1]) - kept[i]), call.backward
        return [max(most, 0) for most in inner], max(held[self.last_event : end + 1]) - kept[-1]

    def _size(self, number: int | None) -> int:
        return 0 if number is None else self.live.sizes[number]


def _merged(costs: Sequence[StepCost]) -> StepCost:
    """Return the most bytes and the least times of several steps."""
    # Times: the least of several steps, as the first is slowed by what happens once. Bytes: the most.
    blocks = tuple(
        BlockCost(
            name=same[0].name,
            **{figure: max(getattr(block, figure) for block in same) for figure in ("input", "saved", "inner")},
            **{figure: min(getattr(block, figure) for block in same) for figure in ("seconds", "tail", "follows")},
        )
        for same in zip(*(cost.blocks for cost in costs), strict=True)
    )
    return StepCost(blocks=blocks, head=max(cost.head for cost in costs))
