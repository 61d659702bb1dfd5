"""Process a written ONNX file: run it, compare it with the model, rewrite its integers.

Also adds quantizers for activations between convolutions that no layer quantizes, and unsigned weight codes for
processors on which products with signed codes saturate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.config.options import coerce
from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.files.atomic import scratch_folder
from shared_core.modules.calls import call_model
from shared_core.quantization.fake_quant_layers import STOCK
from shared_core.quantization.ranges.observers import EstimatorBank, RangeBank
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.onnx_layers import multiplies_token_codes, token_scale

_TOLERANCE = 1e-4  # sums are added in another order: a deep random net differs by 2e-5
_TOKEN_TOLERANCE = 1e-2  # codes that are not in the file are not compared, so one may differ
_UNSEEN = ("token", "fp8", "fp8_group", "fp8_static")  # inputs whose codes are not compared
_FEW = 2**12  # codes
_LARGE = 2**10  # bytes
_SAME_LAYER = 0.5  # share of equal codes that identifies a layer's codes
_SAME_SIGNS = 0.95  # the same for signs, half of which are equal by chance
_NEAR_ZERO = 1e-5  # of the largest value


@dataclasses.dataclass(frozen=True)
class Opened:
    """An ONNX file that was read once: its graph, and its large constants, shared by all its sessions."""

    graph: Any
    constants: dict[str, Any]


def opened(file: Path) -> Opened:
    """Read the file."""
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
            tensor.external_data.add(
                key="location", value="constants"
            )  # passed to a session in memory, no file is read
    return Opened(model, constants)


@contextlib.contextmanager
def checking(file: Opened, reference: nn.Module) -> Iterator[Callable[[Any], tuple[float, float]]]:
    """Yield a function of inputs that returns (largest difference of the outputs, share of codes that differ by one).

    Outputs alone cannot show rounding errors: if two float sums differ in the last bit near a tie, a code changes
    by one, and so does everything after it. So the reference takes the file's codes wherever its
    own differ by one, and then everything must agree.

    The function raises a CompatibilityError if an output differs by more than 1e-4 of the largest output (of 1, if that
    is less). If inputs have a range per token and the file lacks their codes, the limit is 1e-2 of it (of 1e-3).
    """
    from onnx import TensorProto

    # Codes in the file are compared one by one. For other tokens only outputs can be compared.
    layers: list[Any] = [module for module in reference.modules() if type(module) in STOCK]
    schemes = [(layer, layer.quantizer.scheme) for layer in layers]
    unseen = any(each[1].input in _UNSEEN and not multiplies_token_codes(*each) for each in schemes)
    tolerance, least = (_TOKEN_TOLERANCE, 1e-3) if unseen else (_TOLERANCE, 1.0)
    model = file.graph
    # Codes come from QuantizeLinear, or from the Clip that narrows them. Those of FP8 and int16 are not compared. A
    # step of int16 is far below the tolerance.
    wide = (TensorProto.INT16, TensorProto.FLOAT8E4M3FN)
    others = {tensor.name for tensor in model.graph.initializer if tensor.data_type in wide}
    quantizers = {
        name
        for node in model.graph.node
        for name in node.output
        if node.op_type in ("QuantizeLinear", "Clip") and others.isdisjoint(node.input)
    }
    wanted = dict.fromkeys(
        node.input[0]
        for node in model.graph.node
        if node.op_type in ("DequantizeLinear", "MatMulInteger") and node.input[0] in quantizers
    )
    kinds = dict.fromkeys(wanted, "UINT8")
    if any(layer.quantizer.scheme.has_binary_inputs for layer in layers):
        kinds |= {node.output[0]: "BOOL" for node in model.graph.node if node.op_type == "Less"}
    num_outputs = len(model.graph.output)
    # Unoptimized: onnxruntime's fusions may change codes by one. This checks the file, not a kernel.
    session = probing(file, kinds)

    def check(inputs: Any) -> tuple[float, float]:
        found = session.run(None, feeds(session, inputs))
        outputs = found[:num_outputs]
        forced.begin([codes.astype(np.uint8) for codes in found[num_outputs:]])
        expected = _outputs_of(reference, inputs)
        if len(expected) != len(outputs):
            raise CompatibilityError("export_onnx", f"file must have {len(expected)} outputs, got {len(outputs)}")
        largest = 0.0
        for number, (mine, theirs) in enumerate(zip(expected, outputs, strict=True)):
            # double: a float32 difference of near-equal outputs is rounding itself.
            exact = mine.double().numpy()
            difference = float(np.abs(exact - theirs).max(initial=0.0))
            # Relative to the largest output, but not below `least`; `not <=` rejects NaN.
            if not difference <= tolerance * max(least, float(np.abs(exact).max(initial=0.0))):
                rule = f"output {number} of the file must equal the model's to {tolerance:g}"
                remedy = "nothing was written; find the layer by exporting parts of the model"
                raise CompatibilityError("export_onnx", f"{rule}, got a difference of {difference:.3g}", remedy)
            largest = max(largest, difference)
        return largest, forced.moved / max(forced.total, 1)

    forced = _Forced()
    # The last bit of a float sum may put a value near a rounding tie on either side, and later layers would then
    # see another input. With the file's codes put in, everything else must agree to float precision.
    changed = _force(reference, forced)
    try:
        yield check
    finally:
        for quantizer in changed:
            vars(quantizer).pop("input", None)


def _mapping(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


def _outputs_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        return [value for value in tree_leaves(_mapping(call_model(model, inputs))) if isinstance(value, Tensor)]


def session_of(
    file: Path | str | bytes | Opened,
    optimize: bool,
    save: Path | None = None,
    further: bytes = b"",
    fold_weights: bool = False,
) -> Any:
    """Return an onnxruntime session on the CPU, with `fold_weights` one that dequantizes weights before it runs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.log_severity_level = 4  # errors are raised anyway
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # don't busy-wait for a single run
    if fold_weights:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if save is not None:
        options.optimized_model_filepath = str(save)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "constants")
        options.add_session_config_entry("session.disable_prepacking", "1")
    if isinstance(file, Opened):
        options.add_external_initializers(list(file.constants), list(file.constants.values()))
        # concatenated protobuf messages merge, with their lists joined
        model: Any = file.graph.SerializeToString() + further
    else:
        model = file if isinstance(file, bytes) else str(file)
    session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    session.opened = file  # keeps those constants alive: the session reads their memory
    return session


def feeds(session: Any, inputs: Any) -> dict[str, Any]:
    """Return the inputs of a session by name, or by position if the model names them differently."""
    names = [entry.name for entry in session.get_inputs()]
    if isinstance(inputs, Mapping) and set(names) <= set(inputs):
        return {name: inputs[name].detach().cpu().numpy() for name in names}
    # By position too: the exporter may rename nested inputs (args_0).
    tensors = [leaf for leaf in tree_leaves(_mapping(inputs)) if isinstance(leaf, Tensor)]
    return {name: tensor.detach().cpu().numpy() for name, tensor in zip(names, tensors, strict=False)}


def probing(file: Opened, kinds: Mapping[str, str]) -> Any:
    """Return an unoptimized onnxruntime session with tensors of the graph as additional outputs, by name and type."""
    import onnx

    element = onnx.TensorProto.DataType.Value
    # Additional outputs do not change what unoptimized nodes compute.
    further = onnx.ModelProto()
    further.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, element(kind), None) for name, kind in kinds.items()
    )
    return session_of(file, optimize=False, further=further.SerializeToString())


class _Forced:
    """Gives a model's quantizers the codes from a file, or the signs, if they belong to the same layer."""

    def __init__(self) -> None:
        self.begin([])

    def begin(self, codes: list[Any]) -> None:
        """Use these codes from now on: uint8, of every quantized activation, and 1 where one is negative."""
        self.codes = codes
        self.total = self.moved = self.next = 0

    def take(self, values: Tensor, same: float = _SAME_LAYER) -> Tensor:
        """Return the file's codes if some differ from the model's by at most one everywhere, else the model's."""
        mine = values.to(torch.uint8).contiguous().numpy()
        # A large share of the codes equal, and none more than one apart: the same layer. Names don't help, since
        # the exporter invents its own.
        best, fewest = mine, int((1 - same) * mine.size)
        few = mine.ravel()[:_FEW]
        # Layers mostly come in the file's order, so try the next one's codes first.
        for place in (*range(self.next, len(self.codes)), *range(self.next)):
            codes = self.codes[place]
            # Another layer's codes exceed the limit early on.
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
    """Make quantizers use the file's codes; return the hooks."""
    changed: list[Any] = []
    for module in reference.modules():
        quantizer: Any = module.quantizer if type(module) in STOCK else None
        qparams = None if quantizer is None else quantizer.qparams(module)
        if quantizer is not None and multiplies_token_codes(module, quantizer.scheme):
            changed.append(quantizer)
            quantizer.input = partial(_forced_tokens, quantizer.scheme.activation_bits, forced)
        elif quantizer is not None and quantizer.scheme.has_binary_inputs:
            changed.append(quantizer)
            quantizer.input = partial(_forced_signs, quantizer.input, forced)
        elif qparams is not None and quantizer.scheme.has_byte_inputs:
            # The file's codes are unsigned; the lowest code moves the model's to them.
            scale, shift = qparams[0], int(qparams[1]) - quantizer.scheme.input_range[0]
            changed.append(quantizer)
            quantizer.input = partial(_forced_input, quantizer.input, scale, shift, forced)
    return changed


def _forced_input(quantize: Any, scale: Tensor, shift: int, forced: _Forced, module: nn.Module, x: Tensor) -> Tensor:
    mine = (quantize(module, x) / scale).round_().add_(shift)
    return forced.take(mine).sub_(shift).mul_(scale)


def _forced_signs(quantize: Any, forced: _Forced, module: nn.Module, x: Tensor) -> Tensor:
    mine = (x < 0).to(x.dtype)
    # Only where the last bits of a sum decide. A zero has one sign.
    near = (x.abs() <= _NEAR_ZERO * x.abs().amax()) & (x != 0)
    is_negative = torch.where(near, forced.take(mine, _SAME_SIGNS), mine)
    return quantize(module, x).abs() * (1 - 2 * is_negative)  # type: ignore[no-any-return]


def _forced_tokens(bits: int, forced: _Forced, module: nn.Module, x: Tensor) -> Tensor:
    scale = token_scale(x, 2 ** (bits - 1) - 1)
    return forced.take((x / scale).round_().add_(128)).sub_(128).mul_(scale)


def relative_change(reference: nn.Module, inputs: Any, found: Sequence[Any]) -> float:
    """Return the largest difference of outputs from the model's, relative to the model's largest."""
    expected = [value.double().numpy() for value in _outputs_of(reference, inputs)]
    changes = [
        float(np.abs(mine - theirs).max(initial=0.0) / (np.abs(theirs).max(initial=0.0) or 1.0))
        for mine, theirs in zip(found, expected, strict=True)
    ]
    if not np.isfinite(changes).all():
        rule = f"outputs on example_inputs must be finite, got a change of {max(changes)}"
        raise CompatibilityError("export_onnx", rule, "look for NaN")
    return max(changes, default=0.0)


def run_optimized(file: Path | Opened, inputs: Any) -> tuple[dict[str, int], Sequence[Any]]:
    """Return operator → number of integer nodes in onnxruntime's optimized graph, and its outputs if it has some."""
    import onnx

    with scratch_folder() as folder:
        target = folder / "optimized.onnx"
        try:
            session = session_of(file, optimize=True, save=target)
        except Exception as error:  # before 1.32, FP8 codes between convolutions become QLinearConv's
            rule = f"onnxruntime cannot load the file: {str(error)[:300]}"
            remedy = 'pass target="tensorrt" (eff export: --target tensorrt), or skip convolutions in qat'
            raise CompatibilityError("export_onnx", rule, remedy) from error
        nodes = onnx.load(target, load_external_data=False).graph.node
        # Counted after optimization: the file itself has QuantizeLinear and DequantizeLinear around float operators.
        kinds = Counter(node.op_type for node in nodes if _sums_integers(node.op_type))
        return dict(sorted(kinds.items())), session.run(None, feeds(session, inputs)) if kinds else ()


def _sums_integers(kind: str) -> bool:
    # not DynamicQuantizeMatMul: its input has one range, but ours one per token
    return kind in ("QGemm", "QAttention") or kind.startswith(("QLinear", "MatMulInteger", "ConvInteger"))


# A quantizer after one of these moves before it or is fused: onnxruntime computes it on the codes.
_FOLLOWS = frozenset({"Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose"})
# onnxruntime computes these on codes if inputs and output are quantized. SiLU is a Sigmoid and a Mul: in float between
# integer convolutions, it made EfficientNet-B0 slower than the float model.
_JOINS = frozenset({"Add", "AveragePool", "Concat", "GlobalAveragePool", "LeakyRelu", "Mul", "Sigmoid"})
# Their results are some of their input's values, so its codes stay.
_MOVES = frozenset({
    "DepthToSpace", "Flatten", "MaxPool", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split", "Squeeze", "Transpose",
    "Unsqueeze",
})  # fmt: skip


Codes = dict[str, tuple[float, int]]
"""Name of a tensor in an ONNX file → scale and zero point of its uint8 codes."""


Ranges = Mapping[str, tuple[float, float]]
"""Name → smallest and largest value."""


def quantize_activations(
    exact: Path, file: Path, calibration: Iterable[Any] | Codes | None, outputs: Ranges
) -> tuple[Codes | None, tuple[str, ...]]:
    """Rewrite an exported file so that convolutions pass on codes.

    Return the codes of the newly quantized tensors, None if nothing is written, and the tensors that stay in float.

    onnxruntime sums a convolution in integers only if its output is quantized. Training has no quantizer for outputs
    that a residual sum, a concatenation or an average pool reads. Here they get one, in uint8. Its range has the least
    squared error over the calibration batches. Without these, or if earlier codes belong to another graph, it follows
    from the ranges of the convolutions' outputs that training observed (see `bounds_of`). Other readers of a quantized
    tensor read those codes too, so the operators of `_JOINS` are computed on codes. Biases of convolutions are rounded
    to the scale of the sums, s_x·s_w. Outputs of the model stay in float.

    Source: the integer-only graphs of Jacob et al. 2018, arXiv:1712.05877, sections 2.3 and 2.4.
    """
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    # Place first, then measure: only the graph shows which tensors need a range.
    model = onnx_ir.load(exact)
    new = _add_quantizers(model.graph, None)
    names = tuple(quantizer.inputs[0].name for quantizer in new)
    if isinstance(calibration, dict) and {*names} <= {*calibration}:
        codes = {name: calibration[name] for name in names}
    elif calibration is not None and not isinstance(calibration, dict):
        # Ranges come from the exact file, so earlier quantizers do not shift them.
        codes = observed_codes(exact, names, calibration)
    else:
        model = onnx_ir.load(exact)
        bounds = {value.name: bound for value, bound in bounds_of(model.graph, outputs).items()}
        new = _add_quantizers(model.graph, bounds)
        if not new:  # keep biases exact where nothing else changes
            return None, names
        codes = codes_of_bounds([quantizer.inputs[0].name for quantizer in new], bounds)
    for quantizer in new:
        scale, zero_point = codes[quantizer.inputs[0].name]
        # An unsigned scale and zero point per tensor: onnxruntime's fast kernels take uint8 inputs.
        for value, found in zip(quantizer.inputs[1:], (np.float32(scale), np.uint8(zero_point)), strict=True):
            value.const_value = onnx_ir.tensor(np.asarray(found), name=value.name)
            model.graph.register_initializer(value)
    # Layers that now read passed-on codes have their own, unused quantizer.
    RemoveUnusedNodesPass()(model)
    model.graph.sort()  # a reader may come before the quantizer whose codes it now reads
    onnx_ir.save(model, file)
    return codes, tuple(name for name in names if name not in codes)


def _add_quantizers(graph: Any, bounds: Ranges | None) -> list[Any]:
    """Add quantizers after convolutions and joins of codes, and return them.

    `bounds` has the tensors whose range is known, which alone get one; None: all do, and are measured later.
    """
    new: list[Any] = []

    def is_known(value: Any) -> bool:
        return bounds is None or value.name in bounds or not _needs_codes(value) or quantizer_of(value) is not None

    # A copy of the nodes, since some are added during the loop.
    for node in tuple(graph):
        if _moves_codes(node):
            for value in node.outputs:
                _let_read(value, add_quantizer(graph, value, node.inputs[0].producer().inputs[1:]))
            continue
        integer = _is_integer_convolution(node)
        if not integer and node.op_type not in _JOINS:
            continue
        end = _end_of(node.outputs[0])
        if is_known(end) and (integer or _joins_codes(graph, node, is_known, new)):
            if integer:
                _round_bias(graph, node)
            _hand_on_codes(graph, end, new)
    return new


def codes_of_bounds(names: Sequence[str], bounds: Ranges, symmetric: bool = False) -> Codes:
    """Return the codes of tensors with these bounds. Symmetric ones are signed, with zero point 0."""
    bank = RangeBank([(-128, 127) if symmetric else (0, 255)] * len(names), symmetric=[symmetric] * len(names))
    bank.set_ranges(torch.tensor([bounds[name] for name in names]).view(-1, 2), torch.ones(len(names)).bool())
    return dict(zip(names, zip(bank.scale.tolist(), bank.zero_point.tolist(), strict=True), strict=True))


def observed_codes(file: Path, names: tuple[str, ...], calibration: Iterable[Any], symmetric: bool = False) -> Codes:
    """Return the codes of the tensors, over all batches. Symmetric ones are signed, with zero point 0."""
    # The range with the least squared error, which clips rare outliers: 8 bits for all activations need it.
    codes = [(-128, 127) if symmetric else (0, 255)] * len(names)
    bank = EstimatorBank("mse", codes, symmetric=[symmetric] * len(names))
    batches = 0
    session = probing(opened(file), dict.fromkeys(names, "FLOAT"))
    for batch in calibration:
        batches += 1
        try:
            found = session.run(names, feeds(session, batch)) if names else ()
        except Exception as error:  # onnxruntime's errors share no public base
            rule = f"calibration must hold what the model takes, got {type(batch).__name__} ({str(error)[:300]})"
            raise ConfigError("export_onnx", rule, "pass batches like example_inputs, without labels") from error
        for row, value in enumerate(found):
            bank.observe(row, torch.from_numpy(value))
    if not batches:
        raise ConfigError("export_onnx", "calibration must hold batches, got none")
    bank.commit(bank.window)  # only this process exports
    missing = [name for name, known in zip(names, bank.known.tolist(), strict=True) if not known]
    if missing:
        rule = f"calibration must give finite values, but {', '.join(missing[:5])} had none"
        raise TrainingError("export_onnx", rule, "look for NaN")
    return dict(zip(names, zip(bank.scale.tolist(), bank.zero_point.tolist(), strict=True), strict=True))


_SAME = _MOVES | {"AveragePool", "GlobalAveragePool", "Identity", "LeakyRelu", "ReduceMean"}
"""Operators whose values lie in the range of their first input, widened to contain 0."""
_SMALLEST, _SMALLEST_SILU = {"Relu": 0.0, "Gelu": -0.17, "HardSwish": -0.375}, -0.2785
_GATES = frozenset({"HardSigmoid", "Sigmoid", "Softmax"})


def bounds_of(graph: Any, outputs: Ranges) -> dict[Any, tuple[float, float]]:
    """Return (smallest, largest) of the graph's tensors, from the codes and the observed outputs of convolutions.

    Bounds may be wider than the values, as those of a sum are. A layer that reads a tensor has observed it, so these
    are needed only for tensors that no layer reads.
    """
    found: dict[Any, tuple[float, float]] = {}
    for node in graph:
        bound: tuple[float, float] | None = None
        if node.op_type in ("Conv", "ConvTranspose"):
            bound = outputs.get(_layer_of(node))
        elif is_activation(node.outputs[0]):
            scale, zero_point = (float(value.const_value.numpy()) for value in node.inputs[1:])
            bound = (scale * -zero_point, scale * (255 - zero_point))
        elif node.op_type != "DequantizeLinear":
            known = [None if value is None else found.get(value) or _of_constant(value) for value in node.inputs]
            bound = _bound(node, known) if known and known[0] is not None else None
        if bound is not None:
            found |= dict.fromkeys(node.outputs, bound)
    return found


def _bound(node: Any, known: Sequence[Any]) -> tuple[float, float] | None:
    """Return the bounds of an operator's result from those of its inputs; None if it has no rule."""
    kind, (low, high) = node.op_type, known[0]
    if kind in _SAME and _takes_nearest(node):
        return min(low, 0.0), max(high, 0.0)
    if kind in _SMALLEST:
        return _SMALLEST[kind], max(high, 0.0)
    if kind in _GATES:
        return 0.0, 1.0
    if kind == "Clip":
        (least, _), (_, most) = (bound or (-np.inf, np.inf) for bound in (*known[1:], None, None)[:2])
        return min(max(low, least), most), min(max(high, least), most)
    if None in known:
        return None
    if kind == "Add":
        return low + known[1][0], high + known[1][1]
    if kind == "Mul":
        for (x, gate), (_, high) in zip(itertools.permutations(node.inputs), known, strict=True):
            if (maker := gate.producer()) is not None and maker.op_type == "Sigmoid" and maker.inputs[0] is x:
                return _SMALLEST_SILU, max(high, 0.0)
        products = [one * other for one in known[0] for other in known[1]]
        return min(products), max(products)
    if kind == "Concat":
        return min(bound[0] for bound in known), max(bound[1] for bound in known)
    return None


def _of_constant(value: Any) -> tuple[float, float] | None:
    constant = value.const_value
    if constant is None or constant.size == 0:
        return None
    return float(constant.numpy().min()), float(constant.numpy().max())


def _layer_of(convolution: Any) -> str:
    """Return the name of the layer whose codes a convolution multiplies; empty for a model that is the layer."""
    maker = convolution.inputs[1].producer()
    codes = "" if maker is None else maker.inputs[0].name
    return codes.removesuffix("_unsigned").removesuffix("weight_codes").removesuffix(".")  # type: ignore[no-any-return]


def _is_code(value: Any) -> bool:
    """Return True if a tensor (an `onnx_ir.Value`) is dequantized codes."""
    return value.producer() is not None and value.producer().op_type == "DequantizeLinear"


def is_activation(value: Any) -> bool:
    """Return True if a tensor is dequantized codes of 8 bits of an activation."""
    # an embedding's codes come out of a Gather
    maker = value.producer().inputs[0].producer() if _is_code(value) else None
    return maker is not None and maker.op_type in ("QuantizeLinear", "Clip") and not _is_wide(maker)


def _is_wide(node: Any) -> bool:
    """Return True if a quantizer or dequantizer has codes that no integer kernel takes: int16 or FP8."""
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    wide = ("INT16", "FLOAT8E4M3FN")
    return zero is not None and zero.const_value is not None and zero.const_value.dtype.name in wide


def convolves_integers(layer: Any) -> bool:
    """Return True for a fake-quantizing convolution with inputs of at most 8 bits."""
    scheme: LayerScheme = layer.quantizer.scheme
    return isinstance(layer, nn.modules.conv._ConvNd) and scheme.has_byte_inputs


def _is_integer_convolution(node: Any) -> bool:
    """Return True if input, weight and the bias, if any, are codes."""
    return node.op_type == "Conv" and is_activation(node.inputs[0]) and all(map(_is_code, filter(None, node.inputs)))


def _joins_codes(graph: Any, node: Any, is_known: Callable[[Any], bool], new: list[Any]) -> bool:
    """Return True if all inputs of an operator of `_JOINS` are codes, or can be made so."""
    if node.op_type not in _JOINS or not any(map(is_activation, node.inputs)):
        return False
    # All inputs must be codes. Otherwise onnxruntime leaves the sum in float and dequantizes each.
    others = [value for value in node.inputs if not is_activation(value)]
    # A part of a Concat would be quantized after it anyway.
    may_add = node.op_type == "Concat" and all(map(is_known, others))
    if not may_add and None in map(quantizer_of, others):
        return False
    for value in others:
        _hand_on_codes(graph, value, new)
    return True


def constant(graph: Any, name: str, array: Any) -> Any:
    """Return the graph's constant of this name, created from the array if missing."""
    import onnx_ir

    if name not in graph.initializers:
        graph.register_initializer(onnx_ir.val(name, const_value=onnx_ir.tensor(np.asarray(array), name=name)))
    return graph.initializers[name]


def _round_bias(graph: Any, convolution: Any) -> None:
    """Round the bias of an integer convolution to the grid of its sums, as kernels require."""
    import onnx_ir

    if len(convolution.inputs) < 3:
        return
    makers = [value.producer() for value in convolution.inputs]
    # inputs[1] of a DequantizeLinear is its scale. float64, so that the quotient below rounds once.
    x_scale, w_scale, b_scale = (maker.inputs[1].const_value.numpy().astype(np.float64) for maker in makers)
    step = x_scale * w_scale
    # QLinearConv adds an int32 bias to the sums of s_x s_w: it must be on exactly that grid, b = s_x s_w q.
    codes = np.rint(makers[2].inputs[0].const_value.numpy() * b_scale / step)
    # 2^30: a bias may not fill the 32 bits that the sums are added into.
    name, largest = f"{convolution.outputs[0].name}_bias", 2**30
    arrays = {
        "codes": np.clip(codes, -largest, largest).astype(np.int32),
        "scale": step.astype(np.float32),
        "zero_point": np.zeros(len(step), np.int32),
    }
    inputs = [constant(graph, f"{name}_{kind}", array) for kind, array in arrays.items()]
    rounded = onnx_ir.node("DequantizeLinear", inputs, {"axis": 0}, outputs=[onnx_ir.val(name)])
    graph.insert_before(convolution, rounded)
    convolution.replace_input_with(2, rounded.outputs[0])


def _end_of(value: Any) -> Any:
    """Return the tensor after the operations that a runtime computes on codes."""
    readers = value.consumers()
    # Only with one reader: another one needs the tensor before the operation.
    while len(readers) == 1 and readers[0].op_type in _FOLLOWS and not value.is_graph_output():
        value = readers[0].outputs[0]
        readers = value.consumers()
    return value


def _hand_on_codes(graph: Any, value: Any, new: list[Any]) -> None:
    """Make all readers of a tensor read its codes. A quantizer added for this is appended to `new`."""
    import onnx_ir

    if not _needs_codes(value):
        return
    quantizer = quantizer_of(value)
    if quantizer is None:
        # The constants have no values yet: `quantize_activations` measures and fills them in.
        parameters = [onnx_ir.val(f"{value.name}_{kind}") for kind in ("scale", "zero_point")]
        quantizer = add_quantizer(graph, value, parameters)
        new.append(quantizer)
    _let_read(value, quantizer)


def add_quantizer(graph: Any, value: Any, parameters: Sequence[Any]) -> Any:
    """Add a quantizer of a tensor, with scale and zero point, and its dequantizer; return the former."""
    import onnx_ir

    codes, values = (onnx_ir.val(f"{value.name}_{kind}") for kind in ("codes", "values"))
    quantizer = onnx_ir.node("QuantizeLinear", [value, *parameters], outputs=[codes])
    graph.extend([quantizer, onnx_ir.node("DequantizeLinear", [codes, *parameters], outputs=[values])])
    return quantizer


def _moves_codes(node: Any) -> bool:
    """Return True if a node only moves dequantized codes, none of which the graph returns."""
    if node.op_type not in _MOVES or not is_activation(node.inputs[0]) or not _takes_nearest(node):
        return False
    return not any(value.is_graph_output() for value in node.outputs)


def _takes_nearest(node: Any) -> bool:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "nearest"
    return node.op_type != "Resize" or mode == "nearest"


def _needs_codes(value: Any) -> bool:
    readers = value.consumers()
    # A graph's output stays in float, and codes that only a quantizer reads are codes already.
    return bool(readers) and not value.is_graph_output() and [node.op_type for node in readers] != ["QuantizeLinear"]


def quantizer_of(value: Any) -> Any | None:
    """Return the quantizer that some layer has for a tensor: in 8 bits, of the widest range."""
    readers = [node for node in value.consumers() if node.op_type == "QuantizeLinear" and not _is_wide(node)]
    found = [node for node in readers if _dequantized(node) is not None]
    # Each layer that reads a tensor has a range for it. The widest one covers all values, with coarser
    # steps.
    return max(found, key=lambda node: float(node.inputs[1].const_value.numpy()), default=None)


def _dequantized(quantizer: Any) -> Any | None:
    readers = quantizer.outputs[0].consumers()
    return next((node.outputs[0] for node in readers if node.op_type == "DequantizeLinear"), None)


def _let_read(value: Any, quantizer: Any) -> None:
    # tuple: the uses change during the loop.
    for reader, place in tuple(value.uses()):
        if reader is not quantizer:
            reader.replace_input_with(place, _dequantized(quantizer))


WeightCodes = Literal["auto", "signed", "unsigned"]
_EXACT = 64  # 255·64·2, a pair of products, still fits 16 bits


def wants_unsigned(weight_codes: str) -> bool:
    """Return True if weights should be written as unsigned codes; ``auto``: if signed ones saturate here.

    Without VNNI, x86 multiplies unsigned by signed bytes and adds pairs of products in 16 bits: 255·127·2 overflows.
    Without onnxruntime the answer is True, since unsigned codes are exact everywhere.

    Example:
        >>> wants_unsigned("unsigned"), wants_unsigned("signed")
        (True, False)
    """
    coerce(weight_codes, WeightCodes, "export_onnx", "weight_codes")
    return weight_codes == "unsigned" or (weight_codes == "auto" and not onnxruntime_sums_exactly())


@cache
def onnxruntime_sums_exactly() -> bool:
    """Return True if onnxruntime's product of unsigned inputs and signed weights is exact for all 8-bit codes here.

    Tested once per process with a product that may saturate. False if onnxruntime is not installed.
    """
    if find_spec("onnxruntime") is None:
        return False
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    # 64 products of 255 * 127 in int16 pairs saturate (VPMADDUBSW) on processors without VNNI: two of them exceed
    # 32767.
    inputs, outputs = 64, 32
    weight = numpy_helper.from_array(np.full((inputs, outputs), 127, np.int8), "weight")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["codes", "weight"], ["sums"])],
        "saturation",
        [helper.make_tensor_value_info("codes", TensorProto.UINT8, ["rows", inputs])],
        [helper.make_tensor_value_info("sums", TensorProto.INT32, ["rows", outputs])],
        [weight],
    )
    # an IR and opset that every supported onnxruntime reads
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    with scratch_folder() as folder:
        file = folder / "saturation.onnx"
        onnx.save(model, file)
        session = session_of(file, optimize=True)
        # One row and 17 rows: onnxruntime may use different kernels, of which only one saturates.
        sums = [session.run(None, {"codes": np.full((rows, inputs), 255, np.uint8)})[0] for rows in (1, 17)]
    return all((found == 255 * 127 * inputs).all() for found in sums)


def make_unsigned_(model: Any) -> bool:
    """Rewrite int8 weights as uint8, 128 more, with a zero point of 128: the same values. Return True if there are any.

    Weights whose codes are too small to saturate stay, and so do embeddings, which are only gathered.
    """
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    graph, changed = model.graph, False
    for node in graph:
        # Position of the weight's codes in these operators' inputs.
        place = {"DequantizeLinear": 0, "MatMulInteger": 1}.get(node.op_type)
        value = None if place is None else node.inputs[place]
        maker: Any = None if value is None else value.producer()
        turned = maker is not None and maker.op_type == "Transpose"  # a large weight of MatMulInteger, until it is run
        value = maker.inputs[0] if turned else value
        if place is None or value is None or value.const_value is None:
            continue
        codes = value.const_value.numpy()
        # Codes up to 64 are exact as they are: a pair of products fits 16 bits.
        if codes.dtype != np.int8 or max(codes.max(initial=0), -int(codes.min(initial=0))) <= _EXACT:
            continue
        name = f"{value.name}_unsigned"
        codes = codes.T if turned else codes
        # the second zero point of a product belongs to the weights
        zero_point, like = (f"{name}_zero_point", node.inputs[1].const_value.numpy()) if place == 0 else ("of_128", 0)
        node.resize_inputs(3 + place)
        # adds 128 modulo 256, in one pass
        node.replace_input_with(place, constant(graph, name, codes.view(np.uint8) ^ np.uint8(128)))
        node.replace_input_with(2 + place, constant(graph, zero_point, np.full_like(like, 128, np.uint8)))
        changed = True
    RemoveUnusedNodesPass()(model)
    return changed
