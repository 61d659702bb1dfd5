"""Refuse bad values of many tensors by one read of their flags: each look at a GPU waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import EffError

_open: list[list[tuple[Tensor, Callable[[], EffError]]]] = []


def read_together(values: Sequence[Tensor]) -> list[Any]:
    """Return single values of tensors, of one dtype, in one read.

    Example:
        >>> read_together([torch.tensor(3), torch.tensor([4])])
        [3, 4]
    """
    return torch.stack([value.reshape(()).to(values[0].device) for value in values]).tolist() if values else []


def refuse(flag: Tensor, error: Callable[[], EffError]) -> None:
    """Raise an error where a flag is True; inside `checked_together` flags of a GPU are looked at when that ends.

    Args:
        flag: bool, one value.
        error: Makes the error.
    """
    if _open and not flag.is_cpu:
        _open[-1].append((flag, error))
    elif flag:
        raise error()


@contextlib.contextmanager
def checked_together() -> Iterator[None]:
    """Surround what checks many tensors by `refuse`; the first error is raised at the end."""
    flags: list[tuple[Tensor, Callable[[], EffError]]] = []
    _open.append(flags)
    try:
        yield
    finally:
        _open.pop()
    for is_set, (_, error) in zip(read_together([flag for flag, _ in flags]), flags, strict=True):
        if is_set:
            raise error()
