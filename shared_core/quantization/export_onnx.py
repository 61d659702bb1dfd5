"""A model as an ONNX file, quantised layers with explicit QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.atomic import atomic_write, scratch_folder
from shared_core.errors import CompatibilityError, ConfigError, MatchError, MissingExtraError
from shared_core.model_calls import call_model
from shared_core.quantization.export_activations import quantize_activations
from shared_core.quantization.export_check import check_file, integer_nodes, relative_change
from shared_core.quantization.export_layers import to_export
from shared_core.quantization.export_ops import translations
from shared_core.quantization.export_shapes import check_length, dynamic_shapes, one_shorter, two_examples
from shared_core.quantization.export_source import (
    arguments,
    baked_copy,
    check_inputs,
    float_layers,
    plain,
    quantized_reference,
    quiet,
)
from shared_core.quantization.export_unsigned import WeightCodes, make_unsigned, wants_unsigned

_LARGEST_FILE = 2**31 - 2**20  # protobuf's limit, less room for the graph
_OPSETS = range(21, 24)


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """What `export_onnx` wrote.

    Attributes:
        path: The file.
        bytes: Its size.
        quantized: Layers with codes.
        float_layers: Layers of the same types that stay in float.
        integer_nodes: Operator → how many onnxruntime runs on integers after its optimisation on this machine; empty
            if it is not installed.
        largest_difference: Between onnxruntime without optimisation and the model on the example inputs; None if it
            was not compared.
        moved_codes: Share of activation codes that float rounding put on the other side of a tie in that comparison.
        quantized_activations: Tensors between layers that got codes of their own from `calibration`.
        relative_change: What those codes, and biases on the grid of the sums, change in the outputs for the example
            inputs, relative to the largest output; None without `calibration`.
        inputs: Name → shape of what the file takes; an open axis has a name.
        unsigned_weights: Whether weights were written as unsigned codes.
    """

    path: Path
    bytes: int
    quantized: tuple[str, ...]
    float_layers: tuple[str, ...]
    integer_nodes: dict[str, int]
    largest_difference: float | None
    moved_codes: float | None
    quantized_activations: tuple[str, ...] = ()
    relative_change: float | None = None
    inputs: dict[str, tuple[int | str, ...]] = dataclasses.field(default_factory=dict)
    unsigned_weights: bool = False


def export_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: Path | str,
    *,
    opset: int = 21,
    dynamic_batch: bool = True,
    dynamic_length: bool = False,
    verify: bool = True,
    calibration: Iterable[Any] | None = None,
    weight_codes: WeightCodes = "auto",
) -> ExportReport:
    """Write `model` to an ONNX file that computes what it computes in evaluation; return what was written.

    Weights are int8 with a DequantizeLinear, codes of fewer bits too. Static inputs are QuantizeLinear and
    DequantizeLinear in uint8, the model's signed codes moved by 2^(b−1): the values are the same. Biases are int32, so
    that a runtime can sum integers. Weights with a scale for each group are dequantised block by block; inputs with a
    range for each token go through MatMulInteger in Linear layers. A batch norm that alone reads a quantised layer is
    folded into its scales, which leaves the codes as they are. Everything else stays in float; a model without
    quantised layers does as a whole.

    onnxruntime runs a convolution on integers only where its output is quantised: what a residual sum, a concatenation
    or an average pool reads comes out of a convolution in float, for training has no quantiser there. With
    `calibration` it gets one, which is several times faster and no longer exactly what the model computes.

    Args:
        model: In or after quantization-aware training, a plain model on which `apply_ranges` was called, or a float
            model, pruned or factorised or as it is; float32. It is not changed.
        example_inputs: A tensor, a tuple of arguments, or a mapping of keyword arguments.
        path: The file to write; replaced atomically.
        opset: 21 to 23.
        dynamic_batch: Leave the first axis of the inputs open: of all whose first axis is as long as that of the first.
        dynamic_length: Leave the second axis open as well: of all inputs whose second axis is as long as that of the
            first, and, with a length of its own, of those whose names begin with ``decoder_``.
        verify: Run the file in onnxruntime, without optimisation, and compare. Codes that float rounding moves to
            the next step are set to the file's before outputs are compared, to 1e-5 of their size, at least of 1; to
            1e-2 of it where inputs have a range for each token. With `dynamic_length` the same for inputs that are
            shorter by one. Without onnxruntime nothing is compared.
        calibration: Batches of inputs, each as `example_inputs`, for ranges of activations between layers. What is
            compared is the file before it gets them; how far it moves then is in the report.
        weight_codes: ``signed`` is fastest on processors with VNNI or AMX. Without them onnxruntime's products of
            unsigned inputs and signed 8-bit weights saturate, far off on some; ``unsigned`` weights are exact there.
            ``auto``: what is right for the processor that exports. Weights of 7 bits are exact either way.

    Raises:
        MissingExtraError: If onnx or onnxscript is not installed, or with `calibration` onnxruntime.
        MatchError: If there is `calibration` and no layer is quantised.
        CompatibilityError: If a layer's scheme has no exact ONNX form, a weight is not finite, or the file computes
            something else; nothing is written.
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
    _check_arguments(example_inputs, opset, calibration is not None)
    if dynamic_length:
        check_length(plain(example_inputs))
    unsigned = wants_unsigned(weight_codes)
    reference, names = quantized_reference(model, "export_onnx")
    if calibration is not None and not names:
        raise MatchError(
            "export_onnx: with calibration model must have quantised layers, found none; train it with qat, or call "
            "apply_ranges on a model with baked weights"
        )
    runs = importlib.util.find_spec("onnxruntime") is not None
    activations: tuple[str, ...] = ()
    change: float | None = None
    difference = moved = None
    with scratch_folder() as folder:
        file = folder / "model.onnx"
        for exact_bias in (False, True):
            exported, left = _exportable(reference, names, example_inputs, exact_bias)
            shapes = _export(exported, example_inputs, file, opset, dynamic_batch, dynamic_length)
            unsigned = unsigned and make_unsigned(file)
            if not (runs and verify):
                break
            try:
                difference, moved = check_file(file, reference, example_inputs)
                if dynamic_length:
                    difference = max(difference, _check_shorter(file, reference, example_inputs))
                break
            except CompatibilityError:
                if exact_bias:
                    raise
        if calibration is not None:
            exact, file = file, folder / "integer.onnx"
            activations = quantize_activations(exact, file, calibration)
            change = relative_change(file, exact, example_inputs)
        nodes = integer_nodes(file) if runs else {}
        with atomic_write(path) as temporary:
            temporary.write_bytes(file.read_bytes())
    path = Path(path)
    size = path.stat().st_size
    return ExportReport(path, size, names, left, nodes, difference, moved, activations, change, shapes, unsigned)


def _check_arguments(example_inputs: Any, opset: int, calibrates: bool) -> None:
    for library in ("onnx", "onnxscript", *["onnxruntime"] * calibrates):
        if importlib.util.find_spec(library) is None:
            raise MissingExtraError("export_onnx", library, "onnx")
    if isinstance(opset, bool) or opset not in _OPSETS:
        raise ConfigError(f"export_onnx: opset must be {_OPSETS[0]} to {_OPSETS[-1]}, got {opset!r}")
    check_inputs(example_inputs, "export_onnx")


def _exportable(
    reference: nn.Module, names: tuple[str, ...], inputs: Any, exact_bias: bool
) -> tuple[nn.Module, tuple[str, ...]]:
    exported, layers, schemes, qparams = baked_copy(reference, names, inputs)
    shared: dict[int, Any] = {}
    for name, layer in layers.items():
        to_export(name, layer, schemes[name], qparams[name], shared, exact_bias)
    return exported, float_layers(exported)


def _export(
    exported: nn.Module, inputs: Any, file: Path, opset: int, dynamic_batch: bool, dynamic_length: bool
) -> dict[str, tuple[int | str, ...]]:
    """Write the file, and return name → shape of its inputs."""
    import onnxscript
    from onnx_ir.passes.common import DeduplicateInitializersPass

    inputs = plain(inputs)
    if dynamic_batch:
        inputs = two_examples(inputs)
    args, kwargs = arguments(inputs)
    shapes = dynamic_shapes(inputs, batch=dynamic_batch, length=dynamic_length)
    open_axes = {"dynamic_batch": dynamic_batch, "dynamic_length": dynamic_length}
    hint = "".join(f", or pass {name}=False" for name, is_open in open_axes.items() if is_open)
    with quiet(), torch.no_grad():
        try:
            program: Any = torch.onnx.export(
                exported,
                args,
                kwargs=kwargs,
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=shapes,
                output_names=_output_names(call_model(exported, inputs)),
                custom_translation_table=translations(getattr(onnxscript, f"opset{opset}")),
                verbose=False,
            )
        except Exception as error:  # torch.export and the exporter raise whatever the model makes them
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise CompatibilityError(
                f"export_onnx: model must be one that torch.onnx can export, got {type(cause).__name__}: "
                f"{str(cause)[:500]}; simplify its forward{hint}"
            ) from error
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values())
    if size > _LARGEST_FILE:
        raise CompatibilityError(f"export_onnx: model must be smaller than 2 GiB to be one file, got {size} bytes")
    DeduplicateInitializersPass(size_limit=_LARGEST_FILE)(program.model)  # tied weights
    for node in program.model.graph:
        node.metadata_props.clear()  # stack traces of this machine
    taken = {
        value.name: tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        for value in program.model.graph.inputs
    }
    # the exporter fixes an axis without a word where the model needs it to be fixed (torch 2.13)
    asked = {axis.__name__ for axis in tree_leaves(shapes) if axis is not None}
    for place, axis in enumerate(("batch", "length")):
        stays = any(isinstance(size, str) for shape in taken.values() for size in shape[place : place + 1])
        if axis in asked and not stays:
            raise CompatibilityError(
                f"export_onnx: model must take any {axis} to leave it open, and its forward fixes it; make it depend "
                f"on the inputs' shapes{hint}"
            )
    program.save(file)
    return taken


def _check_shorter(file: Path, reference: nn.Module, inputs: Any) -> float:
    try:
        return check_file(file, reference, one_shorter(plain(inputs)))[0]
    except Exception as error:  # the model's own, or onnxruntime's many
        raise CompatibilityError(
            "export_onnx: file must compute what the model does at every length, and with example_inputs that are "
            f"shorter by one it did not: {str(error)[:500]}; pass dynamic_length=False (eff export: --length for a "
            "folder, no --dynamic-length for a function)"
        ) from error


def _output_names(output: Any) -> list[str] | None:
    if isinstance(output, Mapping) and all(isinstance(value, Tensor) for value in output.values()):
        return [str(key) for key in output]
    return None
