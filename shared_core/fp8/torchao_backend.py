"""torchao's float8 training in place of our layers, for the recipes that it has; the only file that knows torchao."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import nn

from shared_core.errors import MissingExtraError
from shared_core.fp8 import probe
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.linear import weight_of
from shared_core.module_match import change_class

# what `Float8Linear.from_float` sets beside what every layer has
_ADDED = ("scaling_type_input", "scaling_type_weight", "scaling_type_grad_output", "config", "linear_mm_config")


def swap_to_torchao(module: nn.Linear, config: Fp8Config) -> None:
    """Make a stock layer torchao's `Float8Linear`, in place: module, parameters and keys stay.

    Products run on torch's scaled matmul where that gives the emulation's numbers, else torchao emulates them.

    Args:
        module: A stock layer.
        config: The options, with recipe `tensorwise` or `rowwise`.

    Raises:
        MissingExtraError: If torchao is not installed.
    """
    layer_class, _ = _torchao(config, module.weight.device)
    follow_device(module, config)
    change_class(module, nn.Linear, layer_class)


def follow_device(module: nn.Module, config: Fp8Config) -> None:
    """Have a layer multiplied as the device that it is on now can: trainers move a model after its conversion."""
    layer_class, settings = _torchao(config, weight_of(module).device)
    donor = layer_class.from_float(module, settings)
    vars(module).update({name: vars(donor)[name] for name in _ADDED})


def is_torchao_linear(module: nn.Module) -> bool:
    """Return whether a layer is torchao's; without importing it."""
    float8 = sys.modules.get("torchao.float8.float8_linear")
    return float8 is not None and isinstance(module, float8.Float8Linear)


def restore_from_torchao(module: nn.Module) -> None:
    """Make a layer of `swap_to_torchao` stock again; one that is stock stays so."""
    if is_torchao_linear(module):
        change_class(module, sys.modules["torchao.float8.float8_linear"].Float8Linear, nn.Linear)
        for name in _ADDED:
            vars(module).pop(name, None)


def _torchao(config: Fp8Config, device: torch.device) -> tuple[Any, Any]:
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise MissingExtraError("fp8: backend=torchao", "torchao", "torchao") from error
    settings = Float8LinearConfig.from_recipe_name(config.recipe)
    reason = probe.why_not_native(config.recipe, config.gradient_dtype, device)
    changes: dict[str, Any] = {"emulate": reason is not None}
    if config.gradient_dtype != settings.cast_config_grad_output.target_dtype:
        gradient = dataclasses.replace(settings.cast_config_grad_output, target_dtype=config.gradient_dtype)
        changes |= {"cast_config_grad_output": gradient, "cast_config_grad_output_for_grad_weight": gradient}
    # the weight's gradient contracts tokens, and tensor cores take multiples of 16; emulation needs no padding
    changes["pad_inner_dim"] = not changes["emulate"]
    return Float8Linear, dataclasses.replace(settings, **changes)
