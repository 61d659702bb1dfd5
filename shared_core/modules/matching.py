"""Select the modules a technique touches, by type, name pattern, size and place. Matching nothing is an error.

Also stacked experts: one parameter holds the matrices of all experts, as in transformers.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shared_core.errors import ConfigError, MatchError, nearest
from shared_core.modules.attention import calls_projection

STACKED_DIMS = 3
"""Axis 0 for experts, then outputs and inputs in the order of `output_axis_of_experts`."""


def output_axis_of_experts(module: nn.Module) -> int | None:
    """Return the axis of the outputs in the parameters that stack experts; None for other modules.

    1 in (experts, out, in), as in Mixtral, Qwen3-MoE and DeepSeek; 2 in (experts, in, out), as in GPT-OSS and
    Llama 4. It follows from `is_transposed` of transformers' modules, or from common sizes.
    """
    stacked = [value for value in module._parameters.values() if value is not None and value.ndim == STACKED_DIMS]
    if not stacked or len({len(value) for value in stacked}) > 1:
        return None
    is_transposed = vars(module).get("is_transposed")
    if isinstance(is_transposed, bool) and "has_gate" in vars(module):
        return 2 if is_transposed else 1
    sizes = vars(module).get("output_size"), vars(module).get("input_size")
    if len(stacked) == 1 and None not in sizes and sizes[0] != sizes[1]:  # JetMoE
        shape = tuple(stacked[0].shape[1:])
        return 1 if shape == sizes else 2 if shape == sizes[::-1] else None
    up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    if up is None or down is None or len(stacked) > 2:
        return None
    if up.shape[2] == down.shape[1] and up.shape[1] == 2 * down.shape[2]:
        return 1
    return 2 if up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1] else None


class _Stacked(type):
    """Makes `isinstance` check a module's contents, because classes of experts have no common base."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Module) and output_axis_of_experts(instance) is not None


class StackedExperts(nn.Module, metaclass=_Stacked):
    """The class of modules that stack experts, for `match_modules` and `isinstance`. It has no instances."""


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that hold the matrices of all experts, by name; empty for other modules."""
    found = {n: value for n, value in module._parameters.items() if value is not None and value.ndim == STACKED_DIMS}
    return found if isinstance(module, StackedExperts) else {}


def gates_between_products(module: nn.Module) -> bool:
    """Return True if the module's ``_apply_gate`` returns the inputs of the second stack.

    This holds for transformers' batched and grouped products. Its eager loops gate in their own code.
    """
    how = getattr(vars(module).get("config"), "_experts_implementation", None)
    return vars(module).get("has_gate") is True and how in ("batched_mm", "grouped_mm")


def matrices(module: nn.Module, tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a tensor with the shape of a module's weight as matrices: one per expert, or the tensor itself."""
    return tensor.unbind(0) if isinstance(module, StackedExperts) else (tensor,)


def matrix_names(name: str, module: nn.Module, num: int) -> list[str]:
    """Return the names of the matrices of a weight."""
    return [f"{name}[{expert}]" for expert in range(num)] if isinstance(module, StackedExperts) else [name]


class PlannedForward:
    """Replaces the forward that a tensor parallel plan put on a layer, and calls the forward of its current class.

    Without gradients the plan would pass plain local parts of weight and input, which do not show if a row is
    whole. Here both are always DTensors, which know their part of the whole.
    """

    def __init__(self, module: nn.Module, planned: Any, style: Any, mesh: Any) -> None:
        self.planned, self._module, self._style, self._mesh = planned, module, style, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        module, style, mesh, asked = self._module, self._style, self._mesh, torch.is_grad_enabled()
        with torch.enable_grad():  # a plan's style decides by this which tensors to pass
            args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
            with torch.set_grad_enabled(asked):
                output = type(module).forward(module, *args, **kwargs)
            output = style.transform_output_post_forward(module, output, mesh)
        return output if asked else output.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return PlannedForward(copy.deepcopy(self._module, memo), self.planned, self._style, self._mesh)


def follow_class(module: nn.Module) -> bool:
    """Return True if a plan's forward on a layer now follows the layer's class, until `leave_planned`.

    False for packed projections and experts, for which plans pass plain parts in training too.
    """
    planned = vars(module).get("forward")
    if not inspect.isfunction(planned):
        return False
    inside = inspect.getclosurevars(planned).nonlocals
    style = inside.get("self")
    takes_parts = getattr(style, "should_use_local_tensors", None)
    if takes_parts is None or "original_forward" not in inside:
        return False
    with torch.enable_grad():
        if takes_parts(module):
            return False
    vars(module)["forward"] = PlannedForward(module, planned, style, inside["mesh"])
    return True


def leave_planned(module: nn.Module) -> None:
    """Restore the plan's own function on a layer that has its own class again."""
    found = vars(module).get("forward")
    if isinstance(found, PlannedForward):
        vars(module)["forward"] = found.planned


_PLACES = ("first", "last")
# except code that only inspects weights or reads parts: Bloom's slices and DeBERTa's other states, off by default,
# and penalties on weights
_READ = re.compile(
    r"(?<!isinstance\()\bself\.(\w+)\.weight\b"
    r"(?!\.(?:dtype|device|shape|size|numel|data|grad|requires_grad|detach|cpu|chunk|abs|norm|pow|square|sum|mean|std|var"
    r"|min|max)\b|\[|\s*=[^=])"
)
# not Lightning's hooks, which read a weight to log it or to create a parameter group
_NO_FORWARD = re.compile(r"init|reset|tie|configure|optimizer|^on_|_step$|^log_|plot|save|load|export|histogram")


@dataclass(frozen=True)
class Matched:
    """A module that a technique may touch, with its plain dotted name; for stacked experts one per parameter."""

    name: str
    module: nn.Module
    parameter: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The module's name, and the parameter's."""
        return (self.name, f"{self.name}.{self.parameter}".lstrip(".")) if self.parameter else (self.name,)


def replaced(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Replace modules everywhere in a model, in place, and return it, or its own replacement."""
    for parent in [*model.modules()]:
        # In `_modules`, under each name that holds it, because setattr would call the user's own __setattr__.
        for name, child in parent._modules.items():
            if child is not None and child in made:
                parent._modules[name] = made[child]
    return made.get(model, model)


def check_model(model: object, where: str) -> None:
    """Raise `ConfigError` unless `model` is a module, not a state dict or a path."""
    if not isinstance(model, nn.Module):
        raise ConfigError(where, f"model must be a module, got {type(model).__name__}", "build it first")


def plain_name(name: str) -> str:
    """Return a module or parameter name without the parts inserted by wrappers.

    Example:
        >>> plain_name("module.net._orig_mod.0.weight")
        'net.0.weight'
    """
    name = name.removeprefix("module.") if name.startswith("module.") else name
    drop = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in drop)


def weight_of(name: str, module: nn.Module) -> nn.Parameter:
    """Return a module's weight by the last part of a weight's name. Recurrent layers have several weights."""
    return cast("nn.Parameter", module._parameters[name.rpartition(".")[2]])


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before FSDP2 sharded it."""
    first, *others = type(module).__bases__
    # FSDP2 creates a class with (FSDPModule, the class) as bases.
    return others[0] if others and first.__name__ == "FSDPModule" else type(module)


def is_transformers_conv1d(module: nn.Module) -> bool:
    """Return True if a module is GPT-2's linear layer with weight (in, out), without importing transformers."""
    return not isinstance(module, nn.Linear) and conv1d_kind(type(module)) is not None  # type: ignore[arg-type]


def conv1d_of(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return transformers' Conv1D if a model has it or a subclass, else an empty tuple."""
    # By the MRO, so that subclasses count, and without importing transformers.
    kinds = {*map(type, model.modules())}
    return tuple({base for kind in kinds for base in kind.__mro__ if _is_conv1d(base)})


@functools.lru_cache(256)  # called for each layer in every step
def conv1d_kind(kind: type) -> Any:
    """Return transformers' Conv1D if a class is it or a subclass, else None."""
    return next((base for base in kind.__mro__ if _is_conv1d(base)), None)


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def change_class(module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Change a layer's class from `old` to `new`, and keep the classes of wrappers."""
    if _is_ours(new) and not _is_ours(old):
        _check_forward(module)
    kind = type(module)
    if kind is old:
        _set_class(module, new)
    else:  # FSDP2 gives a sharded module a new class from its mixin and the old class
        bases = tuple(new if base is old else base for base in kind.__bases__)
        own = {name: value for name, value in vars(kind).items() if name == "__deepcopy__"}
        _set_class(module, type(kind.__name__.replace(old.__name__, new.__name__), bases, own))
    if _is_ours(old) and not _is_ours(new):
        leave_planned(module)


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    names = [name for name, value in vars(module).items() if _is_own_forward(module, value)]
    module.__class__ = kind
    for name in names:
        vars(module)[name] = MethodType(kind.forward, module)


def _is_own_forward(module: nn.Module, value: object) -> bool:
    """Return True if a value is the bound ``forward`` of a module's class."""
    # Accelerate's hooks for `device_map` call the forward they found (`_old_forward`), and leave it on the layer as
    # `forward` when they are removed. Both would keep calling the forward of the old class.
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is type(module).forward


def _check_forward(module: nn.Module) -> None:
    found = vars(module).get("forward")
    if found is None or _is_ours(type(found)) or follow_class(module):  # ours look up the class's forward in every call
        return
    if not any(_is_own_forward(module, value) for value in (found, vars(module).get("_old_forward"))):
        raise MatchError(
            "layers",
            f"forward was replaced by {getattr(found, '__qualname__', found)} on a {type(module).__name__}",
            "replace it after the technique is attached, or name the layer in skip",
        )


@contextlib.contextmanager
def stock_layers(model: nn.Module) -> Iterator[None]:
    """Make layers with a technique's class compute like their stock layers."""
    changed = [(module, type(module)) for module in model.modules() if _is_ours(type(module))]
    try:
        for module, kind in changed:
            stock = next(base for base in kind.__mro__ if not _is_ours(base))
            if stock is not nn.Module:  # else a layer without a stock class
                _set_class(module, stock)
        yield
    finally:
        for module, kind in changed:
            _set_class(module, kind)


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def match_modules(
    model: nn.Module,
    types: tuple[type[nn.Module], ...],
    *,
    where: str,
    include: Iterable[str] = (),
    skip: Iterable[str] = (),
    min_size: int = 0,
) -> list[Matched]:
    """Return the modules to touch, in registration order, each once.

    Args:
        model: The model.
        types: The classes of modules to touch.
        where: The prefix of errors, such as the technique's key.
        include: Names, patterns (``encoder.*``), class names, or ``first`` and ``last``. Empty means all.
        skip: The same for modules to leave out.
        min_size: The smallest number of weights of a module.

    Raises:
        MatchError: If no module is left, or a pattern matches none.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [found.name for found in match_modules(net, (nn.Linear,), where="prune", skip=["last"])]
        ['0']
    """
    names = {plain_name(name): module for name, module in model.named_modules()}
    able = [
        Matched(name, module, parameter)
        for name, module in names.items()
        if isinstance(module, types)
        for parameter in (expert_weights(module) if StackedExperts in types else ()) or ("",)
    ]
    if not able:
        kinds = ", ".join(kind.__name__ for kind in types)
        raise MatchError(where, f"must match at least one module, but {type(model).__name__} has no {kinds}")

    def hit(pattern: str, found: Matched) -> bool:
        if pattern in _PLACES:
            # "last" has index 1 in _PLACES, which gives -1. "first" stays 0.
            return found is able[_PLACES.index(pattern) * -1]
        return any(_fits(pattern, name, found.module) for name in found.names)

    include, skip = list(include), list(skip)
    everything = [Matched(name, module) for name, module in names.items()]
    for pattern in include:
        if not any(hit(pattern, found) for found in able):
            if others := {own_class(found.module).__name__ for found in everything if hit(pattern, found)}:
                rule = (
                    f"include pattern {pattern!r} matches only {', '.join(sorted(others))}, which it does not support"
                )
                raise MatchError(where, rule)
            known = [name for found in able for name in found.names]
            raise MatchError(where, f"include pattern {pattern!r} matches no module{nearest(pattern, known)}")
    for pattern in skip:
        # Only a pattern without any match is a mistake.
        if not any(hit(pattern, found) for found in able) and not any(hit(pattern, found) for found in everything):
            known = [name for name in names if name]
            raise MatchError(where, f"skip pattern {pattern!r} matches no module{nearest(pattern, known)}")

    chosen = [
        found
        for found in able
        if (not include or any(hit(pattern, found) for pattern in include))
        and not any(hit(pattern, found) for pattern in skip)
    ]
    # An empty weight has nothing to change, for any min_size.
    large = [found for found in chosen if _num_weights(found) >= max(min_size, 1)]
    if not large:
        most = max(map(_num_weights, chosen), default=0)
        raise MatchError(
            where,
            f"must match at least one module, got none of {len(able)} with include={include}, skip={skip}, "
            f"min_size={min_size}",
            f"the largest left has {most:,} weights: lower min_size" if most else "change include or skip",
        )
    return large


def chosen_modules(config: Any, model: nn.Module, types: tuple[type[nn.Module], ...], *, where: str) -> list[Matched]:
    """Call `match_modules` with a technique's options `include`, `skip` and `min_size`."""
    return match_modules(model, types, where=where, include=config.include, skip=config.skip, min_size=config.min_size)


def named_by(patterns: Iterable[str], modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the modules that match patterns, as in `match_modules`."""
    places = dict(zip(_PLACES, [*modules][:1] + [*modules][-1:], strict=False))
    asked = list(patterns)
    named = {places[pattern] for pattern in asked if pattern in places}
    others = [pattern for pattern in asked if pattern not in _PLACES]
    return named | {name for name, module in modules.items() if any(_fits(pattern, name, module) for pattern in others)}


def options_by_module(
    where: str, overrides: Iterable[tuple[str, str, str]], layers: Mapping[str, nn.Module], what: str
) -> dict[str, dict[str, str]]:
    """Return the options per layer from overrides, (pattern, option, value). The last match counts."""
    options: dict[str, dict[str, str]] = {name: {} for name in layers}
    for pattern, option, value in overrides:
        hit = named_by([pattern], layers)
        if not hit:
            raise MatchError(where, f"override pattern {pattern!r} matches no {what}{nearest(pattern, layers)}")
        for name in hit:
            options[name][option] = value
    return options


def _fits(pattern: str, name: str, module: nn.Module) -> bool:
    return fnmatch.fnmatchcase(name, pattern) or own_class(module).__name__ == pattern


def _num_weights(found: Matched) -> int:
    module, name = found.module, found.parameter or "weight"
    if parametrize.is_parametrized(module, name):
        # not computed, because each read of its weight advances spectral norm by one iteration
        return max(value.numel() for value in cast(nn.ModuleDict, module.parametrizations)[name].parameters())
    weight = getattr(module, name, None)
    if isinstance(weight, Tensor):
        return weight.numel()
    if stacks := expert_weights(module):
        return sum(value.numel() for value in stacks.values())
    # a recurrent layer has several, ``weight_ih_l0`` and so on, attention ``in_proj_weight``
    return sum(value.numel() for name, value in module.named_parameters(recurse=False) if "weight" in name)


UNHELD = "no optimizer holds it"
"""Reason for leaving out a weight that counts as frozen."""
HELPER = "frozen, and part of a loss or teacher; name it in include"
"""Reason for leaving out a layer that only helps in training (`frozen_helpers`)."""
FROZEN = "frozen, while other layers train; name it in include"
"""Reason for leaving out a layer that the user has frozen."""
PAST_FORWARD = "computes with its weight itself"
"""Reason for leaving out a layer whose parent reads its weight."""


@functools.cache
def weights_read_by(parent: type) -> frozenset[str]:
    """Return the attributes whose weights a module's code reads directly, as Mamba's fused scan does."""
    found: set[str] = set()
    # `fast_paths_off` switches off such code in torch
    for ancestor in (cls for cls in parent.__mro__ if not cls.__module__.startswith("torch.")):
        for name, function in vars(ancestor).items():
            if inspect.isfunction(function) and not _NO_FORWARD.search(name):
                with contextlib.suppress(OSError):  # without source
                    found.update(_READ.findall(inspect.getsource(inspect.unwrap(function))))
    return frozenset(found)


_HELPER = re.compile(r"loss|criterion|perceptual|lpips|teacher", re.IGNORECASE)


def frozen_helpers(model: nn.Module) -> dict[int, str]:
    """Return module id → reason, for frozen parts that a name or class calls a loss or teacher, if other parts train.

    Techniques leave them alone: they only help in training, and changing them changes what the model is trained for.

    Example:
        >>> net = nn.ModuleDict({"net": nn.Linear(2, 2), "perceptual": nn.Sequential(nn.Linear(2, 2))})
        >>> _ = net["perceptual"].requires_grad_(False)
        >>> [name for name, module in net.named_modules() if id(module) in frozen_helpers(net)]
        ['perceptual', 'perceptual.0']
    """
    if not any(value.requires_grad for value in model.parameters()):
        return {}
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        called = name and _HELPER.search(f"{name.rpartition('.')[2]} {own_class(module).__name__}")
        if called and not any(value.requires_grad for value in module.parameters()):
            found |= dict.fromkeys(map(id, module.modules()), HELPER)
    return found


def read_past_forward(model: nn.Module) -> dict[int, str]:
    """Return layer id → reason, for layers whose weights other code uses without calling their forward."""
    found: dict[int, str] = {}
    for parent in model.modules():
        kind: Any = type(parent)
        if not calls_projection(parent):
            found[id(parent.out_proj)] = f"{kind.__name__} {PAST_FORWARD}"
        if kind.__module__.startswith(("shared_core.", "peft.")):
            continue
        for name, child in parent.named_children():
            if name in weights_read_by(kind):  # that of factors is their product
                found |= dict.fromkeys(map(id, child.modules()), f"{kind.__name__} {PAST_FORWARD}")
    return found
