"""The ONNX form of quantised layers: their integers, and the operators that torch.export keeps whole.

torch.onnx writes each operator as nodes of our choice, with explicit QuantizeLinear and DequantizeLinear. The integers
of weight and bias are found from their values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels.quantization import affine as kernels
from eff_kernels.quantization.group import group_codes, group_qparams
from torch import Tensor, nn

from shared_core.errors import CompatibilityError
from shared_core.modules.matching import change_class
from shared_core.modules.weight_views import TRANSPOSED, as_rows, compute, from_rows, weights_of
from shared_core.quantization.fake_quant_layers import STOCK, restore
from shared_core.quantization.schemes import LayerScheme

_ON_GRID = 1e-3
_IN_CACHE = 2**16  # values
_SAME_SCALE = 0.009  # onnxruntime leaves a Conv in float whose bias scale is 1 % off s_x·s_w


def grid_of(rows: Tensor, qmax: int, limit: int) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) of rows that hold whole multiples of a scale each; None if one does not.

    The scale is ``max|w|/m`` for the first m of `qmax`, 1, 2, … `limit` that makes every value of the row whole. Two
    different grids differ by at least 1/128 of a step somewhere, so none is taken for another.

    Args:
        rows: (rows, values), float32, finite.
        qmax: Largest code, and the magnitude that the largest value most likely has.
        limit: Largest magnitude of a code.

    Returns:
        int8 and float32; a row of zeros has the smallest scale of the others.

    Example:
        >>> codes, scale = grid_of(torch.tensor([[0.5, -1.0, 1.5]]), 7, 8)
        >>> codes.tolist(), scale.tolist()
        ([[1, -2, 3]], [0.5])
    """
    codes, scale = torch.empty_like(rows, dtype=torch.int8), rows.new_empty(len(rows))
    # Some rows at a time: what is computed of them stays in the processor's cache.
    size = max(1, _IN_CACHE // max(1, rows.shape[1]))
    parts = zip(torch.split(rows, size), torch.split(codes, size), torch.split(scale, size), strict=True)
    if not all(_fill_grid(some, its_codes, its_scale, qmax, limit) for some, its_codes, its_scale in parts):
        return None
    # A row of zeros has any scale. One of its neighbours' keeps a bias in range of s_x s_w.
    known = scale[scale > 0]
    scale[scale == 0] = known.min() if len(known) else 1.0
    return codes, scale


def _fill_grid(rows: Tensor, codes: Tensor, scale: Tensor, qmax: int, limit: int) -> bool:
    """Write codes and scales as `grid_of`, 0 as the scale of a row of zeros; return whether every row has a grid."""
    # A row's largest value is some whole multiple m of its scale, with m unknown: most often it is qmax (the range
    # was fitted to the largest weight), so that is tried first, then every other m. Rows that fit leave the search.
    # (two reductions: torch's aminmax along an axis takes ten times as long as both)
    lowest, highest = rows.amin(1), rows.amax(1)
    largest = torch.maximum(highest, -lowest)
    left = largest.nonzero().squeeze(1)
    if len(left) < len(rows):
        codes.zero_()
        scale.zero_()
    for steps in itertools.chain((qmax,), (m for m in range(1, limit + 1) if m != qmax)):
        if not len(left):
            break
        some = len(left) < len(rows)
        step = (largest[left] if some else largest) / steps
        exact = (rows[left] if some else rows) / step.unsqueeze(1)
        rounded = exact.round()
        error = exact.sub_(rounded).abs_().amax(1)
        # +qmax is the top of the grid; -(qmax + 1) may occur, so only the upper side is checked.
        fits = (error <= _ON_GRID) & ((highest[left] / step).round() <= qmax)
        if fits.all() and not some:
            codes.copy_(rounded)
            scale.copy_(step)
            return True
        codes[left[fits]], scale[left[fits]] = rounded[fits].to(torch.int8), step[fits]
        left = left[~fits]
    return not len(left)


def bias_codes(bias: Tensor, step: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) of a bias, for integer kernels that add it to their sums; None if it does not fit.

    The scale is ``s_x·s_w``. Where rounding would move a bias by more than the tolerance, scales are moved to
    ``b/code``, which stands for it exactly: by 1 % at most, if that does. Kernels that sum integers take the codes
    alone.

    Example:
        >>> bias_codes(torch.tensor([0.5, 0.26]), torch.tensor([0.1, 0.1]), torch.zeros(2))
        (tensor([5, 3], dtype=torch.int32), tensor([0.1000, 0.0867]))
    """
    bias, step = bias.double(), step.double()
    codes = (bias / step).round()
    # Room for the sums that the bias is added to, in int32.
    if not bool((codes.abs() < 2**30).all()):
        return None
    # The scale for which this code is exactly the bias, kept within what onnxruntime takes as s_x s_w.
    near = (bias / torch.where(codes == 0, torch.ones_like(codes), codes)).clamp(
        step * (1 - _SAME_SCALE), step * (1 + _SAME_SCALE)
    )
    # First the exact step, then the nearby scale. The first one within tolerance runs on integers.
    for scale in (step, near):
        if bool(((codes * scale - bias).abs() <= tolerance).all()):
            return codes.to(torch.int32), scale.float()
    # Else: one code with a scale of its own stands for any bias exactly, and onnxruntime leaves the layer in float.
    codes = torch.where((codes == 0) & (bias != 0), bias.sign(), codes)
    return codes.to(torch.int32), torch.where(codes == 0, step, bias / codes).float()


@dataclasses.dataclass(frozen=True)
class Quantized:
    """The tensors and options that one layer is written from.

    Attributes:
        codes: int8, of the weight's shape, or as rows for a transposed convolution with groups.
        scale: float32, (channels,) or (channels, blocks).
        axis: Of the channels, or of the blocks.
        block: Weights that share a scale along it; 0: all of a channel.
    """

    codes: Tensor
    scale: Tensor
    axis: int
    block: int


def weight_grid(name: str, module: Any, values: Tensor, scheme: LayerScheme) -> Quantized:
    """Return the codes that a layer's quantised weight stands for."""
    rows = as_rows(module, values).contiguous()
    # Binary weights are -1 and 1: two bits hold them, as one bit in two's complement has no 1.
    bits = max(scheme.weight_bits, 2)
    # limit allows one more step than qmax: -2^(b-1) is a code too.
    qmax, limit = 2 ** (bits - 1) - 1, 2 ** (bits - 1)
    block = 0
    if scheme.weight == "group":
        block = scheme.group_of(rows.shape[1])
        if scheme.affine:  # q − z is stored
            qmax = min(127, 2**bits - 1)
        limit = qmax
    found = grid_of(rows.view(-1, block) if block else rows, qmax, limit)
    if found is None:  # no grid holds NaN or infinity
        if not values.isfinite().all():
            raise CompatibilityError(
                "export_onnx", f"weights of {name} must be finite, got NaN or infinity", "look for the diverged step"
            )
        raise CompatibilityError(
            "export_onnx",
            f"{name} must have weights on a grid of int8 codes, got {scheme.weight} of {bits} bits "
            f"{'with zero points ' if scheme.affine else ''}that are not",
            "bake them, or take fewer bits",
        )
    codes, scale = found
    if not block and bits < 7:
        # The same values on a finer grid, for it is that of the bias too; −2^(b−1) becomes −64: with codes of 8 bits
        # products saturate on processors without VNNI
        factor = 2 ** (7 - bits)
        codes, scale = codes * factor, scale / factor
    codes = codes.view(rows.shape)
    if block:
        if module.__class__ is nn.Embedding or isinstance(module, (nn.Linear, nn.RNNBase)):
            return Quantized(codes, scale.view(len(rows), -1), 1, block)
        raise CompatibilityError(
            "export_onnx",
            f"{name} must have a scale for each channel to be exported as a convolution, got groups",
            "skip it in qat, or override its scheme with int8_weight",
        )
    if not isinstance(module, TRANSPOSED):
        return Quantized(codes.view(values.shape), scale, 0, 0)
    # (in, out / groups, ...): a channel is a pair (group, out), and DequantizeLinear scales along one axis. Rows are
    # kept, and put into the weight's shape in the graph.
    if module.groups > 1:  # its channels lie on two axes
        return Quantized(codes, scale, 0, 0)
    return Quantized(from_rows(module, codes, values).contiguous(), scale, 1, 0)


def shared_grid(name: str, module: Any, weight: Tensor, scheme: LayerScheme, shared: dict[int, Quantized]) -> Quantized:
    """Return the codes of a layer's weight: of tied layers the same tensors, by the weight's identity in `shared`."""
    key = id(weight)
    if key not in shared:
        shared[key] = weight_grid(name, module, weight.detach(), scheme)
    return shared[key]


@torch.library.custom_op("efftrain::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Return codes in uint8, ``clamp(ne(x/s) + z, 0, 2^bits − 1)``; QuantizeLinear, and Clip below 8 bits."""
    # round() is to the nearest even, as in QuantizeLinear.
    codes = (x / scale).round() + zero_point.to(x.dtype)
    return codes.clamp(0, 2**bits - 1).to(torch.uint8)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


@torch.library.custom_op("efftrain::dequantize", mutates_args=())
def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block: int) -> Tensor:
    """Return ``s·(q − z)``; the scale is one for all, one for each slice of an axis, or one for each block along it."""
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


@torch.library.custom_op("efftrain::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x wᵀ + b`` of a matrix x; one Gemm, where the exporter would choose MatMul and Add, never fused."""
    return F.linear(x, weight, bias)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("efftrain::quantize_rows", mutates_args=())
def quantize_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Return the codes of a matrix in uint8, 128 more than signed ones, with a scale for each row, (rows, 1)."""
    return ((x / scale).round() + 128).clamp(0, 255).to(torch.uint8)


@quantize_rows.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


@torch.library.custom_op("efftrain::integer_linear", mutates_args=())
def integer_linear(codes: Tensor, weight_codes: Tensor, zero_point: int) -> Tensor:
    """Return ``(q_x − z) q_wᵀ`` in int32; MatMulInteger."""
    # double is exact: 255 * 127 * n stays below 2^53 for any layer, and torch has no int8 product on a CPU with all
    # shapes.
    return F.linear(codes.double() - zero_point, weight_codes.double()).to(torch.int32)


@integer_linear.register_fake
def _(codes: Tensor, weight_codes: Tensor, zero_point: int) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], weight_codes.shape[0]), dtype=torch.int32)


def translations(opset: Any) -> dict[Any, Callable[..., Any]]:
    """Return what torch.onnx makes of the ops above."""
    from onnx import TensorProto, helper
    from onnxscript.function_libs.torch_lib.ops import core as torchlib

    def byte(value: int) -> Any:
        return opset.Constant(value=helper.make_tensor("byte", TensorProto.UINT8, [], [value]))

    def to_quantize(x: Any, scale: Any, zero_point: Any, bits: int) -> Any:
        codes = opset.QuantizeLinear(x, scale, zero_point)
        # uint8 saturates at 255 by itself; fewer bits need a Clip, which `_is_activation` knows as part of the codes.
        return codes if bits == 8 else opset.Clip(codes, byte(0), byte(2**bits - 1))

    def to_dequantize(codes: Any, scale: Any, zero_point: Any = None, axis: int = 0, block: int = 0) -> Any:
        inputs = (codes, scale) if zero_point is None else (codes, scale, zero_point)
        return opset.DequantizeLinear(*inputs, axis=axis, **({"block_size": block} if block else {}))

    def to_linear(x: Any, weight: Any, bias: Any = None) -> Any:
        return opset.Gemm(*((x, weight) if bias is None else (x, weight, bias)), transB=1)

    def to_quantize_rows(x: Any, scale: Any) -> Any:
        # rounds, moves and converts in one pass; scales for each row in it OpenVINO (2026.4) would take for columns'
        return opset.QuantizeLinear(opset.Div(x, scale), opset.Constant(value_float=1.0), byte(128))

    def to_integer_linear(codes: Any, weight_codes: Any, zero_point: int) -> Any:
        # ONNX's product has the weight as (in, out); the constant is transposed when the file is optimised.
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
        ops.dequantize.default: to_dequantize,
        ops.linear.default: to_linear,
        ops.integer_linear.default: to_integer_linear,
        ops.quantize_rows.default: to_quantize_rows,
        # what transformers makes masks with: torch.onnx has these only once they are decomposed
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
        # As torch.onnx's, in the operators that onnxruntime takes into its products, and without a search of all
        # weights for NaN: a row of which all is masked has finite scores, as the mask is the lowest number.
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
            # onnxruntime would make one operator of sum and norm, several times slower on CPUs than the two (1.31):
            # a Reshape that changes nothing stands between.
            shape = opset.Constant(value_ints=[0] * (len(input.shape) - 1) + [-1])
            input = opset.Reshape(input, shape)
        return torchlib.aten_layer_norm(input, normalized_shape, weight, bias, eps)

    return to_layer_norm


_BIAS_TOLERANCE = 1e-6
INTEGER_WEIGHTS = ("channel", "group", "ternary", "binary")


class Exported(nn.Module):
    """A layer that holds codes: ``weight_codes``, ``weight_scale`` and, if they are quantised, input and bias."""

    scheme: LayerScheme

    def quantized_input(self: Any, x: Tensor) -> Tensor:
        """Return the input as its codes can hold it."""
        if self.scheme.input == "static":
            codes = quantize(x, self.input_scale, self.input_zero_point, self.scheme.activation_bits)
            x = dequantize(codes, self.input_scale, self.input_zero_point, 0, 0)
        elif self.scheme.input == "token":
            axis = -1 - len(getattr(self, "kernel_size", ()))
            x = of_tokens(x.movedim(axis, -1), self.scheme).movedim(-1, axis)
        return x

    def quantized_weight(self: Any) -> Tensor:
        """Return the values that the codes stand for."""
        values: Tensor = dequantize(
            self.weight_codes, self.weight_scale, self.weight_zero_point, self.scale_axis, self.block
        )
        return values

    def quantized_bias(self: Any) -> Tensor | None:
        """Return the bias, from its codes if it has some."""
        bias: Tensor | None = self.bias
        if hasattr(self, "bias_codes"):
            bias = dequantize(self.bias_codes, self.bias_scale, self.bias_zero_point, 0, 0)
        return bias


def of_tokens(x: Tensor, scheme: LayerScheme) -> Tensor:
    """Return values as codes with a range for each token, the last axis, can hold them."""
    # Symmetric: the zero point is a constant, which MatMulInteger takes for all rows.
    if not scheme.affine_input:
        scale = token_scale(x, scheme.activation_bits)
        return (x / scale).round() * scale
    size = x.shape[-1]
    scale, zero_point = group_qparams(x, size, scheme.activation_bits, False)
    codes = group_codes(x, scale, zero_point, size, scheme.activation_bits).squeeze(-2)
    return (codes - zero_point) * scale


def token_scale(x: Tensor, bits: int) -> Tensor:
    """Return the scale of each token, the last axis: ``max|x| / (2^(bits - 1) - 1)``, or the least normal number."""
    # two reductions are faster in onnxruntime than the magnitudes of all values; a token of zeros has codes of 0
    scale: Tensor = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)) / (2 ** (bits - 1) - 1)
    return torch.clamp(scale, min=torch.finfo(torch.float32).tiny)


def multiplies_token_codes(module: nn.Module, scheme: LayerScheme) -> bool:
    """Return whether the file has codes of a layer's tokens, which MatMulInteger takes."""
    symmetric = not scheme.affine_input and scheme.weight != "group"
    return isinstance(module, nn.Linear) and scheme.input == "token" and symmetric


class ExportLinear(Exported, nn.Linear):
    """A linear layer; one Gemm on a matrix, whatever the axes of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x̂ ŵᵀ + b``."""
        # Gemm takes matrices: the other axes become rows and come back.
        rows = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        of_tokens = multiplies_token_codes(self, self.scheme)
        if of_tokens:
            y = self._of_token_codes(rows)
        else:
            y = linear(self.quantized_input(rows), self.quantized_weight(), self.quantized_bias())
        y = y + self.bias if of_tokens and self.bias is not None else y
        return y if input.dim() == 2 else y.reshape(*input.shape[:-1], self.out_features)

    def _of_token_codes(self, rows: Tensor) -> Tensor:
        scale = token_scale(rows, self.scheme.activation_bits)
        # onnxruntime's kernels for unsigned inputs are the faster ones
        total = integer_linear(quantize_rows(rows, scale), self.weight_codes, 128)  # type: ignore[arg-type]
        # The scales come after the integer sum: (q_x - z) q_w^T s_x s_w. onnxruntime's product takes in a product of
        # two scales of which the first is one number, here the largest token's; what the tokens' differ by comes after.
        largest = scale.amax(0)
        y: Tensor = total.to(rows.dtype) * (largest * self.weight_scale) * (scale / largest)  # type: ignore[operator]
        return y


class _ExportConv(Exported):
    def forward(self: Any, input: Tensor) -> Tensor:
        x = self.quantized_input(input)
        return self._conv_forward(x, self.quantized_weight(), self.quantized_bias())  # type: ignore[no-any-return]


class ExportConv1d(_ExportConv, nn.Conv1d):
    """A 1-d convolution."""


class ExportConv2d(_ExportConv, nn.Conv2d):
    """A 2-d convolution."""


class ExportConv3d(_ExportConv, nn.Conv3d):
    """A 3-d convolution."""


class _ExportTransposed(Exported):
    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        x = self.quantized_input(input)
        weight = self.quantized_weight()
        if self.groups > 1:
            weight = from_rows(self, weight, self.weight)
        return compute(self, x, weight, self.quantized_bias(), output_size)


class ExportConvTranspose1d(_ExportTransposed, nn.ConvTranspose1d):
    """A transposed 1-d convolution."""


class ExportConvTranspose2d(_ExportTransposed, nn.ConvTranspose2d):
    """A transposed 2-d convolution."""


class ExportConvTranspose3d(_ExportTransposed, nn.ConvTranspose3d):
    """A transposed 3-d convolution."""


class ExportEmbedding(Exported, nn.Embedding):
    """An embedding that gathers codes and dequantises those alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of the indices."""
        indices = input.reshape(-1)
        # Only what is asked for is dequantised; the table stays in codes.
        codes: Tensor = self.weight_codes.index_select(0, indices)  # type: ignore[operator]
        scale: Tensor = self.weight_scale.index_select(0, indices)  # type: ignore[operator]
        found: Tensor = dequantize(codes, scale, None, self.scale_axis, self.block)
        return found.reshape(*input.shape, self.embedding_dim)


EXPORTED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ExportLinear,
    nn.Conv1d: ExportConv1d,
    nn.Conv2d: ExportConv2d,
    nn.Conv3d: ExportConv3d,
    nn.ConvTranspose1d: ExportConvTranspose1d,
    nn.ConvTranspose2d: ExportConvTranspose2d,
    nn.ConvTranspose3d: ExportConvTranspose3d,
    nn.Embedding: ExportEmbedding,
}


def check_begun(name: str, module: Any, where: str = "export_onnx") -> None:
    """Refuse a layer that does not quantise yet."""
    if not module.quantizer.bank.quantizing:
        raise CompatibilityError(
            where, f"{name} must be quantised, got a layer before qat's begin", "train past it, or let qat finish"
        )


def check_exportable(
    name: str, module: Any, where: str = "export_onnx", kinds: Mapping[type[nn.Module], Any] = EXPORTED
) -> None:
    """Refuse a fake-quantising layer that no exported file can hold as it is."""
    scheme: LayerScheme = module.quantizer.scheme
    if STOCK[type(module)] not in kinds:
        raise CompatibilityError(
            where,
            f"{name} must be one of {', '.join(kind.__name__ for kind in kinds)}, got {STOCK[type(module)].__name__}",
            "skip it in qat",
        )
    if scheme.weight not in INTEGER_WEIGHTS or scheme.input not in ("none", "static", "token"):
        raise CompatibilityError(
            where,
            f"{name} must have integer codes, got weight {scheme.weight} and input {scheme.input}",
            "train with scheme int8, int8_weight, int8_dynamic, int4_weight or ternary",
        )
    if getattr(module, "max_norm", None) is not None:
        raise CompatibilityError(where, f"{name} must have no max_norm, which rescales rows", "skip it in qat")
    if getattr(module, "proj_size", 0):
        raise CompatibilityError(where, f"{name} must have no proj_size, which ONNX lacks", "skip it in qat")
    for weight in weights_of(module).values():
        if weight.dtype != torch.float32:
            raise CompatibilityError(where, f"{name} must be float32, got {weight.dtype}", "call model.float() first")


def input_grid(scheme: LayerScheme, qparams: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return the buffers of a static input, from its scale and signed zero point."""
    scale, zero_point = qparams
    # moved to unsigned codes: 0 is then the smallest value of what a ReLU gives, and the ReLU folds
    return {"input_scale": scale, "input_zero_point": (zero_point - scheme.input_range[0]).to(torch.uint8)}


def hold_codes_(
    module: nn.Module, tensors: Mapping[str, Tensor], kinds: Mapping[type[nn.Module], type[nn.Module]]
) -> None:
    """Give a layer its codes as buffers, and its class of `kinds`; its float weight and bias have been read."""
    restore(module)
    vars(module).pop("quantized_range", None)  # the buffers say it now, and blocks that differ in them alone are alike
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
    """Turn a stock layer whose weight holds the values of its codes into one that holds the codes."""
    grid = shared_grid(name, module, module.weight, scheme, shared)
    # The largest sum of products of codes, 255 * 128 for each input, must fit int32. (Transposed ones have no integer
    # kernel.)
    if scheme.input != "none" and not isinstance(module, TRANSPOSED) and grid.codes[0].numel() * 128 * 255 >= 2**31:
        raise CompatibilityError(
            "export_onnx",
            f"{name} must sum fewer products than overflow 32 bits, got {grid.codes[0].numel()} per output",
            "skip it in qat",
        )
    # onnxruntime has integer kernels for weights with a zero point alone
    weight_zeros = torch.zeros(grid.scale.shape, dtype=torch.int8)
    tensors = {"weight_codes": grid.codes, "weight_scale": grid.scale, "weight_zero_point": weight_zeros}
    if qparams is not None:
        input_scale, _ = qparams
        tensors |= input_grid(scheme, qparams)
        if module.bias is not None and not grid.block:
            # Absolute, on the layer's output: far below what the written file is checked with.
            tolerance = torch.full((len(grid.scale),), _BIAS_TOLERANCE)
            if isinstance(module, nn.modules.conv._ConvNd) and not exact_bias:
                # onnxruntime's QLinearConv wants the very scale, and what it rounds away is far below the step of
                # what reads it
                # A scale for the output without data: input span times the norm of a channel's weights.
                span = input_scale * (2**scheme.activation_bits - 1)
                norm = grid.scale * grid.codes.float().movedim(grid.axis, 0).flatten(1).norm(dim=1)
                tolerance = 1e-5 * (span * norm).clamp_min(1)
            found = None
            # With a scale for each channel alone: a transposed layer with groups may have other numbers of both.
            if len(grid.scale) == len(module.bias):
                found = bias_codes(module.bias, input_scale * grid.scale, tolerance)
            if found is not None:
                zeros = torch.zeros(len(module.bias), dtype=torch.int32)
                tensors |= {"bias_codes": found[0], "bias_scale": found[1], "bias_zero_point": zeros}
    module.scheme, module.scale_axis, module.block = scheme, grid.axis, grid.block
    hold_codes_(module, tensors, EXPORTED)
