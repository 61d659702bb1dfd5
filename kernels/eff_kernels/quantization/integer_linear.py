"""The product of int8 codes with a CPU's integer instructions (oneDNN, FBGEMM), and a test of their exactness.

No flag shows if sums are exact. Without VNNI or AMX, x86 adds pairs of products in 16 bits, where ``255·127·2``
saturates. Kernels choose their instructions: oneDNN obeys ONEDNN_MAX_CPU_ISA, torch asks the processor, and some
shapes widen first.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

FBGEMM = "fbgemm"
"""The name of FBGEMM among ``torch.backends.quantized.supported_engines``."""


_FBGEMM_LARGEST = 64
"""The largest magnitude of a weight with which FBGEMM's pairs of products never saturate."""


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


def pack_for_fbgemm(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """Return a linear layer's weight in FBGEMM's layout.

    Args:
        weight: int8, (outputs, inputs), on a CPU.
        scale: float32, (outputs,).
        bias: float32, (outputs,), or None.
    """
    with fbgemm_engine(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 calls its quantized tensors deprecated, without a date
        zeros = torch.zeros(len(scale), dtype=torch.long)
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantized, bias)


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


class PackedLinear:
    """A linear layer of int8 codes, packed for the kernels of a CPU: `integer_linear`, and FBGEMM for few rows.

    For one row of 8 M codes FBGEMM takes about a third of oneDNN's time (AVX2). Both are timed once per shape, number
    of threads and process. FBGEMM is used if it is faster and gives the same bits, so outputs don't depend on the
    times. Its copy of the weight is made when few rows first come.

    Args:
        weight: q_w, int8, (outputs, inputs), on a CPU.
        weight_scale: s_w, float32, (outputs,).
        bias: b, float32, (outputs,), or None.

    Example:
        >>> layer = PackedLinear(torch.tensor([[3, -5]], dtype=torch.int8), torch.tensor([0.1]), None)
        >>> layer(torch.tensor([[130, 127]], dtype=torch.uint8), 0.5, 128)  # (2·3 + (-1)·(-5))·0.05
        tensor([[0.5500]])
        >>> layer.few(torch.tensor([[2.0, -1.0]]), 0.5, 128)
        tensor([[0.5500]])
    """

    def __init__(self, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> None:
        self.weight, self.weight_scale, self.bias = weight, weight_scale, bias
        self._onednn, self._fbgemm = pack(weight), None
        self._is_exact: bool | None = None

    def __call__(self, codes: Tensor, scale: float, zero_point: int, row_scale: Tensor | None = None) -> Tensor:
        """Return the output in float32. The arguments are those of `integer_linear`."""
        return integer_linear(codes, scale, zero_point, self._onednn, self.weight_scale, self.bias, row_scale)

    @staticmethod
    def are_few(x: Tensor) -> bool:
        """Return True if `few` takes an input with this number of rows: up to 32, outside a compiler."""
        return not torch.compiler.is_compiling() and 0 < x.numel() <= _FEW * x.shape[-1]

    def few(self, centered: Tensor, scale: float, zero_point: int, row_scale: Tensor | None = None) -> Tensor:
        """Return the same for codes minus the zero point, float32, of few rows."""
        rows = centered.reshape(-1, centered.shape[-1])
        y = (self._on_fbgemm if self._is_faster(rows, scale, zero_point) else self._on_onednn)(rows, scale, zero_point)
        y = y.view(*centered.shape[:-1], -1)
        # The kernels' own additions of a bias round differently.
        if row_scale is None:
            return y if self.bias is None else y.add_(self.bias)
        return y.mul_(row_scale) if self.bias is None else torch.addcmul(self.bias, y, row_scale, out=y)

    def _is_faster(self, *arguments: Any) -> bool:
        if self._is_exact is None:
            self._is_exact = _fbgemm_is_exact(self.weight)
        key = (*self.weight.shape, len(arguments[0]), torch.get_num_threads())
        if self._is_exact and key not in _FBGEMM_IS_FASTER:
            fbgemm, onednn = partial(self._on_fbgemm, *arguments), partial(self._on_onednn, *arguments)
            _FBGEMM_IS_FASTER[key] = torch.equal(fbgemm(), onednn()) and _seconds(fbgemm) < _seconds(onednn)
        return self._is_exact and _FBGEMM_IS_FASTER[key]

    def _on_onednn(self, rows: Tensor, scale: float, zero_point: int) -> Tensor:
        codes = (rows + zero_point).to(torch.uint8)
        return integer_linear(codes, scale, zero_point, self._onednn, self.weight_scale, None)

    def _on_fbgemm(self, rows: Tensor, scale: float, zero_point: int) -> Tensor:
        if self._fbgemm is None:
            self._fbgemm = pack_for_fbgemm(self.weight, self.weight_scale, None)
        # FBGEMM rounds its input itself, and finds these codes again.
        x = rows if scale == 1 else rows * scale
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x, scale, zero_point, self._fbgemm
        )
        return y


_FEW = 32  # rows; from 64 on both kernels take about the same time
_FBGEMM_IS_FASTER: dict[tuple[int, ...], bool] = {}


def _fbgemm_is_exact(weight: Tensor) -> bool:
    if FBGEMM not in torch.backends.quantized.supported_engines:
        return False
    low, high = (int(value) for value in weight.aminmax())
    return sums_exactly("fbgemm") or max(-low, high) <= _FBGEMM_LARGEST


def _seconds(product: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        product()
        times.append(time.perf_counter() - start)
    return min(times)


_Kernel = Literal["linear", "convolution", "matmul", "fbgemm"]

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
            CPU, or FBGEMM's product, which `PackedLinear` and ``torch.quantized_lstm`` use.

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


def _fbgemm() -> bool:
    packed = pack_for_fbgemm(_filled(127, _OUTPUTS, _INPUTS), _ones(), None)
    # values from 0 to 255 get a step of 1: code 255
    codes = (torch.full((rows, _INPUTS), 255.0, device="cpu") for rows in _ROWS)
    return all(bool((torch.ops.quantized.linear_dynamic(x, packed) == 255 * 127 * _INPUTS).all()) for x in codes)


_PROBES: dict[str, Callable[[], bool]] = {
    "linear": _linear,
    "convolution": _convolution,
    "matmul": _matmul,
    "fbgemm": _fbgemm,
}
