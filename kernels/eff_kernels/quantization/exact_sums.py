"""Test by one product if this process's integer kernels sum products of 8-bit codes exactly. No flag shows it.

Without VNNI or AMX, x86 adds pairs of products in 16 bits, where ``255·127·2`` saturates. Kernels choose their
instructions: oneDNN obeys ONEDNN_MAX_CPU_ISA, torch asks the processor, and some shapes widen first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from eff_kernels.quantization.integer_linear import fbgemm_engine, integer_linear, pack

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
