"""Which weights are pruned, why others are not, and the towers they belong to.

Towers are a model's top-level parts, such as a vision and a text encoder, whose weights may differ in scale.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.plan import Touched
from shared_core.errors import CompatibilityError, MatchError, by_reason
from shared_core.modules.calls import has_rows
from shared_core.modules.matching import (
    UNHELD,
    StackedExperts,
    chosen_modules,
    conv1d_of,
    expert_weights,
    matrix_names,
    options_by_module,
    own_class,
    plain_name,
    weight_of,
)
from shared_core.modules.own_forward import COMPUTED, UNKNOWN, why_computed
from shared_core.modules.weight_views import CONVOLUTIONS, PACKED, input_axis, output_axis, weights_of
from shared_core.pruning.config import PruneConfig

_FEW = 0.1
"""Warn if a tower keeps less than this fraction of the share that the others keep."""


def tower_names(names: Sequence[str]) -> list[str]:
    """Return the tower of each weight.

    Towers are the top-level modules. A module that wraps all others except single layers is skipped, and numbered
    modules are not split.

    Example:
        >>> tower_names(["model.vision.0.fc.weight", "model.vision.1.fc.weight", "model.text.a.weight",
        ...              "model.text.b.weight", "head.weight"])
        ['model.vision', 'model.vision', 'model.text', 'model.text', 'head']
        >>> tower_names(["model.layers.0.fc.weight", "model.layers.1.fc.weight", "head.weight"])
        ['model.layers', 'model.layers', 'head']
    """
    paths = [name.split(".")[:-1] for name in names]
    around: list[str] = []
    while True:
        layers: dict[str, set[tuple[str, ...]]] = {}
        for path in paths:
            if path[: len(around)] == around and len(path) > len(around):
                layers.setdefault(path[len(around)], set()).add(tuple(path))
        several = [child for child, inside in layers.items() if len(inside) > 1]
        if any(child.isdecimal() for child in layers) or len(several) != 1:
            break
        around.append(several[0])
    numbered = any(child.isdecimal() for child in layers)
    depth = len(around) + (not numbered)
    return [".".join(path[: depth if path[: len(around)] == around else 1]) for path in paths]


def tower_notes(where: str, weights: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return a warning for each tower of several matrices that is almost empty while the others are not."""
    counts: dict[str, list[int]] = {}
    for tower, (size, gone) in zip(tower_names([*weights]), weights.values(), strict=True):
        size_, gone_, matrices = counts.get(tower, [0, 0, 0])
        counts[tower] = [size_ + size, gone_ + gone, matrices + 1]
    sizes, gones = (sum(count[i] for count in counts.values()) for i in (0, 1))
    notes = []
    for tower, (size, gone, matrices) in counts.items():
        if matrices < 2 or size == sizes:
            continue
        share, others = gone / size, (gones - gone) / (sizes - size)
        if 1 - share < _FEW * (1 - others):
            notes.append(
                f"{where}: {share:.1%} of the weights of {tower} are pruned, but {others:.1%} elsewhere, because all "
                "share one threshold. Use scope tower to give each part its own".replace("%", " %")
            )
    return notes


_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
_NEVER_CALLED = (
    "attention reads this weight without calling the layer, so its inputs are not seen. Use criterion magnitude or "
    "taylor, without cost flops or energy"
)
_NO_EXPERTS_INPUTS = (
    "multiplies each expert's tokens internally, so their inputs are not seen. Use criterion magnitude or taylor, "
    "without cost flops or energy"
)
_NO_INPUTS = "uses this weight internally, so its inputs are not seen. Use criterion magnitude or taylor"
LEFT_ALONE = "left dense by overrides, sparsity 0"
_LEFT_OUT = "left out by include, skip or min_size"
_NO_UNITS = "has packed outputs that cannot be pruned as units. Use granularity unstructured, n_m or block"
_NO_ROWS = "is not a linear layer, and criterion sparsegpt supports no other. Use wanda"
_UNABLE = (COMPUTED, _NEVER_CALLED, _NO_INPUTS, _NO_EXPERTS_INPUTS, _NO_UNITS, _NO_ROWS)


def prunable_types(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the prunable module types with one ``weight``: linear and convolutional layers.

    transformers' ``Conv1D`` (GPT-2's linear layer) is found by name, so transformers need not be imported.
    """
    return (*_TYPES, *conv1d_of(model))


@dataclass(frozen=True)
class Targets:
    """The weights and modules that pruning touches.

    Attributes:
        modules: Weight name (as in ``model.state_dict()``, without wrapper prefixes) → a module that holds it
            (`weight_of`).
        left_out: Name of every other matrix or larger tensor → why it is not pruned.
        sparsities: Weight name → sparsity from `config.overrides`, including weights left out for sparsity 0.
    """

    modules: dict[str, nn.Module]
    left_out: dict[str, str]
    sparsities: dict[str, float] = field(default_factory=dict)

    @property
    def own(self) -> dict[str, float]:
        """Sparsities of the pruned weights that have one of their own."""
        return {name: share for name, share in self.sparsities.items() if name in self.modules}

    def without(self, unheld: Container[Tensor], where: str, verb: str = "prune") -> Self:
        """Return the targets without the weights that no optimizer holds."""
        out = {name: UNHELD for name, weight in self.weights().items() if weight in unheld}
        if len(out) == len(self.modules):
            raise MatchError(where, f"no optimizer trains any of the weights to {verb}")
        modules = {name: module for name, module in self.modules.items() if name not in out}
        return replace(self, modules=modules, left_out=self.left_out | out)

    def touched(self) -> Touched:
        """Return the weights to prune, and why others stay dense."""
        return Touched.parameters(self.weights().items(), self.left_out, asked=self.sparsities.keys() - self.modules)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the current parameters of the modules: a wrapper (FSDP2) may have replaced them."""
        return {name: weight_of(name, module) for name, module in self.modules.items()}


def find_targets(model: nn.Module, config: PruneConfig) -> Targets:
    """Return the weights to prune, in registration order, each tensor once.

    Special cases:
        - A shared tensor is pruned, once, only if all its modules are chosen. An output layer tied to an embedding
          stays dense.
        - A frozen tensor is pruned only if `config.include` names its module.
        - A computed ``weight`` (weight norm, another parametrization) or one that is not floating point never is.
        - Biases and other vectors never are.
        - Packed attention projections, recurrent weights and each expert of stacked experts are pruned as separate
          matrices, but not by units.
        - Weights with sparsity 0 in `config.overrides` are left out.
    """
    types: tuple[type[nn.Module], ...] = (*prunable_types(model), *PACKED, StackedExperts)
    chosen = chosen_modules(config, model, types, where="prune")
    places = {found.module: found.name for found in chosen}
    stacked = {id(found.module._parameters[found.parameter]) for found in chosen if found.parameter}
    # By tensor: a tied one is pruned only if all modules that hold it are within reach.
    holders: dict[Tensor, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((plain_name(module_name), module, name))

    modules: dict[str, nn.Module] = {}
    left_out: dict[str, str] = {}
    for parameter, held_by in holders.items():
        # Named after the holder that matched, so that include, skip and overrides use the same name.
        place, module, name = next((held for held in held_by if held[1] in places), held_by[0])
        full_name = f"{place}.{name}".removeprefix(".")
        reason = _reason(parameter, held_by, places, types, config)
        if reason is None and isinstance(module, StackedExperts) and id(parameter) not in stacked:
            reason = _LEFT_OUT
        if reason and reason.endswith(_UNABLE) and not {place, full_name}.isdisjoint(config.include):
            raise CompatibilityError("prune", f"include must name layers that can be pruned, got {place}: {reason}")
        if reason is None:
            modules[full_name] = module
        elif parameter.ndim > 1:
            left_out[full_name] = reason
    if config.granularity == "n_m":
        for name in list(modules):
            size = weight_of(name, modules[name]).shape[input_axis(modules[name])]
            if size % config.kept_of[1]:
                left_out[name] = f"its {size} inputs are not a multiple of {config.kept_of[1]} (n_m = {config.n_m})"
                del modules[name]
    sparsities = _own_sparsities(config, modules, holders) if config.overrides else {}
    for name in (name for name, share in sparsities.items() if not share):
        left_out[name] = LEFT_ALONE
        del modules[name]
    if not modules:
        reasons = by_reason(left_out) or "no matrix among them"
        raise MatchError("prune", f"must find at least one weight to prune, but all were left out ({reasons})")
    if not config.prunes_units and config.granularity != "n_m":
        _refuse_nothing_of_weights(config, modules, sparsities)
    return Targets(modules, left_out, sparsities)


def _own_sparsities(
    config: PruneConfig, modules: dict[str, nn.Module], holders: dict[Tensor, list[tuple[str, nn.Module, str]]]
) -> dict[str, float]:
    """Return the sparsity of each weight for which an override names any module that holds it."""
    places = {name: [place for place, _, _ in holders[weight_of(name, module)]] for name, module in modules.items()}
    named = {place: module for held in holders.values() for place, module, _ in held}
    for name in (name for name, module in modules.items() if isinstance(module, StackedExperts)):
        places[name].append(name)  # after the module's: the parameter's own name wins
        named[name] = modules[name]
    layers = {place: named[place] for found in places.values() for place in found}
    options = options_by_module("prune", config.override_options(), layers, "pruned layer")
    return {
        name: float(options[place]["sparsity"]) for name, found in places.items() for place in found if options[place]
    }


def refuse_nothing(config: PruneConfig, sizes: Mapping[str, int], what: str, own: Mapping[str, float]) -> None:
    """Refuse a sparsity that rounds to nothing. Each of `sizes` keeps at least one, except with granularity layer."""
    for name, share in own.items():
        if share and min(round(share * sizes[name]), sizes[name] - 1) < 1:
            rule = f"overrides must prune at least one of {sizes[name]} {what} of {name}, got sparsity {share}"
            raise MatchError("prune", rule, "raise it, or use 0 to leave it dense")
    rest = {name: size for name, size in sizes.items() if name not in own}
    of_towers = config.resolved_scope == "tower"
    together: dict[str, list[int]] = {}
    for tower, size in zip(tower_names([*rest]) if of_towers else [""] * len(rest), rest.values(), strict=True):
        together.setdefault(tower, []).append(size)
    if of_towers and len(together) < 2:
        found = "".join(f"one, {tower or 'the model'}" for tower in together) or "none"
        raise MatchError("prune", f"scope tower must find two top-level parts, got {found}", "use scope global")
    for of_one in together.values():
        _refuse_nothing_together(config, of_one, what)


def _refuse_nothing_together(config: PruneConfig, sizes: list[int], what: str) -> None:
    if config.granularity == "layer":
        most = round(config.sparsity * len(sizes))
    elif config.resolved_scope == "local" or config.criterion == "wanda":
        # With wanda or local scope each tensor (row) rounds by itself, so the largest one decides.
        most = max((min(round(config.sparsity * size), size - 1) for size in sizes), default=0)
    else:
        most = min(round(config.sparsity * sum(sizes)), sum(sizes) - len(sizes))
    if config.sparsity and sizes and most < 1:
        together = ", use one threshold for all (scope global)" if config.resolved_scope == "local" else ""
        rule = f"sparsity must prune at least one of {sum(sizes)} {what}, got {config.sparsity}, which rounds to none"
        raise MatchError("prune", rule, f"raise it{together}, or prune in smaller pieces")


def _refuse_nothing_of_weights(
    config: PruneConfig, modules: dict[str, nn.Module], sparsities: Mapping[str, float]
) -> None:
    sizes: dict[str, int] = {}
    own: dict[str, float] = {}
    for name, module in modules.items():
        shape = weight_of(name, module).shape
        for matrix in matrix_names(name, module, shape[0]):
            one = shape[1:] if matrix != name else shape
            sizes[matrix] = one.numel()
            if config.granularity == "block":
                rows, columns = block_of(config, module)
                # Partial tiles at the border count as tiles.
                sizes[matrix] = -(-one[0] // rows) * -(-one[1:].numel() // columns)
            elif config.criterion == "wanda":
                sizes[matrix] //= shape[output_axis(module)]
            if name in sparsities:
                own[matrix] = sparsities[name]
    refuse_nothing(config, sizes, "blocks" if config.granularity == "block" else "weights", own)


def block_of(config: PruneConfig, module: nn.Module) -> tuple[int, int]:
    """Return the size of a tile along the first and the other axes of a layer's matrix."""
    outputs, inputs = config.block_size
    return (inputs, outputs) if isinstance(module, StackedExperts) and output_axis(module) == 2 else (outputs, inputs)


def _reason(
    parameter: Tensor,
    held_by: list[tuple[str, nn.Module, str]],
    places: dict[nn.Module, str],
    types: tuple[type[nn.Module], ...],
    config: PruneConfig,
) -> str | None:
    """Return why a tensor is left dense, or None if it is pruned."""
    outside = [held for held in held_by if held[1] not in places or not _is_pruned(held[1], held[2])]
    if outside:
        place, module, name = outside[0]
        tied = f"shared with {place or 'the model'}: " if len(outside) < len(held_by) else ""
        if isinstance(module, types) and _is_pruned(module, name):
            return f"{tied}{_LEFT_OUT}"
        return f"{tied}{type(module).__name__}.{name} is not a prunable weight"
    if not parameter.is_floating_point():
        return f"not floating point ({parameter.dtype})"
    if not parameter.requires_grad and not config.include:
        return "frozen; name its module in include to prune it"
    for _, holder, name in held_by:
        computed = why_computed(holder, keeps_zeros=True) if name == "weight" else None
        if computed and not (computed == UNKNOWN and config.include):
            return f"{type(holder).__name__}: {computed}"
    module = held_by[0][1]
    if isinstance(module, StackedExperts):
        if config.prunes_units:
            return f"{type(module).__name__} {_NO_UNITS}"
        return f"{type(module).__name__} {_NO_EXPERTS_INPUTS}" if config.watches_layers else None
    if config.watches_layers and own_class(module) is NonDynamicallyQuantizableLinear:
        return _NEVER_CALLED
    if config.criterion == "sparsegpt" and not has_rows(module):
        return f"{type(module).__name__} {_NO_ROWS}"
    if isinstance(module, PACKED):
        if parameter.numel() < config.min_size:
            return "left out by min_size"
        if config.prunes_units:
            return f"{type(module).__name__} {_NO_UNITS}"
        if config.gathers_at_layers:
            return f"{type(module).__name__} {_NO_INPUTS}"
    return None


def _is_pruned(module: nn.Module, name: str) -> bool:
    """Return True if a tensor that a chosen module holds under this name is prunable."""
    if isinstance(module, StackedExperts):
        return name in expert_weights(module)
    return name in weights_of(module) if isinstance(module, PACKED) else name == "weight"


def refuse_sharded(config: PruneConfig, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights sharded by FSDP2 if the options need more than one whole weight at a time."""
    sharded = next((name for name, weight in weights.items() if is_sharded(weight)), None)
    if sharded and (reason := config.why_not_sharded):
        raise CompatibilityError("prune", f"sharded weights such as {sharded} are not supported here: {reason}")


def refuse_adapters(where: str, model: nn.Module, chosen: Mapping[str, nn.Module], done: str, instead: str) -> None:
    """Refuse to change weights that PEFT later merges with others, which would undo the change."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")  # if PEFT is not imported, there are no such layers
    if tuners is None:
        return
    inside = {
        id(part)
        for layer in model.modules()
        if isinstance(layer, tuners.BaseTunerLayer) and isinstance(layer, nn.Module)
        for part in layer.modules()
    }
    name = next((name for name, module in chosen.items() if id(module) in inside), None)
    if name is not None:
        rule = f"weights of PEFT adapters and of the layers below them cannot be changed, got {name}: {done}"
        raise CompatibilityError(where, rule, f"{instead}, or exclude these layers with skip")
