"""Converted linear and convolution layers on oneDNN's int8 kernels, which torch ships for CPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from eff_kernels.quantization.affine import scale_of_largest
from eff_kernels.quantization.group import group_codes, group_qparams
from eff_kernels.quantization.integer_linear import PackedLinear
from torch import Tensor

from shared_core.quantization.integer.layers import IntConv2d, IntLinear, PackedLayer

# 2 M values at a time stay in cache while they are rounded, clamped and converted.
_PART = 1 << 21
LOWEST = -128  # shifts signed codes to unsigned ones, which the processor's instructions take


def in_parts(x: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a tensor (its last axis) in parts of at most 8 MiB in float32.

    Larger temporary tensors are allocated from the system in every forward, and the first access to new memory takes
    longer than the arithmetic. Under a compiler, which fuses this, there is one part.

    Example:
        >>> [*map(len, in_parts(torch.zeros(3, 2000, 1000)))]
        [2097, 2097, 1806]
    """
    if torch.compiler.is_compiling() or x.numel() <= _PART:
        return (x,)
    rows: tuple[Tensor, ...] = torch.split(x.reshape(-1, x.shape[-1]), max(1, _PART // x.shape[-1]))
    return rows


def joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Join parts of `in_parts` to one tensor of a shape."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts]).view(shape)


def static_codes(
    x: Tensor,
    scale: float,
    zero_point: int,
    qmin: int,
    qmax: int,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Return ``clamp(ne(x/s) + z, qmin, qmax) + 128`` of a float32 tensor as uint8. The tensor is not changed.

    Example:
        >>> static_codes(torch.tensor([0.5, 1.2, 9.0]), 1.0, 2, -8, 7).tolist()
        [130, 131, 135]
    """
    return unsigned((x / scale).round_().add_(zero_point).clamp_(qmin, qmax), memory_format)


def unsigned(codes: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """Return integers from -128 to 127, plus 128, as uint8.

    Example:
        >>> unsigned(torch.tensor([-128.0, 0.0, 127.0])).tolist()
        [0, 128, 255]
    """
    # torch 2.13 converts to int8 five times as fast as to uint8
    # int8 to uint8 by flipping the sign bit: the same as adding 128.
    return codes.to(torch.int8, memory_format=memory_format).view(torch.uint8).bitwise_xor_(-LOWEST)


def keep_nan_(output: Tensor, input: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Set the output to NaN where the input has NaN, which has no code; return it."""
    # amax propagates NaN: the check takes one pass, and without NaN no mask is needed.
    nan = input.amax(dims, keepdim=True).isnan()
    if torch.compiler.is_compiling() or bool(nan.any()):
        output.add_(torch.where(nan, torch.nan, 0.0))
    return output


class OneDnnConv2d(PackedLayer, IntConv2d):
    """An `IntConv2d` on oneDNN: int8 products, sums in 32-bit integers, output in float.

    Sums equal those of the reference, so outputs differ only by float rounding. An example with
    NaN returns NaN. On devices other than the CPU it runs the reference.

    `take` makes one of an `IntConv2d`.
    """

    @staticmethod
    def why_not(module: IntConv2d) -> str:
        """Return why oneDNN cannot run a convolution; empty if it can."""
        if not hasattr(torch.ops.onednn, "qconv2d_pointwise"):
            return "this torch was built without oneDNN"
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return f"oneDNN supports only numeric zero padding, not {module.padding_mode} by {module.padding}"
        return ""

    def _pack(self) -> None:
        # plain values: reading a buffer in each forward would cost a synchronization under torch.compile
        self._scale, self._zero_point = float(self.input_scale), int(self.input_zero_point)
        self._zero_points = torch.zeros(len(self.weight_scale), dtype=torch.int32)
        self._bias = None if self.bias is None else self.bias.float()
        self._packed = None
        if self.weight_codes.device.type == "cpu":
            self._packed = torch.ops.onednn.qconv_prepack(
                # Codes are shifted by 128, so the zero point is too.
                self.weight_codes, self.weight_scale, self._scale, self._zero_point - LOWEST,
                self.stride, self.padding, self.dilation, self.groups, None,
            )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`."""
        if input.dim() != 4 or not self._runs(input):
            return super().forward(input)
        x = input.float()
        codes = static_codes(x, self._scale, self._zero_point, self.qmin, self.qmax, torch.channels_last)
        y: Tensor = torch.ops.onednn.qconv2d_pointwise(
            codes, self._scale, self._zero_point - LOWEST,
            self._packed, self.weight_scale, self._zero_points, self._bias, self.stride, self.padding, self.dilation,
            self.groups, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return keep_nan_(y, x, (1, 2, 3)).to(input.dtype)


class _OneDnnLinear(PackedLayer):
    kind = "Linear"
    bias: Tensor | None

    def _pack(self) -> None:
        self._packed = None
        if self.weight_codes.device.type == "cpu":
            bias = None if self.bias is None else self.bias.float()
            self._packed = PackedLinear(self.weight_codes, self.weight_scale, bias)


class OneDnnLinear(_OneDnnLinear, IntLinear):
    """An `IntLinear` on oneDNN: int8 products, sums in 32-bit integers, output in float.

    Sums equal those of the reference, so outputs differ only by float rounding. A row with
    NaN returns NaN. On devices other than the CPU it runs the reference.

    `take` makes one of an `IntLinear`.
    """

    def _pack(self) -> None:
        super()._pack()
        # plain values: reading a buffer in each forward would cost a synchronization under torch.compile
        self._scale, self._zero_point = float(self.input_scale), int(self.input_zero_point)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`."""
        if not self._runs(input):
            return super().forward(input)
        x = input.float()
        zero_point = self._zero_point - LOWEST
        if self._packed.are_few(x):
            centered = (x / self._scale).round_().clamp_(self.qmin - self._zero_point, self.qmax - self._zero_point)
            y = self._packed.few(centered, self._scale, zero_point)
        else:
            y = self._packed(self._codes(x), self._scale, zero_point)
        return keep_nan_(y, x, (-1,)).to(input.dtype)

    def _codes(self, x: Tensor) -> Tensor:
        parts = [static_codes(part, self._scale, self._zero_point, self.qmin, self.qmax) for part in in_parts(x)]
        return joined(parts, x.shape)


class OneDnnTokenLinear(_OneDnnLinear):
    """A linear layer on oneDNN with a dynamic scale per row, ``max|x| / (2^(b-1) - 1)``.

    ``y = s_x·s_w·Σ q_x·q_w + b``, the sum an exact 32-bit integer. A row with NaN or infinity returns NaN.
    On other devices the same is computed in float64.
    """

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None, activation_bits: int, kernel: str) -> None:
        super().__init__()
        self.activation_bits, self.kernel = activation_bits, kernel
        self.register_buffer("weight_codes", codes)
        self.register_buffer("weight_scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())
        self._pack()

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`."""
        if not input.numel():
            return input.new_zeros(*input.shape[:-1], len(self.weight_codes))
        input = input.detach()  # a gradient through only the scales would be wrong
        return (self._on_kernels(input) if self._runs(input) else self._in_float64(input)).to(input.dtype)

    def _on_kernels(self, x: Tensor) -> Tensor:
        largest_code = 2 ** (self.activation_bits - 1) - 1
        packed: PackedLinear = self._packed
        if packed.are_few(x):
            centered, scale = few_row_codes(x, largest_code)
            return packed.few(centered, 1.0, -LOWEST, scale)
        codes, scales = zip(*(row_codes(part, largest_code) for part in in_parts(x)), strict=True)
        return packed(joined(codes, x.shape), 1.0, -LOWEST, joined(scales, (*x.shape[:-1], 1)))

    def _in_float64(self, x: Tensor) -> Tensor:
        scale, _ = group_qparams(x, x.shape[-1], self.activation_bits, True)
        codes = group_codes(x, scale, None, x.shape[-1], self.activation_bits).flatten(-2)
        # The scale is infinite, and the row's codes are meaningless.
        scale = _nan_if_not_finite(scale)
        y = F.linear(codes.double(), self.weight_codes.double()).round_() * self.weight_scale.double() * scale
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Return shape and width."""
        return f"{tuple(self.weight_codes.shape)}, activation_bits={self.activation_bits}"


def row_codes(x: Tensor, largest_code: int) -> tuple[Tensor, Tensor]:
    """Return symmetric codes plus 128 as uint8, and the scale per row: NaN if a value of the row is not finite.

    Example:
        >>> codes, scale = row_codes(torch.tensor([[2.54, -1.0], [torch.inf, 0.0]]), 127)
        >>> codes[0].tolist(), scale.tolist()
        ([255, 78], [[0.019999999552965164], [nan]])
    """
    x = x.float()
    values = x.abs()
    scale = scale_of_largest(values.amax(-1, keepdim=True), largest_code)
    codes = unsigned(torch.div(x, scale, out=values).round_())
    return codes, _nan_if_not_finite(scale)


def few_row_codes(x: Tensor, largest_code: int) -> tuple[Tensor, Tensor]:
    """Return what `row_codes` returns, but minus 128 and as float32, of few rows on a CPU.

    It uses numpy, whose calls take a fifth of the time of torch's on so few values.

    Example:
        >>> few_row_codes(torch.tensor([[2.54, -1.0]]), 127)
        (tensor([[127., -50.]]), tensor([[0.0200]]))
    """
    values, largest = x.float().numpy(), np.float32(largest_code)
    amax = np.abs(values).max(-1, keepdims=True)
    with np.errstate(all="ignore"):
        # as `scale_of_largest` computes it
        scale = amax / largest
        scale = np.where(amax / scale > largest, np.nextafter(scale, np.float32(np.inf)), scale) + (amax == 0)
        return torch.from_numpy(np.rint(values / scale)), torch.from_numpy(scale + 0 * scale)


def _nan_if_not_finite(scale: Tensor) -> Tensor:
    return torch.add(scale, scale, alpha=0)  # 0 times infinity is NaN, in one operation
