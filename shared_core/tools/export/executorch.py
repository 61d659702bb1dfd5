"""Write a model as an ExecuTorch program for phones and boards.

Quantized layers get a forward that XNNPACK's integer kernels recognize, or compute exactly from their codes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from eff_kernels.quantization import affine as kernels
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shared_core.errors import CompatibilityError
from shared_core.files.atomic import atomic_write, scratch_folder
from shared_core.modules.calls import call_model
from shared_core.modules.matching import change_class
from shared_core.modules.weight_views import TRANSPOSED
from shared_core.quantization.ranges.kv_cache import cache_scales
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.onnx_layers import EXPORTED, of_tokens
from shared_core.tools.export.source import (
    Quantized,
    arguments,
    baked_copy,
    check_exportable,
    check_inputs,
    check_installed,
    float_layers,
    plain,
    quantized_reference,
    quiet,
    shared_grid,
)

_INT8 = (-128, 127)


def _decomposed() -> Any:
    import torch.ao.quantization.fx._decomposed  # registers the operators

    return torch.ops.quantized_decomposed


class _Program:
    """A layer that holds codes. ``by_operators``: its forward uses quantized_decomposed's operators."""

    scheme: LayerScheme
    by_operators: bool
    input_qparams: tuple[float, int] | None
    output_qparams: tuple[float, int] | None

    def forward(self: Any, *args: Any) -> Tensor:
        """Return the layer's output."""
        # With a rounded output the next integer layer can read codes: XNNPACK fuses dequantize-layer-quantize into one
        # kernel.
        y: Tensor = super().forward(*args)  # type: ignore[misc]
        return y if self.output_qparams is None else _through(y, *self.output_qparams)

    def quantized_input(self: Any, x: Tensor) -> Tensor:
        """Return the input rounded to its codes' values."""
        if self.scheme.input == "token":
            return self._of_tokens(x)  # type: ignore[no-any-return]
        if self.input_qparams is None:
            return x
        scale, zero_point = self.input_qparams
        # The operators that XNNPACK's partitioner recognizes. The same formula in other operators stays in float.
        if self.by_operators:
            return _through(x, scale, zero_point)
        low, high = self.scheme.input_range
        values: Tensor = ((x / scale).round() + zero_point).clamp(low, high).sub(zero_point) * scale
        return values

    def _of_tokens(self: Any, x: Tensor) -> Tensor:
        if self.by_operators:
            # XNNPACK rounds rows to asymmetric int8 codes: at least as fine as the scheme's symmetric range.
            ops = _decomposed()
            scale, zero_point = ops.choose_qparams_per_token_asymmetric.default(x, torch.int8)
            codes = ops.quantize_per_token.default(x, scale, zero_point, *_INT8, torch.int8)
            found: Tensor = ops.dequantize_per_token.default(
                codes, scale, zero_point, *_INT8, torch.int8, torch.float32
            )
            return found
        # The token's axis: the last one of a linear layer, the channels of a convolution.
        axis = -1 - len(getattr(self, "kernel_size", ()))
        return of_tokens(x.movedim(axis, -1), self.scheme).movedim(-1, axis)

    def quantized_weight(self: Any) -> Tensor:
        """Return the values of the codes."""
        if self.by_operators:
            values: Tensor = _decomposed().dequantize_per_channel.default(
                self.weight_codes, self.weight_scale, self.weight_zero_point, self.scale_axis, *_INT8, torch.int8
            )
            return values
        return self._spread(self.weight_codes, self.weight_scale)  # type: ignore[no-any-return]

    def quantized_bias(self: Any) -> Tensor | None:
        """Return the bias, which stays in float."""
        return self.bias  # type: ignore[no-any-return]

    def _spread(self: Any, codes: Tensor, scale: Tensor) -> Tensor:
        # Only codes are stored: if no operator fits, each call computes the weight from them.
        if self.block:
            return codes.to(scale.dtype) * scale.repeat_interleave(self.block, self.scale_axis)
        return codes.to(scale.dtype) * kernels.along(scale, codes.dim(), self.scale_axis)


def _through(x: Tensor, scale: float, zero_point: int) -> Tensor:
    ops = _decomposed()
    codes = ops.quantize_per_tensor.default(x, scale, zero_point, *_INT8, torch.int8)
    values: Tensor = ops.dequantize_per_tensor.default(codes, scale, zero_point, *_INT8, torch.int8)
    return values


class _Linear(nn.Linear):
    def forward(self: Any, input: Tensor) -> Tensor:
        return nn.functional.linear(self.quantized_input(input), self.quantized_weight(), self.bias)


class _Embedding(nn.Embedding):
    def forward(self: Any, input: Tensor) -> Tensor:
        # Rows are gathered as codes and then multiplied, so the float table never exists.
        indices = input.reshape(-1)
        codes, scale = (values.index_select(0, indices) for values in (self.weight_codes, self.weight_scale))
        found: Tensor = self._spread(codes, scale).reshape(*input.shape, self.embedding_dim)
        return found


# The forward of a convolution is that of ONNX files, between inputs and weights of ours.
_PROGRAM: dict[type[nn.Module], type[nn.Module]] = {
    kind: type(f"Program{kind.__name__}", (_Program, base), {})
    for kind, base in (EXPORTED | {nn.Linear: _Linear, nn.Embedding: _Embedding}).items()
}


@torch.no_grad()
def program_layer(
    name: str, module: Any, scheme: LayerScheme, qparams: tuple[Tensor, Tensor] | None, shared: dict[int, Quantized]
) -> None:
    """Turn a stock layer whose weight has quantized values into one that holds the codes."""
    grid = shared_grid(name, module, module.weight, scheme, shared)
    # int64, the dtype that dequantize_per_channel has zero points in.
    zeros = torch.zeros(grid.scale.shape, dtype=torch.int64)
    kind = type(module)
    # Drop the float weight: the program should hold only the codes.
    module.weight = None
    for buffer, value in (("codes", grid.codes), ("scale", grid.scale), ("zero_point", zeros)):
        module.register_buffer(f"weight_{buffer}", value)
    module.scheme, module.scale_axis, module.block = scheme, grid.axis, grid.block
    # Plain numbers: the operators take a scale and a zero point as attributes.
    module.input_qparams = None if qparams is None else (float(qparams[0]), int(qparams[1]))
    module.output_qparams = None
    of_tokens = scheme.input == "token" and kind is nn.Linear and not scheme.affine_input
    fits = scheme.input == "none" or (scheme.activation_bits == 8 and (scheme.input == "static" or of_tokens))
    # XNNPACK clamps to 8 bits, whatever the range, and has one scale per channel
    module.by_operators = fits and not grid.block and kind not in TRANSPOSED
    change_class(module, type(module), _PROGRAM[kind])


def set_output_range(module: Any, low: float, high: float) -> None:
    """Quantize a layer's output to 8 bits, so that its products are summed as integers. The range includes 0."""
    # 0 needs a code: padding and ReLU's zeros are then exact.
    low, high = min(low, 0.0), max(high, 0.0)
    # 255 steps over the range; the lowest value gets code -128.
    scale = max(high - low, 1e-8) / 255
    module.output_qparams = (scale, round(-128 - low / scale))


_LARGEST_CHANGE = 0.05


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """The result of `export_executorch`.

    Attributes:
        path: The file.
        bytes: Its size.
        quantized: Layers with codes in the file.
        integer: Those that run on XNNPACK's integer kernels.
        float_layers: Layers of the same types that stay in float.
        other_operators: Operator → number of calls on ExecuTorch's portable kernels, which XNNPACK does not support.
        relative_change: Largest difference from the model on the example inputs, relative to the largest output; None
            if not compared.
        cache_scales_left_out: Attention layers with cache scales (`calibrate_kv_cache`), which the file lacks.
    """

    path: Path
    bytes: int
    quantized: tuple[str, ...]
    integer: tuple[str, ...]
    float_layers: tuple[str, ...]
    other_operators: dict[str, int]
    relative_change: float | None
    cache_scales_left_out: tuple[str, ...]


def export_executorch(
    model: nn.Module,
    example_inputs: Any,
    path: Path | str,
    *,
    verify: bool = True,
    calibration: Iterable[Any] | None = None,
) -> ProgramReport:
    """Write `model` to a ``.pte`` file that ExecuTorch's runtime loads on a device; return a report.

    Weights are int8 codes in the file. XNNPACK sums integers in a layer with a static 8-bit input whose output is
    quantized too, by the next layer or with `calibration`. It also does in Linear layers with a range per token,
    whose grid there has a zero point, which makes it finer. Every other quantized layer computes as in
    the model, on weights dequantized at run time: the file is as small, the layer slower than in float.

    Args:
        model: A float32 model: in or after quantization-aware training, with `apply_ranges` called, or in float,
            also pruned or factorized. It is not changed.
        example_inputs: A tensor, a tuple of arguments, or a mapping of keyword arguments. The program takes only inputs
            of these shapes.
        path: The file to write; replaced atomically.
        verify: Run the file in ExecuTorch's runtime and compare.
        calibration: Batches like `example_inputs`, for ranges of outputs that no quantized layer reads.

    Raises:
        MissingExtraError: If executorch is not installed.
        CompatibilityError: If the model cannot be exported, or the program's outputs differ by more than 5 % of the
            largest; nothing is written.
        ConfigError: If an argument breaks its rule.

    Source: ExecuTorch 1.5, XNNPACK backend.

    Example:
        ``export_executorch(apply_ranges(model, ranges), torch.ones(1, 3, 224, 224), "model.pte").integer``
    """
    check_installed("export_executorch", "executorch", "executorch")
    check_inputs(example_inputs, "export_executorch")
    reference, names = quantized_reference(model, "export_executorch", partial(check_exportable, kinds=EXPORTED))
    exported, layers, schemes, qparams, _ = baked_copy(reference, names, example_inputs)
    shared: dict[int, Quantized] = {}
    weights = [layer.weight for layer in layers.values()]  # kept alive, so that ids stay unique
    # In model order: a tied weight gets its codes from the first layer.
    for name, layer in layers.items():
        program_layer(name, layer, schemes[name], qparams[name], shared)
    del weights
    with quiet():
        # Only lowering shows what XNNPACK supports: lower, check, change, and lower again.
        edge, integer = _lowered(exported, example_inputs, layers)
        if calibration is not None:
            ranges = _output_ranges(reference, names, [example_inputs, *calibration])
            # A layer with a static input that runs in float lacks an output range: XNNPACK's integer kernels write
            # codes.
            for name in set(layers) - set(integer):
                if layers[name].by_operators and layers[name].scheme.input == "static":
                    set_output_range(layers[name], *ranges[name])
            edge, integer = _lowered(exported, example_inputs, layers)
        while left := [layer for name, layer in layers.items() if name not in integer and _is_integer_conv(layer)]:
            # executorch 1.5.1: after a convolution on XNNPACK, one on portable kernels reads the values in the wrong
            # order
            for layer in left:
                layer.by_operators = False
            edge, integer = _lowered(exported, example_inputs, layers)
        buffer = edge.to_executorch().buffer
    with scratch_folder() as folder:
        file = folder / "model.pte"
        # A temporary file first: the target is written only after the comparison.
        file.write_bytes(buffer)
        change = _compare(file, reference, example_inputs) if verify else None
        with atomic_write(path) as temporary:
            temporary.write_bytes(buffer)
    path = Path(path)
    return ProgramReport(
        path=path, bytes=path.stat().st_size, quantized=names, integer=integer, float_layers=float_layers(exported),
        other_operators=_portable(edge), relative_change=change, cache_scales_left_out=tuple(cache_scales(reference)),
    )  # fmt: skip


def _output_ranges(
    reference: nn.Module, names: tuple[str, ...], batches: Iterable[Any]
) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest output of each layer over batches."""
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        # Each range includes 0, as `set_output_range` requires.
        low, high = found.get(name, (0.0, 0.0))
        found[name] = (min(low, float(output.min())), max(high, float(output.max())))

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name in names:
            hooks.callback(reference.get_submodule(name).register_forward_hook(partial(watch, name)).remove)
        for batch in batches:
            call_model(reference, batch)
    return found


def _lowered(exported: nn.Module, inputs: Any, layers: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return the lowered program, and the layers that XNNPACK runs on integers."""
    import executorch.kernels.quantized  # noqa: F401  # registers what runs codes that XNNPACK leaves alone
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    args, kwargs = arguments(plain(inputs))
    try:
        program = torch.export.export(exported, args, kwargs)
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    except Exception as error:  # torch.export raises any error of the model
        rule = f"torch.export cannot trace the model: {type(error).__name__}: {str(error)[:500]}"
        raise CompatibilityError("export_executorch", rule, "simplify its forward") from error
    # A weight that is dequantized separately in the graph is not in an integer kernel.
    lowered = edge.exported_program()
    buffers = lowered.graph_signature.inputs_to_buffers
    alone = {
        buffers[argument.name].rpartition(".")[0]
        for node in lowered.graph.nodes
        if "dequantize_per_channel" in str(node.target)
        for argument in node.all_input_nodes
        if argument.name in buffers
    }
    quantizes = [name for name, layer in layers.items() if layer.by_operators and layer.scheme.input != "none"]
    return edge, tuple(name for name in quantizes if name not in alone)


def _is_integer_conv(layer: Any) -> bool:
    return isinstance(layer, nn.modules.conv._ConvNd) and bool(layer.by_operators) and layer.scheme.input != "none"  # type: ignore[union-attr]


def _portable(edge: Any) -> dict[str, int]:
    nodes = edge.exported_program().graph.nodes
    names = [node.target.name() for node in nodes if node.op == "call_function" and hasattr(node.target, "name")]
    return dict(sorted(Counter(name.partition("::")[2] for name in names if "::" in name).items()))


def _compare(file: Path, reference: nn.Module, inputs: Any) -> float:
    from executorch.runtime import Runtime

    args, kwargs = arguments(plain(inputs))
    # The runtime takes tensors by position: the leaves in call order.
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    try:
        method = Runtime.get().load_program(str(file)).load_method("forward")
        found = [output for output in method.execute(tensors) if isinstance(output, Tensor)]
    except RuntimeError as error:
        remedy = "nothing was written; look for an operator without a kernel there, such as a 3-d convolution"
        rule = f"the program does not run in ExecuTorch's runtime: {error}"
        raise CompatibilityError("export_executorch", rule, remedy) from error
    with torch.no_grad():
        expected = [leaf for leaf in tree_leaves(plain(call_model(reference, inputs))) if isinstance(leaf, Tensor)]
    # Relative to the largest value of each output: values near 0 would inflate any change.
    changes = [
        float((mine.double() - theirs.double()).abs().max() / (theirs.double().abs().max().clamp_min(1e-12)))
        for mine, theirs in zip(found, expected, strict=False)
        if theirs.numel()
    ]
    change = max(changes, default=0.0) if len(found) == len(expected) else math.inf
    # `not <=`, so that NaN fails too.
    if not change <= _LARGEST_CHANGE:
        got = f"a change of {change:.3g} in {len(found)} of {len(expected)}"
        rule = f"outputs of the program must equal the model's to {_LARGEST_CHANGE:.0%}, got {got}"
        remedy = "nothing was written; pass more calibration batches, or leave calibration out"
        raise CompatibilityError("export_executorch", rule, remedy)
    return change
