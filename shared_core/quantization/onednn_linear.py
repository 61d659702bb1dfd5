"""Converted linear layers on oneDNN's int8 kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from eff_kernels.integer_linear import integer_linear, pack
from eff_kernels.quantization_group import group_codes, group_qparams
from torch import Tensor

from shared_core.quantization.integer_modules import IntLinear
from shared_core.quantization.onednn_layer import LOWEST, OneDnnLayer, keep_nan_, static_codes, unsigned


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
        codes = static_codes(x, self._scale, self._zero_point, self.qmin, self.qmax)
        y = integer_linear(
            unsigned(codes), self._scale, self._zero_point - LOWEST, self._packed, self.weight_scale, self._bias
        )
        return keep_nan_(y, x, (-1,)).to(input.dtype)


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
        input, features = input.detach(), input.shape[-1]  # a gradient through the scales alone would mislead
        scale, _ = group_qparams(input, features, self.activation_bits, True)
        codes = group_codes(input, scale, None, features, self.activation_bits).flatten(-2)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        if self._runs(input):
            y = integer_linear(unsigned(codes), 1.0, -LOWEST, self._packed, self.weight_scale, self._bias, scale)
        else:
            total = F.linear(codes.double(), self.weight_codes.double()).round_()
            y = total * self.weight_scale.double() * scale
            y = y if self.bias is None else y + self.bias
        return y.to(input.dtype)

    def extra_repr(self) -> str:
        """Return shape and width."""
        return f"{tuple(self.weight_codes.shape)}, activation_bits={self.activation_bits}"
