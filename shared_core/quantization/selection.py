"""Which layers are quantised, and why the others are not."""

from __future__ import annotations

from collections import Counter

from torch import nn

from shared_core.errors import CompatibilityError, MatchError
from shared_core.module_match import match_modules
from shared_core.quantization.layers import weights_of
from shared_core.quantization.modules import FAKE_QUANT, is_quantized


def select_layers(
    model: nn.Module, include: tuple[str, ...], skip: tuple[str, ...]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return (name → layer to quantise, name → why a matched layer stays in float).

    Args:
        model: Searched through.
        include: As in `match_modules`. A layer that stands here by its own name or type must be quantisable.
        skip: As in `match_modules`.

    Raises:
        MatchError: If nothing is left.
        CompatibilityError: If a layer that was asked for by name or type cannot be quantised, or the model
            already has quantisers.
    """
    if any(is_quantized(module) for module in model.modules()):
        raise CompatibilityError("qat: model must have no quantisers yet; detach or finish the earlier run first")
    matched = match_modules(model, tuple(FAKE_QUANT), where="qat", include=include, skip=skip)
    # a module under two names is one owner: `modules()` yields it once
    owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    reasons = [_why_not(found.name, found.module) for found in matched]
    able = [found.module for found, reason in zip(matched, reasons, strict=True) if reason is None]
    quantised = Counter(id(weight) for module in able for weight in weights_of(module).values())
    layers: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for found, why in zip(matched, reasons, strict=True):
        reason = why
        # an embedding and a head that share a weight quantise its rows alike
        if reason is None and any(owners[id(w)] > quantised[id(w)] for w in weights_of(found.module).values()):
            reason = "its weight is tied to another module, which would not be quantised"
        if reason is None:
            layers[found.name] = found.module
        elif found.name in include or type(found.module).__name__ in include:
            raise CompatibilityError(f"qat: include must name layers that can be quantised, got {found.name}: {reason}")
        else:
            left_out[found.name] = reason
    if not layers:
        told = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise MatchError(f"qat: must match at least one module that can be quantised; {told}")
    return layers, left_out


def _why_not(name: str, module: nn.Module) -> str | None:
    if any(part.startswith("lora_") for part in name.split(".")):
        return "a LoRA adapter, trained in float over a quantised base"
    if type(module) not in FAKE_QUANT:
        # also torch's own NonDynamicallyQuantizableLinear: attention reads its weight and never calls its
        # forward
        return f"{type(module).__name__} is a class of its own, whose forward is not known"
    weights = weights_of(module)
    if not weights:
        return "its weight is computed by other code (a parametrisation, torch.nn.utils.prune)"
    dtypes = {weight.dtype for weight in weights.values() if not weight.is_floating_point()}
    return f"its weight is {dtypes.pop()}, not floating point" if dtypes else None
