"""Whether an exported file computes what the model computes, and on which kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.errors import CompatibilityError
from shared_core.files.atomic import scratch_folder
from shared_core.modules.calls import call_model
from shared_core.quantization.fake_quant_layers import STOCK
from shared_core.tools.export.onnx_layers import multiplies_token_codes, token_scale

TOLERANCE = 1e-5
_TOKEN_TOLERANCE = 1e-2  # codes that are not in the file are not compared, so that one may have moved
_FEW = 2**12  # codes
_LARGE = 2**10  # bytes
_SAME_LAYER = 0.5  # share of equal codes that tells a layer's codes from another's


@dataclasses.dataclass(frozen=True)
class Opened:
    """An ONNX file that was read once: its graph, and its large constants, which all sessions of it share."""

    graph: Any
    constants: dict[str, Any]


def opened(file: Path) -> Opened:
    """Return the file's content."""
    import onnx
    import onnxruntime

    model, constants = onnx.load(file), {}
    kinds = {onnx.TensorProto.FLOAT, onnx.TensorProto.INT8, onnx.TensorProto.UINT8}  # which numpy has as well
    for tensor in model.graph.initializer:
        if tensor.data_type in kinds and len(tensor.raw_data) >= _LARGE:
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            values = np.frombuffer(tensor.raw_data, kind).reshape(tuple(tensor.dims))
            constants[tensor.name] = onnxruntime.OrtValue.ortvalue_from_numpy(values)
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.external_data.add(key="location", value="constants")  # a session is handed them, and reads no file
    return Opened(model, constants)


@contextlib.contextmanager
def checking(file: Opened, reference: nn.Module) -> Iterator[Callable[[Any], tuple[float, float]]]:
    """Yield a function of inputs that returns (largest difference of the outputs, share of codes that moved by one).

    Rounding cannot be compared by outputs alone: where two float sums differ in the last bit around a tie, a code moves
    by one and with it, for a good reason, everything behind it. So the reference takes the file's codes wherever its
    own differ by one, and then everything must agree.

    The function raises a CompatibilityError if an output differs by more than 1e-5 of the largest output (of 1, if that
    is less); where inputs have a range for each token and the file lacks their codes, 1e-2 of it (of 1e-3).
    """
    # Codes that are in the file are compared one by one; of other tokens only outputs can be.
    layers: list[Any] = [module for module in reference.modules() if type(module) in STOCK]
    unseen = any(
        layer.quantizer.scheme.input == "token" and not multiplies_token_codes(layer, layer.quantizer.scheme)
        for layer in layers
    )
    tolerance, least = (_TOKEN_TOLERANCE, 1e-3) if unseen else (TOLERANCE, 1.0)
    model = file.graph
    # Codes come from QuantizeLinear, or from the Clip that narrows them.
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    wanted = dict.fromkeys(
        node.input[0]
        for node in model.graph.node
        if node.op_type in ("DequantizeLinear", "MatMulInteger")
        and makers.get(node.input[0]) in ("QuantizeLinear", "Clip")
    )
    num_outputs = len(model.graph.output)
    # Without optimisation: onnxruntime's fusions may move codes by one. What is checked is the file, not a kernel.
    session = probing(file, wanted, "UINT8")

    def check(inputs: Any) -> tuple[float, float]:
        found = session.run(None, feeds(session, inputs))
        outputs = found[:num_outputs]
        forced.begin(found[num_outputs:])
        with torch.no_grad():
            expected = [x for x in tree_leaves(_mapping(call_model(reference, inputs))) if isinstance(x, Tensor)]
        if len(expected) != len(outputs):
            raise CompatibilityError("export_onnx", f"file must have {len(expected)} outputs, got {len(outputs)}")
        largest = 0.0
        for number, (mine, theirs) in enumerate(zip(expected, outputs, strict=True)):
            # double: a float32 difference of near-equal outputs is rounding itself.
            exact = mine.double().numpy()
            difference = float(np.abs(exact - theirs).max(initial=0.0))
            # Relative to the largest output, but not below `least`; `not <=` refuses NaN.
            if not difference <= tolerance * max(least, float(np.abs(exact).max(initial=0.0))):
                raise CompatibilityError(
                    "export_onnx",
                    f"output {number} of the file must equal the model's to {tolerance:g}, got a difference of "
                    f"{difference:.3g}",
                    "nothing was written; find the layer by exporting parts of the model",
                )
            largest = max(largest, difference)
        return largest, forced.moved / max(forced.total, 1)

    forced = _Forced()
    # A value on the border of two codes may fall to either side, by the last bit of a float sum, and layers behind it
    # would see another input. With the file's codes put in, everything else must agree to float precision.
    quantizers = _force(reference, forced)
    try:
        yield check
    finally:
        for quantizer in quantizers:
            vars(quantizer).pop("input", None)


def _mapping(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


def session_of(file: Path | str | Opened, optimise: bool, save: Path | None = None, further: bytes = b"") -> Any:
    """Return an onnxruntime session on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    options.log_severity_level = 4  # what goes wrong is raised
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # what runs once need not be waited for so
    if save is not None:
        options.optimized_model_filepath = str(save)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "constants")
        options.add_session_config_entry("session.disable_prepacking", "1")
    if isinstance(file, Opened):
        options.add_external_initializers(list(file.constants), list(file.constants.values()))
        # the bytes of two messages of protobuf are one of both, their lists joined
        model: Any = file.graph.SerializeToString() + further
    else:
        model = str(file)
    session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session.opened = file  # it reads the memory of those constants, and holds them no other way
    return session


def feeds(session: Any, inputs: Any) -> dict[str, Any]:
    """Return the inputs of a session by name; by position where the model names them otherwise."""
    names = [entry.name for entry in session.get_inputs()]
    if isinstance(inputs, Mapping) and set(names) <= set(inputs):
        return {name: inputs[name].detach().cpu().numpy() for name in names}
    # By position too: the exporter may rename inputs (args_0) where they are nested.
    tensors = [leaf for leaf in tree_leaves(_mapping(inputs)) if isinstance(leaf, Tensor)]
    return {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=False)}


def probing(file: Opened, names: Iterable[str], kind: str) -> Any:
    """Return an onnxruntime session, without optimisation, with tensors of the graph as further outputs."""
    import onnx

    element = onnx.TensorProto.DataType.Value(kind)
    # Further outputs do not change what unoptimised nodes compute.
    further = onnx.ModelProto()
    further.graph.output.extend(onnx.helper.make_tensor_value_info(name, element, None) for name in names)
    return session_of(file, optimise=False, further=further.SerializeToString())


class _Forced:
    """Gives quantisers of a model the codes that a file found, where they are those of the same layer."""

    def __init__(self) -> None:
        self.begin([])

    def begin(self, codes: list[Any]) -> None:
        """Take these from now on: uint8, of every quantised activation."""
        self.codes = codes
        self.total = self.moved = self.next = 0

    def take(self, values: Tensor) -> Tensor:
        """Return the file's codes if some are nowhere more than one away from the model's, else the model's."""
        mine = values.to(torch.uint8).contiguous().numpy()
        # More than half of the codes equal, and none further than one away: those are the same layer's. Names would
        # not do, as the exporter makes up its own.
        best, fewest = mine, int((1 - _SAME_LAYER) * mine.size)
        few = mine.ravel()[:_FEW]
        # Layers mostly come in the file's order: the next one's codes are tried first.
        for place in (*range(self.next, len(self.codes)), *range(self.next)):
            codes = self.codes[place]
            # Another layer's differ in more than is allowed long before their end.
            if codes.size != mine.size or np.count_nonzero(codes.ravel()[:_FEW] != few) > fewest:
                continue
            codes = codes.reshape(mine.shape)
            apart = codes != mine
            moved = int(np.count_nonzero(apart))
            # int16: uint8 minus uint8 wraps around
            if moved > fewest or (np.abs(np.subtract(codes[apart], mine[apart], dtype=np.int16)) > 1).any():
                continue
            best, fewest, self.next = codes, moved, place
            if not moved:
                break
        self.total += mine.size
        self.moved += 0 if best is mine else fewest
        return torch.from_numpy(best).to(values.dtype)


def _force(reference: nn.Module, forced: _Forced) -> list[Any]:
    """Let quantisers take the file's codes; return them."""
    changed: list[Any] = []
    for module in reference.modules():
        quantizer: Any = module.quantizer if type(module) in STOCK else None
        qparams = None if quantizer is None else quantizer.qparams(module)
        if quantizer is not None and multiplies_token_codes(module, quantizer.scheme):
            changed.append(quantizer)
            quantizer.input = _forced_tokens(quantizer.scheme.activation_bits, forced)
        elif qparams is not None:
            # The file's codes are unsigned; `lowest` moves the model's to them.
            (scale, zero_point), lowest = qparams, quantizer.scheme.input_range[0]
            changed.append(quantizer)
            quantizer.input = _forced_input(quantizer.input, scale, zero_point, lowest, forced)
    return changed


def _forced_input(quantize: Any, scale: Tensor, zero_point: Tensor, lowest: int, forced: _Forced) -> Any:
    shift = int(zero_point) - lowest

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        mine = (quantize(module, x) / scale).round_().add_(shift)
        return forced.take(mine).sub_(shift).mul_(scale)

    return forward


def _forced_tokens(bits: int, forced: _Forced) -> Any:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        scale = token_scale(x, bits)
        return forced.take((x / scale).round_().add_(128)).sub_(128).mul_(scale)

    return forward


def relative_change(file: Path, other: Path, inputs: Any) -> float:
    """Return the largest difference between two files' outputs, without optimisation, relative to the largest output.

    Raises:
        CompatibilityError: If it is not finite.
    """
    pairs: list[tuple[Any, Any]] = []
    for session in (session_of(file, optimise=False), session_of(other, optimise=False)):
        pairs.append(session.run(None, feeds(session, inputs)))
    changes = [
        float(np.abs(mine - theirs).max(initial=0.0) / (np.abs(theirs).max(initial=0.0) or 1.0))
        for mine, theirs in zip(*pairs, strict=True)
    ]
    if not np.isfinite(changes).all():
        raise CompatibilityError(
            "export_onnx", f"outputs on example_inputs must be finite, got a change of {max(changes)}", "look for NaN"
        )
    return max(changes, default=0.0)


def integer_nodes(file: Path | Opened) -> dict[str, int]:
    """Return operator → how many of them onnxruntime runs on integers once it has optimised the file."""
    import onnx

    with scratch_folder() as folder:
        target = folder / "optimised.onnx"
        session_of(file, optimise=True, save=target)
        nodes = onnx.load(target, load_external_data=False).graph.node
    kinds = Counter(node.op_type for node in nodes)
    # Counted after optimisation: the file itself has QuantizeLinear and DequantizeLinear around float operators only.
    return {kind: count for kind, count in sorted(kinds.items()) if _sums_integers(kind)}


def _sums_integers(kind: str) -> bool:
    # DynamicQuantizeMatMul is not among them: its input has one range where ours has one for each token
    return kind in ("QGemm", "QAttention") or kind.startswith(("QLinear", "MatMulInteger", "ConvInteger"))
