"""Compare an ONNX file of integers with the same graph in float, on this machine."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from shared_core.tools.export.onnx_files import constant, feeds, is_activation, session_of

_LARGEST = 2**30  # bytes of the float weights
_SECONDS, _FEWEST = 0.2, 5


def milliseconds(file: Path, inputs: Any) -> tuple[float, float] | None:
    """Return the time of a file and of its graph in float, medians of alternating runs in onnxruntime.

    None if the weights in float are larger than 1 GiB.
    """
    in_float = graph_in_float(file)
    if in_float is None:
        return None
    sessions = [session_of(file, optimize=True), session_of(in_float, optimize=True, fold_weights=True)]
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


def graph_in_float(file: Path) -> bytes | None:
    """Return the graph of a file without quantizers of activations; None if its weights are too large in float.

    Weights are still codes, which a session with `fold_weights` dequantizes before its first run. Embeddings stay as
    they are: rows of codes are gathered, not multiplied.
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
            size += 4 * codes.size
        elif node.op_type == "Round":  # tokens of other layers: s · round(x / s)
            quotient, product = node.inputs[0].producer(), node.outputs[0].consumers()
            if quotient is not None and quotient.op_type == "Div" and [one.op_type for one in product] == ["Mul"]:
                _read_instead(graph, product[0].outputs[0], quotient.inputs[0])
        elif node.op_type == "MatMulInteger":
            size += _multiply_in_float(graph, node)
        if size > _LARGEST:
            return None
    RemoveUnusedNodesPass()(model)
    whole: bytes = onnx_ir.to_proto(model).SerializeToString()
    return whole


def _multiply_in_float(graph: Any, node: Any) -> int:
    """Replace a layer's product of token codes by one of its input and weight; return the weight's bytes in float."""
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
    name, width = node.outputs[0].name, codes.shape[1]
    scales = np.broadcast_to(scale.reshape(-1), (width,))
    zeros = np.full(width, 128 if len(node.inputs) > 3 else 0, codes.dtype)
    parts = [node.inputs[1], constant(graph, f"{name}_scale", scales), constant(graph, f"{name}_zero", zeros)]
    weight = onnx_ir.node("DequantizeLinear", parts, {"axis": 1})
    product = onnx_ir.node("MatMul", [rows, weight.outputs[0]])
    for one in (weight, product):
        graph.insert_before(node, one)
    _read_instead(graph, end, product.outputs[0])
    return 4 * int(codes.size)


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
