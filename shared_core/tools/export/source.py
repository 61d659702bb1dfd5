"""The model that is exported: a copy whose layers quantise as they did in training, and its baked twin."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shared_core.errors import CompatibilityError, ConfigError
from shared_core.modules.weight_views import weights_of
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
)
from shared_core.quantization.ranges.saved_ranges import apply_ranges, merge_folds_
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.onnx_layers import check_begun, check_exportable


def plain(inputs: Any) -> Any:
    """Return inputs that torch.export takes for what they are.

    A mapping becomes a dict: a tokenizer's BatchEncoding is one that torch does not know. A tensor that stands in two
    places is copied for the second: torch.export takes the two for one input, and reads one of them for both.
    """
    seen: set[int] = set()

    def apart(x: Tensor) -> Tensor:
        if id(x) in seen:
            return x.clone()
        seen.add(id(x))
        return x

    return tree_map_only(Tensor, apart, dict(inputs) if isinstance(inputs, Mapping) else inputs)


def check_inputs(inputs: Any, where: str) -> None:
    """Refuse inputs to export with that hold no tensor."""
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(plain(inputs))):
        raise ConfigError(
            where,
            f"example_inputs must hold a tensor, got {type(inputs).__name__}",
            "pass what the model is called with",
        )


def quantized_reference(
    model: nn.Module, where: str, check: Callable[[str, Any, str], None] = check_exportable
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy of `model` in evaluation whose quantised layers all fake-quantise, and their names, if any."""
    # A copy: folding and baking change it. On the CPU, where the runtimes compute.
    reference = conv1d_as_linear(copy.deepcopy(model)).eval().cpu()
    for name, module in reference.named_modules():
        if is_quantized(module):
            check_begun(name, module, where)
    # Before the ranges are read: a merged batch norm scales the weight, and so changes its codes.
    merge_folds_(reference)
    entries = {
        name: layer_entry(module)
        for name, module in reference.named_modules()
        # stock layers that training left, and layers whose batch norm was just merged
        if type(module) in FAKE_QUANT or (is_quantized(module) and module.quantizer.baked)  # type: ignore[union-attr]
    }
    after = {name: entry for name, entry in entries.items() if entry is not None}
    # Layers that training has baked (or a fold just has) are made to quantise again from what is kept for deployment:
    # their grid is needed, and the baked weight alone does not tell it.
    if after:
        apply_ranges(reference, after)
    reference = cells_as_linear(reference)
    names = tuple(name for name, module in reference.named_modules() if type(module) in STOCK)
    for name in names:
        check(name, reference.get_submodule(name), where)
    half = (torch.float16, torch.bfloat16)  # the runtimes compute neither on a CPU as torch does
    odd = next((name for name, value in reference.named_parameters() if value.dtype in half), None)
    if odd is not None:
        raise CompatibilityError(
            where, f"model must be float32, got {reference.get_parameter(odd).dtype} for {odd}", "call model.float()"
        )
    return reference, names


def baked_copy(
    reference: nn.Module, names: tuple[str, ...], inputs: Any = None
) -> tuple[nn.Module, dict[str, Any], dict[str, LayerScheme], dict[str, tuple[Tensor, Tensor] | None]]:
    """Return a copy with stock layers and batch norms folded, those layers, their schemes, and their inputs' ranges.

    Args:
        reference: From `quantized_reference`.
        names: Its quantised layers.
        inputs: To trace it with; None: batch norms stay.
    """
    # Values that nothing writes into, which baking and folding do, are not copied.
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
    # Before baking, which drops the quantiser's state.
    qparams = {name: layer.quantizer.qparams(layer) for name, layer in layers.items()}
    schemes = {}
    # Tied layers have one weight: bake it once.
    baked: set[int] = set()
    for name, layer in layers.items():
        quantizer = layer.quantizer
        scheme = quantizer.scheme
        if scheme.has_range and qparams[name] is None:  # it saw no input: the model leaves that in float too
            scheme = dataclasses.replace(scheme, input="none")
        schemes[name] = scheme
        if not quantizer.baked:
            bake_(layer, baked)
    for layer in layers.values():
        restore(layer)
    if inputs is not None:
        with contextlib.suppress(CompatibilityError):  # a model that cannot be traced keeps its batch norms
            fuse_batch_norm(exported, plain(inputs))
    return exported, layers, schemes, qparams


def float_layers(exported: nn.Module) -> tuple[str, ...]:
    """Return the layers that could be quantised and are not."""
    return tuple(name for name, module in exported.named_modules() if type(module) in FAKE_QUANT and weights_of(module))


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) that inputs stand for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence exporters while they run."""
    # they warn of torchvision's operators and of their own registries
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
