"""Converted linear layers on oneDNN's int8 kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from eff_kernels.integer_linear import integer_linear, pack
from eff_kernels.quantization import scale_of_largest
from eff_kernels.quantization_group import group_codes, group_qparams
from torch import Tensor

from shared_core.quantization.integer_modules import IntLinear
from shared_core.quantization.onednn_layer import (
    LOWEST,
    OneDnnLayer,
    in_parts,
    joined,
    keep_nan_,
    static_codes,
    unsigned,
)


class _OneDnnLinear(OneDnnLayer):
    kind = "Linear"
    bias: Tensor | None

    def _pack(self) -> None:
        self._bias = None if self.bias is None else self.bias.float()
        self._packed = pack(self.weight_codes) if self.weight_codes.device.type == "cpu" else None


class OneDnnLinear(_OneDnnLinear, IntLinear):
    """An `IntLinear` that hands codes to oneDNN: int8 products, sums in 32-bit integers, output in float.

    Sums are the same integers as those of the reference, so outputs differ by float rounding alone. A row that holds
    NaN comes out as NaN. On other devices than the CPU it computes what the reference computes.

    `take` makes one of an `IntLinear`.
    """

    def _pack(self) -> None:
        super()._pack()
        # plain values: reading a buffer in each forward would cost a synchronisation under torch.compile
        self._scale, self._zero_point = float(self.input_scale), int(self.input_zero_point)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`."""
        if not self._runs(input):
            return super().forward(input)
        x = input.float()
        codes = self._codes(x)
        y = integer_linear(codes, self._scale, self._zero_point - LOWEST, self._packed, self.weight_scale, self._bias)
        return keep_nan_(y, x, (-1,)).to(input.dtype)

    def _codes(self, x: Tensor) -> Tensor:
        parts = [static_codes(part, self._scale, self._zero_point, self.qmin, self.qmax) for part in in_parts(x)]
        return joined(parts, x.shape)


class OneDnnTokenLinear(_OneDnnLinear):
    """A linear layer on oneDNN whose rows have a scale each, ``max|x| / (2^(b-1) - 1)``, found when they are seen.

    ``y = s_x·s_w·Σ q_x·q_w + b``, the sum an exact 32-bit integer. A row that holds NaN or infinity comes out as NaN.
    Elsewhere than on a CPU the same is computed in float64.

    Args:
        codes: int8, (outputs, inputs).
        scale: float32, (outputs,).
        bias: In float, or None.
        activation_bits: b, up to 8.
        kernel: What `conversion_report` says of it.
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
        input = input.detach()  # a gradient through the scales alone would mislead
        if self._runs(input):
            codes, scale = self._rows(input)
            y = integer_linear(codes, 1.0, -LOWEST, self._packed, self.weight_scale, self._bias, scale)
        else:
            scale, _ = group_qparams(input, input.shape[-1], self.activation_bits, True)
            codes = group_codes(input, scale, None, input.shape[-1], self.activation_bits).flatten(-2)
            scale = _nan_if_not_finite(scale)
            total = F.linear(codes.double(), self.weight_codes.double()).round_()
            y = total * self.weight_scale.double() * scale
            y = y if self.bias is None else y + self.bias
        return y.to(input.dtype)

    def _rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        largest_code = 2 ** (self.activation_bits - 1) - 1
        codes, scales = zip(*(row_codes(part, largest_code) for part in in_parts(x)), strict=True)
        return joined(codes, x.shape), joined(scales, (*x.shape[:-1], 1))

    def extra_repr(self) -> str:
        """Return shape and width."""
        return f"{tuple(self.weight_codes.shape)}, activation_bits={self.activation_bits}"


def row_codes(x: Tensor, largest_code: int) -> tuple[Tensor, Tensor]:
    """Return symmetric codes as uint8, 128 more, and each row's scale; NaN where a value of the row is not finite.

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


def _nan_if_not_finite(scale: Tensor) -> Tensor:
    return torch.add(scale, scale, alpha=0)  # 0 times infinity is NaN; one operation, where rows are few
