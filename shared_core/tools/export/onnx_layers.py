"""The ONNX form of quantized layers: their integers, and operators that torch.export keeps whole.

torch.onnx writes each operator as nodes of our choice, with explicit QuantizeLinear and DequantizeLinear. The integers
of weights and biases are recovered from their values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.group import group_codes, group_qparams
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.modules.attention import OpenAttention, project
from shared_core.modules.matching import change_class
from shared_core.modules.weight_views import TRANSPOSED, as_rows, compute, from_rows, weights_of
from shared_core.quantization.fake_quant_layers import restore, times_scale
from shared_core.quantization.low_bit import E4M3_MAX, box_means, from_blocks, mean_magnitude
from shared_core.quantization.rounding import has_output_scale
from shared_core.quantization.schemes import FP8_GROUP, WIDE, LayerScheme
from shared_core.tools.export.served import codes_of
from shared_core.tools.export.source import Quantized, bias_codes, in_place, shared_grid, with_room_for


@torch.library.custom_op("efftrain::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Return codes in uint8, ``clamp(ne(x/s) + z, 0, 2^bits − 1)``; QuantizeLinear, and Clip below 8 bits.

    Codes of 16 bits are int16, with zero point 0.
    """
    # round() is to the nearest even, as in QuantizeLinear.
    codes = (x / scale).round() + zero_point.to(x.dtype)
    low = -(2 ** (bits - 1)) if bits == WIDE else 0
    return codes.clamp(low, low + 2**bits - 1).to(zero_point.dtype)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@torch.library.custom_op("efftrain::signs", mutates_args=())
def signs(x: Tensor) -> Tensor:
    """Return −1 where `x` is negative, else 1; Less and Where."""
    return torch.where(x < 0, -1.0, 1.0).to(x.dtype)


@signs.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("efftrain::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int) -> Tensor:
    """Return ``s·(q − z)``. The scale is one number, one per slice of an axis, or one per block along it."""
    values = codes.to(scale.dtype)
    if zero_point is not None:
        # In float, as ONNX defines it for integers of 8 bits: q - z overflows int8.
        values = values - _spread(zero_point.to(scale.dtype), codes.dim(), axis, block)
    return values * _spread(scale, codes.dim(), axis, block)


def _spread(values: Tensor, dims: int, axis: int, block: int) -> Tensor:
    if block:
        return values.repeat_interleave(block, axis)
    return kernels.along(values, dims, axis) if values.dim() else values


@dequantize.register_fake
def _(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int) -> Tensor:
    return torch.empty_like(codes, dtype=scale.dtype)


@torch.library.custom_op("efftrain::quantize_fp8", mutates_args=())
def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Return ``x/s`` in float8_e4m3fn, saturated."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@quantize_fp8.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)


@torch.library.custom_op("efftrain::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x wᵀ + b`` of a matrix x, as one Gemm. The exporter would use MatMul and Add, which are never fused."""
    return F.linear(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("efftrain::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Return uint8 codes of a matrix, 128 more than signed ones, with a scale per row, (rows, 1)."""
    return ((x / scale).round() + 128).clamp(0, 255).to(torch.uint8)


@quantize_rows.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


@torch.library.custom_op("efftrain::integer_linear", mutates_args=())
def integer_linear(codes: Tensor, weight_codes: Tensor, zero_point: int) -> Tensor:
    """Return ``(q_x − z) q_wᵀ`` in int32; MatMulInteger."""
    # double is exact: 255 * 127 * n stays below 2^53 for any layer, and torch has no int8 product on a CPU for all
    # shapes.
    return F.linear(codes.double() - zero_point, weight_codes.double()).to(torch.int32)


@integer_linear.register_fake
def _(codes: Tensor, weight_codes: Tensor, zero_point: int) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], weight_codes.shape[0]), dtype=torch.int32)


def translations(opset: Any) -> dict[Any, Callable[..., Any]]:
    """Return torch.onnx's translations of the ops above."""
    from onnx import TensorProto, helper
    from onnxscript.function_libs.torch_lib.ops import core as torchlib

    def byte(value: int) -> Any:
        return opset.Constant(value=helper.make_tensor("byte", TensorProto.UINT8, [], [value]))

    def to_quantize(x: Any, scale: Any, zero_point: Any, bits: int) -> Any:
        codes = opset.QuantizeLinear(x, scale, zero_point)
        # uint8 saturates at 255; fewer bits need a Clip, which `is_activation` treats as part of the codes.
        return codes if bits in (8, WIDE) else opset.Clip(codes, byte(0), byte(2**bits - 1))

    def to_quantize_fp8(x: Any, scale: Any) -> Any:
        zero = helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], b"\0", raw=True)
        return opset.QuantizeLinear(x, scale, opset.Constant(value=zero))

    def to_signs(x: Any) -> Any:
        is_negative = opset.Less(x, opset.Constant(value_float=0.0))
        return opset.Where(is_negative, opset.Constant(value_float=-1.0), opset.Constant(value_float=1.0))

    def to_dequantize(codes: Any, scale: Any, zero_point: Any = None, axis: int = 0, block: int = 0) -> Any:
        inputs = (codes, scale) if zero_point is None else (codes, scale, zero_point)
        return opset.DequantizeLinear(*inputs, axis=axis, **({"block_size": block} if block else {}))

    def to_linear(x: Any, weight: Any, bias: Any = None) -> Any:
        return opset.Gemm(*((x, weight) if bias is None else (x, weight, bias)), transB=1)

    def to_quantize_rows(x: Any, scale: Any) -> Any:
        # rounds, shifts and converts in one pass; OpenVINO (2026.4) would mistake row scales in it for column scales
        return opset.QuantizeLinear(opset.Div(x, scale), opset.Constant(value_float=1.0), byte(128))

    def to_integer_linear(codes: Any, weight_codes: Any, zero_point: int) -> Any:
        # ONNX's product needs the weight as (in, out); the constant is transposed when the file is optimized.
        return opset.MatMulInteger(codes, opset.Transpose(weight_codes, perm=[1, 0]), byte(zero_point))

    def to_dtype(x: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None) -> Any:
        return opset.Cast(x, to=dtype)

    def to_device(x: Any, device: Any, dtype: int, *others: Any) -> Any:
        return opset.Cast(x, to=dtype)

    def to_layout(x: Any, dtype: int | None = None, **others: Any) -> Any:
        return opset.Identity(x) if dtype is None else opset.Cast(x, to=dtype)

    ops = torch.ops.efftrain
    aten = torch.ops.aten
    # From opset 23 attention is one operator.
    attention = {aten.scaled_dot_product_attention.default: _to_attention(opset)} if opset.version < 23 else {}
    return {
        **attention,
        aten.layer_norm.default: _to_layer_norm(opset),
        ops.quantize.default: to_quantize,
        ops.quantize_fp8.default: to_quantize_fp8,
        ops.signs.default: to_signs,
        ops.dequantize.default: to_dequantize,
        ops.linear.default: to_linear,
        ops.integer_linear.default: to_integer_linear,
        ops.quantize_rows.default: to_quantize_rows,
        # used in transformers' masks: torch.onnx supports these only when decomposed
        aten.__and__.Tensor: torchlib.aten_bitwise_and,
        aten.to.dtype: to_dtype,
        aten.to.device: to_device,
        aten.to.dtype_layout: to_layout,
    }


def _to_attention(opset: Any) -> Callable[..., Any]:
    from onnx_ir import DataType
    from onnxscript.function_libs.torch_lib.ops import nn as torchlib

    def to_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        size = query.shape[-1]
        if is_causal or enable_gqa or dropout_p or query.dtype != DataType.FLOAT or not isinstance(size, int):
            return torchlib.aten_scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        # Like torch.onnx's, but with operators that onnxruntime fuses, and without a search of all weights for NaN: a
        # fully masked row has finite scores, since the mask is the lowest number.
        product = opset.MatMul(query, opset.Transpose(key, perm=[0, 1, 3, 2]))
        scores = opset.Mul(product, opset.Constant(value_float=size**-0.5 if scale is None else scale))
        if attn_mask is not None:
            if attn_mask.dtype == DataType.BOOL:
                lowest = torch.finfo(torch.float32).min
                attn_mask = opset.Where(attn_mask, opset.Constant(value_float=0.0), opset.Constant(value_float=lowest))
            scores = opset.Add(scores, attn_mask)
        return opset.MatMul(opset.Softmax(scores, axis=-1), value)

    return to_attention


def _to_layer_norm(opset: Any) -> Callable[..., Any]:
    from onnxscript.function_libs.torch_lib.ops import core as torchlib

    def to_layer_norm(
        input: Any,
        normalized_shape: Any,
        weight: Any = None,
        bias: Any = None,
        eps: float = 1e-5,
        cudnn_enable: bool = False,
    ) -> Any:
        maker = input.producer()
        if maker is not None and maker.op_type == "Add" and len(input.shape) > 1:
            # onnxruntime would fuse sum and norm into an operator several times slower on CPUs (1.31): a Reshape that
            # changes nothing prevents it.
            shape = opset.Constant(value_ints=[0] * (len(input.shape) - 1) + [-1])
            input = opset.Reshape(input, shape)
        return torchlib.aten_layer_norm(input, normalized_shape, weight, bias, eps)

    return to_layer_norm


_BIAS_TOLERANCE = 1e-6
_ALL = slice(None)


class Exported(nn.Module):
    """A layer that holds codes: ``weight_codes``, ``weight_scale`` and, if quantized, input and bias."""

    scheme: LayerScheme

    def quantized_input(self: Any, x: Tensor) -> Tensor:
        """Return the input rounded to its codes' values."""
        if self.scheme.input == "static":
            codes = quantize(x, self.input_scale, self.input_zero_point, self.scheme.activation_bits)
            x = dequantize(codes, self.input_scale, self.input_zero_point, 0, 0)
        elif self.scheme.input == "token":
            axis = -1 - len(getattr(self, "kernel_size", ()))
            x = of_tokens(x.movedim(axis, -1), self.scheme).movedim(-1, axis)
        elif self.scheme.input == "fp8_static":
            x = dequantize(quantize_fp8(x, self.input_scale), self.input_scale, None, 0, 0)
        elif self.scheme.input in ("fp8", "fp8_group"):
            axis = -1 - len(getattr(self, "kernel_size", ()))
            x = _of_tokens_in_fp8(x.movedim(axis, -1), self.scheme).movedim(-1, axis)
        elif self.scheme.has_binary_inputs:
            axis = -1 - len(getattr(self, "kernel_size", ()))
            scaled = self.scheme.input == "binary_scaled" and not has_output_scale(self)
            x = signs(x) * mean_magnitude(x, axis) if scaled else signs(x)
        return x

    def quantized_weight(self: Any) -> Tensor:
        """Return the values of the codes."""
        values: Tensor = dequantize(
            self.weight_codes, self.weight_scale, self.weight_zero_point, self.scale_axis, self.block
        )
        return values

    def quantized_bias(self: Any) -> Tensor | None:
        """Return the bias, from its codes if it has any."""
        bias: Tensor | None = self.bias
        if hasattr(self, "bias_codes"):
            bias = dequantize(self.bias_codes, self.bias_scale, self.bias_zero_point, 0, 0)
        return bias

    def value_of(self: Any, name: str, rows: slice = _ALL) -> Tensor:
        """Return some rows of a weight from their codes, or a bias."""
        if not hasattr(self, f"{name}_codes"):
            return getattr(self, name)  # type: ignore[no-any-return]
        tensors = (getattr(self, f"{name}_{part}") for part in ("codes", "scale", "zero_point"))
        # codes are sliced, not values, so that a product reads dequantized codes
        found: Tensor = dequantize(*(x if rows == _ALL else x[rows] for x in tensors), *self.grids[name])
        return found


def of_tokens(x: Tensor, scheme: LayerScheme) -> Tensor:
    """Return values rounded to codes with a range per token, along the last axis."""
    # Symmetric: the zero point is a constant, which MatMulInteger uses for all rows.
    if not scheme.affine_input:
        scale = token_scale(x, scheme.input_range[1])
        return (x / scale).round() * scale
    size = x.shape[-1]
    scale, zero_point = group_qparams(x, size, scheme.activation_bits, False)
    codes = group_codes(x, scale, zero_point, size, scheme.activation_bits).squeeze(-2)
    return (codes - zero_point) * scale


def _of_tokens_in_fp8(x: Tensor, scheme: LayerScheme) -> Tensor:
    """Return values rounded to e4m3 with a scale per token, or per 128 of its features."""
    width = x.shape[-1] if scheme.input == "fp8" or x.shape[-1] % FP8_GROUP else FP8_GROUP
    groups = x.reshape(*x.shape[:-1], -1, width)
    scale, one = token_scale(groups, E4M3_MAX), torch.ones(())
    rounded: Tensor = dequantize(quantize_fp8(groups / scale, one), one, None, 0, 0) * scale
    return rounded.reshape(x.shape)


def token_scale(x: Tensor, qmax: float) -> Tensor:
    """Return the scale of each token (last axis): ``max|x| / qmax``, or the least normal number."""
    # two reductions are faster in onnxruntime than the absolute values of all elements; a token of zeros has codes of 0
    scale: Tensor = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)) / qmax
    return torch.clamp(scale, min=torch.finfo(torch.float32).tiny)


def multiplies_token_codes(module: nn.Module, scheme: LayerScheme) -> bool:
    """Return True if the file has per-token codes for the layer, for MatMulInteger."""
    symmetric = not scheme.affine_input and scheme.weight != "group"
    return isinstance(module, nn.Linear) and scheme.input == "token" and symmetric


class ExportLinear(Exported, nn.Linear):
    """A linear layer; one Gemm on a matrix, whatever the axes of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x̂ ŵᵀ + b``."""
        # Gemm takes matrices: flatten the other axes into rows and restore them.
        rows = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        of_tokens = multiplies_token_codes(self, self.scheme)
        if of_tokens:
            y = self._of_token_codes(rows)
        else:
            y = linear(self.quantized_input(rows), self.quantized_weight(), self.quantized_bias())
        y = y + self.bias if of_tokens and self.bias is not None else y
        return y if input.dim() == 2 else y.reshape(*input.shape[:-1], self.out_features)

    def _of_token_codes(self, rows: Tensor) -> Tensor:
        scale = token_scale(rows, self.scheme.input_range[1])
        # onnxruntime's kernels for unsigned inputs are the faster ones
        total = integer_linear(quantize_rows(rows, scale), self.weight_codes, 128)  # type: ignore[arg-type]
        # The scales come after the integer sum: (q_x - z) q_w^T s_x s_w. onnxruntime fuses a product of two scales of
        # which the first is one number, here the largest token's. The other tokens' ratios to it follow.
        largest = scale.amax(0)
        y: Tensor = total.to(rows.dtype) * (largest * self.weight_scale) * (scale / largest)  # type: ignore[operator]
        return y


class _ExportConv(Exported):
    def forward(self: Any, input: Tensor) -> Tensor:
        x = self.quantized_input(input)
        if self.scheme.input == "binary_scaled":
            return times_scale(self, self._conv_forward(x, self.quantized_weight(), None), box_means(self, input))
        return self._conv_forward(x, self.quantized_weight(), self.quantized_bias())  # type: ignore[no-any-return]


class _ExportTransposed(Exported):
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        x = self.quantized_input(input)
        weight = self.quantized_weight()
        if self.groups > 1:
            weight = from_rows(self, weight, self.weight)
        return compute(self, x, weight, self.quantized_bias(), output_size)


class ExportEmbedding(Exported, nn.Embedding):
    """An embedding that gathers codes and dequantizes those alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the indices."""
        indices = input.reshape(-1)
        # Only the requested rows are dequantized; the table stays in codes.
        codes: Tensor = self.weight_codes.index_select(0, indices)  # type: ignore[operator]
        scale: Tensor = self.weight_scale.index_select(0, indices)  # type: ignore[operator]
        found: Tensor = dequantize(codes, scale, None, self.scale_axis, self.block)
        return found.reshape(*input.shape, self.embedding_dim)


_CONVOLUTIONS = {
    _ExportConv: (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    _ExportTransposed: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
EXPORTED: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: ExportLinear, nn.Embedding: ExportEmbedding} | {
    kind: type(f"Export{kind.__name__}", (base, kind), {}) for base, kinds in _CONVOLUTIONS.items() for kind in kinds
}


def input_grid(scheme: LayerScheme, qparams: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the buffers of a static input, from its scale and signed zero point."""
    scale, zero_point = qparams
    if scheme.input == "fp8_static":
        return {"input_scale": scale}
    if scheme.has_wide_inputs:
        return {"input_scale": scale, "input_zero_point": zero_point.to(torch.int16)}
    # shifted to unsigned codes: 0 is then the smallest value after a ReLU, and the ReLU folds
    return {"input_scale": scale, "input_zero_point": (zero_point - scheme.input_range[0]).to(torch.uint8)}


def hold_codes_(
    module: nn.Module, tensors: Mapping[str, Tensor | None], kinds: Mapping[type[nn.Module], type[nn.Module]]
) -> None:
    """Give a layer its codes as buffers, and its class from `kinds`. Float weight and bias are no longer needed."""
    restore(module)
    vars(module).pop("quantized_range", None)  # now in buffers, so that blocks that differ only there are equal
    for buffer, value in tensors.items():
        module.register_buffer(buffer, value)
    change_class(module, type(module), kinds[type(module)])


@torch.no_grad()
def to_export(
    name: str,
    module: Any,
    scheme: LayerScheme,
    qparams: tuple[Tensor, Tensor] | None,
    shared: dict[int, Quantized],
    exact_bias: bool = True,
) -> None:
    """Turn a stock layer whose weight has quantized values into one that holds the codes."""
    is_fp8 = scheme.weight.startswith("fp8")
    make_grid = _fp8_grid if is_fp8 else shared_grid
    grid = make_grid(name, module, module.weight, scheme, shared)
    # The largest sum of products of codes, 255 * 128 for each input, must fit int32. (Transposed ones and int16 inputs
    # have no integer kernel.)
    if scheme.has_byte_inputs and not isinstance(module, TRANSPOSED) and grid.codes[0].numel() * 128 * 255 >= 2**31:
        rule = f"{name} sums too many products for 32 bits: {grid.codes[0].numel()} per output"
        raise CompatibilityError("export_onnx", rule, "skip it in qat")
    tensors: dict[str, Tensor | None] = {}
    if qparams is not None:
        input_scale, _ = qparams
        tensors |= input_grid(scheme, qparams)
        if module.bias is not None and not grid.block and scheme.has_byte_inputs:
            # Absolute, at the layer's output: far below the tolerance of the file's check.
            tolerance = torch.full((len(grid.scale),), _BIAS_TOLERANCE)
            span = input_scale * (2**scheme.activation_bits - 1)
            if isinstance(module, nn.modules.conv._ConvNd) and not exact_bias:
                # onnxruntime's QLinearConv needs the exact scale, and its rounding is far below the next reader's step.
                # The output's scale without data: input span times the norm of a channel's weights.
                norm = grid.scale * grid.codes.float().movedim(grid.axis, 0).flatten(1).norm(dim=1)
                tolerance = 1e-5 * (span * norm).clamp_min(1)
            found = None
            # Only with a scale per channel: a transposed layer with groups may have other numbers of both.
            if len(grid.scale) == len(module.bias):
                grid = with_room_for(module.bias, grid, input_scale, span, tolerance)
                found = bias_codes(module.bias, input_scale * grid.scale, tolerance)
            if found is not None:
                zeros = torch.zeros(len(module.bias), dtype=torch.int32)
                tensors |= {"bias_codes": found[0], "bias_scale": found[1], "bias_zero_point": zeros}
    # onnxruntime has integer kernels only for weights with a zero point
    weight_zeros = None if is_fp8 else torch.zeros(grid.scale.shape, dtype=torch.int8)
    tensors |= {"weight_codes": grid.codes, "weight_scale": grid.scale, "weight_zero_point": weight_zeros}
    module.scheme, module.scale_axis, module.block = scheme, grid.axis, grid.block
    hold_codes_(module, tensors, EXPORTED)


def _fp8_grid(name: str, module: Any, weight: Tensor, scheme: LayerScheme, shared: dict[int, Quantized]) -> Quantized:
    """Return the e4m3 codes of a layer's quantized weight. Tied layers share tensors."""
    if id(weight) not in shared:
        rows = as_rows(module, weight.detach())
        codes, scale = codes_of("export_onnx", name, rows, scheme, {}, torch.float32)
        block = 0
        if scheme.weight == "fp8_block":  # 128 channels share a scale; ONNX has one for each
            block = scheme.group_of(rows.shape[1])
            codes = from_blocks(codes, rows.shape, block)
            scale = scale.view(-1, rows.shape[1] // block).repeat_interleave(FP8_GROUP, 0)[: len(rows)]
        elif scheme.weight == "fp8_tensor":
            scale = scale.expand(len(rows))
        codes = codes.view(rows.shape).to(torch.float8_e4m3fn)
        shared[id(weight)] = in_place(name, module, codes, scale.contiguous(), block, weight.detach())
    return shared[id(weight)]


# The gates in a row of weights, as torch stacks them, in ONNX's order: input, output, forget, cell; update, reset, new.
_GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN": (0,)}


class _ExportRecurrent(Exported):
    """A recurrent layer that holds the codes of all its weights."""

    def forward(self: Any, input: Tensor, hx: Any = None) -> Any:
        """Return the stock layer's result for the values of the codes."""
        alone, axis = input.dim() == 2, 0 if self.batch_first else 1
        x = self.quantized_input(input.unsqueeze(axis) if alone else input)
        directions, is_lstm = 2 if self.bidirectional else 1, isinstance(self, nn.LSTM)
        if hx is None:
            zeros = x.new_zeros(self.num_layers * directions, x.shape[axis], self.hidden_size)
            states = (zeros, zeros) if is_lstm else (zeros,)
        else:
            given = hx if is_lstm else (hx,)
            states = tuple(state.unsqueeze(1) for state in given) if alone else given
        values = [self.value_of(name) for name in self._flat_weights_names]
        run: Any = getattr(torch._VF, self.mode.lower())  # type: ignore[attr-defined]
        options = (self.bias, self.num_layers, 0.0, False, self.bidirectional, self.batch_first)
        y, *left = run(x, states if is_lstm else states[0], values, *options)
        if alone:
            y, left = y.squeeze(axis), [state.squeeze(1) for state in left]
        return y, tuple(left) if is_lstm else left[0]


class ExportLSTM(_ExportRecurrent, nn.LSTM):  # type: ignore[misc]
    """`torch.nn.LSTM` of codes."""


class ExportGRU(_ExportRecurrent, nn.GRU):  # type: ignore[misc]
    """`torch.nn.GRU` of codes."""


class ExportRNN(_ExportRecurrent, nn.RNN):  # type: ignore[misc]
    """`torch.nn.RNN` of codes."""


class ExportAttention(Exported, OpenAttention):
    """`torch.nn.MultiheadAttention` of codes; one Gemm on a matrix for each product."""

    def project(self: Any, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the projected query, key and value."""

        def product(x: Tensor, name: str, rows: slice, bias: Tensor | None) -> Tensor:
            # onnxruntime has no integer Gemm that adds a float bias
            added = bias if self.scheme.input == "static" else None
            inside = bias if added is None else None
            matrix = self.quantized_input(x.reshape(-1, x.shape[-1]))
            y: Tensor = linear(matrix, self.value_of(name, rows), inside)
            y = y if added is None else y + added
            return y.reshape(*x.shape[:-1], y.shape[-1])

        return project(self, (query, key, value), product)


PACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.LSTM: ExportLSTM, nn.GRU: ExportGRU, nn.RNN: ExportRNN, nn.MultiheadAttention: ExportAttention
}  # fmt: skip


@torch.no_grad()
def to_export_packed(
    name: str, module: Any, scheme: LayerScheme, qparams: tuple[Tensor, Tensor] | None, shared: dict[int, Quantized]
) -> None:
    """Turn a stock layer with several weights, which have quantized values, into one that holds the codes."""
    tensors: dict[str, Tensor] = {}
    grids: dict[str, tuple[int, int]] = {}
    for key, weight in weights_of(module).items():
        grid = shared_grid(f"{name}.{key}", module, weight, scheme, shared)
        zeros = torch.zeros(grid.scale.shape, dtype=torch.int8)
        tensors |= {f"{key}_codes": grid.codes, f"{key}_scale": grid.scale, f"{key}_zero_point": zeros}
        grids[key] = grid.axis, grid.block
    if qparams is not None:
        tensors |= input_grid(scheme, qparams)
    module.scheme, module.grids = scheme, grids
    hold_codes_(module, tensors, PACKED)


def recurrent_translations(opset: Any) -> dict[Any, Callable[..., Any]]:
    """Return torch.onnx's translations of recurrent operators, adapted for layers of codes.

    torch.onnx splits weights into gates, which would split values that an engine dequantizes in each run.
    Here the codes are reordered and then dequantized as the operator needs them.
    """
    from onnxscript.function_libs.torch_lib.ops import core as torchlib

    aten = torch.ops.aten
    return {
        aten.lstm.input: _to_recurrent(opset, "LSTM", torchlib.aten_lstm),
        aten.gru.input: _to_recurrent(opset, "GRU", torchlib.aten_gru),
        # torchlib has neither
        aten.rnn_tanh.input: _to_recurrent(opset, "RNN", None, "Tanh"),
        aten.rnn_relu.input: _to_recurrent(opset, "RNN", None, "Relu"),
    }


def _to_recurrent(
    opset: Any, kind: str, of_floats: Callable[..., Any] | None, activation: str = ""
) -> Callable[..., Any]:
    def to_recurrent(
        input: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if of_floats is not None and not any(map(_dequantized, params)):
            return of_floats(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        states = hx if kind == "LSTM" else (hx,)
        size, directions = states[0].shape[2], 2 if bidirectional else 1
        rows = opset.Constant(
            value_ints=np.arange(size * len(_GATES[kind])).reshape(-1, size)[[*_GATES[kind]]].ravel().tolist()
        )
        first = opset.Constant(value_ints=[0])

        def gates(value: Any) -> Any:
            """Return weights or biases of one direction in ONNX's order, with an axis for directions."""
            if (maker := _dequantized(value)) is not None:
                constants = [opset.Gather(constant, rows, axis=0) for constant in maker.inputs]
                attributes = {name: attribute.as_int() for name, attribute in maker.attributes.items()}
                value = opset.DequantizeLinear(*constants, **attributes)
            else:
                value = opset.Gather(value, rows, axis=0)
            return opset.Unsqueeze(value, first)

        def joined(values: Sequence[Any], axis: int = 0) -> Any:
            return values[0] if len(values) == 1 else opset.Concat(*values, axis=axis)

        x = opset.Transpose(input, perm=[1, 0, 2]) if batch_first else input
        ends: list[Any] = []
        for layer in range(num_layers):
            own = params[layer * (len(params) // num_layers) :][: len(params) // num_layers]
            parts = [[gates(value) for value in own[place :: len(own) // directions]] for place in range(2)]
            biases = [gates(value) for value in (*own[2:4], *own[6:8])] if has_biases else []
            pairs = [joined(biases[place : place + 2], axis=1) for place in range(0, len(biases), 2)]
            begin, end = (opset.Constant(value_ints=[n * directions]) for n in (layer, layer + 1))
            options: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
            options |= {"activations": [activation] * directions} if activation else {}
            y, *last = getattr(opset, kind)(
                x, *map(joined, parts), joined(pairs) if pairs else None, None,
                *(opset.Slice(state, begin, end, first) for state in states),
                hidden_size=size, direction="bidirectional" if bidirectional else "forward",
                **options,
            )  # fmt: skip
            ends.append(last)
            # (steps, directions, batch, size) → (steps, batch, directions · size)
            x = opset.Reshape(opset.Transpose(y, perm=[0, 2, 1, 3]), opset.Constant(value_ints=[0, 0, -1]))
        y = opset.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        return (y, *(joined(state) for state in zip(*ends, strict=True)))

    return to_recurrent


def _dequantized(value: Any) -> Any:
    """Return the node that dequantizes a value, None if there is none."""
    maker = value.producer()
    return maker if maker is not None and maker.op_type == "DequantizeLinear" else None
