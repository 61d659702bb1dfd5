"""Quantised layers whose forward ExecuTorch's XNNPACK recognises, or computes exactly by arithmetic on codes."""

from __future__ import annotations

from typing import Any

import torch
from eff_kernels import quantization as kernels
from torch import Tensor, nn

from shared_core.quantization.export_codes import Quantized, shared_grid
from shared_core.quantization.export_layers import EXPORTED, of_tokens
from shared_core.quantization.layers import TRANSPOSED
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

    def forward(self: Any, *args: Any) -> Tensor:
        """Return the layer's output."""
        y: Tensor = super().forward(*args)  # type: ignore[misc]
        return y if self.output_qparams is None else _through(y, *self.output_qparams)

    def quantized_input(self: Any, x: Tensor) -> Tensor:
        """Return the input as its codes can hold it."""
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

    def quantized_weight(self: Any) -> Tensor:
        """Return the values that the codes stand for."""
        if self.by_operators:
            values: Tensor = _decomposed().dequantize_per_channel.default(
                self.weight_codes, self.weight_scale, self.weight_zero_point, self.scale_axis, *_INT8, torch.int8
            )
            return values
        return self._spread(self.weight_codes, self.weight_scale)  # type: ignore[no-any-return]

    def quantized_bias(self: Any) -> Tensor | None:
        """Return the bias, which stays in float."""
        return self.bias  # type: ignore[no-any-return]

    def _spread(self: Any, codes: Tensor, scale: Tensor) -> Tensor:
        if self.block:
            return codes.to(scale.dtype) * scale.repeat_interleave(self.block, self.scale_axis)
        return codes.to(scale.dtype) * kernels.along(scale, codes.dim(), self.scale_axis)


def _through(x: Tensor, scale: float, zero_point: int) -> Tensor:
    ops = _decomposed()
    codes = ops.quantize_per_tensor.default(x, scale, zero_point, *_INT8, torch.int8)
    values: Tensor = ops.dequantize_per_tensor.default(codes, scale, zero_point, *_INT8, torch.int8)
    return values


class _Linear(nn.Linear):
    def forward(self: Any, input: Tensor) -> Tensor:
        return nn.functional.linear(self.quantized_input(input), self.quantized_weight(), self.bias)


class _Embedding(nn.Embedding):
    def forward(self: Any, input: Tensor) -> Tensor:
        indices = input.reshape(-1)
        codes, scale = (values.index_select(0, indices) for values in (self.weight_codes, self.weight_scale))
        found: Tensor = self._spread(codes, scale).reshape(*input.shape, self.embedding_dim)
        return found


# The forward of a convolution is that of ONNX files, between inputs and weights of ours.
_PROGRAM: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Program{kind.__name__}", (_Program, base), {})
    for kind, base in (EXPORTED | {nn.Linear: _Linear, nn.Embedding: _Embedding}).items()
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
    grid = shared_grid(name, module, scheme, shared)
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
