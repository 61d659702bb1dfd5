"""Weights of an ONNX file as unsigned codes, for processors on which products with signed ones saturate."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shared_core.atomic import scratch_folder
from shared_core.errors import ConfigError, nearest
from shared_core.quantization.export_check import session_of

WeightCodes = Literal["auto", "signed", "unsigned"]
_EXACT = 64  # 255·64·2, a pair of products, still fits 16 bits


def wants_unsigned(weight_codes: str) -> bool:
    """Return whether weights are to be written as unsigned codes; ``auto``: where signed ones saturate here.

    Without VNNI, x86 multiplies unsigned by signed bytes and adds pairs of products in 16 bits: 255·127·2 is too much.
    Where onnxruntime is not installed, unsigned ones: they are exact everywhere.

    Raises:
        ConfigError: If it is none of the three.

    Example:
        >>> wants_unsigned("unsigned"), wants_unsigned("signed")
        (True, False)
    """
    if weight_codes not in get_args(WeightCodes):
        known = get_args(WeightCodes)
        raise ConfigError(
            f"export_onnx: weight_codes must be one of {', '.join(known)}, got {weight_codes!r}"
            f"{nearest(str(weight_codes), known)}"
        )
    return weight_codes == "unsigned" or (weight_codes == "auto" and not onnxruntime_sums_exactly())


@cache
def onnxruntime_sums_exactly() -> bool:
    """Return whether onnxruntime's product of unsigned inputs and signed weights is exact for all 8-bit codes here.

    One saturating product shows it, when it is first asked in a process. Without onnxruntime nothing shows it: False.
    """
    if find_spec("onnxruntime") is None:
        return False
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    inputs, outputs = 64, 32
    weight = numpy_helper.from_array(np.full((inputs, outputs), 127, np.int8), "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["codes", "weight"], ["sums"])],
        "saturation",
        [helper.make_tensor_value_info("codes", TensorProto.UINT8, ["rows", inputs])],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, ["rows", outputs])],
        [weight],
    )
    # of an IR and an opset that every onnxruntime of the extra reads
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    with scratch_folder() as folder:
        file = folder / "saturation.onnx"
        onnx.save(model, file)
        session = session_of(file, optimise=True)
        sums = [session.run(None, {"codes": np.full((rows, inputs), 255, np.uint8)})[0] for rows in (1, 17)]
    return all((found == 255 * 127 * inputs).all() for found in sums)


def make_unsigned(file: Path) -> bool:
    """Rewrite int8 weights as uint8, 128 more, with a zero point of 128: the same values; return whether there are any.

    Weights whose codes are too small to saturate stay, and so do embeddings, of which rows are taken.
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.load(file)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    made: dict[str, Any] = {}
    for node in model.graph.node:
        place = {"DequantizeLinear": 0, "MatMulInteger": 1}.get(node.op_type)
        codes = None if place is None else constants.get(node.input[place])
        if place is None or codes is None or codes.dtype != np.int8:
            continue
        if np.abs(codes.astype(np.int32)).max(initial=0) <= _EXACT:
            continue
        name = f"{node.input[place]}_unsigned"
        made[name] = (codes.astype(np.int16) + 128).astype(np.uint8)
        # of a product the second zero point is that of the weights
        zero_point, shape = (f"{name}_zero_point", constants[node.input[1]].shape) if place == 0 else ("of_128", ())
        made[zero_point] = np.full(shape, 128, np.uint8)
        node.input[place] = name
        del node.input[2 + place :]
        node.input.append(zero_point)
    read = {name for node in model.graph.node for name in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*kept, *(numpy_helper.from_array(value, name) for name, value in made.items())])
    onnx.save(model, file)
    return bool(made)
