"""Compare an ONNX file of integers with the same graph in float, on this machine."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared_core.tools.export.onnx_files import constant, feeds, is_activation, session_of
from shared_core.tools.export.onnx_layers import dequantize

_LARGEST = 2**30  # bytes of the float file
_SECONDS, _FEWEST = 0.2, 5


def milliseconds(file: Path, folder: Path, inputs: Any) -> tuple[float, float] | None:
    """Return the time of a file and of its graph in float, medians of alternating runs in onnxruntime.

    None if the float graph would be larger than 1 GiB. It is written into the folder.
    """
    in_float = folder / "float.onnx"
    if not write_in_float(file, in_float):
        return None
    sessions = [session_of(path, optimize=True) for path in (file, in_float)]
    given = feeds(sessions[0], inputs)
    times: list[list[float]] = [[], []]
    for session in sessions:
        session.run(None, given)
    end = time.perf_counter() + _SECONDS
    while len(times[0]) < _FEWEST or time.perf_counter() < end:
        for session, taken in zip(sessions, times, strict=True):
            start = time.perf_counter()
            session.run(None, given)
            taken.append(time.perf_counter() - start)
    integers, floats = (1e3 * statistics.median(taken) for taken in times)
    return integers, floats


def write_in_float(file: Path, target: Path) -> bool:
    """Write the graph of a file without quantizers, with float weights of the same values; False if it is too large.

    Embeddings stay as they are: rows of codes are gathered, not multiplied.
    """
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model = onnx_ir.load(file)
    graph: Any = model.graph
    size = 0
    for node in tuple(graph):
        if node.op_type == "DequantizeLinear" and is_activation(node.outputs[0]):
            maker = node.inputs[0].producer()
            maker = maker.inputs[0].producer() if maker.op_type == "Clip" else maker
            _read_instead(graph, node.outputs[0], maker.inputs[0])
        elif node.op_type == "DequantizeLinear" and (codes := _constant_of(node.inputs[0])) is not None:
            values = _values(node, codes)
            size += values.nbytes
            _read_instead(graph, node.outputs[0], constant(graph, f"{node.outputs[0].name}_float", values))
        elif node.op_type == "Round":  # tokens of other layers: s · round(x / s)
            quotient, product = node.inputs[0].producer(), node.outputs[0].consumers()
            if quotient is not None and quotient.op_type == "Div" and [one.op_type for one in product] == ["Mul"]:
                _read_instead(graph, product[0].outputs[0], quotient.inputs[0])
        elif node.op_type == "MatMulInteger":
            size += _multiply_in_float(graph, node)
        if size > _LARGEST:
            return False
    RemoveUnusedNodesPass()(model)
    onnx_ir.save(model, target)
    return True


def _multiply_in_float(graph: Any, node: Any) -> int:
    """Replace a layer's product of token codes by one of its input and float weight; return the weight's bytes."""
    import onnx_ir

    # The input is Quantize(x / s_x), the output Cast(sum) · (one number · s_w) · ratios.
    rows, end = node.inputs[0].producer().inputs[0].producer().inputs[0], node.outputs[0]
    scale: Any = None
    for _ in ("Cast", "Mul", "Mul"):
        reader = end.consumers()[0]
        makers = [value.producer() for value in reader.inputs if value is not end and value.producer() is not None]
        found = map(_constant_of, (value for maker in makers for value in maker.inputs))
        scale = next((one for one in found if one is not None), None) if scale is None else scale
        end = reader.outputs[0]
    codes: Any = _constant_of(node.inputs[1])
    values = (codes.astype(np.float32) - (128 if len(node.inputs) > 3 else 0)) * scale
    product = onnx_ir.node("MatMul", [rows, constant(graph, f"{node.outputs[0].name}_float", values)])
    graph.insert_before(node, product)
    _read_instead(graph, end, product.outputs[0])
    return int(values.nbytes)


def _read_instead(graph: Any, value: Any, other: Any) -> None:
    """Make all readers of a tensor read another one, which takes its place among the outputs."""
    for reader, place in tuple(value.uses()):
        reader.replace_input_with(place, other)
    graph.outputs[:] = [other if output is value else output for output in graph.outputs]


def _constant_of(value: Any) -> Any | None:
    """Return the array of a constant, also of a transposed one; None for other tensors."""
    maker = value.producer()
    if maker is not None and maker.op_type == "Transpose":
        codes = _constant_of(maker.inputs[0])
        return None if codes is None else codes.T
    return None if value.const_value is None else value.const_value.numpy()


def _values(node: Any, codes: Any) -> Any:
    """Return the values of a DequantizeLinear of constant codes."""
    attributes = {name: node.attributes[name].as_int() for name in ("axis", "block_size") if name in node.attributes}
    scale, *zero_point = (torch.tensor(value.const_value.numpy()) for value in node.inputs[1:])
    # as int32, which biases are: torch has none of numpy's 4-bit types
    values = dequantize(
        torch.from_numpy(codes.astype(np.int32)),
        scale,
        zero_point[0] if zero_point else None,
        attributes.get("axis", 1) % codes.ndim,
        attributes.get("block_size", 0),
    )
    return values.numpy()
