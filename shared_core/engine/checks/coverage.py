"""Measure how much of a model each technique covers. The run prints it at the start and stops below half."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shared_core.engine.checks.optimizer_parameters import (
    own_parameters,
    shapes_of,
    unheld,
    unheld_note,
    untrained_modules,
)
from shared_core.engine.plan import Touched
from shared_core.engine.recipe import PARTIAL, PARTIAL_FLAG
from shared_core.engine.technique import returned
from shared_core.errors import MatchError, by_reason
from shared_core.modules.matching import FROZEN, HELPER, named_by, own_class, plain_name
from shared_core.printing import listed, share_text

if TYPE_CHECKING:
    from shared_core.config.options import TechniqueConfig
    from shared_core.engine.technique import Context

ENOUGH = 0.5
"""Minimum share of the weights that multiply activations which a technique must reach by default."""

_OF_LAYERS = ("layers", "factorized layers", "weights")
"""`Touched.what` of techniques that work per layer or weight. All others work on the run as a whole."""
_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NORM = re.compile(r"Norm(\dd|s)?$")
_NO_MATRIX = re.compile(r"embed|pos(ition)?s?$|pos_|token|table|codebook|norm|(^|_)(log|quer(y|ies))$", re.IGNORECASE)
_TOLD = 6
_FROZEN = "frozen weights"


@dataclass(frozen=True)
class Weight:
    """A tensor that multiplies activations: all its names, the class of its module, its number of elements."""

    names: list[str]
    kind: str
    numel: int


@dataclass(frozen=True)
class Counted:
    """The weights of a model before techniques change it.

    Args:
        multiplying: Weights that multiply activations.
        beside: Number of elements in embeddings, norms, biases and others.
        holders: Modules that hold `multiplying` weights, by plain name, in registration order.
        modules: All modules by plain name.
        frozen: Names of `multiplying` weights that don't require gradients.
        unheld: Names of parameters that no optimizer holds, and of modules with only such parameters.
    """

    multiplying: list[Weight] = field(default_factory=list)
    beside: dict[str, int] = field(default_factory=dict)
    holders: dict[str, nn.Module] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    unheld: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reach:
    """The share of the weights that multiply activations which one technique reaches.

    Args:
        within: Number of elements that it reaches.
        total: Number of elements in all of them.
        left: Number of unchanged tensors and their elements, by class of module and reason.
        beside: Number of elements in embeddings, norms, biases, unchanged frozen weights and others. They are not
            part of `total`.
        unasked: Number of unchanged elements that the user has not excluded by `skip` or `min_size`.
    """

    within: int
    total: int
    left: dict[str, tuple[int, int]]
    beside: dict[str, int]
    unasked: int

    @property
    def share(self) -> float:
        """The ratio ``within / total``."""
        return self.within / self.total if self.total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the receipt."""
        left = {kind: {"tensors": count, "elements": numel} for kind, (count, numel) in self.left.items()}
        return {"share": self.share, "within": self.within, "total": self.total, "left": left, "beside": self.beside}

    def line(self) -> str:
        """Return the share and what is left unchanged, in one line."""
        words = {"others": "other parameters"}
        beside = ", ".join(f"{numel:,} in {words.get(kind, kind)}" for kind, numel in self.beside.items())
        text = f"covers {share_text(self.share)} of the weights that multiply activations"
        text += f"; unchanged: {self._left()}" if self.left else ""
        return text + (f" (not counted: {beside})" if beside else "")

    def _left(self) -> str:
        largest = sorted(self.left.items(), key=lambda item: -item[1][1])
        parts = [f"{share_text(numel / self.total)} in {count} {kind}" for kind, (count, numel) in largest[:_TOLD]]
        return "; ".join(parts) + (f"; and {len(largest) - _TOLD} more kinds" if len(largest) > _TOLD else "")

    def refusal(self, key: str, config: TechniqueConfig, remedy: str = "") -> MatchError | None:
        """Return an error if the share is below `ENOUGH`, without counting skipped layers. None if `include` is set.

        Args:
            key: The technique.
            config: Its options.
            remedy: How to continue anyway; by default for training.
        """
        chosen: tuple[str, ...] = getattr(config, "include", ())
        if chosen or self.within >= ENOUGH * (self.within + self.unasked):
            return None
        include = f", or name the layers with include (--{key}_include)"
        remedy = remedy or (
            f"to train anyway, add --{PARTIAL_FLAG} true ({PARTIAL}: true at the top of a recipe)"
            + (include if hasattr(config, "include") else "")
        )
        return MatchError(
            key,
            f"covers only {share_text(self.share)} of the weights that multiply activations, at least {ENOUGH:.0%} is "
            "required",
            f"unchanged: {self._left()}; {remedy}",
        )

    def refuse_partial(self, key: str, config: TechniqueConfig, remedy: str = "") -> None:
        """Raise the error of `refusal`, if there is one."""
        if (error := self.refusal(key, config, remedy)) is not None:
            raise error


def count(model: nn.Module) -> Counted:
    """Return the weights of a model that multiply activations, and the number of all other elements.

    Weights that multiply activations are those of linear, convolutional and recurrent layers, packed attention weights,
    and matrices or stacks of them in other modules, such as experts. Parameters whose name says that they are a table,
    a position, a token or a logarithm (Mamba's ``A_log``) are not. A tensor of an embedding, tied or not, counts as
    embedding.

    Args:
        model: The model before techniques attach.

    Example:
        >>> found = count(nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.LSTM(4, 2), nn.Linear(2, 3)))
        >>> sum(weight.numel for weight in found.multiplying), found.beside
        (54, {'embeddings': 36, 'norms': 8, 'biases': 19})
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    found = Counted(modules=modules)
    # By identity: a head tied to an embedding is the same tensor.
    embedded = {id(value) for module in modules.values() if _embeds(module) for value in module._parameters.values()}
    names: dict[int, list[str]] = {}
    for prefix, module in modules.items():
        for name, value in module._parameters.items():
            if value is None or is_lazy(value):
                continue
            own = names.setdefault(id(value), [])
            own.append(f"{prefix}.{name}".removeprefix("."))
            # A further name of a tied weight, which counts once.
            if len(own) > 1:
                continue
            holder = modules.get(prefix.partition(".parametrizations.")[0], module)  # of a parametrized layer
            kind = "embeddings" if id(value) in embedded or _embeds(holder) else _beside(holder, name, value)
            if kind is None:
                found.multiplying.append(Weight(own, own_class(holder).__name__, value.numel()))
                found.holders[prefix] = module
            else:
                found.beside[kind] = found.beside.get(kind, 0) + value.numel()
    frozen = {id(value) for value in model.parameters() if not value.requires_grad}
    return replace(found, frozen=frozenset(name for held, own in names.items() if held in frozen for name in own))


def reach(
    counted: Counted,
    touched: Touched,
    config: TechniqueConfig,
    model: nn.Module,
    *,
    reaches_frozen: bool = False,
) -> Reach | None:
    """Return what a technique reaches, or None if it works on the run as a whole.

    Args:
        counted: From `count`, before techniques attached.
        touched: What the technique reports as touched.
        config: Its options.
        model: The model in its present state.
        reaches_frozen: True if unchanged frozen weights count against the technique.
    """
    if touched.what not in _OF_LAYERS or not touched.tensors:
        return None
    there = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    # All enclosing modules: a technique may name a layer, its weight, or a parent module.
    inside = {place for name in touched.tensors for place in _around(name)}
    out = {place: reason for name, reason in touched.left_out.items() for place in (_around(name)[0], name)}
    skip: tuple[str, ...] = getattr(config, "skip", ())
    # Globs also match enclosing layers, such as one that PEFT has wrapped with adapters.
    globs = {*skip} - {"first", "last"}
    skipped = named_by(skip, counted.holders) | named_by(globs, counted.modules)
    # For stacked experts, globs match the parameter's own name.
    skipped |= {
        name for one in counted.multiplying for name in one.names if any(fnmatchcase(name, glob) for glob in globs)
    }
    within = unasked = 0
    left: dict[str, tuple[int, int]] = {}
    apart_from = counted.unheld if reaches_frozen else counted.unheld | counted.frozen
    beside = dict(counted.beside)
    for weight in counted.multiplying:
        places = [place for name in weight.names for place in (name, *_around(name))]
        # For a layer that was split (`low_rank`), look at what replaced it.
        apart = {_around(name)[0] for name in weight.names} if there.isdisjoint(weight.names) else set()
        if apart & inside or not {*touched.tensors, *touched.handled_otherwise}.isdisjoint(places):
            within += weight.numel
            continue
        reasons = [touched.left_out[place] for place in places if place in touched.left_out]
        if not apart_from.isdisjoint(places) or not {FROZEN, HELPER}.isdisjoint(reasons):
            beside[_FROZEN] = beside.get(_FROZEN, 0) + weight.numel
            continue
        asked = "" if skipped.isdisjoint(places) else "skip names it"
        asked = asked or _too_small(config, weight)
        asked = asked or ("" if set(touched.asked).isdisjoint(places) else "the options name it")
        reasons += [asked, *(out.get(place, "") for place in apart)]
        reason = next(filter(None, reasons), "")
        label = weight.kind + (f" ({reason})" if reason else "")
        tensors, numel = left.get(label, (0, 0))
        left[label] = tensors + 1, numel + weight.numel
        # Layers that the user excluded don't count against the technique.
        unasked += 0 if asked else weight.numel
    total = within + sum(numel for _, numel in left.values())
    return Reach(within, total, left, beside, unasked)


def _too_small(config: TechniqueConfig, weight: Weight) -> str:
    """Return a reason if `min_size` excludes the weight and the user has set it. The default does not count."""
    least = int(getattr(config, "min_size", 0))
    return f"smaller than min_size {least}" if weight.numel < least and "min_size" in config.changed() else ""


def refuse_empty(key: str, touched: Touched) -> None:
    """Refuse a technique that works on layers or weights, but chose none.

    Raises:
        MatchError: If there are none.
    """
    if touched.what in _OF_LAYERS and not touched.tensors:
        left = by_reason(touched.left_out)
        raise MatchError(key, f"matches no {touched.what}{f' ({left})' if left else ''}", "check include and skip")


class Coverage(dict[str, Reach]):
    """Reach of each technique that works on layers, by key. Measured again once the optimizers are known."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = Counted()
        self._trained: set[tuple[nn.Module, str]] = set()
        self._knows_held = False
        self.idle: Mapping[nn.Parameter, str] = {}
        """Parameters that do not train when training begins, frozen by the user or in no optimizer, and their names."""

    def look_at(self, context: Context) -> None:
        """Count the weights of the user's model before techniques change it."""
        self._counted = count(context.model)
        context.shapes = {module: shapes_of(module) for module in context.model.modules()}
        owned = own_parameters(context.model)
        self._trained = {(owner, name) for owner, name, value in owned if value.requires_grad}

    def measure(self, context: Context, *, allow_partial: bool) -> None:
        """Measure what each technique reaches.

        Args:
            context: The context after all techniques attached.
            allow_partial: True to accept less than `ENOUGH`. `include` also allows it.

        Raises:
            MatchError: If a technique reaches less, or nothing.
        """
        found: dict[str, Reach] = {}
        for key, technique in context.techniques.items():
            touched, frozen = context.touched[key], technique.reaches_frozen
            refuse_empty(key, touched)
            one = reach(self._counted, touched, technique.config, context.model, reaches_frozen=frozen)
            if one is None:
                continue
            found[key] = one
            if not allow_partial:
                one.refuse_partial(key, technique.config)
        self.clear()
        self.update(found)

    def learn_held(self, context: Context, timed: Callable[[str], AbstractContextManager[None]]) -> str:
        """Exclude parameters that no optimizer holds from all techniques. Return a note, or "" if there are none.

        Only the first call of a run counts: later, techniques may give optimizers copies instead of parameters.

        Args:
            context: The context, with the optimizers.
            timed: Measures the time of a technique, by its key.
        """
        if self._knows_held:
            return ""
        self._knows_held, context.unheld = True, unheld(context.model, context.optimizers, self._trained)
        named = [(value, plain_name(name)) for name, value in context.model.named_parameters()]
        frozen = {value: name for value, name in named if not value.requires_grad and name in self._counted.frozen}
        self.idle = {**context.unheld, **frozen}
        if not context.unheld:
            return ""
        # Before techniques remove what they added to these layers.
        note = unheld_note(context.model, context.unheld)
        places = frozenset([*context.unheld.values(), *untrained_modules(context.model, context.unheld)])
        for key, technique in context.techniques.items():
            with timed(key), torch.device("cpu"):
                context.touched[key] = returned(key, "leave_unheld", technique.leave_unheld(context), Touched)
        self._counted = replace(self._counted, unheld=places)
        return note


def after_training(
    counted: Counted, touched: Touched, config: TechniqueConfig, model: nn.Module, *, where: str, allow_partial: bool
) -> Reach:
    """Return what a technique reaches in a trained model. Frozen weights count like all others.

    Args:
        counted: From `count`, before the model was changed.
        touched: The layers to change.
        config: The options.
        model: The model.
        where: Name of the caller in errors.
        allow_partial: True to accept less than `ENOUGH`. `include` also allows it.

    Raises:
        MatchError: If the share is too small.
    """
    found = reach(counted, touched, config, model, reaches_frozen=True) or Reach(0, 0, {}, counted.beside, 0)
    remedy = f"to continue anyway, pass {PARTIAL}=True (--{PARTIAL.replace('_', '-')}), or name the layers in include"
    if not allow_partial:
        found.refuse_partial(where, config, remedy)
    return found


def lines(reaches: Mapping[str, Reach]) -> list[str]:
    """Return a line for each technique that leaves weights unchanged which multiply activations."""
    return [f"{key}: {one.line()}" for key, one in reaches.items() if one.left or _FROZEN in one.beside]


def frozen_notes(touched: Mapping[str, Touched]) -> Iterator[str]:
    """Yield a note for each technique that leaves frozen layers alone because they are frozen."""
    for key, one in touched.items():
        for reason in (HELPER, FROZEN):
            if names := [name for name, why in one.left_out.items() if why == reason]:
                yield f"{key}: unchanged: {listed(names)} ({reason})"


def _around(name: str) -> list[str]:
    """Return the names of the enclosing modules, the innermost first and the model's own (empty) last."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _embeds(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _beside(module: nn.Module, name: str, value: Tensor) -> str | None:
    """Return the kind of a tensor that multiplies no activations, None for one that does."""
    if any(_NORM.search(kind.__name__) for kind in type(module).__mro__ if kind not in _CONTAINERS):
        return "norms"
    if "bias" in name or (value.ndim < 2 and name == "beta"):
        # Vectors multiply elementwise, if at all.
        return "biases"
    if value.ndim < 2 or name in ("original0", "weight_g"):  # the norms of weight_norm
        return "others"
    # The remaining tensors of torch's own layers multiply activations.
    kinds = [kind for kind in type(module).__mro__ if kind not in _CONTAINERS]
    if any(kind.__module__.startswith("torch.nn.") for kind in kinds):
        return None
    if min(value.shape) < 2 or _NO_MATRIX.search(name):
        return "others"
    if _NO_MATRIX.search(type(module).__name__):
        return "embeddings"
    return None  # in the user's own modules: anything but a table, position, token or logarithm
