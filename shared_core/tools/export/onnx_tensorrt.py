"""Rewrite an ONNX file for TensorRT: signed codes, float biases, and Q/DQ on the shortcuts of residual sums."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shared_core.tools.export.engines import is_codes, maker_of, product_of, weighted
from shared_core.tools.export.onnx_files import (
    Codes,
    Ranges,
    add_quantizer,
    bounds_of,
    codes_of_bounds,
    constant,
    observed_codes,
    quantizer_of,
)

_ZERO = 128
"""The unsigned code of 0 in a signed range."""


def write_for_tensorrt(
    exact: Path, file: Path, calibration: Iterable[Any] | Codes | None, outputs: Ranges
) -> tuple[Codes, tuple[str, ...]]:
    """Rewrite an exported file. Return the codes of shortcuts that got any here, and the shortcuts left in float.

    Values stay the same, except that residual sums read the codes of their shortcut. These are those of a layer that
    reads the shortcut too. Without one they come from the batches, or from the range that training observed.

    Args:
        exact: The file as exported, with unsigned codes.
        file: Where to write.
        calibration: Batches of inputs. Codes from an earlier calibration belong to another graph and are not used.
        outputs: Layer → observed range of its output.
    """
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model = onnx_ir.load(exact)
    graph = model.graph
    shortcuts = _shortcuts(graph)
    names = tuple(dict.fromkeys(value.name for _, _, value in shortcuts if quantizer_of(value) is None))
    if names and calibration is not None and not isinstance(calibration, dict):
        codes = observed_codes(exact, names, calibration, symmetric=True)
    else:
        bounds = {value.name: bound for value, bound in bounds_of(graph, outputs).items()}
        codes = codes_of_bounds([name for name in names if name in bounds], bounds, symmetric=True)
    for node, place, value in shortcuts:
        quantizer = quantizer_of(value)
        if quantizer is None:
            if value.name not in codes:
                continue
            arrays = np.float32(codes[value.name][0]), np.uint8(_ZERO)
            parameters = [constant(graph, f"{value.name}_{kind}", array)
                          for kind, array in zip(("scale", "zero_point"), arrays, strict=True)]  # fmt: skip
            quantizer = add_quantizer(graph, value, parameters)
        node.replace_input_with(place, next(use.outputs[0] for use in quantizer.outputs[0].consumers()))
    _sign_(graph)
    _fold_(graph)
    RemoveUnusedNodesPass()(model)
    graph.sort()
    onnx_ir.save(model, file)
    return codes, tuple(name for name in names if name not in codes)


def _shortcuts(graph: Any) -> list[tuple[Any, int, Any]]:
    """Return (sum, position of the shortcut in its inputs, shortcut) of the residual sums."""
    found = []
    for node in graph:
        if node.op_type != "Add" or any(value.const_value is not None or is_codes(value) for value in node.inputs):
            continue
        products = [product_of(value) is not None for value in node.inputs]
        if any(products):
            place = 1 if products[0] else 0
            found.append((node, place, node.inputs[place]))
    return found


def _sign_(graph: Any) -> None:
    """Write unsigned activation codes with zero point 128 as signed ones with 0: the same values."""
    import onnx_ir

    for node in graph:
        has_zero = node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.inputs) > 2
        zero = node.inputs[2] if has_zero else None
        array = None if zero is None or zero.const_value is None else zero.const_value.numpy()
        if array is not None and array.dtype == np.uint8 and array.shape == () and array == _ZERO:
            node.replace_input_with(2, constant(graph, "signed_zero_point", np.int8(0)))
            for value in node.outputs if node.op_type == "QuantizeLinear" else ():
                value.type = onnx_ir.TensorType(onnx_ir.DataType.INT8)


def _fold_(graph: Any) -> None:
    """Dequantize constants that are not weights of products, and tables of embeddings: TensorRT has them in float."""
    import onnx_ir

    kept = {id(maker_of(weight, "DequantizeLinear")) for _, weight in weighted(graph) if is_codes(weight)}
    for node in tuple(graph):
        if node.op_type != "DequantizeLinear" or id(node) in kept:
            continue
        gathers = [maker_of(value, "Gather") for value in node.inputs[:2]]
        sources = [gather.inputs[0] if gather is not None else value
                   for gather, value in zip(gathers, node.inputs, strict=False)]  # fmt: skip
        if any(source.const_value is None for source in sources):
            continue
        values = _dequantized(node, *(source.const_value.numpy() for source in sources))
        folded = constant(graph, f"{node.outputs[0].name}_float", values)
        if gathers[0] is not None:
            gather = onnx_ir.node("Gather", [folded, gathers[0].inputs[1]], {"axis": 0})
            graph.insert_before(node, gather)
            folded = gather.outputs[0]
        for reader, place in tuple(node.outputs[0].uses()):
            reader.replace_input_with(place, folded)


def _dequantized(node: Any, codes: Any, scale: Any) -> Any:
    """Return the values of a constant, whose zero point is 0."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    if scale.ndim == 1 and codes.ndim:
        scale = scale.reshape([-1 if place == axis % codes.ndim else 1 for place in range(codes.ndim)])
    elif scale.ndim > 1:  # one per block
        scale = np.repeat(scale, codes.shape[axis] // scale.shape[axis], axis)
    return codes.astype(np.float32) * scale
