"""Rules of engines for ONNX files with QuantizeLinear and DequantizeLinear, checked node by node.

Each rule is a function of a graph (`onnx_ir.Graph`) that yields the nodes that break it.

Sources: TensorRT 10 developer guide, "Working with Quantized Types", and onnx-tensorrt 10.1; onnxruntime 1.31's
selectors of Q/DQ groups on CPUs; OpenVINO 2026.4, tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from shared_core.errors import CompatibilityError

Target = Literal["onnxruntime", "tensorrt", "openvino"]


class Broken(NamedTuple):
    """A node that breaks a rule, and the way round."""

    node: Any
    rule: str
    remedy: str


Rule = Callable[[Any], Iterator[Broken]]
_SYMMETRIC = "train with --qat_symmetric true, or quantize with eff quantize --symmetric"
_CALIBRATE = "pass --calibration"
_AGAIN = "export the model with --target"
_FIXED = "use inputs with fixed ranges (scheme int8)"
_WEIGHTED = {"Conv": 1, "Gemm": 1, "MatMul": 1}
"""Operator whose weight can be codes → position of the weight in its inputs."""
_SAME_SCALE = 0.01
_MOVES = ("Reshape", "Transpose", "Flatten")


def maker_of(value: Any, *kinds: str) -> Any:
    """Return the node that computes a tensor if it is one of these operators, else None."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in kinds else None


def is_codes(value: Any) -> bool:
    """Return True if a tensor is dequantized."""
    return maker_of(value, "DequantizeLinear") is not None


def weighted(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (node, its weight) for products with a weight whose codes or floats are in the file."""
    for node in graph:
        place = _WEIGHTED.get(node.op_type)
        weight = None if place is None else node.inputs[place]
        maker = maker_of(weight, "DequantizeLinear")
        held: Any = weight if maker is None else maker.inputs[0]
        if held is not None and held.const_value is not None:
            yield node, weight


def product_of(value: Any) -> Any:
    """Return the product of codes whose result a tensor is, perhaps in another shape; None if there is none."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in _MOVES:
        node = node.inputs[0].producer()
    if node is None or node.op_type not in _WEIGHTED:
        return None
    return node if is_codes(node.inputs[_WEIGHTED[node.op_type]]) and is_codes(node.inputs[0]) else None


def _grids(graph: Any) -> Iterator[Any]:
    """Yield the nodes that give scales: quantizers, and dequantizers of constants."""
    for node in graph:
        dequantizes = node.op_type == "DequantizeLinear" and not maker_of(node.inputs[0], "QuantizeLinear")
        if dequantizes or node.op_type == "QuantizeLinear":
            yield node


def _constant(node: Any, place: int) -> Any:
    """Return a node's input as an array; None if it has none there, or one computed at run time."""
    value = node.inputs[place] if place < len(node.inputs) else None
    return value.const_value.numpy() if value is not None and value.const_value is not None else None


def _is_constant(value: Any) -> bool:
    return value is not None and value.const_value is not None


def zero_points_are_zero(graph: Any) -> Iterator[Broken]:
    """TensorRT: codes are signed, with zero point 0."""
    for node in _grids(graph):
        zero = _constant(node, 2)
        if zero is None and node.op_type == "QuantizeLinear":  # without a zero point the codes are uint8
            yield Broken(node, "has unsigned codes", _SYMMETRIC)
        elif zero is not None and (zero.dtype == np.uint8 or zero.any()):
            yield Broken(node, f"has {zero.dtype} codes with zero point {zero.ravel()[0]}", _SYMMETRIC)
        elif zero is not None and zero.dtype == np.int16:
            yield Broken(node, "has int16 codes", "use inputs of int8_static")


def scales_are_constant_and_positive(graph: Any) -> Iterator[Broken]:
    """TensorRT: scales are constants above 0."""
    for node in _grids(graph):
        scale = _constant(node, 1)
        if scale is None:
            yield Broken(node, "has a scale that is computed at run time", _FIXED)
        elif not (np.isfinite(scale) & (scale > 0)).all():
            yield Broken(node, "has a scale that is not above 0", "skip the layer, or calibrate with other batches")


def activations_have_one_scale(graph: Any) -> Iterator[Broken]:
    """TensorRT and OpenVINO: activations have one scale per tensor."""
    for node in graph:
        scale = _constant(node, 1) if node.op_type == "QuantizeLinear" else None
        if scale is not None and scale.size != 1:
            yield Broken(node, "has several scales for an activation", _FIXED)


def codes_are_dequantized(graph: Any) -> Iterator[Broken]:
    """TensorRT: only DequantizeLinear reads codes."""
    for node in graph:
        if node.op_type == "QuantizeLinear":
            other = next((use for use in node.outputs[0].consumers() if use.op_type != "DequantizeLinear"), None)
            if other is not None:
                yield Broken(other, f"reads the codes of {node.name}", "use 8 bits per activation")


def products_are_of_floats(graph: Any) -> Iterator[Broken]:
    """TensorRT and OpenVINO: integer products are written as products of dequantized values."""
    for node in graph:
        if node.op_type in ("MatMulInteger", "ConvInteger", "DynamicQuantizeLinear") or node.op_type.startswith("QL"):
            yield Broken(node, "multiplies codes", _FIXED)


def weights_are_per_output_channel(graph: Any) -> Iterator[Broken]:
    """TensorRT: weights have one scale per tensor or per output channel, and transposed convolutions none of these."""
    for node in graph:
        if node.op_type == "ConvTranspose" and is_codes(node.inputs[1]):
            yield Broken(node, "has a weight in codes along its output channels", "skip the layer")
    for node, weight in weighted(graph):
        maker = maker_of(weight, "DequantizeLinear")
        if maker is None or not _is_constant(maker.inputs[1]) or maker.inputs[1].const_value.size == 1:
            continue
        rows_first = node.op_type == "Conv" or (node.op_type == "Gemm" and _attribute(node, "transB", 0))
        wanted, axis = 0 if rows_first else 1, _attribute(maker, "axis", 1)
        if _attribute(maker, "block_size", 0):
            yield Broken(maker, f"has a scale per group for {node.name}", "use weights of int8, one scale per channel")
        elif axis != wanted:
            yield Broken(maker, f"scales axis {axis} of the weight of {node.name}, not {wanted}", _AGAIN)


def operands_are_both_codes(graph: Any) -> Iterator[Broken]:
    """TensorRT: weight and input of a layer are both codes or both floats."""
    for node, weight in weighted(graph):
        if is_codes(weight) != is_codes(node.inputs[0]):
            what = ("weight", "input") if is_codes(weight) else ("input", "weight")
            remedy = "use scheme int8 with symmetric, or skip the layer"
            yield Broken(node, f"has codes for its {what[0]} but not for its {what[1]}", remedy)


def biases_are_float(graph: Any) -> Iterator[Broken]:
    """TensorRT: biases are floats."""
    for node in graph:
        if node.op_type in ("Conv", "Gemm", "ConvTranspose") and len(node.inputs) > 2 and is_codes(node.inputs[2]):
            yield Broken(node, "has a bias in codes", _AGAIN)


def shortcuts_are_codes(graph: Any) -> Iterator[Broken]:
    """TensorRT: of the two parts of a residual sum, the one that is not fused with the product is codes."""
    for node in graph:
        if node.op_type != "Add" or any(map(_is_constant, node.inputs)):
            continue
        products, codes = ([test(value) for value in node.inputs] for test in (product_of, is_codes))
        if all(codes) and any(product_of(_before_codes(value)) for value in node.inputs):
            yield Broken(node, "quantizes both parts of a sum", _AGAIN)
        elif any(products) and not any(codes):
            yield Broken(node, "adds a product to a float shortcut", _CALIBRATE)


def _before_codes(value: Any) -> Any:
    """Return the float tensor that a tensor of codes was quantized from."""
    quantizer = maker_of(maker_of(value, "DequantizeLinear").inputs[0], "QuantizeLinear")
    return None if quantizer is None else quantizer.inputs[0]


def padding_is_part_of_convolutions(graph: Any) -> Iterator[Broken]:
    """TensorRT: no codes between a Pad and a convolution."""
    for node in graph:
        if node.op_type == "Conv" and is_codes(node.inputs[0]) and maker_of(_before_codes(node.inputs[0]), "Pad"):
            yield Broken(node, "reads codes of a Pad", "let the convolution pad with zeros itself")


def codes_of_shared_tensors_are_unsigned(graph: Any) -> Iterator[Broken]:
    """onnxruntime: signed codes with several readers leave convolutions in float."""
    for node in graph:
        zero = _constant(node, 2) if node.op_type == "QuantizeLinear" else None
        if zero is None or zero.dtype != np.int8:
            continue
        readers = node.outputs[0].consumers()
        if len(readers) > 1 or any(len(reader.outputs[0].consumers()) > 1 for reader in readers):
            yield Broken(node, "has signed codes with several readers", _AGAIN)


def convolutions_pass_on_codes(graph: Any) -> Iterator[Broken]:
    """onnxruntime: a convolution's output, after a ReLU or Clip, is quantized once and read only as codes."""
    for node, weight in weighted(graph):
        if node.op_type != "Conv" or not is_codes(weight) or not is_codes(node.inputs[0]):
            continue
        value = node.outputs[0]
        while len(value.consumers()) == 1 and value.consumers()[0].op_type in ("Relu", "Clip"):
            value = value.consumers()[0].outputs[0]
        readers = [reader.op_type for reader in value.consumers()]
        if readers != ["QuantizeLinear"] and not value.is_graph_output():
            yield Broken(node, f"is read by {', '.join(readers)}, so it runs in float", _CALIBRATE)


def quantizers_absorb_relu(graph: Any) -> Iterator[Broken]:
    """onnxruntime: the smallest code after a convolution's ReLU is 0, so that the quantizer replaces the ReLU."""
    for node in graph:
        relu = maker_of(node.inputs[0], "Relu") if node.op_type == "QuantizeLinear" else None
        product = None if relu is None else product_of(relu.inputs[0])
        zero = None if product is None or product.op_type != "Conv" else _constant(node, 2)
        if zero is not None and (zero != np.iinfo(zero.dtype).min).any():
            remedy = "use inputs with zero points (without symmetric)"
            yield Broken(node, "does not replace the ReLU before it, so the convolution runs in float", remedy)


def sums_are_of_codes(graph: Any) -> Iterator[Broken]:
    """onnxruntime: if one part of a sum is codes, so is the other."""
    for node in graph:
        if node.op_type == "Add" and not any(map(_is_constant, node.inputs)):
            codes = [is_codes(value) for value in node.inputs]
            if any(codes) and not all(codes):
                yield Broken(node, "adds codes and floats", _CALIBRATE)


def weights_are_signed_with_a_zero_point(graph: Any) -> Iterator[Broken]:
    """onnxruntime: weights in codes have a zero point, which its integer kernels need."""
    for node, weight in weighted(graph):
        maker = maker_of(weight, "DequantizeLinear")
        if maker is not None and is_codes(node.inputs[0]) and (len(maker.inputs) < 3 or maker.inputs[2] is None):
            yield Broken(maker, f"has no zero point for the weight of {node.name}", _AGAIN)


def biases_have_the_scale_of_the_sums(graph: Any) -> Iterator[Broken]:
    """onnxruntime: the scale of a bias in codes is within 1 % of that of the products."""
    for node in graph:
        bias = node.inputs[2] if node.op_type == "Conv" and len(node.inputs) > 2 else None
        makers = [maker_of(value, "DequantizeLinear") for value in (*node.inputs[:2], bias)] if bias is not None else []
        if not makers or None in makers:
            continue
        x, weight, found = (maker.inputs[1].const_value.numpy().astype(np.float64) for maker in makers)
        if not np.allclose(found, x * weight, rtol=_SAME_SCALE, atol=0):
            yield Broken(node, "has a bias whose scale is not that of its products", "skip the layer")


def _attribute(node: Any, name: str, default: int) -> int:
    return int(node.attributes[name].as_int()) if name in node.attributes else default


RULES: dict[str, tuple[Rule, ...]] = {
    "tensorrt": (
        zero_points_are_zero, scales_are_constant_and_positive, activations_have_one_scale, codes_are_dequantized,
        products_are_of_floats, weights_are_per_output_channel, operands_are_both_codes, biases_are_float,
        shortcuts_are_codes, padding_is_part_of_convolutions,
    ),
    "onnxruntime": (
        codes_of_shared_tensors_are_unsigned, convolutions_pass_on_codes, quantizers_absorb_relu, sums_are_of_codes,
        weights_are_signed_with_a_zero_point, biases_have_the_scale_of_the_sums,
    ),
    "openvino": (activations_have_one_scale, products_are_of_floats),
}  # fmt: skip
"""Engine → its rules."""
_SHOWN = 5


def check_file(file: Path, target: str) -> None:
    """Raise `CompatibilityError` if a node of a file breaks a rule of an engine."""
    import onnx_ir

    check_target(onnx_ir.load(file).graph, target)


def check_target(graph: Any, target: str) -> None:
    """Raise `CompatibilityError` with the nodes of a graph that break a rule of an engine.

    Example:
        >>> import onnx_ir
        >>> node = onnx_ir.node("Conv", [onnx_ir.val("x"), onnx_ir.val("w")], name="stem")
        >>> check_target(onnx_ir.Graph(node.inputs, node.outputs, nodes=[node]), "tensorrt")  # nothing is quantized
    """
    found = [broken for rule in RULES[target] for broken in rule(graph)]
    if not found:
        return
    lines = [f"{node.op_type} {node.name} {rule}" for node, rule, _ in found[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    remedies = ", or ".join(dict.fromkeys(remedy for _, _, remedy in found[:_SHOWN]))
    raise CompatibilityError("export_onnx", f"the file breaks rules of {target}: {'; '.join(lines)}{more}", remedies)
