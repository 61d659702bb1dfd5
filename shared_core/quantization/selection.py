"""Which layers are quantised, and why the others are not."""

from __future__ import annotations

from collections import Counter

from torch import nn

from shared_core.errors import CompatibilityError, MatchError
from shared_core.module_match import match_modules
from shared_core.quantization.modules import FAKE_QUANT, STOCK


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
    if any(type(module) in STOCK for module in model.modules()):
        raise CompatibilityError("qat: model must have no quantisers yet; detach or finish the earlier run first")
    matched = match_modules(model, tuple(FAKE_QUANT), where="qat", include=include, skip=skip)
    owners = Counter(id(weight) for module in model.modules() for weight in module._parameters.values())
    layers: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for found in matched:
        reason = _why_not(found.name, found.module, owners)
        if reason is None:
            layers[found.name] = found.module
        elif found.name in include or type(found.module).__name__ in include:
            raise CompatibilityError(f"qat: include must name layers that can be quantised, got {found.name}: {reason}")
        else:
            left_out[found.name] = reason
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise MatchError(f"qat: must match at least one module that can be quantised; {reasons}")
    return layers, left_out


def _why_not(name: str, module: nn.Module, owners: Counter[int]) -> str | None:
    if any(part.startswith("lora_") for part in name.split(".")):
        return "a LoRA adapter, trained in float over a quantised base"
    if type(module) not in FAKE_QUANT:
        # also torch's own NonDynamicallyQuantizableLinear: attention reads its weight and never calls its
        # forward
        return f"{type(module).__name__} is a class of its own, whose forward is not known"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed by other code (a parametrisation, torch.nn.utils.prune)"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, not floating point"
    if owners[id(weight)] > 1:
        return "its weight is tied to another module, which would not be quantised"
    return None
