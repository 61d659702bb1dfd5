"""Operations with their ONNX form: what torch.export keeps whole and torch.onnx writes as nodes of our choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels import quantization as kernels
from torch import Tensor


@torch.library.custom_op("efftrain::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Return codes in uint8, ``clamp(ne(x/s) + z, 0, 2^bits − 1)``; QuantizeLinear, and Clip below 8 bits."""
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


@torch.library.custom_op("efftrain::integer_linear", mutates_args=())
def integer_linear(codes: Tensor, weight_codes: Tensor, zero_point: int) -> Tensor:
    """Return ``(q_x − z) q_wᵀ`` in int32; MatMulInteger."""
    return F.linear(codes.double() - zero_point, weight_codes.double()).to(torch.int32)


@integer_linear.register_fake
def _(codes: Tensor, weight_codes: Tensor, zero_point: int) -> Tensor:
    return codes.new_empty((*codes.shape[:-1], weight_codes.shape[0]), dtype=torch.int32)


def translations(opset: Any) -> dict[Any, Callable[..., Any]]:
    """Return what torch.onnx makes of the ops above.

    Args:
        opset: The onnxscript opset, 21 or newer.
    """
    from onnx import TensorProto, helper

    def byte(value: int) -> Any:
        return opset.Constant(value=helper.make_tensor("byte", TensorProto.UINT8, [], [value]))

    def to_quantize(x: Any, scale: Any, zero_point: Any, bits: int) -> Any:
        codes = opset.QuantizeLinear(x, scale, zero_point)
        return codes if bits == 8 else opset.Clip(codes, byte(0), byte(2**bits - 1))

    def to_dequantize(codes: Any, scale: Any, zero_point: Any = None, axis: int = 0, block: int = 0) -> Any:
        inputs = (codes, scale) if zero_point is None else (codes, scale, zero_point)
        return opset.DequantizeLinear(*inputs, axis=axis, **({"block_size": block} if block else {}))

    def to_linear(x: Any, weight: Any, bias: Any = None) -> Any:
        return opset.Gemm(*((x, weight) if bias is None else (x, weight, bias)), transB=1)

    def to_integer_linear(codes: Any, weight_codes: Any, zero_point: int) -> Any:
        return opset.MatMulInteger(codes, opset.Transpose(weight_codes, perm=[1, 0]), byte(zero_point))

    ops = torch.ops.efftrain
    return {
        ops.quantize.default: to_quantize,
        ops.dequantize.default: to_dequantize,
        ops.linear.default: to_linear,
        ops.integer_linear.default: to_integer_linear,
    }
