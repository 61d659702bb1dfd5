"""Converted 2-d convolutions on oneDNN's int8 kernels, which torch brings along on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from shared_core.quantization.integer_modules import IntConv2d
from shared_core.quantization.onednn_layer import LOWEST, OneDnnLayer, keep_nan_, static_codes


class OneDnnConv2d(OneDnnLayer, IntConv2d):
    """An `IntConv2d` that hands codes to oneDNN: int8 products, sums in 32-bit integers, output in float.

    Sums are the same integers as those of the reference, so outputs differ by float rounding alone. An example that
    holds NaN comes out as NaN. On other devices than the CPU it computes what the reference computes.

    `take` makes one of an `IntConv2d`.
    """

    kind = "Conv2d"

    @staticmethod
    def why_not(module: IntConv2d) -> str:
        """Return why oneDNN cannot compute a convolution; empty if it can."""
        if not hasattr(torch.ops.onednn, "qconv2d_pointwise"):
            return "this torch was built without oneDNN"
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return f"oneDNN pads with zeros by numbers, not {module.padding_mode} by {module.padding}"
        return ""

    def _pack(self) -> None:
        # plain values: reading a buffer in each forward would cost a synchronisation under torch.compile
        self._scale, self._zero_point = float(self.input_scale), int(self.input_zero_point)
        self._zero_points = torch.zeros(len(self.weight_scale), dtype=torch.int32)
        self._bias = None if self.bias is None else self.bias.float()
        self._packed = None
        if self.weight_codes.device.type == "cpu":
            self._packed = torch.ops.onednn.qconv_prepack(
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
