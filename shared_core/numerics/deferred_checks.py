"""Read or check many tensors at once, because each read from a GPU waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import EffError

_SHARED_BYTES = 1 << 26
_open: list[list[tuple[Tensor, Callable[[], EffError]]]] = []


def read_together(values: Sequence[Tensor]) -> list[Any]:
    """Return the values of single-element tensors of one dtype in one read.

    Example:
        >>> read_together([torch.tensor(3), torch.tensor([4])])
        [3, 4]
    """
    return torch.stack([value.reshape(()).to(values[0].device) for value in values]).tolist() if values else []


def copied_to_cpu(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield copies of tensors on the CPU, in order. Up to 64 MiB of one device are copied at once.

    Example:
        >>> list(copied_to_cpu([torch.tensor([1.5]), torch.tensor(2)]))
        [tensor([1.5000]), tensor(2)]
    """
    held: list[Tensor] = []
    for tensor in tensors:
        found = [*held, tensor.detach()]
        if held and (tensor.device != held[0].device or sum(each.nbytes for each in found) > _SHARED_BYTES):
            yield from _in_one_copy(held)
            found = found[-1:]
        held = found
    yield from _in_one_copy(held)


def _in_one_copy(tensors: list[Tensor]) -> Iterator[Tensor]:
    if len(tensors) < 2 or tensors[0].is_cpu:
        yield from (tensor.to("cpu", copy=True) for tensor in tensors)
        return
    together = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).cpu()
    for tensor, part in zip(tensors, torch.split(together, [tensor.nbytes for tensor in tensors]), strict=True):
        # cloned, so that it is aligned to its type and does not keep the others in memory
        yield part.clone().view(tensor.dtype).view(tensor.shape)


def refuse(flag: Tensor, error: Callable[[], EffError]) -> None:
    """Raise an error if a flag is True. Within `checked_together`, GPU flags are read at its end."""
    if _open and not flag.is_cpu:
        _open[-1].append((flag, error))
    elif flag:
        raise error()


@contextlib.contextmanager
def checked_together() -> Iterator[None]:
    """Collect the checks that `refuse` makes in this context, and raise the first error at its end."""
    flags: list[tuple[Tensor, Callable[[], EffError]]] = []
    _open.append(flags)
    try:
        yield
    finally:
        _open.pop()
    for is_set, (_, error) in zip(read_together([flag for flag, _ in flags]), flags, strict=True):
        if is_set:
            raise error()
