"""Whose weights are shared, in how many bits, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shared_core.errors import MatchError
from shared_core.module_match import match_modules, plain_name
from shared_core.pruning.compression.config import ShareConfig
from shared_core.pruning.compression.sharing import SHARED_DTYPES
from shared_core.pruning.targets import prunable_types


@dataclass(frozen=True)
class SharedTargets:
    """What weight sharing touches: by name of the weight a module that holds it, and the bits of its codes."""

    modules: dict[str, nn.Module]
    bits: dict[str, int]
    left_out: dict[str, str]
    """The weights of chosen modules that are left as they are, with the reason."""

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the modules hold now: a wrapper may have replaced them since."""
        weights = {name: module._parameters["weight"] for name, module in self.modules.items()}
        return {name: weight for name, weight in weights.items() if weight is not None}


def find_shared(model: nn.Module, config: ShareConfig) -> SharedTargets:
    """Return the weights to share, those of linear, convolutional and embedding layers, each tensor once.

    A tensor that several modules hold is shared only if all of them are chosen; a frozen one only if
    `config.include` names its module; one that is computed, not float16, bfloat16, float32 or float64, or an
    embedding's with sparse gradients or ``max_norm``, never.

    Raises:
        MatchError: If nothing is left, or a pattern matches nothing.
    """
    types = (*prunable_types(model), nn.Embedding)
    chosen = match_modules(
        model, types, where="share", include=config.include, skip=config.skip, min_size=config.min_size
    )
    widths = [
        ({found.module for found in match_modules(model, types, where="share: bits_of", include=[pattern])}, bits)
        for pattern, bits in config.widths().items()
    ]
    is_chosen = {found.module for found in chosen}
    holders: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = f"{plain_name(module_name)}.{name}".removeprefix(".")
                holders.setdefault(parameter, []).append((whole, module))

    targets = SharedTargets({}, {}, {})
    for found in chosen:
        name = f"{found.name}.weight".removeprefix(".")
        weight = found.module._parameters.get("weight")
        if weight is None:
            targets.left_out[name] = "computed, by weight norm or another parametrisation"
        elif name != holders[weight][0][0]:
            continue  # under its first name, or left out with it
        elif outside := next((held for held, module in holders[weight] if module not in is_chosen), None):
            targets.left_out[name] = f"shared with {outside}, which is not chosen"
        elif weight.dtype not in SHARED_DTYPES:
            targets.left_out[name] = f"not a float of 16 to 64 bits ({weight.dtype})"
        elif getattr(found.module, "sparse", False) or getattr(found.module, "max_norm", None) is not None:
            targets.left_out[name] = "an embedding with sparse gradients, or one that is normalised in forward"
        elif not weight.requires_grad and not config.include:
            targets.left_out[name] = "frozen; name its module in include to share its weights"
        else:
            targets.modules[name] = found.module
            targets.bits[name] = next((bits for modules, bits in widths if found.module in modules), config.bits)
    if not targets.modules:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in targets.left_out.items()) or "tied to others"
        raise MatchError(f"share: must find at least one weight to share, but all were left out ({reasons})")
    return targets
