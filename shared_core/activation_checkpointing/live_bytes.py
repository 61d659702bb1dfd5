"""The memory of the tensors that a step of training makes: when each was made and let go, on any device."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared_core.ranks import local_part


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operations make while it is entered, and when they are released.

    Each storage counts once, whole, however many tensors see it. What a kernel takes for the moment does not count.

    Args:
        device_type: Where they are, such as ``cuda``; what lies elsewhere does not count.
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
            if _address(value) not in given:
                self._note(value)
        return output

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers or tensor.device.type != self._device_type or not storage.nbytes():
            return
        number = len(self.sizes)
        self._numbers[storage._cdata] = number
        self.sizes.append(storage.nbytes())
        self.events.append((storage.nbytes(), number))
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
        """Return the bytes held after each event, some storages left out.

        A storage is held from its first event to its last: `keep_until_now` can come after its release.
        """
        last = {number: i for i, (_, number) in enumerate(self.events)}
        changes, released = [0] * (len(self.events) + 1), set()
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
    """Run what is compiled eagerly: a function that torch.compile meets under `LiveBytes` is never compiled again.

    So it is in torch 2.13.
    """
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


class PeakBytes:
    """What `measure_peak` measured."""

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
