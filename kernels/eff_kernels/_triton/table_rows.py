"""Read a `TensorTable` in a kernel: the row of a program, and the addresses in it."""

from __future__ import annotations

from eff_kernels._triton.launch import has_triton

if has_triton():
    import triton
    import triton.language as tl


def _row_of_program(
    table: tl.tensor, owners: tl.tensor, columns: tl.constexpr, chunk: tl.constexpr, aligned: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    # The program's row: addresses of its columns, then size, first program and index.
    program = tl.program_id(0)
    row = table + tl.load(owners + program) * (columns + 3)
    size = tl.load(row + columns)
    if aligned:
        size = tl.multiple_of(size, 16)
    start = (program - tl.load(row + columns + 1)) * chunk
    return row, start, size, tl.load(row + columns + 2)


def _pointer(row: tl.tensor, column: tl.constexpr, like: tl.tensor, aligned: tl.constexpr) -> tl.tensor:
    pointer = tl.load(row + column).to(like.dtype)
    if aligned:
        # only of a pointer, not of the integer that it was, the compiler keeps this (Triton 3.9)
        pointer = tl.multiple_of(pointer, 16)
    return pointer


if has_triton():
    # a kernel finds what it calls among its module's globals
    row_of_program = triton.jit(_row_of_program)
    pointer = triton.jit(_pointer)
