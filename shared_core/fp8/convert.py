"""Which layers multiply in FP8, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError
from shared_core.fp8.arithmetic import Arithmetic, CastArithmetic, ScaledArithmetic
from shared_core.fp8.casts import cast_for
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.hfp8 import Hfp8EndCast
from shared_core.fp8.int16 import SharedExponentBank
from shared_core.fp8.linear import Fp8Layer, features_of, is_stock, swap, weight_of
from shared_core.fp8.operators import LayerFp8
from shared_core.fp8.scaling import AmaxBank, NonFiniteWatch
from shared_core.fp8.torchao_backend import is_torchao_linear, swap_to_torchao
from shared_core.module_match import conv1d_of, is_transformers_conv1d, match_modules, read_past_forward

Bank = AmaxBank | SharedExponentBank


@dataclass
class Selection:
    """Which layers change, by name: to the recipe's format, to 16 bit (`hfp8`), or not at all, and why not."""

    narrow: dict[str, nn.Module] = field(default_factory=dict)
    sixteen_bit: dict[str, nn.Module] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def convert_to_fp8(model: nn.Module, config: Fp8Config) -> nn.Module:
    """Return `model`, changed in place so that its linear layers multiply in FP8; for loops without a session.

    Args:
        model: Any model with `nn.Linear` layers or transformers' `Conv1D`, GPT-2's linear layer.
        config: The options. `delayed` and `int16` are refused, whose histories move with the steps that a session
            counts, and `hfp8`, which rounds the weights after each of them.

    Raises:
        ConfigError: With such a recipe.
        MatchError: If no layer is left, or a pattern matches nothing.
        CompatibilityError: If a layer named in ``include`` cannot multiply in FP8.

    Source: Micikevicius et al. 2022, arXiv:2209.05433.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 2))
        >>> [type(layer).__name__ for layer in convert_to_fp8(net, Fp8Config(recipe="tensorwise"))]
        ['Linear', 'Fp8Linear', 'Linear']
    """
    if config.has_session_state:
        raise ConfigError(
            f"convert_to_fp8: recipe must be one without history, got {config.recipe!r}; "
            "use a Session, which counts steps"
        )
    for index, module in enumerate(select_layers(model, config).narrow.values()):
        convert_layer(module, config, index=index)
    return model


def convert_layer(
    module: nn.Module,
    config: Fp8Config,
    *,
    index: int,
    bank: Bank | None = None,
    watch: NonFiniteWatch | None = None,
    sixteen_bit: bool = False,
) -> LayerFp8 | None:
    """Change one layer in place and return what it got beside its weight; None where torchao multiplies.

    Args:
        module: A stock layer.
        config: The options.
        index: The layer's place in the bank.
        bank: What all layers remember of past steps, for recipes that do.
        watch: Told of NaN and infinity.
        sixteen_bit: Whether this layer is one that `hfp8` runs in 16 bit.
    """
    if config.backend == "torchao" and isinstance(module, nn.Linear):
        swap_to_torchao(module, config)
        return None
    arithmetic: Arithmetic
    if sixteen_bit:
        arithmetic = CastArithmetic(Hfp8EndCast(), watch)
    elif config.has_scales:
        arithmetic = ScaledArithmetic(config, bank if isinstance(bank, AmaxBank) else None, index, watch)
    else:
        arithmetic = CastArithmetic(cast_for(config.recipe, index, bank), watch if bank is None else None)
    layer = LayerFp8(arithmetic, watch)
    swap(module, layer)
    return layer


def select_layers(model: nn.Module, config: Fp8Config) -> Selection:
    """Return which layers to swap, and why a matched layer stays in high precision.

    A layer that ``include`` names, by its full name, ``first`` or ``last``, must be able; one that only a pattern or a
    type matches, or nothing at all, goes through the filter: the model's first and last linear layers are left out,
    and so are sizes that tensor cores cannot multiply. With `hfp8` the first and the last layer run in 16 bit, as the
    paper has them.

    Raises:
        MatchError: If nothing is left.
        CompatibilityError: If a named layer cannot run, or the model is converted already.
    """
    if any(isinstance(module, Fp8Layer) or is_torchao_linear(module) for module in model.modules()):
        raise CompatibilityError("fp8: model must have no FP8 layers yet; detach or finish the earlier run first")
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, *conv1d_of(model))
    matched = match_modules(model, kinds, where="fp8", include=config.include, skip=config.skip)
    able = [module for module in model.modules() if isinstance(module, kinds)]
    ends, readers = {"first": able[0], "last": able[-1]}, read_past_forward(model)
    found = Selection()
    for match in matched:
        name, module = match.name, match.module
        named = name in config.include or any(module is ends.get(pattern) for pattern in config.include)
        place = next((place for place, end in ends.items() if end is module), None)
        reason = _why_no_linear(name, module, config)
        if reason is None:
            if place and not named and config.recipe == "hfp8":
                found.sixteen_bit[name] = module
                continue
            reason = _why_odd_size(module)
        if reason is None and id(module) in readers:
            reason = f"{readers[id(module)]}, past any product in FP8"
        if named and reason is not None:
            raise CompatibilityError(f"fp8: include must name layers that can multiply in FP8, got {name}: {reason}")
        if reason is None and place and not named:
            reason = f"the model's {place} linear layer; name it in include to have it in FP8"
        if reason is None:
            found.narrow[name] = module
        else:
            found.left_out[name] = reason
    if not found.narrow:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(found.left_out.items())[:3])
        raise MatchError(f"fp8: must match at least one layer that can multiply in FP8; {reasons}")
    return found


def _why_no_linear(name: str, module: nn.Module, config: Fp8Config) -> str | None:
    if any(part.startswith("lora_") for part in name.split(".")):
        return "a LoRA adapter, small and trained in high precision"
    if not is_stock(module):
        # also torch's own NonDynamicallyQuantizableLinear: attention reads its weight and never calls its forward
        return f"{type(module).__name__} is a class of its own, whose forward is not known"
    if config.backend == "torchao" and is_transformers_conv1d(module):
        return "torchao multiplies nn.Linear alone; leave backend out"
    if not weight_of(module).is_floating_point():
        return f"its weight is {weight_of(module).dtype}, not floating point"
    return None


def _why_odd_size(module: nn.Module) -> str | None:
    for side, size in zip(("in_features", "out_features"), features_of(module), strict=True):
        if size % 16:
            return f"{side} must be a multiple of 16 for FP8 tensor cores, got {size}"
    return None
