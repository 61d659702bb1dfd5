"""Which layers multiply in FP8, and why the others do not."""

from __future__ import annotations

from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.linear import Fp8Linear, LayerFp8, swap
from shared_core.module_match import match_modules


def convert_to_fp8(model: nn.Module, config: Fp8Config) -> nn.Module:
    """Return `model`, changed in place so that its linear layers multiply in FP8; for loops without a session.

    Args:
        model: Any model with `nn.Linear` layers.
        config: The options. Delayed scaling is refused: its histories move with the steps that a session counts.

    Raises:
        ConfigError: With ``recipe="delayed"``.
        MatchError: If no layer is left, or a pattern matches nothing.
        CompatibilityError: If a layer named in ``include`` cannot multiply in FP8.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 2))
        >>> [type(layer).__name__ for layer in convert_to_fp8(net, Fp8Config(recipe="tensorwise"))]
        ['Linear', 'Fp8Linear', 'Linear']
    """
    if config.recipe == "delayed":
        raise ConfigError(
            "convert_to_fp8: recipe must be one without history, got 'delayed'; use a Session, which counts steps"
        )
    layers, _ = select_layers(model, config)
    for index, module in enumerate(layers.values()):
        swap(module, LayerFp8(config, None, index))
    return model


def select_layers(model: nn.Module, config: Fp8Config) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return (name → layer to swap, name → why a matched layer stays in high precision).

    A layer that ``include`` names, by its full name, ``first`` or ``last``, must be able; one that only a pattern or a
    type matches, or nothing at all, goes through the filter: the model's first and last linear layers are left out,
    and so are sizes that tensor cores cannot multiply.

    Raises:
        MatchError: If nothing is left.
        CompatibilityError: If a named layer cannot run, or the model is converted already.
    """
    if any(type(module) is Fp8Linear for module in model.modules()):
        raise CompatibilityError("fp8: model must have no FP8 layers yet; detach or finish the earlier run first")
    matched = match_modules(model, (nn.Linear,), where="fp8", include=config.include, skip=config.skip)
    able = [module for module in model.modules() if isinstance(module, nn.Linear)]
    ends = {"first": able[0], "last": able[-1]}
    layers: dict[str, nn.Linear] = {}
    left_out: dict[str, str] = {}
    for found in matched:
        module = found.module
        named = found.name in config.include or any(module is ends.get(pattern) for pattern in config.include)
        reason = _why_not(found.name, module)
        if named and reason is not None:
            raise CompatibilityError(
                f"fp8: include must name layers that can multiply in FP8, got {found.name}: {reason}"
            )
        if reason is None and not named:
            places = [place for place, end in ends.items() if end is module]
            reason = f"the model's {places[0]} linear layer; name it in include to have it in FP8" if places else None
        if reason is None and isinstance(module, nn.Linear):
            layers[found.name] = module
        else:
            left_out[found.name] = str(reason)
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise MatchError(f"fp8: must match at least one layer that can multiply in FP8; {reasons}")
    return layers, left_out


def _why_not(name: str, module: nn.Module) -> str | None:
    if any(part.startswith("lora_") for part in name.split(".")):
        return "a LoRA adapter, small and trained in high precision"
    if type(module) is not nn.Linear:
        # also torch's own NonDynamicallyQuantizableLinear: attention reads its weight and never calls its forward
        return f"{type(module).__name__} is a class of its own, whose forward is not known"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}, not floating point"
    for side, size in (("in_features", module.in_features), ("out_features", module.out_features)):
        if size % 16:
            return f"{side} must be a multiple of 16 for FP8 tensor cores, got {size}"
    return None
