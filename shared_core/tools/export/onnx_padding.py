"""Padding in the form that onnxruntime computes on integers, and computes right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def fold_padding_(model: Any) -> None:
    """Remove each Pad that adds zeros for convolutions alone: their own padding grows instead. Values stay the same.

    onnxruntime computes a Pad in float, also between layers of integers. TensorFlow's ``SAME`` is written this way, as
    in MobileNetV2 and EfficientNet of transformers.
    """
    import onnx_ir

    for node in tuple(model.graph):
        added = _zeros_added(node) if node.op_type == "Pad" and not node.outputs[0].is_graph_output() else None
        if added is None:
            continue
        readers = list(_readers(node.outputs[0]))
        if not all(place == 0 and _may_pad(reader, added) for reader, place in readers):
            continue
        for reader, _ in readers:
            pads = zip(_pads_of(reader) or [0] * len(added), added, strict=True)
            reader.attributes["pads"] = onnx_ir.AttrInt64s("pads", [old + new for old, new in pads])
        for reader, place in tuple(node.outputs[0].uses()):
            reader.replace_input_with(place, node.inputs[0])
        model.graph.remove(node, safe=True)


def average_within_(model: Any) -> None:
    """Make average pools without padding divide by the number of values in a window. Values stay the same.

    onnxruntime (1.31) divides integers by the kernel's size instead if the pool has ``ceil_mode`` and
    ``count_include_pad``: the pool over all pixels in EfficientNet of transformers (1280 x 1280) gave zeros.
    """
    import onnx_ir

    for node in model.graph:
        if node.op_type == "AveragePool" and not any(_pads_of(node)):
            node.attributes["count_include_pad"] = onnx_ir.AttrInt64("count_include_pad", 0)


def _zeros_added(pad: Any) -> list[int] | None:
    """Return begin and end of the spatial axes; None if it adds other values, to other axes, or an unknown number."""
    mode = pad.attributes["mode"].as_string() if "mode" in pad.attributes else "constant"
    given = [None if value is None else value.const_value for value in pad.inputs[1:]]
    counts, value = given[0], given[1] if len(given) > 1 else None
    is_zero = len(pad.inputs) < 3 or pad.inputs[2] is None or (value is not None and not value.numpy().any())
    if mode != "constant" or counts is None or not is_zero or (len(pad.inputs) > 3 and pad.inputs[3] is not None):
        return None
    sizes = counts.numpy().tolist()
    half = len(sizes) // 2
    begin, end = sizes[:half], sizes[half:]
    return None if any((*begin[:2], *end[:2])) or min(sizes) < 0 else [*begin[2:], *end[2:]]


def _readers(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield what reads a tensor or its codes, and as which input: 0 is a code of every range."""
    for reader, place in value.uses():
        codes = reader.op_type in ("QuantizeLinear", "DequantizeLinear") or (
            reader.op_type == "Clip" and value.producer().op_type == "QuantizeLinear"
        )
        yield from _readers(reader.outputs[0]) if codes else ((reader, place),)


def _may_pad(reader: Any, added: list[int]) -> bool:
    automatic = reader.attributes["auto_pad"].as_string() if "auto_pad" in reader.attributes else "NOTSET"
    return reader.op_type == "Conv" and automatic == "NOTSET" and len(_pads_of(reader)) in (0, len(added))


def _pads_of(convolution: Any) -> list[int]:
    return list(convolution.attributes["pads"].as_ints()) if "pads" in convolution.attributes else []
