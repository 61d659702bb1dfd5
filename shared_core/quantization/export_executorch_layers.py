"""Quantised layers whose forward ExecuTorch's XNNPACK recognises, or computes exactly by arithmetic on codes."""

from __future__ import annotations

from typing import Any

import torch
from eff_kernels import quantization as kernels
from torch import Tensor, nn

from shared_core.quantization.export_codes import Quantized, weight_grid
from shared_core.quantization.export_layers import of_tokens
from shared_core.quantization.layers import TRANSPOSED, compute, from_rows
from shared_core.quantization.schemes import LayerScheme

_INT8 = (-128, 127)


def _decomposed() -> Any:
    import torch.ao.quantization.fx._decomposed  # registers the operators

    return torch.ops.quantized_decomposed


class _Program:
    """A layer that holds codes; ``by_operators`` says whether its forward is written with quantized_decomposed's."""

    scheme: LayerScheme
    by_operators: bool
    input_qparams: tuple[float, int] | None
    output_qparams: tuple[float, int] | None

    def run(self: Any, x: Tensor, *rest: Any) -> Tensor:
        """Return the layer's output."""
        weight = self._values()
        y: Tensor = self._compute(self._rounded(x), weight, *rest)
        return y if self.output_qparams is None else _through(y, *self.output_qparams)

    def _rounded(self: Any, x: Tensor) -> Tensor:
        if self.scheme.input == "token":
            return self._of_tokens(x)  # type: ignore[no-any-return]
        if self.input_qparams is None:
            return x
        scale, zero_point = self.input_qparams
        if self.by_operators:
            return _through(x, scale, zero_point)
        low, high = self.scheme.input_range
        values: Tensor = ((x / scale).round() + zero_point).clamp(low, high).sub(zero_point) * scale
        return values

    def _of_tokens(self: Any, x: Tensor) -> Tensor:
        if self.by_operators:
            ops = _decomposed()
            scale, zero_point = ops.choose_qparams_per_token_asymmetric.default(x, torch.int8)
            codes = ops.quantize_per_token.default(x, scale, zero_point, *_INT8, torch.int8)
            found: Tensor = ops.dequantize_per_token.default(
                codes, scale, zero_point, *_INT8, torch.int8, torch.float32
            )
            return found
        axis = -1 - len(getattr(self, "kernel_size", ()))
        return of_tokens(x.movedim(axis, -1), self.scheme).movedim(-1, axis)

    def _values(self: Any) -> Tensor:
        if self.by_operators:
            values: Tensor = _decomposed().dequantize_per_channel.default(
                self.weight_codes, self.weight_scale, self.weight_zero_point, self.scale_axis, *_INT8, torch.int8
            )
            return values
        return self._spread(self.weight_codes, self.weight_scale)  # type: ignore[no-any-return]

    def _spread(self: Any, codes: Tensor, scale: Tensor) -> Tensor:
        if self.block:
            return codes.to(scale.dtype) * scale.repeat_interleave(self.block, self.scale_axis)
        return codes.to(scale.dtype) * kernels.along(scale, codes.dim(), self.scale_axis)


def _through(x: Tensor, scale: float, zero_point: int) -> Tensor:
    ops = _decomposed()
    codes = ops.quantize_per_tensor.default(x, scale, zero_point, *_INT8, torch.int8)
    values: Tensor = ops.dequantize_per_tensor.default(codes, scale, zero_point, *_INT8, torch.int8)
    return values


class ProgramLinear(_Program, nn.Linear):
    """A linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x̂ ŵᵀ + b``."""
        return self.run(input)

    def _compute(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(x, weight, self.bias)


class _ProgramConv(_Program):
    def forward(self, input: Tensor) -> Tensor:
        return self.run(input)

    def _compute(self: Any, x: Tensor, weight: Tensor) -> Tensor:
        return self._conv_forward(x, weight, self.bias)  # type: ignore[no-any-return]


class ProgramConv1d(_ProgramConv, nn.Conv1d):
    """A 1-d convolution."""


class ProgramConv2d(_ProgramConv, nn.Conv2d):
    """A 2-d convolution."""


class ProgramConv3d(_ProgramConv, nn.Conv3d):
    """A 3-d convolution."""


class _ProgramTransposed(_Program):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return self.run(input, output_size)

    def _compute(self: Any, x: Tensor, weight: Tensor, output_size: list[int] | None) -> Tensor:
        if self.groups > 1:
            weight = from_rows(self, weight, self.weight)
        return compute(self, x, weight, self.bias, output_size)


class ProgramConvTranspose1d(_ProgramTransposed, nn.ConvTranspose1d):
    """A transposed 1-d convolution."""


class ProgramConvTranspose2d(_ProgramTransposed, nn.ConvTranspose2d):
    """A transposed 2-d convolution."""


class ProgramConvTranspose3d(_ProgramTransposed, nn.ConvTranspose3d):
    """A transposed 3-d convolution."""


class ProgramEmbedding(_Program, nn.Embedding):
    """An embedding that gathers codes and dequantises those alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the indices."""
        indices = input.reshape(-1)
        codes: Tensor = self.weight_codes.index_select(0, indices)  # type: ignore[operator]
        scale: Tensor = self.weight_scale.index_select(0, indices)  # type: ignore[operator]
        return self._spread(codes, scale).reshape(*input.shape, self.embedding_dim)


_PROGRAM: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ProgramLinear,
    nn.Conv1d: ProgramConv1d,
    nn.Conv2d: ProgramConv2d,
    nn.Conv3d: ProgramConv3d,
    nn.ConvTranspose1d: ProgramConvTranspose1d,
    nn.ConvTranspose2d: ProgramConvTranspose2d,
    nn.ConvTranspose3d: ProgramConvTranspose3d,
    nn.Embedding: ProgramEmbedding,
}


@torch.no_grad()
def program_layer(
    name: str,
    module: Any,
    scheme: LayerScheme,
    qparams: tuple[Tensor, Tensor] | None,
    shared: dict[int, Quantized],
) -> None:
    """Turn a stock layer whose weight holds the values of its codes into one that holds the codes.

    Args:
        name: What errors call it.
        module: The layer.
        scheme: How it is quantised.
        qparams: Scale and signed zero point of a static input.
        shared: Identity of a weight → its codes, so that tied layers hold the same tensors; is added to.
    """
    key = id(module.weight)
    if key not in shared:
        shared[key] = weight_grid(name, module, module.weight.detach(), scheme)
    grid = shared[key]
    zeros = torch.zeros(grid.scale.shape, dtype=torch.int64)
    kind = type(module)
    module.weight = None
    for buffer, value in (("codes", grid.codes), ("scale", grid.scale), ("zero_point", zeros)):
        module.register_buffer(f"weight_{buffer}", value)
    module.scheme, module.scale_axis, module.block = scheme, grid.axis, grid.block
    module.input_qparams = None if qparams is None else (float(qparams[0]), int(qparams[1]))
    module.output_qparams = None
    of_tokens = scheme.input == "token" and kind is nn.Linear and not scheme.affine_input
    fits = scheme.input == "none" or (scheme.activation_bits == 8 and (scheme.input == "static" or of_tokens))
    # XNNPACK clamps to 8 bits, whatever the range, and has one scale a channel
    module.by_operators = fits and not grid.block and kind not in TRANSPOSED
    module.__class__ = _PROGRAM[kind]


def set_output_range(module: Any, low: float, high: float) -> None:
    """Quantise a layer's output in 8 bits, of a range that holds 0, so that its products can be summed as integers."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = max(high - low, 1e-8) / 255
    module.output_qparams = (scale, round(-128 - low / scale))
