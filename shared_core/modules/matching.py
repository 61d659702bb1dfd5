"""Which modules a technique touches: by type, name pattern, size and place. Matching nothing is an error."""

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
from shared_core.modules.experts import StackedExperts, expert_weights


class PlannedForward:
    """Stands in for the function that a plan put on a layer: the same around the forward of the layer's present class.

    Without gradients the plan would hand over plain parts of weight and input, of which nothing tells whether a row is
    whole; here both are always tensors that know which part of a whole they are.
    """

    def __init__(self, module: nn.Module, planned: Any, style: Any, mesh: Any) -> None:
        self.planned, self._module, self._style, self._mesh = planned, module, style, mesh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer computes."""
        module, style, mesh, asked = self._module, self._style, self._mesh, torch.is_grad_enabled()
        with torch.enable_grad():  # by which a style tells which tensors to hand over
            args, kwargs = style.transform_inputs_pre_forward(module, args, kwargs, mesh)
            with torch.set_grad_enabled(asked):
                output = type(module).forward(module, *args, **kwargs)
            output = style.transform_output_post_forward(module, output, mesh)
        return output if asked else output.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedForward:
        return PlannedForward(copy.deepcopy(self._module, memo), self.planned, self._style, self._mesh)


def follow_class(module: nn.Module) -> bool:
    """Return True if a layer has a plan's forward that follows its class from now on, until `leave_planned`.

    Not where a plan hands over plain parts in training too: those of packed projections and of experts.
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
    """Put the plan's own function back on a layer that has its own class again."""
    found = vars(module).get("forward")
    if isinstance(found, PlannedForward):
        vars(module)["forward"] = found.planned


_PLACES = ("first", "last")
# but for what is only looked at, and parts of it: Bloom's slices and DeBERTa's states of others, off unless asked for,
# and penalties on weights
_READ = re.compile(
    r"(?<!isinstance\()\bself\.(\w+)\.weight\b"
    r"(?!\.(?:dtype|device|shape|size|numel|data|grad|requires_grad|detach|cpu|chunk|abs|norm|pow|square|sum|mean|std|var"
    r"|min|max)\b|\[|\s*=[^=])"
)
# not Lightning's hooks, which look at a weight to log it or to give it a group of its own
_NO_FORWARD = re.compile(r"init|reset|tie|configure|optimizer|^on_|_step$|^log_|plot|save|load|export|histogram")


@dataclass(frozen=True)
class Matched:
    """A module that a technique may touch, by its plain dotted name; of stacked experts one for each parameter."""

    name: str
    module: nn.Module
    parameter: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The module's name, and the parameter's."""
        return (self.name, f"{self.name}.{self.parameter}".lstrip(".")) if self.parameter else (self.name,)


def replaced(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return the model with modules replaced in place wherever it holds them; a new one where it is replaced itself."""
    for parent in [*model.modules()]:
        # In `_modules`, under each name that holds it: setattr would go through the user's own __setattr__.
        for name, child in parent._modules.items():
            if child is not None and child in made:
                parent._modules[name] = made[child]
    return made.get(model, model)


def check_model(model: object, where: str) -> None:
    """Raise `ConfigError` unless `model` is a module: a state dict or a path is none."""
    if not isinstance(model, nn.Module):
        raise ConfigError(where, f"model must be a module, got {type(model).__name__}", "build it first")


def plain_name(name: str) -> str:
    """Return a module or parameter name without the parts that wrappers insert.

    Example:
        >>> plain_name("module.net._orig_mod.0.weight")
        'net.0.weight'
    """
    name = name.removeprefix("module.") if name.startswith("module.") else name
    drop = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in drop)


def weight_of(name: str, module: nn.Module) -> nn.Parameter:
    """Return the weight that a module holds under the last part of a weight's name; recurrent layers hold several."""
    return cast("nn.Parameter", module._parameters[name.rpartition(".")[2]])


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class, without what FSDP2 makes of it when it shards the module."""
    first, *others = type(module).__bases__
    # FSDP2 makes a class with (FSDPModule, the class) as bases.
    return others[0] if others and first.__name__ == "FSDPModule" else type(module)


def is_transformers_conv1d(module: nn.Module) -> bool:
    """Return True if a module is GPT-2's linear layer, whose weight is (in, out); transformers is not imported."""
    return not isinstance(module, nn.Linear) and conv1d_kind(type(module)) is not None  # type: ignore[arg-type]


def conv1d_of(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return transformers' Conv1D if a model has it or a class made of it, and nothing otherwise."""
    # Through the MRO, so that a subclass counts, and without importing transformers.
    kinds = {*map(type, model.modules())}
    return tuple({base for kind in kinds for base in kind.__mro__ if _is_conv1d(base)})


@functools.lru_cache(256)  # asked for each layer in every step
def conv1d_kind(kind: type) -> Any:
    """Return the class Conv1D of transformers that a class is or is made of, None if it is neither."""
    return next((base for base in kind.__mro__ if _is_conv1d(base)), None)


def _is_conv1d(kind: type) -> bool:
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def change_class(module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Give a layer of class `old` the class `new`, and leave what a wrapper made of it in place."""
    if _is_ours(new) and not _is_ours(old):
        _check_forward(module)
    kind = type(module)
    if kind is old:
        _set_class(module, new)
    else:  # FSDP2 gives a module that it shards a class of its own, made of its mixin and the class it had
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
    # accelerate's hooks, which `device_map` puts on layers, call the one that they found (`_old_forward`), and leave it
    # on the layer as `forward` when they are removed. Both would go on calling that of the layer's class before.
    return isinstance(value, MethodType) and value.__self__ is module and value.__func__ is type(module).forward


def _check_forward(module: nn.Module) -> None:
    found = vars(module).get("forward")
    if found is None or _is_ours(type(found)) or follow_class(module):  # ours look up that of the class at every call
        return
    if not any(_is_own_forward(module, value) for value in (found, vars(module).get("_old_forward"))):
        raise MatchError(
            "layers",
            f"forward must be that of its class, got {getattr(found, '__qualname__', found)} put on a "
            f"{type(module).__name__} itself",
            "do that after the technique is attached, or name the layer in skip",
        )


@contextlib.contextmanager
def stock_layers(model: nn.Module) -> Iterator[None]:
    """Have layers that techniques gave a class of their own compute as the stock layers that they stand for."""
    changed = [(module, type(module)) for module in model.modules() if _is_ours(type(module))]
    try:
        for module, kind in changed:
            stock = next(base for base in kind.__mro__ if not _is_ours(base))
            if stock is not nn.Module:  # else a layer that stands for itself
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
            # "last" is index 1 in _PLACES: times -1 it is -1, and "first" stays 0.
            return found is able[_PLACES.index(pattern) * -1]
        return any(_fits(pattern, name, found.module) for name in found.names)

    include, skip = list(include), list(skip)
    for pattern in include:
        if not any(hit(pattern, found) for found in able):
            known = [name for found in able for name in found.names]
            raise MatchError(where, f"include pattern {pattern!r} matches no module{nearest(pattern, known)}")
    everything = [Matched(name, module) for name, module in names.items()]
    for pattern in skip:
        # Only a pattern that matches nothing at all is a mistake.
        if not any(hit(pattern, found) for found in able) and not any(hit(pattern, found) for found in everything):
            known = [name for name in names if name]
            raise MatchError(where, f"skip pattern {pattern!r} matches no module{nearest(pattern, known)}")

    chosen = [
        found
        for found in able
        if (not include or any(hit(pattern, found) for pattern in include))
        and not any(hit(pattern, found) for pattern in skip)
    ]
    # An empty weight has nothing to change, whatever min_size is.
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
    """Return what `match_modules` does by a technique's options `include`, `skip` and `min_size`."""
    return match_modules(model, types, where=where, include=config.include, skip=config.skip, min_size=config.min_size)


def named_by(patterns: Iterable[str], modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the modules that patterns name, as `match_modules` reads them."""
    places = dict(zip(_PLACES, [*modules][:1] + [*modules][-1:], strict=False))
    asked = list(patterns)
    named = {places[pattern] for pattern in asked if pattern in places}
    others = [pattern for pattern in asked if pattern not in _PLACES]
    return named | {name for name, module in modules.items() if any(_fits(pattern, name, module) for pattern in others)}


def options_by_module(
    where: str, overrides: Iterable[tuple[str, str, str]], layers: Mapping[str, nn.Module], what: str
) -> dict[str, dict[str, str]]:
    """Return for each layer the options that overrides, (pattern, option, value), set; of two the later one counts."""
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
        # not computed: spectral norm goes one iteration further whenever somebody looks at its weight
        return max(value.numel() for value in cast(nn.ModuleDict, module.parametrizations)[name].parameters())
    weight = getattr(module, name, None)
    if isinstance(weight, Tensor):
        return weight.numel()
    if stacks := expert_weights(module):
        return sum(value.numel() for value in stacks.values())
    # a recurrent layer has several, ``weight_ih_l0`` and so on, attention ``in_proj_weight``
    return sum(value.numel() for name, value in module.named_parameters(recurse=False) if "weight" in name)


UNHELD = "no optimizer holds it"
"""Of a weight that counts as frozen, in reasons why it is left out."""
PAST_FORWARD = "computes with its weight itself"
"""Of a parent, in reasons why a layer is left out."""


@functools.cache
def weights_read_by(parent: type) -> frozenset[str]:
    """Return whose weights a module's code reads to compute with, as Mamba's fused scan does, by attribute."""
    found: set[str] = set()
    # `fast_paths_off` switches torch's own such code off
    for ancestor in (cls for cls in parent.__mro__ if not cls.__module__.startswith("torch.")):
        for name, function in vars(ancestor).items():
            if inspect.isfunction(function) and not _NO_FORWARD.search(name):
                with contextlib.suppress(OSError):  # without source
                    found.update(_READ.findall(inspect.getsource(inspect.unwrap(function))))
    return frozenset(found)


def read_past_forward(model: nn.Module) -> dict[int, str]:
    """Return, by identity of a layer, whose code computes with its weights past its forward, as a reason."""
    found: dict[int, str] = {}
    for parent in model.modules():
        kind: Any = type(parent)
        if kind.__module__.startswith(("shared_core.", "peft.")):
            continue
        for name, child in parent.named_children():
            if name in weights_read_by(kind):  # that of factors is their product
                found |= dict.fromkeys(map(id, child.modules()), f"{kind.__name__} {PAST_FORWARD}")
    return found
