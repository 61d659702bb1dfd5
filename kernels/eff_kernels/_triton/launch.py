"""Launch Triton kernels: check that Triton works, reduce host time, and process a whole model in one launch.

With one launch per parameter, the host would limit a step's element-wise work. A `TensorTable` holds the addresses
of many tensors, and each program of one launch looks up its part of them.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


@functools.cache
def has_triton() -> bool:
    """Return True if `triton` is installed, as with CUDA builds of torch on Linux."""
    return importlib.util.find_spec("triton") is not None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_eager_cuda(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if `x` (not empty, up to 32 bits) and the others are plain tensors on one GPU, and not traced.

    The compiler fuses torch's own operations and cannot see inside an operator. ``torch.func`` cannot either.

    Example:
        >>> on_eager_cuda(torch.ones(2))
        False
    """
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.dtype in _DTYPES
        and x.numel() > 0
        and all(t is None or (is_plain(t) and t.device == x.device) for t in (x, *others))
        and not torch._C._are_functorch_transforms_active()
        and compiles_for(x.device)
    )


def is_plain(x: Tensor) -> bool:
    """Return True for a tensor or parameter, False for other subclasses (such as DTensor), which keep data elsewhere.

    Example:
        >>> is_plain(nn.Parameter(torch.ones(2)))
        True
    """
    return type(x) in (Tensor, nn.Parameter)


@functools.cache
def compiles_for(device: torch.device) -> bool:
    """Return True if Triton and the kernel sources are installed, and the GPU supports bfloat16 (Ampere or later)."""
    has_sources = not __file__.endswith(".pyc")  # a bytecode-only install has none
    return has_sources and has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


def remembering(kernel: Any) -> Any:
    """Return a Triton kernel that finds its compiled version in a third of Triton's own host time.

    In every launch, Triton binds arguments by name, computes the properties on which its code depends, and reads its
    settings from the environment. Here these properties are the cache key: constants, types, addresses or integers
    divisible by 16, and integers that are 1 or have more than 32 bits. Triton itself launches unknown keys, and
    everything in its interpreter.
    """
    import triton  # only here, because this module is imported even without launches

    if triton.knobs.runtime.interpret:
        return kernel
    compiled: dict[Any, tuple[Any, list[Any]]] = {}

    def run(*args: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Any:
        key = (args[0].get_device(), *map(_specialized, args), *constants.items())
        if (found := compiled.get(key)) is None:
            made = type(kernel).run(kernel, *args, grid=grid, warmup=warmup, **constants)
            if made is not None and not warmup:
                compiled[key] = made, [constants[name] for name in kernel.arg_names[len(args) :]]
            return made
        made, rest = found
        made[(*grid, 1, 1)[:3]](*args, *rest)
        return made

    kernel.run = run
    return kernel


def _specialized(value: Any) -> Any:
    kind = type(value)
    if kind is int:
        return value == 1 or (value & 15 == 0, -(2**31) <= value < 2**31)
    return kind if kind is float else (value.dtype, value.data_ptr() & 15 == 0)


def directly(operator: Any) -> Any:
    """Return an operator's function, to avoid the dispatch, or the operator itself if something traces operators.

    Args:
        operator: From `torch.library.custom_op`. It must not change its arguments, which need no gradient here.
    """
    return operator if torch._C._len_torch_dispatch_stack() else operator._init_fn


def cdiv(count: int, size: int) -> int:
    """Return ``count / size``, rounded up. Triton's own version takes 5 us of host time.

    Example:
        >>> cdiv(9, 4)
        3
    """
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two not below a positive count. Triton's own version takes 5 us of host time.

    Example:
        >>> next_power_of_2(9), next_power_of_2(8)
        (16, 8)
    """
    return 1 << (count - 1).bit_length()


_LARGEST_AXIS = 65_535  # programs on the second and on the third axis of a grid


def grid_of_tiles(rows: int, columns: int) -> tuple[int, int, int]:
    """Return a grid for this number of tiles.

    A program's column is its index on the third axis times the size of the second plus its index there. It may be
    beyond the last.

    Example:
        >>> grid_of_tiles(100_000, 4), grid_of_tiles(1, 65_536)
        ((100000, 4, 1), (1, 32768, 2))
    """
    slices = -(-columns // _LARGEST_AXIS)
    return rows, -(-columns // slices), slices


_ALIGNED = 16


class TensorTable(NamedTuple):
    """Rows of tensors of the same dtypes, in the layout for a kernel."""

    table: Tensor
    """int64, per row: the address of each column's tensor, its number of elements, the row's first program, its index
    among all rows."""
    owners: Tensor
    """int64, per program: its row."""
    like: list[Tensor]
    """One tensor per column, which gives the column's dtype."""
    is_aligned: bool
    """True if addresses and sizes are multiples of 16, so that loads can be vectors."""


def runs_in_one_launch(*columns: Sequence[Tensor]) -> bool:
    """Return True if Triton can read these tensors by address: plain, dense, on one GPU, and not while compiling.

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

    Nothing waits for the device: tables are copied from pinned memory, only once for tensors that keep their address.

    Args:
        chunk: Elements of one program.
        columns: Dense tensors on one device; the first column's sizes count.
    """
    if not columns[0]:
        return
    device = columns[0][0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    # A model has hundreds of tensors, most of them small, so use one launch for all, with a table from program to
    # tensor. The caller keeps the tensors alive until the launch is queued.
    addresses = tuple(tuple(tensor.data_ptr() for tensor in column) for column in columns)
    dtypes = tuple(tuple(tensor.dtype for tensor in column) for column in columns)
    sizes = tuple(tensor.numel() for tensor in columns[0])
    tables = _tables(chunk, addresses, sizes, dtypes, device, stream)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(tables)
    for table, owners, row, is_aligned, _ in tables:
        yield TensorTable(table, owners, [column[row] for column in columns], is_aligned)


_CAPTURED: list[object] = []
"""Tables that a CUDA graph reads in each replay, and copies again if it captured the copy."""


@functools.lru_cache(maxsize=8)  # weights, gradients and masks of a model or two
def _tables(
    chunk: int,
    addresses: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    dtypes: tuple[tuple[torch.dtype, ...], ...],
    device: torch.device,
    stream: int,
) -> list[tuple[Tensor, Tensor, int, bool, Tensor]]:
    """Return per table the rows, their programs, a row, True if all are aligned, and its source in host memory."""
    # The arguments determine a table's contents, so a table of freed tensors does no harm. A copy queued on
    # one stream is not yet visible on another.
    groups: dict[tuple[bool, tuple[torch.dtype, ...]], list[int]] = {}
    places, counts = np.array(addresses, dtype=np.int64), np.array(sizes, dtype=np.int64)
    aligned = (places % _ALIGNED == 0).all(0) & (counts % _ALIGNED == 0)
    for index in counts.nonzero()[0].tolist():
        key = bool(aligned[index]), tuple(column[index] for column in dtypes)
        groups.setdefault(key, []).append(index)
    tables = []
    for (is_aligned, _), rows in groups.items():
        # Program p belongs to row owners[p] and begins (p - first program) * chunk elements into it.
        programs = -(-counts[rows] // chunk)
        table = np.vstack((places[:, rows], counts[rows], programs.cumsum() - programs, rows)).T.reshape(-1)
        owners = np.repeat(np.arange(len(rows)), programs)
        # One copy to the device. An odd table is padded with a zero, so that `owners` after it is 16-byte aligned.
        source = packed = torch.from_numpy(np.concatenate((table, np.zeros(len(table) % 2, np.int64), owners)))
        if device.type == "cuda":
            # Pinned and asynchronous, so that the host does not wait for earlier kernels.
            source = source.pin_memory()
            packed = source.to(device, non_blocking=True)
        tables.append((packed[: len(table)], packed[-len(owners) :], rows[0], is_aligned, source))
    return tables
