"""The product of int8 codes with a CPU's integer instructions (oneDNN, FBGEMM), and a test of their exactness.

No flag shows if sums are exact. Without VNNI or AMX, x86 adds pairs of products in 16 bits, where ``255·127·2``
saturates. Kernels choose their instructions: oneDNN obeys ONEDNN_MAX_CPU_ISA, torch asks the processor, and some
shapes widen first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Literal

import torch
from torch import Tensor

FBGEMM = "fbgemm"
"""The name of FBGEMM among ``torch.backends.quantized.supported_engines``."""


@contextlib.contextmanager
def fbgemm_engine() -> Iterator[None]:
    """Return a context in which weights are packed for FBGEMM. The process's engine stays what it was."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = FBGEMM
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def pack(weight: Tensor) -> Tensor:
    """Return the codes of a linear layer's weight in oneDNN's layout, for `integer_linear`.

    Args:
        weight: int8, (outputs, inputs), on a CPU.
    """
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def integer_linear(
    codes: Tensor,
    scale: float,
    zero_point: int,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """Return ``s_x·s_w·Σ(q_x − z)·q_w + b`` in float32, the sums exact 32-bit integers.

    x86 without VNNI or AMX adds pairs of products in 16 bits, so q_w must lie within ±64 there.

    Args:
        codes: uint8, (..., inputs), on a CPU.
        scale: s_x, or with `row_scale` a factor of it.
        zero_point: z, for unsigned codes.
        packed: q_w, from `pack`.
        weight_scale: s_w, float32, (outputs,).
        bias: b, float32, (outputs,), or None.
        row_scale: A factor of s_x for each row, float32, (..., 1).

    Example:
        >>> codes, weight = torch.tensor([[130, 127]], dtype=torch.uint8), torch.tensor([[3, -5]], dtype=torch.int8)
        >>> integer_linear(codes, 0.5, 128, pack(weight), torch.tensor([0.1]), None)  # (2·3 + (-1)·(-5))·0.05
        tensor([[0.5500]])
    """
    if torch.compiler.is_compiling():
        # inductor's lowering of oneDNN's operator only supports weights that are constants of the graph (torch 2.13)
        opaque: Tensor = _opaque(codes, scale, zero_point, packed, weight_scale, bias, row_scale)
        return opaque
    zero_points = torch.zeros(len(weight_scale), dtype=torch.int32)
    # bias is added after scaling the rows, so not by the kernel if rows have scales.
    added = bias if row_scale is None else None
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, scale, zero_point, packed, weight_scale, zero_points, added, 1.0, 0, torch.float32, "none", [], ""
    )
    if row_scale is None:
        return y
    return y.mul_(row_scale) if bias is None else torch.addcmul(bias, y, row_scale, out=y)


_opaque = torch.library.custom_op("eff_kernels::integer_linear", integer_linear, mutates_args=())


@_opaque.register_fake
def _(codes: Tensor, scale: float, zero_point: int, packed: Tensor, weight_scale: Tensor, *_: object) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], len(weight_scale)), dtype=torch.float32)


_Kernel = Literal["linear", "convolution", "matmul", "recurrent"]

# Long enough for a kernel to use its wide instructions, small enough to cost nothing.
_INPUTS, _OUTPUTS = 64, 32
_ROWS = (1, 17)  # there are separate kernels for one row


@cache
def sums_exactly(kernel: _Kernel) -> bool:
    """Return True if a kernel's sums are exact for all 8-bit codes. Otherwise weights must lie within ±64.

    Tested with one saturating product on the first call in a process, then cached. A kernel that this torch
    lacks counts as exact, one that fails does not.

    Args:
        kernel: ``torch.ops.onednn.qlinear_pointwise``, ``torch.ops.onednn.qconv2d_pointwise``, ``torch._int_mm`` on a
            CPU, or FBGEMM's product in ``torch.quantized_lstm``.

    Example:
        >>> sums_exactly("linear") in (True, False)
        True
    """
    try:
        with torch.inference_mode():
            return _PROBES[kernel]()
    except AttributeError:  # torch was built without oneDNN
        return True
    except RuntimeError:
        return False


def _filled(value: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device="cpu")


def _ones() -> Tensor:
    return torch.ones(_OUTPUTS, device="cpu")


# The largest codes: pairs are added in 16 bits by AVX2's vpmaddubsw, which saturates at 32,767 < 2 · 255 · 127.
def _linear() -> bool:
    packed = pack(_filled(127, _OUTPUTS, _INPUTS))
    codes = (_filled(255, rows, _INPUTS, dtype=torch.uint8) for rows in _ROWS)
    return all(bool((integer_linear(x, 1.0, 0, packed, _ones(), None) == 255 * 127 * _INPUTS).all()) for x in codes)


def _convolution() -> bool:
    ones, zeros = _ones(), torch.zeros(_OUTPUTS, dtype=torch.int32, device="cpu")
    geometry = ([1, 1], [0, 0], [1, 1], 1)  # stride, padding, dilation, groups
    packed = torch.ops.onednn.qconv_prepack(_filled(127, _OUTPUTS, _INPUTS, 3, 3), ones, 1.0, 0, *geometry, None)
    codes = _filled(255, 1, _INPUTS, 8, 8, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    y: Tensor = torch.ops.onednn.qconv2d_pointwise(
        codes, 1.0, 0, packed, ones, zeros, None, *geometry, 1.0, 0, torch.float32, "none", [], ""
    )
    return bool((y == 255 * 127 * _INPUTS * 9).all())


def _matmul() -> bool:
    # signed by signed: a kernel adds 128 to one factor, halves the other or moves its sign; 127 or -128 reveals this
    return all(
        bool((torch._int_mm(_filled(code, rows, _INPUTS), _filled(code, _INPUTS, _OUTPUTS)) == code**2 * _INPUTS).all())
        for code in (127, -128)
        for rows in _ROWS
    )


def _recurrent() -> bool:
    scale, zeros = _ones().double(), torch.zeros(_OUTPUTS, dtype=torch.long, device="cpu")
    weight = torch._make_per_channel_quantized_tensor(_filled(127, _OUTPUTS, _INPUTS), scale, zeros, 0)
    with fbgemm_engine():
        packed = torch.ops.quantized.linear_prepack(weight, None)
    # values from 0 to 255 get a step of 1: code 255
    codes = (torch.full((rows, _INPUTS), 255.0, device="cpu") for rows in _ROWS)
    return all(bool((torch.ops.quantized.linear_dynamic(x, packed) == 255 * 127 * _INPUTS).all()) for x in codes)


_PROBES: dict[str, Callable[[], bool]] = {
    "linear": _linear,
    "convolution": _convolution,
    "matmul": _matmul,
    "recurrent": _recurrent,
}
