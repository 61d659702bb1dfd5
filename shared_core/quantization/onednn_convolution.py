"""Converted 2-d convolutions on oneDNN's int8 kernels, which torch brings along on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shared_core.quantization.integer_modules import IntConv2d

_LOWEST = -128  # moves signed codes to unsigned ones, for which the instructions are made


class OneDnnConv2d(IntConv2d):
    """An `IntConv2d` that hands codes to oneDNN: int8 products, sums in 32-bit integers, output in float.

    Sums are the same integers as those of the reference, so outputs differ by float rounding alone. An example that
    holds NaN comes out as NaN. On other devices than the CPU it computes what the reference computes.

    `take` makes one of an `IntConv2d`.
    """

    kernel: str
    _packed: Tensor | None

    @classmethod
    def take(cls, module: IntConv2d, kernel: str) -> None:
        """Change a converted convolution's class to this one; its buffers stay as they are.

        Args:
            module: One for which `why_not` returns nothing.
            kernel: What `conversion_report` says of it.
        """
        module.__class__ = cls
        module.kernel = kernel  # type: ignore[assignment]
        module._pack()  # type: ignore[operator]

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
                self.weight_codes, self.weight_scale, self._scale, self._zero_point - _LOWEST,
                self.stride, self.padding, self.dilation, self.groups, None,
            )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": None}  # oneDNN's layout can be neither copied nor saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._pack()

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the type of `input`."""
        if self._packed is None or input.device.type != "cpu" or input.dim() != 4 or not input.numel():
            return super().forward(input)
        x = input.float()
        codes = (x / self._scale).round_().add_(self._zero_point - _LOWEST)
        codes = codes.clamp_(self.qmin - _LOWEST, self.qmax - _LOWEST)
        y: Tensor = torch.ops.onednn.qconv2d_pointwise(
            codes.to(torch.uint8, memory_format=torch.channels_last), self._scale, self._zero_point - _LOWEST,
            self._packed, self.weight_scale, self._zero_points, self._bias, self.stride, self.padding, self.dilation,
            self.groups, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        nan = x.amax((1, 2, 3), keepdim=True).isnan()
        return y.add_(torch.where(nan, torch.nan, 0.0)).to(input.dtype)
