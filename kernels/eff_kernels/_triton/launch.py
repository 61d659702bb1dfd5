"""Launching Triton kernels: whether Triton can be used, what a launch costs the host, one for a whole model's tensors.

A launch for each parameter would make a step's element-wise work bound by the host. A `TensorTable` holds the addresses
of many tensors; each program of one launch looks up its part of them.
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
    """Return True if `triton` can be found: CUDA builds of torch bring it on Linux."""
    return importlib.util.find_spec("triton") is not None


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_eager_cuda(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if `x`, of up to 32 bits and not empty, and the others are plain tensors on one GPU, and not traced.

    The compiler fuses torch's own operations and cannot look into an operator; ``torch.func`` cannot either.

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
    """Return True if a tensor is no subclass but a parameter; a subclass (a DTensor, say) has its data elsewhere.

    Example:
        >>> is_plain(nn.Parameter(torch.ones(2)))
        True
    """
    return type(x) in (Tensor, nn.Parameter)


@functools.cache
def compiles_for(device: torch.device) -> bool:
    """Return True if Triton is there, with sources to compile, and knows bfloat16 on the GPU: from Ampere on."""
    has_sources = not __file__.endswith(".pyc")  # an install of byte code alone has none
    return has_sources and has_triton() and torch.cuda.get_device_capability(device) >= (8, 0)


def remembering(kernel: Any) -> Any:
    """Return a kernel of Triton that finds what it compiled for such arguments in a third of Triton's own host time.

    In every launch, Triton binds arguments by name, asks of each what its code depends on, and reads its settings from
    the environment. What the code depends on is the key here: constants, types, whether an address or an integer is
    divisible by 16, whether an integer is 1 or has more than 32 bits. Triton launches what is not known yet, and its
    interpreter everything.
    """
    import triton  # not before: who launches nothing imports this module too

    if triton.knobs.runtime.interpret:
        return kernel
    compiled: dict[Any, tuple[Any, list[Any]]] = {}

    def run(*args: Any, grid: tuple[int, ...], warmup: bool, **constants: Any) -> Any:
        key = (args[0].get_device(), *map(_specialised, args), *constants.items())
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


def _specialised(value: Any) -> Any:
    kind = type(value)
    if kind is int:
        return value == 1 or (value & 15 == 0, -(2**31) <= value < 2**31)
    return kind if kind is float else (value.dtype, value.data_ptr() & 15 == 0)


def directly(operator: Any) -> Any:
    """Return an operator's own function where nobody watches operators, whose dispatch takes longer; else the operator.

    Args:
        operator: Made by `torch.library.custom_op`; it changes none of its arguments, which take no gradient here.
    """
    return operator if torch._C._len_torch_dispatch_stack() else operator._init_fn


def cdiv(count: int, size: int) -> int:
    """Return how many parts of a size there are, the last of which may be smaller; Triton's takes 5 us of the host.

    Example:
        >>> cdiv(9, 4)
        3
    """
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    """Return the smallest power of two that is not below a positive count; Triton's takes 5 us of the host.

    Example:
        >>> next_power_of_2(9), next_power_of_2(8)
        (16, 8)
    """
    return 1 << (count - 1).bit_length()


_LARGEST_AXIS = 65_535  # programs on the second and on the third axis of a grid


def grid_of_tiles(rows: int, columns: int) -> tuple[int, int, int]:
    """Return a grid for so many tiles.

    A program's column is its place on the third axis times the second's size plus its place there; it may lie behind
    the last.

    Example:
        >>> grid_of_tiles(100_000, 4), grid_of_tiles(1, 65_536)
        ((100000, 4, 1), (1, 32768, 2))
    """
    slices = -(-columns // _LARGEST_AXIS)
    return rows, -(-columns // slices), slices


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
    """True if addresses and sizes are multiples of 16, so that loads can be vectors."""


def runs_in_one_launch(*columns: Sequence[Tensor]) -> bool:
    """Return True if Triton can read these tensors by address: plain, dense, of one GPU, and not while compiling.

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

    Nothing waits for the device: the table travels from pinned memory, once for tensors that stay where they are.

    Args:
        chunk: Elements of one program.
        columns: Dense tensors on one device; the first column's sizes count.
    """
    if not columns[0]:
        return
    device = columns[0][0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    # A model has hundreds of tensors, most of them small: one launch for all, each program told its tensor by a
    # table. The caller keeps the tensors alive until the launch is queued.
    addresses = tuple(tuple(tensor.data_ptr() for tensor in column) for column in columns)
    dtypes = tuple(tuple(tensor.dtype for tensor in column) for column in columns)
    sizes = tuple(tensor.numel() for tensor in columns[0])
    tables = _tables(chunk, addresses, sizes, dtypes, device, stream)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(tables)
    for table, owners, row, is_aligned, _ in tables:
        yield TensorTable(table, owners, [column[row] for column in columns], is_aligned)


_CAPTURED: list[object] = []
"""Tables that a CUDA graph reads, and copies anew if it captured the copy, in each replay."""


@functools.lru_cache(maxsize=8)  # weights, gradients and masks of a model or two
def _tables(
    chunk: int,
    addresses: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    dtypes: tuple[tuple[torch.dtype, ...], ...],
    device: torch.device,
    stream: int,
) -> list[tuple[Tensor, Tensor, int, bool, Tensor]]:
    """Return of each table the rows, their programs, a row, whether all are aligned, and where it came from."""
    # All that a table says is among the arguments, so that one of tensors that are gone does no harm. What travels on
    # one stream is not there yet on another.
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
        # One copy to the device; an odd table gets a zero, so that `owners` is 16-byte aligned behind it.
        source = packed = torch.from_numpy(np.concatenate((table, np.zeros(len(table) % 2, np.int64), owners)))
        if device.type == "cuda":
            # Pinned and asynchronous: the host does not wait for the kernels before this one.
            source = source.pin_memory()
            packed = source.to(device, non_blocking=True)
        tables.append((packed[: len(table)], packed[-len(owners) :], rows[0], is_aligned, source))
    return tables
