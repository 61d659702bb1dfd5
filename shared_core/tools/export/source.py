"""The model to export: a copy that quantizes as in training, and its baked version.

The integers of weights and biases are recovered from their values.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shared_core.errors import CompatibilityError, ConfigError, MissingExtraError
from shared_core.modules.weight_views import PACKED, TRANSPOSED, as_rows, from_rows, weights_of
from shared_core.quantization.batch_norm import fuse_batch_norm
from shared_core.quantization.fake_quant_layers import (
    FAKE_QUANT,
    STOCK,
    bake_,
    cells_as_linear,
    conv1d_as_linear,
    is_quantized,
    layer_entry,
    restore,
    with_stock_classes,
)
from shared_core.quantization.ranges.saved_ranges import apply_ranges, merge_folds_
from shared_core.quantization.schemes import LayerScheme


def plain(inputs: Any) -> Any:
    """Return inputs in a form that torch.export handles correctly.

    A mapping becomes a dict, since torch does not know a tokenizer's BatchEncoding. A tensor used twice is copied,
    because torch.export would treat both as one input.
    """
    seen: set[int] = set()

    def apart(x: Tensor) -> Tensor:
        if id(x) in seen:
            return x.clone()
        seen.add(id(x))
        return x

    return tree_map_only(Tensor, apart, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def check_installed(where: str, library: str, extra: str) -> None:
    """Raise an error if a library that an export needs is missing."""
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        raise MissingExtraError(where, library, extra)


def check_inputs(inputs: Any, where: str) -> None:
    """Raise an error for example inputs without a tensor."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(plain(inputs))):
        rule = f"example_inputs must hold a tensor, got {type(inputs).__name__}"
        raise ConfigError(where, rule, "pass the inputs of the model's forward")


def quantized_reference(
    model: nn.Module, where: str, check: Callable[[str, Any, str], None]
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of `model` in evaluation with all quantized layers fake-quantizing, and their names."""
    # A copy: folding and baking change it. On the CPU, where the runtimes compute.
    reference = with_stock_classes(conv1d_as_linear(copy.deepcopy(model))).eval().cpu()
    for name, module in reference.named_modules():
        if is_quantized(module) and not module.quantizer.bank.quantizing:  # type: ignore[union-attr]
            rule = f"{name} is not quantized yet, because qat has not begun"
            raise CompatibilityError(where, rule, "train past it, or let qat finish")
    # Before the ranges are read: a merged batch norm scales the weight, which changes its codes.
    merge_folds_(reference)
    entries = {
        name: layer_entry(module)
        for name, module in reference.named_modules()
        # stock layers after training, and layers whose batch norm was just merged
        if type(module) in FAKE_QUANT or (is_quantized(module) and module.quantizer.baked)  # type: ignore[union-attr]
    }
    after = {name: entry for name, entry in entries.items() if entry is not None}
    # Layers baked in training (or just folded) quantize again from their deployment data, because the baked weight
    # alone does not determine the grid.
    if after:
        apply_ranges(reference, after)
    reference = cells_as_linear(reference)
    baked: set[int] = set()
    for module in reference.modules():  # floats of 16 bits have no codes to write
        if is_quantized(module) and module.quantizer.scheme.is_half:  # type: ignore[union-attr]
            bake_(module, baked)
            restore(module)
    names = tuple(name for name, module in reference.named_modules() if type(module) in STOCK)
    for name in names:
        check(name, reference.get_submodule(name), where)
    half = (torch.float16, torch.bfloat16)  # on a CPU the runtimes don't compute these as torch does
    odd = next((name for name, value in reference.named_parameters() if value.dtype in half), None)
    if odd is not None:
        rule = f"model must be float32, got {reference.get_parameter(odd).dtype} for {odd}"
        raise CompatibilityError(where, rule, "call model.float()")
    return reference, names


def baked_copy(
    reference: nn.Module, names: tuple[str, ...], inputs: Any = None
) -> tuple[nn.Module, dict[str, Any], dict[str, LayerScheme], dict[str, tuple[Tensor, Tensor] | None], set[str]]:
    """Return a copy with stock layers and folded batch norms, its quantized layers, their schemes and input ranges.

    The last value has the layers into which a batch norm was folded here.
    """
    # Values that baking and folding never modify are not copied.
    folds = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in reference.modules())
    unbaked = [layer for name in names if not (layer := reference.get_submodule(name)).quantizer.baked]  # type: ignore[union-attr]
    written = {id(weight) for layer in unbaked for weight in weights_of(layer).values()}
    shared: dict[int, Any] = {
        id(value): nn.Parameter(value.detach(), value.requires_grad)
        for value in reference.parameters()
        if not folds and type(value) is nn.Parameter and id(value) not in written
    }
    exported = copy.deepcopy(reference, shared)
    layers: dict[str, Any] = {name: exported.get_submodule(name) for name in names}
    # Before baking, which drops the quantizer's state.
    qparams = {name: layer.quantizer.qparams(layer) for name, layer in layers.items()}
    schemes = {}
    # Tied layers share a weight: bake it once.
    baked: set[int] = set()
    for name, layer in layers.items():
        quantizer = layer.quantizer
        scheme = quantizer.scheme
        if scheme.has_range and qparams[name] is None:  # it saw no input, so the model keeps it in float too
            scheme = dataclasses.replace(scheme, input="none")
        schemes[name] = scheme
        if not quantizer.baked:
            bake_(layer, baked)
    for layer in layers.values():
        restore(layer)
    fused: set[str] = set()
    if inputs is not None:
        with contextlib.suppress(CompatibilityError):  # a model that cannot be traced keeps its batch norms
            fused = {pair.layer for pair in fuse_batch_norm(exported, plain(inputs)).fused}
    return exported, layers, schemes, qparams, fused


def float_layers(exported: nn.Module) -> tuple[str, ...]:
    """Return the layers that could be quantized but are not."""
    return tuple(name for name, module in exported.named_modules() if type(module) in FAKE_QUANT and weights_of(module))


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as (args, kwargs)."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters while they run."""
    # they warn about torchvision's operators and their own registries
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


Pairs = dict[str, Collection[str]]
"""Formats of weights → those of inputs."""
INTEGERS: Pairs = dict.fromkeys(("channel", "group", "ternary", "binary"), ("none", "static", "token"))


def check_exportable(
    name: str,
    module: Any,
    where: str,
    kinds: Mapping[type[nn.Module], Any],
    pairs: Pairs = INTEGERS,
) -> None:
    """Raise an error for a fake-quantizing layer that no exported file can represent.

    Args:
        name: Its name.
        module: The layer.
        where: Prefix of the error.
        kinds: Stock classes that can be exported.
        pairs: Formats that can be exported.
    """
    scheme: LayerScheme = module.quantizer.scheme
    kind, known = STOCK[type(module)], ", ".join(each.__name__ for each in kinds)
    odd = next((weight.dtype for weight in weights_of(module).values() if weight.dtype != torch.float32), None)
    or_fp8, also = ("or FP8 ", ", fp8 or fp8_static") if "fp8" in pairs else ("", "")
    schemes = f"train with scheme int8, int8_weight, int8_dynamic, int4_weight, ternary{also}"
    for breaks, rule, remedy in (
        (kind not in kinds, f"be one of {known}, got {kind.__name__}", "skip it in qat"),
        (scheme.input not in pairs.get(scheme.weight, ()), f"have integer {or_fp8}codes, got {scheme}", schemes),
        (getattr(module, "max_norm", None) is not None, "have no max_norm, which rescales rows", "skip it in qat"),
        (getattr(module, "proj_size", 0), "have no proj_size, which ONNX lacks", "skip it in qat"),
        (odd is not None, f"be float32, got {odd}", "call model.float() first"),
    ):
        if breaks:
            raise CompatibilityError(where, f"{name} must {rule}", remedy)


_ON_GRID = 1e-3
_IN_CACHE = 2**16  # values
_LARGEST_BIAS = 2**30  # in codes: leaves room in int32 for the sums that the bias is added to
_SAME_SCALE = 0.009  # onnxruntime leaves a Conv in float if its bias scale is 1 % off s_x·s_w


def grid_of(rows: Tensor, qmax: int, limit: int) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) of rows that are whole multiples of a scale each; None if one is not.

    The scale is ``max|w|/m`` for the first m of `qmax`, 1, 2, … `limit` that makes every value of the row whole. Two
    different grids differ by at least 1/128 of a step somewhere, so they cannot be confused.

    Returns:
        int8 and float32; a row of zeros has the smallest scale of the others.

    Example:
        >>> codes, scale = grid_of(torch.tensor([[0.5, -1.0, 1.5]]), 7, 8)
        >>> codes.tolist(), scale.tolist()
        ([[1, -2, 3]], [0.5])
    """
    codes, scale = torch.empty_like(rows, dtype=torch.int8), rows.new_empty(len(rows))
    # Some rows at a time, so that intermediate values fit the processor's cache.
    size = max(1, _IN_CACHE // max(1, rows.shape[1]))
    parts = zip(torch.split(rows, size), torch.split(codes, size), torch.split(scale, size), strict=True)
    if not all(_fill_grid(some, its_codes, its_scale, qmax, limit) for some, its_codes, its_scale in parts):
        return None
    # A row of zeros fits any scale. A neighbor's keeps the bias in the range of s_x s_w.
    known = scale[scale > 0]
    scale[scale == 0] = known.min() if len(known) else 1.0
    return codes, scale


def _fill_grid(rows: Tensor, codes: Tensor, scale: Tensor, qmax: int, limit: int) -> bool:
    """Write codes and scales as `grid_of` does, 0 as the scale of a row of zeros. Return True if all rows fit."""
    # A row's largest value is m times its scale, with m unknown. It is usually qmax (the range was fitted to the
    # largest weight), so try that first, then every other m. Rows that fit leave the search.
    # (two reductions: torch's aminmax along an axis is ten times slower)
    lowest, highest = rows.amin(1), rows.amax(1)
    largest = torch.maximum(highest, -lowest)
    left = largest.nonzero().squeeze(1)
    if len(left) < len(rows):
        codes.zero_()
        scale.zero_()
    for steps in itertools.chain((qmax,), (m for m in range(1, limit + 1) if m != qmax)):
        if not len(left):
            break
        some = len(left) < len(rows)
        step = (largest[left] if some else largest) / steps
        exact = (rows[left] if some else rows) / step.unsqueeze(1)
        rounded = exact.round()
        error = exact.sub_(rounded).abs_().amax(1)
        # -(qmax + 1) may occur, and changes its sign with a batch norm of γ < 0; int8 has no code 128.
        fits = (error <= _ON_GRID) & ((highest[left] / step).round() <= min(limit, 127))
        if fits.all() and not some:
            codes.copy_(rounded)
            scale.copy_(step)
            return True
        codes[left[fits]], scale[left[fits]] = rounded[fits].to(torch.int8), step[fits]
        left = left[~fits]
    return not len(left)


def bias_codes(bias: Tensor, step: Tensor, tolerance: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (codes, scales) of a bias, for integer kernels that add it to their sums; None if it does not fit.

    The scale is ``s_x·s_w``. If rounding would move a bias by more than the tolerance, its scale is changed to
    ``b/code``, which is exact, if that changes it by at most 1 %. Kernels that sum integers use only the codes.

    Example:
        >>> bias_codes(torch.tensor([0.5, 0.26]), torch.tensor([0.1, 0.1]), torch.zeros(2))
        (tensor([5, 3], dtype=torch.int32), tensor([0.1000, 0.0867]))
    """
    bias, step = bias.double(), step.double()
    codes = (bias / step).round()
    if not bool((codes.abs() < _LARGEST_BIAS).all()):
        return None
    # The scale for which this code is exactly the bias, within what onnxruntime accepts as s_x s_w.
    near = (bias / torch.where(codes == 0, torch.ones_like(codes), codes)).clamp(
        step * (1 - _SAME_SCALE), step * (1 + _SAME_SCALE)
    )
    # First the exact step, then the nearby scale. The first one within tolerance runs on integers.
    for scale in (step, near):
        if bool(((codes * scale - bias).abs() <= tolerance).all()):
            return codes.to(torch.int32), scale.float()
    # Otherwise a code with its own scale represents any bias exactly, and onnxruntime leaves the layer in float.
    codes = torch.where((codes == 0) & (bias != 0), bias.sign(), codes)
    return codes.to(torch.int32), torch.where(codes == 0, step, bias / codes).float()


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A layer's int8 codes and their scales along an axis: (channels,), or (channels, blocks) with a block size."""

    codes: Tensor
    scale: Tensor
    axis: int
    block: int


def with_room_for(bias: Tensor, grid: Quantized, input_scale: Tensor, span: Tensor, tolerance: Tensor) -> Quantized:
    """Return the codes with a larger scale for channels whose bias would not fit 32 bits, such as those of γ ≈ 0.

    Left as it is, onnxruntime would clip the bias. A scale changes only if `span`, the width of the input's range,
    times the norm of the change of a channel's weights is within the tolerance, or that part of a bias above 1.

    Example:
        >>> grid = Quantized(torch.tensor([[1, -127], [1, -127]], dtype=torch.int8), torch.tensor([1e-20, 0.1]), 0, 0)
        >>> scale = torch.tensor(0.1)
        >>> found = with_room_for(torch.ones(2), grid, scale, 255 * scale, torch.full((2,), 1e-6))
        >>> found.codes.tolist(), found.scale[1].item() == grid.scale[1].item()
        ([[0, 0], [1, -127]], True)
    """
    wide = (bias.double().abs() >= _LARGEST_BIAS * input_scale.double() * grid.scale.double()).nonzero().squeeze(1)
    if not len(wide):
        return grid
    codes, scale = grid.codes.movedim(grid.axis, 0).clone(), grid.scale.clone()
    rows, step = codes[wide].double().flatten(1), input_scale.double()
    old, new = scale[wide].double(), (1 + 1e-6) * bias[wide].double().abs() / (_LARGEST_BIAS * step)
    fewer = (rows * (old / new).unsqueeze(1)).round()
    change = (rows * old.unsqueeze(1) - fewer * new.unsqueeze(1)).norm(dim=1)
    fits = span * change <= tolerance[wide] * bias[wide].abs().clamp_min(1)
    codes[wide[fits]] = fewer[fits].to(torch.int8).view(-1, *codes.shape[1:])
    scale[wide[fits]] = new[fits].float()
    return dataclasses.replace(grid, codes=codes.movedim(0, grid.axis).contiguous(), scale=scale)


def weight_grid(name: str, module: Any, values: Tensor, scheme: LayerScheme) -> Quantized:
    """Return the codes of a layer's quantized weight."""
    rows = as_rows(module, values).contiguous()
    # Binary weights are -1 and 1: they need two bits, since one bit in two's complement has no 1.
    bits = max(scheme.weight_bits, 2)
    # limit allows one more step than qmax, since -2^(b-1) is a code too.
    qmax, limit = 2 ** (bits - 1) - 1, 2 ** (bits - 1)
    block = 0
    if scheme.weight == "group":
        block = scheme.group_of(rows.shape[1])
        if scheme.affine:  # q − z is stored
            qmax = limit = min(127, 2**bits - 1)
    found = grid_of(rows.view(-1, block) if block else rows, qmax, limit)
    if found is None:  # NaN and infinity are on no grid
        check_finite("export_onnx", name, values)
        got = f"{scheme.weight} of {bits} bits {'with zero points ' if scheme.affine else ''}that are not"
        rule = f"{name} must have weights on a grid of int8 codes, got {got}"
        remedy = "export the model that was saved after training; if an earlier run left eff_deployment.json, delete it"
        raise CompatibilityError("export_onnx", rule, remedy)
    codes, scale = found
    if not block and bits < 7:
        # The same values on a finer grid, which the bias uses too; −2^(b−1) becomes −64: with 8-bit codes products
        # saturate on processors without VNNI
        factor = 2 ** (7 - bits)
        codes, scale = codes * factor, scale / factor
    return in_place(name, module, codes.view(rows.shape), scale, block, values)


def in_place(name: str, module: Any, codes: Tensor, scale: Tensor, block: int, values: Tensor) -> Quantized:
    """Return the codes of rows in the shape of the layer's weight, with the axis of their scales."""
    if block:
        if module.__class__ is nn.Embedding or isinstance(module, (nn.Linear, *PACKED)):
            return Quantized(codes, scale.view(len(codes), -1), 1, block)
        rule = f"{name} must have a scale per channel to be exported as a convolution, got groups"
        raise CompatibilityError("export_onnx", rule, "skip it in qat, or override its scheme with int8_weight")
    if not isinstance(module, TRANSPOSED):
        return Quantized(codes.view(values.shape), scale, 0, 0)
    # (in, out / groups, ...): a channel is a pair (group, out), and DequantizeLinear scales along one axis. Rows are
    # kept, and reshaped to the weight's shape in the graph.
    if module.groups > 1:  # its channels are spread over two axes
        return Quantized(codes, scale, 0, 0)
    return Quantized(from_rows(module, codes, values).contiguous(), scale, 1, 0)


def check_finite(where: str, name: str, weight: Tensor) -> None:
    """Raise an error for a weight that diverged."""
    if not bool(torch.isfinite(weight).all()):
        rule = f"weights of {name} must be finite, got NaN or infinity"
        raise CompatibilityError(where, rule, "look for the step at which training diverged")


def shared_grid(name: str, module: Any, weight: Tensor, scheme: LayerScheme, shared: dict[int, Quantized]) -> Quantized:
    """Return the codes of a layer's weight. Tied layers share tensors, by the weight's identity in `shared`."""
    key = id(weight)
    if key not in shared:
        shared[key] = weight_grid(name, module, weight.detach(), scheme)
    return shared[key]
