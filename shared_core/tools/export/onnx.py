"""Write a model as an ONNX file. Quantized layers have explicit QuantizeLinear and DequantizeLinear nodes.

Also chooses the inputs' dynamic axes, and keeps torch.onnx from repeating work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import (
    KeyPath,
    MappingKey,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_map_with_path,
)

from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.files.atomic import atomic_write, scratch_folder
from shared_core.libraries import collecting_later
from shared_core.modules.calls import call_model
from shared_core.quantization.fake_quant_layers import STOCK, is_quantized
from shared_core.quantization.ranges.kv_cache import cache_scales
from shared_core.tools.export.engines import Target, check_file
from shared_core.tools.export.onnx_blocks import export_around_blocks, repeated_blocks
from shared_core.tools.export.onnx_files import (
    Codes,
    WeightCodes,
    checking,
    convolves_integers,
    feeds,
    make_unsigned_,
    opened,
    quantize_activations,
    relative_change,
    run_optimized,
    session_of,
    wants_unsigned,
)
from shared_core.tools.export.onnx_layers import (
    EXPORTED,
    PACKED,
    recurrent_translations,
    to_export,
    to_export_packed,
    translations,
)
from shared_core.tools.export.onnx_tensorrt import write_for_tensorrt
from shared_core.tools.export.source import (
    INTEGERS,
    Pairs,
    arguments,
    baked_copy,
    check_exportable,
    check_inputs,
    check_installed,
    float_layers,
    plain,
    quantized_reference,
    quiet,
)

_SHORTEST = 3  # torch.export treats a length of 1 as a constant, and the file is also run with one less


def dynamic_shapes(inputs: Any, *, batch: bool, length: bool) -> Any:
    """Return the dynamic axes of the inputs for `torch.export`, None if there are none.

    Inputs whose names begin with ``decoder_`` have a separate length.
    """
    if not (batch or length):
        return None
    # Axes of the batch's size count as batch axes, and second axes of equal length as lengths, which share a name.
    examples, lengths = _batch(inputs) if batch else None, _lengths(inputs) if length else {}
    open_axes = {name: torch.export.Dim(name) for name in ("batch", *lengths)}

    def axes(path: KeyPath, value: Any) -> dict[int, Any] | None:
        is_batch = isinstance(value, Tensor) and value.dim() > 0 and len(value) == examples
        found = {0: open_axes["batch"]} if is_batch else {}
        return found | ({1: open_axes[_axis(path)]} if _has_length(path, value, lengths) else {}) or None

    return tree_map_with_path(axes, inputs if isinstance(inputs, dict | tuple | list) else (inputs,))


def one_shorter(inputs: Any) -> Any:
    """Return inputs that are one shorter along the dynamic length axes."""
    lengths = _lengths(inputs)
    return tree_map_with_path(lambda path, x: x[:, :-1] if _has_length(path, x, lengths) else x, inputs)


def _batch(inputs: Any) -> int | None:
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return len(first) if first.dim() else None


def _lengths(inputs: Any) -> dict[str, int]:
    # Encoder and decoder may differ in length: each has its own axis, found by the argument's name.
    found: dict[str, int] = {}
    for path, value in tree_flatten_with_path(inputs)[0]:
        if isinstance(value, Tensor) and value.dim() > 1:
            found.setdefault(_axis(path), value.shape[1])
    return found


def _axis(path: KeyPath) -> str:
    name = next((str(key.key) for key in reversed(path) if isinstance(key, MappingKey)), "")
    return "decoder_length" if name.startswith("decoder_") else "length"


def _has_length(path: KeyPath, value: Any, lengths: Mapping[str, int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == lengths.get(_axis(path))


_LARGEST_FILE = 2**31 - 2**20  # protobuf's limit, less room for the graph
_FIXED = {
    "dynamic_batch": "dynamic_batch=False (eff export: --static-batch)",
    "dynamic_length": "dynamic_length=False (eff export: --length for a folder, no --dynamic-length for a function)",
}


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """The result of `export_onnx`.

    Attributes:
        path: The file.
        bytes: Its size.
        quantized: Layers with codes.
        float_layers: Layers of the same types that stay in float.
        integer_nodes: Operator → number of integer nodes after onnxruntime's optimization on this machine; empty
            if it is not installed.
        largest_difference: Between unoptimized onnxruntime and the model on the example inputs; None if not
            compared.
        moved_codes: Share of activation codes that differ by one because of rounding ties in that comparison.
        quantized_activations: Tensors between layers with codes from `calibration` or from what training observed, and
            these codes.
        float_activations: Such tensors without codes: the operator before one computes in float.
        relative_change: Largest difference of the file's outputs from the model's, in optimized onnxruntime on this
            machine and relative to the largest output, for the example inputs: by codes between layers, by biases on
            the grid of the sums, and by kernels. None without integer nodes.
        inputs: Name → shape of the file's inputs; a dynamic axis has a name.
        unsigned_weights: True if weights were written as unsigned codes.
        cache_scales_left_out: Attention layers with cache scales (`calibrate_kv_cache`), which the file lacks.
        target: The engine whose rules were checked.
    """

    path: Path
    bytes: int
    quantized: tuple[str, ...]
    float_layers: tuple[str, ...]
    integer_nodes: dict[str, int]
    largest_difference: float | None
    moved_codes: float | None
    quantized_activations: Codes = dataclasses.field(default_factory=dict)
    float_activations: tuple[str, ...] = ()
    relative_change: float | None = None
    inputs: dict[str, tuple[int | str, ...]] = dataclasses.field(default_factory=dict)
    unsigned_weights: bool = False
    cache_scales_left_out: tuple[str, ...] = ()
    target: str | None = None


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: Path | str,
    *,
    opset: int = 21,
    dynamic_batch: bool = True,
    dynamic_length: bool = False,
    verify: bool = True,
    calibration: Iterable[Any] | Codes | None = None,
    weight_codes: WeightCodes = "auto",
    target: Target | None = None,
) -> ExportReport:
    """Write `model` to an ONNX file with the same outputs as in evaluation; return a report.

    Integer weights are int8 with a DequantizeLinear, also codes of fewer bits. Static inputs are QuantizeLinear and
    DequantizeLinear in uint8, the model's signed codes shifted by 2^(b−1): the values are the same. Those of 16 bits
    are int16, and their layers multiply in float. Biases are int32, so that a runtime can sum integers. Weights with a
    scale per group are dequantized block by block. Inputs with a range per token go through MatMulInteger in Linear
    layers. Binary inputs are Less and Where, and FP8 weights and inputs float8e4m3fn; both multiply in float. A batch
    norm that is the only reader of a quantized layer is folded into its scales, so codes do not change. Everything else
    stays in float, also a whole model without quantized layers.

    onnxruntime runs a convolution on integers only if its output is quantized. For residual sums, concatenations
    and average pools training has no quantizer, but it observes the outputs of convolutions. From their ranges, or from
    `calibration`, the file gets these quantizers. That is several times faster, but no longer exactly what the model
    computes: the report has the change of the outputs.

    Args:
        model: A float32 model: in or after quantization-aware training, with `apply_ranges` called, or in float,
            also pruned or factorized. It is not changed.
        example_inputs: A tensor, a tuple of arguments, or a mapping of keyword arguments.
        path: The file to write; replaced atomically.
        opset: 21 to 23.
        dynamic_batch: Make the first axis dynamic, in all inputs whose first axis is as long as that of the first.
        dynamic_length: Make the second axis dynamic as well, in all inputs whose second axis is as long as that of the
            first. Inputs whose names begin with ``decoder_`` have a separate length.
        verify: Run the file in unoptimized onnxruntime and compare. Codes that differ by one because of rounding
            are set to the file's before outputs are compared, to 1e-4 of their size, at least of 1; to
            1e-2 of it if inputs have a range per token. With `dynamic_length` the same for inputs one
            shorter. Without onnxruntime nothing is compared.
        calibration: Batches like `example_inputs` for ranges of activations between layers, which fit these better
            than what training observed. Or the codes from an earlier calibration (the report's
            `quantized_activations`), which are ignored if they belong to another graph. The comparison uses the file
            without codes between layers.
        weight_codes: ``signed`` is fastest on processors with VNNI or AMX. Without them onnxruntime's products of
            unsigned inputs and signed 8-bit weights saturate, with large errors on some; ``unsigned`` weights are exact
            there. ``auto``: the right choice for this processor. Weights of 7 bits are exact either way.
        target: Engine whose rules the file must keep (`shared_core.tools.export.engines`). ``tensorrt`` also writes
            signed codes, for layers with symmetric inputs, float biases, and codes only on the shortcuts of residual
            sums. None: written for onnxruntime, without a check.

    Raises:
        MissingExtraError: If onnx or onnxscript is not installed, or with `calibration` onnxruntime.
        MatchError: If `calibration` is given and no layer is quantized.
        CompatibilityError: If a layer's scheme has no exact ONNX form, a weight is not finite, the file's outputs
            differ, or a node breaks a rule of `target`; nothing is written.
        ConfigError: If an argument breaks its rule.

    Source: the ONNX operators QuantizeLinear and DequantizeLinear, opset 21.

    Example:
        >>> import tempfile
        >>> from shared_core.quantization import apply_ranges
        >>> net = nn.Sequential(nn.Linear(2, 1))
        >>> _ = net[0].weight.data.fill_(0.5)
        >>> net = apply_ranges(net, {"0": {"min": 0.0, "max": 2.55}})
        >>> report = export_onnx(net, torch.ones(3, 2), Path(tempfile.mkdtemp()) / "net.onnx")
        >>> report.quantized, report.integer_nodes, report.largest_difference < 1e-5
        (('0',), {'QGemm': 1}, True)
    """
    _check_arguments(example_inputs, opset, calibration is not None, dynamic_length)
    if target is not None:
        checked(target, Target, "export_onnx", "target")
    for_tensorrt = target == "tensorrt"
    unsigned = wants_unsigned(weight_codes) and not for_tensorrt
    reference, names = quantized_reference(model, "export_onnx", _check_layer)
    if calibration is not None and not names:
        remedy = "train it with qat, or call apply_ranges on a model with baked weights"
        raise MatchError("export_onnx", "calibration needs quantized layers, but the model has none", remedy)
    runs = importlib.util.find_spec("onnxruntime") is not None
    activations: Codes = {}
    waiting: tuple[str, ...] = ()
    difference = moved = written = None
    with scratch_folder() as folder:
        file = folder / "model.onnx"
        # Repeated blocks are traced once if a check follows. If it finds a difference, everything is traced. A bias
        # within tolerance of s_x s_w runs on integers. If the file still differs too much, write it again with an exact
        # bias, in float.
        once, exact_bias = runs and verify, False
        while True:
            exported, left, outputs = _exportable(reference, names, example_inputs, exact_bias)
            groups = repeated_blocks(exported, plain(example_inputs)) if once else []
            program, shapes = _export(exported, example_inputs, opset, dynamic_batch, dynamic_length, groups)
            fold_padding_(program.model)
            average_within_(program.model)
            # The second round runs only if the first found something to change.
            unsigned = unsigned and make_unsigned_(program.model)
            program.save(file)
            del program  # before the file is read
            if not (runs and verify):
                break
            try:
                written = opened(file)
                with checking(written, reference) as check:
                    difference, moved = check(example_inputs)
                    if dynamic_length:
                        difference = max(difference, _check_shorter(check, example_inputs))
                break
            except CompatibilityError:
                if exact_bias:
                    raise
                once, exact_bias = False, not groups
        convolves = any(convolves_integers(reference.get_submodule(name)) for name in names)
        asked = convolves or (calibration is not None and bool(names))  # otherwise don't read the file
        found = None
        if asked or for_tensorrt:
            write = write_for_tensorrt if for_tensorrt else quantize_activations
            found, waiting = write(file, folder / "integer.onnx", calibration, outputs)
        if found is not None:
            file, activations, written = folder / "integer.onnx", found, None
        if target is not None:
            check_file(file, target)
        # Of the final file: the integer nodes depend on onnxruntime's fusions here, and so do outputs.
        nodes, results = run_optimized(written or file, example_inputs) if runs and not for_tensorrt else ({}, ())
        if runs and for_tensorrt:  # its kernels are not here: the nodes as they are written
            session = session_of(file, optimize=False)
            results = session.run(None, feeds(session, example_inputs))
        change = relative_change(reference, example_inputs, results) if results else None
        with atomic_write(path) as temporary:
            shutil.move(file, temporary)
    path = Path(path)
    size = path.stat().st_size
    return ExportReport(
        path, size, names, left, nodes, difference, moved, activations, waiting, change, shapes, unsigned,
        tuple(cache_scales(reference)), target,
    )  # fmt: skip


def codes_between_layers(model: nn.Module, calibration: list[Any]) -> Codes:
    """Return the codes of tensors between layers from `export_onnx` with calibration; none without convolutions."""
    if not any(isinstance(layer, nn.modules.conv._ConvNd) and is_quantized(layer) for layer in model.modules()):
        return {}
    with scratch_folder() as folder:
        report = export_onnx(model, calibration[0], folder / "model.onnx", calibration=calibration)
        return report.quantized_activations


_WITH_SIGNS: Pairs = {weight: (*inputs, "binary", "binary_scaled") for weight, inputs in INTEGERS.items()}
_FP8: Pairs = dict.fromkeys(("fp8", "fp8_tensor", "fp8_block"), ("none", "fp8_static", "fp8", "fp8_group"))


def _check_layer(name: str, module: Any, where: str) -> None:
    may_be_fp8 = STOCK[type(module)] in EXPORTED.keys() - {nn.Embedding}
    check_exportable(name, module, where, EXPORTED | PACKED, _WITH_SIGNS | (_FP8 if may_be_fp8 else {}))


def _check_arguments(example_inputs: Any, opset: int, calibrates: bool, dynamic_length: bool) -> None:
    for library in ("onnx", "onnxscript", *["onnxruntime"] * calibrates):
        check_installed("export_onnx", library, "onnx")
    checked(opset, int, "export_onnx", "opset", low=21, high=23)
    check_inputs(example_inputs, "export_onnx")
    shape = tuple(next(leaf for leaf in tree_leaves(plain(example_inputs)) if isinstance(leaf, Tensor)).shape)
    if dynamic_length and (len(shape) < 2 or shape[1] < _SHORTEST):
        rule = f"dynamic_length needs example_inputs of (batch, length, ...), with a length of at least {_SHORTEST}"
        raise ConfigError("export_onnx", f"{rule}, got {shape}", "use longer ones or leave it out")


def _exportable(
    reference: nn.Module, names: tuple[str, ...], inputs: Any, exact_bias: bool
) -> tuple[nn.Module, tuple[str, ...], dict[str, tuple[float, float]]]:
    """Return the model of codes, its float layers, and the ranges of its layers' outputs."""
    exported, layers, schemes, qparams, fused = baked_copy(reference, names, inputs)
    shared: dict[int, Any] = {}
    for name, layer in layers.items():
        if type(layer) in PACKED:
            to_export_packed(name, layer, schemes[name], qparams[name], shared)
        else:
            to_export(name, layer, schemes[name], qparams[name], shared, exact_bias)
    # The output of a layer was observed without the batch norm that it got here.
    seen = {name: layer for name, layer in layers.items() if name not in fused}
    return exported, float_layers(exported), _output_ranges(reference, seen)


def _output_ranges(reference: nn.Module, layers: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the observed ranges of layers' outputs. Layers of equal codes, which the file stores once, share one."""
    found: dict[Any, dict[str, tuple[float, float]]] = {}
    for name, layer in layers.items():
        quantized: Any = reference.get_submodule(name)
        entry = quantized.quantizer.entry(quantized)
        if entry is not None and "output" in entry:
            codes = layer.weight_codes
            bounds = entry["output"]["min"], entry["output"]["max"]
            found.setdefault((codes.shape, codes.numpy().tobytes()), {})[name] = bounds
    widest: dict[str, tuple[float, float]] = {}
    for same in found.values():
        lows, highs = zip(*same.values(), strict=True)
        widest |= dict.fromkeys(same, (min(lows), max(highs)))
    return widest


def _export(
    exported: nn.Module,
    inputs: Any,
    opset: int,
    dynamic_batch: bool,
    dynamic_length: bool,
    groups: list[dict[str, Any]],
) -> tuple[Any, dict[str, tuple[int | str, ...]]]:
    """Return the program, and name → shape of its inputs."""
    from onnx_ir.passes.common import DeduplicateInitializersPass

    inputs = plain(inputs)
    if dynamic_batch and _batch(inputs) == 1:  # torch.export would treat it as a constant
        inputs = tree_map_only(Tensor, lambda x: torch.cat([x, x]) if x.dim() and len(x) == 1 else x, inputs)
    shapes = dynamic_shapes(inputs, batch=dynamic_batch, length=dynamic_length)
    open_axes = {"dynamic_batch": dynamic_batch, "dynamic_length": dynamic_length}
    hint = "".join(f", or pass {_FIXED[name]}" for name, is_open in open_axes.items() if is_open)
    program = _program(exported, inputs, shapes, opset, hint, groups)
    graph = program.model.graph
    size = sum(value.const_value.nbytes for value in graph.initializers.values())
    if size > _LARGEST_FILE:
        raise CompatibilityError("export_onnx", f"model must be smaller than 2 GiB to be one file, got {size} bytes")
    DeduplicateInitializersPass(size_limit=_LARGEST_FILE)(program.model)  # tied weights
    for node in graph:
        node.metadata_props.clear()  # stack traces of this machine
    taken = {
        value.name: tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        for value in graph.inputs
    }
    # the exporter silently fixes an axis if the model needs it fixed (torch 2.13)
    # Dynamic axes must still have a name (a str) in some input.
    asked = {axis.__name__ for axis in tree_leaves(shapes) if axis is not None}
    for place, axis in enumerate(("batch", "length")):
        stays = any(isinstance(size, str) for shape in taken.values() for size in shape[place : place + 1])
        if axis in asked and not stays:
            rule = f"the model's forward fixes the {axis}, so it cannot be dynamic"
            raise CompatibilityError("export_onnx", rule, f"make it depend on the inputs' shapes{hint}")
    return program, taken


def _program(exported: nn.Module, inputs: Any, shapes: Any, opset: int, hint: str, groups: list[dict[str, Any]]) -> Any:
    """Return torch.onnx's program of a model."""
    import onnxscript

    args, kwargs = arguments(inputs)
    # Our operators stay whole in torch.export. Here each becomes the ONNX nodes that onnxruntime fuses.
    operators = getattr(onnxscript, f"opset{opset}")
    table = translations(operators) | recurrent_translations(operators)

    def export(names: list[str] | None = None, optimize: bool = False) -> Any:
        return torch.onnx.export(
            exported,
            args,
            kwargs=kwargs,
            dynamo=True,
            opset_version=opset,
            dynamic_shapes=shapes,
            custom_translation_table=table,
            output_names=names,
            optimize=optimize,
            verbose=False,
        )

    def traced_once() -> Any:
        outputs: list[Any] = []
        seen = exported.register_forward_hook(lambda module, given, output: outputs.append(output))
        program = None
        try:
            with contextlib.suppress(Exception), _decomposing_if_needed(), _promoting_alone():
                program = export()
            if program is None:  # torch.onnx supports some operations only when decomposed
                program = export()
        finally:
            seen.remove()
        for value, name in zip(program.model.graph.outputs, _names(outputs[0]) or (), strict=False):
            value.name = name
        return program

    with quiet(), torch.no_grad(), _parsing_if_needed(), collecting_later():
        try:
            program = None
            if groups:
                with contextlib.suppress(Exception):  # the whole model may work, or give the real error
                    program = export_around_blocks(exported, groups, traced_once)
            return export(_names(call_model(exported, inputs)), optimize=True) if program is None else program
        except Exception as error:  # torch.export and the exporter raise any error of the model
            cause: BaseException = error
            # The innermost cause is the model's error. The outer ones repeat the exporter's advice.
            while cause.__cause__ is not None:
                cause = cause.__cause__
            rule = f"torch.onnx cannot export the model: {type(cause).__name__}: {str(cause)[:500]}"
            raise CompatibilityError("export_onnx", rule, f"simplify its forward{hint}") from error


def _names(output: Any) -> list[str] | None:
    """Return the outputs' names: from a mapping of tensors (a ModelOutput), else from the exporter."""
    named = isinstance(output, Mapping) and all(isinstance(value, Tensor) for value in output.values())
    return [str(key) for key in output] if named else None


@contextlib.contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Temporarily replace an attribute of a class."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _decomposing_if_needed() -> contextlib.AbstractContextManager[None]:
    """Keep torch.onnx from decomposing programs with nothing to decompose."""
    # It decomposes every program: a second trace, as long as the first, that changes few operations.
    decompose = torch.export.ExportedProgram.run_decompositions

    def run(program: torch.export.ExportedProgram, table: Any = None, **options: Any) -> Any:
        graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]
        targets = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
        # operations that change their inputs become functions there, and nested graphs are searched
        pure = not any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets)
        flat = not any(isinstance(target, HigherOrderOperator) for target in targets)
        whole = table is not None and pure and flat and targets.isdisjoint(table)
        return program if whole else decompose(program, table, **options)

    return _instead(torch.export.ExportedProgram, "run_decompositions", run)


def _promoting_alone() -> contextlib.AbstractContextManager[None]:
    """Keep torch.onnx from rerunning a program on fake tensors when it adds casts for mixed types."""
    # The trace already has each node's result, and a cast of its inputs does not change it.
    from torch.onnx._internal.fx.passes import type_promotion

    promoting = type_promotion._TypePromotionInterpreter
    run = promoting.run_node

    def promote(interpreter: Any, node: fx.Node) -> Any:
        if node.op != "call_function" or node.meta.get("val") is None:
            return run(interpreter, node)
        rule = type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table)
        if rule is not None:
            with interpreter._set_current_node(node):
                interpreter._maybe_promote_node(node, rule)
        return node.meta["val"]

    return _instead(promoting, "run_node", promote)


def _parsing_if_needed() -> contextlib.AbstractContextManager[None]:
    """Keep onnxscript from parsing all 500 functions of its library to find the name of their domain."""
    from onnxscript.values import TracedOnnxFunction

    parse: Any = vars(TracedOnnxFunction)["function_ir"].fget

    class Unparsed:
        def __init__(self, function: Any) -> None:
            self.function, self.domain = function, function.opset.domain

        def __getattr__(self, name: str) -> Any:
            return getattr(parse(self.function), name)

    return _instead(TracedOnnxFunction, "function_ir", property(Unparsed))


def _check_shorter(check: Callable[[Any], tuple[float, float]], inputs: Any) -> float:
    try:
        return check(one_shorter(plain(inputs)))[0]
    except Exception as error:  # the model's own, or one of onnxruntime's
        rule = "the file must match the model at every length, and with example_inputs that are one shorter"
        message = f"{rule} it did not: {str(error)[:500]}"
        raise CompatibilityError("export_onnx", message, f"pass {_FIXED['dynamic_length']}") from error


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
