"""Measure how much of a model a technique reaches: told before anything else; below half of it a run stops."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
from shared_core.engine.protocols import LeavesUnheld, offering
from shared_core.engine.recipe import PARTIAL, PARTIAL_FLAG
from shared_core.errors import MatchError
from shared_core.modules.matching import named_by, own_class, plain_name

if TYPE_CHECKING:
    from shared_core.config.options import TechniqueConfig
    from shared_core.engine.plan import Touched
    from shared_core.engine.technique import Context

ENOUGH = 0.5
"""The least share of the weights that multiply activations which a technique must reach unasked."""

_OF_LAYERS = ("layers", "factorised layers", "weights")
"""`Touched.what` of techniques that work on one layer or weight after the other; others are of the run as a whole."""
_CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NORM = re.compile(r"Norm(\dd|s)?$")
_NO_MATRIX = re.compile(r"embed|pos(ition)?s?$|pos_|token|table|codebook|norm|(^|_)(log|quer(y|ies))$", re.IGNORECASE)
_TOLD = 6
_FROZEN = "frozen weights"


@dataclass(frozen=True)
class Weight:
    """A tensor that multiplies activations: all the names it has, the kind of module that holds it, its elements."""

    names: list[str]
    kind: str
    numel: int


@dataclass(frozen=True)
class Counted:
    """The weights of a model before a technique touched it.

    Args:
        multiplying: Those that multiply activations.
        beside: Elements of embeddings, norms, biases and others.
        holders: By plain name the modules that hold the former, in registration order.
        modules: All modules by plain name.
        frozen: Names of the former that require no gradients.
        unheld: Names of parameters, and of modules, of which no optimizer holds any.
    """

    multiplying: list[Weight] = field(default_factory=list)
    beside: dict[str, int] = field(default_factory=dict)
    holders: dict[str, nn.Module] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    unheld: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Reach:
    """The share that one technique reaches of the weights that multiply activations.

    Args:
        within: Their elements within reach.
        total: Of all.
        left: By kind of module and reason, how many tensors are left as they are and their elements.
        beside: Elements of embeddings, norms, biases, frozen weights that are left, and others, which are not among
            `total`.
        unasked: Elements left that neither `skip` nor a `min_size` of the user's leaves out.
    """

    within: int
    total: int
    left: dict[str, tuple[int, int]]
    beside: dict[str, int]
    unasked: int

    @property
    def share(self) -> float:
        """The number: within / total."""
        return self.within / self.total if self.total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the receipt."""
        left = {kind: {"tensors": count, "elements": numel} for kind, (count, numel) in self.left.items()}
        return {"share": self.share, "within": self.within, "total": self.total, "left": left, "beside": self.beside}

    def line(self) -> str:
        """Return the number and what is left in one line."""
        beside = ", ".join(f"{numel:,} of {kind}" for kind, numel in self.beside.items())
        told = f"{percent(self.share)} of the weights that multiply activations are within reach"
        told += f"; left as they are: {self._left()}" if self.left else ""
        return told + (f" (beside them: {beside})" if beside else "")

    def _left(self) -> str:
        largest = sorted(self.left.items(), key=lambda item: -item[1][1])
        parts = [f"{percent(numel / self.total)} in {count} of {kind}" for kind, (count, numel) in largest[:_TOLD]]
        return "; ".join(parts) + (f"; and {len(largest) - _TOLD} kinds more" if len(largest) > _TOLD else "")

    def refusal(self, key: str, config: TechniqueConfig, remedy: str = "") -> MatchError | None:
        """Return the error of less than `ENOUGH` of what was not skipped, None where `include` chose the layers.

        Args:
            key: The technique.
            config: Its options.
            remedy: How to go on all the same; by default in training.
        """
        chosen: tuple[str, ...] = getattr(config, "include", ())
        if chosen or self.within >= ENOUGH * (self.within + self.unasked):
            return None
        include = f", or name the layers that are meant with include (--{key}_include)"
        remedy = remedy or (
            f"to train like this add --{PARTIAL_FLAG} true ({PARTIAL}: true beside the techniques of a recipe)"
            + (include if hasattr(config, "include") else "")
        )
        return MatchError(
            key,
            f"at least {ENOUGH:.0%} of the weights that multiply activations must be within reach, got "
            f"{percent(self.share)}",
            f"left as they are: {self._left()}; {remedy}",
        )


def count(model: nn.Module) -> Counted:
    """Return the weights of a model: those that multiply activations, and how many there are beside them.

    The former are the weights of linear, convolutional and recurrent layers, attention's packed ones, and matrices or
    stacks of them in modules of other libraries and the user's own, such as experts, unless the parameter's name says
    that it is a table, a position, a token or a logarithm (Mamba's ``A_log``). A tensor that an embedding holds is the
    embedding's, tied or not.

    Args:
        model: Before techniques attach.

    Example:
        >>> found = count(nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.LSTM(4, 2), nn.Linear(2, 3)))
        >>> sum(weight.numel for weight in found.multiplying), found.beside
        (54, {'embeddings': 36, 'norms': 8, 'biases': 19})
    """
    modules = {plain_name(name): module for name, module in model.named_modules()}
    found = Counted(modules=modules)
    # By identity: a head that is tied to an embedding is one with it.
    embedded = {id(value) for module in modules.values() if _embeds(module) for value in module._parameters.values()}
    names: dict[int, list[str]] = {}
    for prefix, module in modules.items():
        for name, value in module._parameters.items():
            if value is None or is_lazy(value):
                continue
            own = names.setdefault(id(value), [])
            own.append(f"{prefix}.{name}".removeprefix("."))
            # Further names of a tied weight: counted once.
            if len(own) > 1:
                continue
            holder = modules.get(prefix.partition(".parametrizations.")[0], module)  # of a parametrised layer
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
    """Return what a technique reaches, None of one that works on the run as a whole.

    Args:
        counted: From `count`, before techniques attached.
        touched: What the technique says that it touches.
        config: Its options.
        model: The model, as it is now.
        reaches_frozen: Whether frozen weights that it leaves count against it.
    """
    if touched.what not in _OF_LAYERS or not touched.tensors:
        return None
    there = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    # All modules around what was touched: a technique may name a layer, its weight, or a module above.
    inside = {place for name in touched.tensors for place in _around(name)}
    out = {place: reason for name, reason in touched.left_out.items() for place in (_around(name)[0], name)}
    skip: tuple[str, ...] = getattr(config, "skip", ())
    # by the name of a layer around the weight too, such as one that peft has given adapters
    globs = {*skip} - {"first", "last"}
    skipped = named_by(skip, counted.holders) | named_by(globs, counted.modules)
    # of stacked experts the parameter's own name
    skipped |= {
        name for one in counted.multiplying for name in one.names if any(fnmatchcase(name, glob) for glob in globs)
    }
    within = unasked = 0
    left: dict[str, tuple[int, int]] = {}
    apart_from = counted.unheld if reaches_frozen else counted.unheld | counted.frozen
    beside = dict(counted.beside)
    for weight in counted.multiplying:
        places = [place for name in weight.names for place in (name, *_around(name))]
        # of a layer that was taken apart (`low_rank`) what stands in its place
        apart = {_around(name)[0] for name in weight.names} if there.isdisjoint(weight.names) else set()
        if apart & inside or not {*touched.tensors, *touched.reached}.isdisjoint(places):
            within += weight.numel
            continue
        if not apart_from.isdisjoint(places):
            beside[_FROZEN] = beside.get(_FROZEN, 0) + weight.numel
            continue
        asked = "" if skipped.isdisjoint(places) else "skip names it"
        asked = asked or _too_small(config, weight)
        asked = asked or ("" if set(touched.asked).isdisjoint(places) else "overrides names it")
        reasons = [*(touched.left_out[place] for place in places if place in touched.left_out), asked]
        reason = next(filter(None, [*reasons, *(out.get(place) for place in apart)]), "")
        label = weight.kind + (f" ({reason})" if reason else "")
        tensors, numel = left.get(label, (0, 0))
        left[label] = tensors + 1, numel + weight.numel
        # What the user asked to be left out does not count against the technique.
        unasked += 0 if asked else weight.numel
    total = within + sum(numel for _, numel in left.values())
    return Reach(within, total, left, beside, unasked)


def _too_small(config: TechniqueConfig, weight: Weight) -> str:
    """Return that `min_size` leaves a weight out where the user has set it; its default nobody asked for."""
    least = int(getattr(config, "min_size", 0))
    return f"smaller than min_size {least}" if weight.numel < least and "min_size" in config.changed() else ""


class Coverage(dict[str, Reach]):
    """By key what the techniques of a run reach that work on layers; measured again once optimizers are known."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = Counted()
        self._trained: set[tuple[nn.Module, str]] = set()
        self._knows_held = False

    def look_at(self, context: Context) -> None:
        """Count the weights of the user's model, before techniques replace layers and move weights."""
        self._counted = count(context.model)
        context.shapes = {module: shapes_of(module) for module in context.model.modules()}
        owned = own_parameters(context.model)
        self._trained = {(owner, name) for owner, name, value in owned if value.requires_grad}

    def measure(self, context: Context, *, allow_partial: bool) -> None:
        """Measure what each technique reaches.

        Args:
            context: All techniques are attached.
            allow_partial: Whether less than `ENOUGH` will do, as it does where `include` chose the layers.

        Raises:
            MatchError: If one reaches less.
        """
        found: dict[str, Reach] = {}
        for key, technique in context.techniques.items():
            touched, frozen = context.touched[key], technique.reaches_frozen
            one = reach(self._counted, touched, technique.config, context.model, reaches_frozen=frozen)
            if one is None:
                continue
            found[key] = one
            if not allow_partial and (error := one.refusal(key, technique.config)) is not None:
                raise error
        self.clear()
        self.update(found)

    def learn_held(self, context: Context, timed: Callable[[str], AbstractContextManager[None]]) -> str:
        """Have techniques leave alone what no optimizer holds, and return a line that tells it; "" if nothing is left.

        The first call of a run decides: techniques give optimizers copies in place of parameters later.

        Args:
            context: With the optimizers.
            timed: Counts the time of a technique, by its key.
        """
        if self._knows_held:
            return ""
        self._knows_held, context.unheld = True, unheld(context.model, context.optimizers, self._trained)
        if not context.unheld:
            return ""
        # Before techniques take out what they added to them.
        told = unheld_note(context.model, context.unheld)
        places = frozenset([*context.unheld.values(), *untrained_modules(context.model, context.unheld)])
        for key, leaving in offering(context.techniques, LeavesUnheld):
            with timed(key), torch.device("cpu"):
                context.touched[key] = leaving.leave_unheld(context)
        self._counted = replace(self._counted, unheld=places)
        return told


def after_training(
    counted: Counted, touched: Touched, config: TechniqueConfig, model: nn.Module, *, where: str, allow_partial: bool
) -> Reach:
    """Return what a technique reaches of a trained model, of which frozen weights count as others do.

    Args:
        counted: From `count`, before the model was changed.
        touched: What is to be changed.
        config: The options.
        model: The model.
        where: Who changes it, for errors.
        allow_partial: Whether less than `ENOUGH` will do, as it does where `include` chose the layers.

    Raises:
        MatchError: If less is reached.
    """
    found = reach(counted, touched, config, model, reaches_frozen=True) or Reach(0, 0, {}, counted.beside, 0)
    remedy = f"to go on all the same pass {PARTIAL}=True (--{PARTIAL.replace('_', '-')}), or name the layers in include"
    if not allow_partial and (error := found.refusal(where, config, remedy)) is not None:
        raise error
    return found


def lines(reaches: Mapping[str, Reach]) -> list[str]:
    """Return a line about each technique that leaves some of the weights that multiply activations as they are."""
    return [f"{key}: {one.line()}" for key, one in reaches.items() if one.left or _FROZEN in one.beside]


def percent(share: float) -> str:
    """Return a share in words, never 0 % of something, nor 100 % of less than all.

    Example:
        >>> percent(0.9999), percent(1.0), percent(0.125)
        ('above 99.9 %', '100 %', '12.5 %')
    """
    text = f"{share:.1%}"
    text = "below 0.1%" if share and text == "0.0%" else "above 99.9%" if share < 1 and text == "100.0%" else text
    return text.replace("100.0%", "100%").replace("%", " %")


def _around(name: str) -> list[str]:
    """Return the names of the modules around a tensor or module, the innermost first, the model's own (empty) last."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _embeds(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _beside(module: nn.Module, name: str, value: Tensor) -> str | None:
    """Return what a tensor is counted as that multiplies no activations, None of one that does."""
    if any(_NORM.search(kind.__name__) for kind in type(module).__mro__ if kind not in _CONTAINERS):
        return "norms"
    if "bias" in name or (value.ndim < 2 and name == "beta"):
        # Vectors multiply elementwise, if at all.
        return "biases"
    if value.ndim < 2 or name in ("original0", "weight_g"):  # the norms of weight_norm
        return "others"
    # torch's own layers are known: what is left of them multiplies.
    kinds = [kind for kind in type(module).__mro__ if kind not in _CONTAINERS]
    if any(kind.__module__.startswith("torch.nn.") for kind in kinds):
        return None
    if min(value.shape) < 2 or _NO_MATRIX.search(name):
        return "others"
    if _NO_MATRIX.search(type(module).__name__):
        return "embeddings"
    return None  # of a user's module: what is no table, position, token or logarithm
