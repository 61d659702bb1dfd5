"""Many tensors in one Triton launch: a table of their addresses, and for each program which part of which it takes.

Each parameter of a model is a launch of its own otherwise, and a step's element-wise work is then bound by the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from eff_kernels.eager_cuda import compiles_for, is_plain

_ALIGNED = 16


class TensorTable(NamedTuple):
    """Rows of tensors of the same dtypes, as a kernel finds them."""

    table: Tensor
    """int64, row by row: the address of each column's tensor, the elements of one, the row's first program, its index
    among all rows."""
    owners: Tensor
    """int64, by program: its row."""
    like: list[Tensor]
    """One tensor of each column: its dtype is the column's."""
    is_aligned: bool
    """Whether addresses and sizes are multiples of 16, so that loads can be vectors."""


def runs_in_one_launch(*columns: Sequence[Tensor]) -> bool:
    """Return whether Triton can read these tensors by address: plain, dense, of one GPU, and not while compiling.

    Args:
        columns: Lists of tensors of one length, which a launch reads together.

    Example:
        >>> runs_in_one_launch([torch.ones(2)])
        False
    """
    first = columns[0]
    if not first or not first[0].is_cuda or torch.compiler.is_compiling():
        return False
    device = first[0].device
    tensors = itertools.chain.from_iterable(columns)
    return compiles_for(device) and all(is_plain(t) and t.device == device and _is_dense(t) for t in tensors)


def _is_dense(tensor: Tensor) -> bool:
    if tensor.layout != torch.strided:
        return False
    return tensor.is_contiguous() or (tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def tensor_tables(chunk: int, *columns: Sequence[Tensor]) -> Iterator[TensorTable]:
    """Yield tables of the rows that are not empty, one for all rows of the same dtypes and alignment.

    Nothing waits for the device: the table travels from pinned memory.

    Args:
        chunk: Elements of one program.
        columns: Dense tensors on one device; the first column's sizes count.
    """
    groups: dict[tuple[bool, tuple[torch.dtype, ...]], list[int]] = {}
    addresses = np.array([[tensor.data_ptr() for tensor in column] for column in columns], dtype=np.int64)
    sizes = np.array([tensor.numel() for tensor in columns[0]], dtype=np.int64)
    aligned = (addresses % _ALIGNED == 0).all(0) & (sizes % _ALIGNED == 0)
    for index in sizes.nonzero()[0].tolist():
        key = bool(aligned[index]), tuple(column[index].dtype for column in columns)
        groups.setdefault(key, []).append(index)
    for (is_aligned, _), rows in groups.items():
        programs = -(-sizes[rows] // chunk)
        table = np.vstack((addresses[:, rows], sizes[rows], programs.cumsum() - programs, rows)).T.reshape(-1)
        owners = np.repeat(np.arange(len(rows)), programs)
        packed = torch.from_numpy(np.concatenate((table, np.zeros(len(table) % 2, np.int64), owners)))
        like = [column[rows[0]] for column in columns]
        if like[0].is_cuda:
            packed = packed.pin_memory().to(like[0].device, non_blocking=True)
        yield TensorTable(packed[: len(table)], packed[-len(owners) :], like, is_aligned)
