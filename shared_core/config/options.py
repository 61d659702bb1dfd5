"""Typed options with help, which the configs of all techniques share; read from flags, YAML and Python alike.

How help texts and tables tell an option: its meaning with its range, its type, its default.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

from shared_core.config.ability import Ability
from shared_core.config.training_time import Position, parse_position
from shared_core.errors import ConfigError, as_share, did_you_mean, nearest, require

if TYPE_CHECKING:
    import torch


def option(default: Any = dataclasses.MISSING, help: str = "", **extra: Any) -> Any:
    """Return a dataclass field with help text; `extra` goes into its metadata.

    Args:
        default: Its value when not given; without one it must be given.
        help: For ``--help``, `eff flags` and the documents.
        extra: ``low``/``high`` bound a number, or those of a list, inclusively, ``above``/``below`` exclusively;
            ``at_most``/``at_least`` name an option that does. With ``only_with={"range": ("ema",)}`` a value other than
            the default needs one of these values of that option, or of a property that `conditions` describes:
            elsewhere it would be ignored without a word. ``required=True``: there it must be given.
            ``each={"n_m": {"schedule": ("one_shot",)}}`` tells what one of its values needs of other options.
            ``flag_type`` is the type that a command line reads.
    """
    return dataclasses.field(default=default, metadata={"help": help, **extra})


@dataclasses.dataclass(frozen=True)
class Figure:
    """The meaning of a number that a technique logs.

    Args:
        text: In one line, for the documents.
        in_bar: Whether a progress bar shows it: what moves and is watched, two a technique at most.
        only: When it is logged, if not always.
    """

    text: str
    in_bar: bool = False
    only: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of a dataclass of options: coerces and checks each once, when it is made.

    A subclass sets `key`, which errors begin with, and may check options against each other in `validate`. What it
    declares serves Python, YAML, flags and their help: `TechniqueConfig` and the options of commands are made of it.

    Raises:
        ConfigError: If an option breaks its rule, needs others that are not given, or does nothing beside them.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Baking(Options):
        ...     key = "bake"
        ...     needs = {"glaze": ("minutes",)}
        ...     minutes: int | None = option(None, "how long", low=1)
        ...     glaze: bool = option(False, "whether it shines")
        >>> Baking(minutes="9", glaze=True).to_dict()
        {'minutes': 9, 'glaze': True}
        >>> Baking(glaze=True)
        Traceback (most recent call last):
            ...
        shared_core.errors.ConfigError: bake: glaze must come with minutes; add what is missing
    """

    key: ClassVar[str] = ""
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Of options that do nothing alone, the others that must be given too; those of base classes hold as well."""
    without: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Of options, those that they leave nothing to do."""
    conditions: ClassVar[Mapping[str, str]] = {}
    """Properties that ``only_with`` names beside options, and what messages call them."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the repr of this class: `dataclass` would write one with all options into each subclass."""
        super().__init_subclass__(**options)
        cls.__repr__ = Options.__repr__  # type: ignore[method-assign]

    def __new__(cls, **options: Any) -> Self:
        """Refuse what is not an option; Python's own error would not tell the nearest one."""
        cls._check_names(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Coerce every option to its annotation, check its bounds, then check them against each other."""
        hints = self.hints()
        for field in dataclasses.fields(self):
            value = coerce(getattr(self, field.name), hints[field.name], *self.named(field.name))
            _check_bounds(value, field.metadata, *self.named(field.name))
            # Frozen: the dataclass's own __setattr__ refuses.
            object.__setattr__(self, field.name, value)
        # After all are coerced: an option may be compared with one that comes later.
        for field in dataclasses.fields(self):
            self._check_kind(field.name, field.metadata)
            self._check_order(field.name, field.metadata)
        for field in dataclasses.fields(self):
            if self.is_given(field.name):
                self._check_company(field.name)
        self.validate()

    def _check_kind(self, name: str, rules: Mapping[str, Any]) -> None:
        """Refuse an option where it has no use, values that exclude each other, and the lack of what is required."""
        called, value = self.named(name)[1], getattr(self, name)
        if self.is_given(name):  # only then: a default beside another kind does no harm
            self._check_others(called, rules.get("only_with", {}), "leave it out")
        elif rules.get("required") and not self.unmet(rules["only_with"]):
            told = ", ".join(self.condition(other, (getattr(self, other),)) for other in rules["only_with"])
            self.require(False, f"{called} must be given with {told}")
        if "each" in rules:
            self._check_others(self.written(name, value), rules["each"].get(value, {}), "change one or the other")

    def _check_others(self, subject: str, only_with: Mapping[str, tuple[Any, ...]], remedy: str) -> None:
        for other in self.unmet(only_with):
            found = getattr(self, other)
            got = "" if found is False else f", got {self.condition(other, (found,))}"
            self.require(False, f"{subject} must come with {self.condition(other, only_with[other])}{got}", remedy)

    def _check_order(self, name: str, rules: Mapping[str, Any]) -> None:
        value = getattr(self, name)
        for kind, sign in {"at_most": 1, "at_least": -1}.items() if value is not None else ():
            if kind in rules and sign * value > sign * (bound := getattr(self, rules[kind])):
                raise self._error(name, f"must be {kind.replace('_', ' ')} {self.written(rules[kind], bound)}")

    def _check_company(self, name: str) -> None:
        """Refuse an option without others that it needs, or beside others that leave it nothing to do."""
        for others in self._company("needs", name):
            told = f"{self.named(name)[1]} must come with {' and '.join(self.named(other)[1] for other in others)}"
            self.require(all(map(self.is_given, others)), told, "add what is missing")
        for others in self._company("without", name):
            beside = [self.named(other)[1] for other in others if self.is_given(other)]
            told = f"{self.named(name)[1]} must stand without {', '.join(beside)}"
            self.require(not beside, told, "leave one or the other out")

    def validate(self) -> None:
        """Raise `ConfigError` where options contradict each other."""

    def require(self, holds: object, rule: str, remedy: str = "") -> None:
        """Raise `ConfigError` unless a rule of these options holds."""
        require(holds, self.key, rule, remedy)

    @classmethod
    def named(cls, name: str) -> tuple[str, str]:
        """Return where an error of an option is, and what it calls the option."""
        return f"{cls.key}.{name}", name

    @classmethod
    def written(cls, name: str, value: Any) -> str:
        """Return an option with its value as the user writes it."""
        return f"{name}={value}"

    @classmethod
    def condition(cls, name: str, values: tuple[Any, ...]) -> str:
        """Return an option with some of its values; of a property that holds, what `conditions` calls it."""
        called = cls.conditions.get(name) or cls.named(name)[1]
        hint = cls.hints().get(name)
        others = [choice for choice in get_args(hint) if choice not in values] if get_origin(hint) is Literal else []
        if 0 < len(others) < len(values):
            return f"another {called} than {_either(others)}"
        return called if values == (True,) else cls.written(cls.conditions.get(name, name), _either(values))

    @classmethod
    def meaning(cls, field: dataclasses.Field[Any]) -> str:
        """Return an option's help text as sentences, with its range and what it needs, if they do not stand there.

        Example:
            >>> from shared_core.quantization import QatConfig
            >>> QatConfig.meaning(QatConfig.__dataclass_fields__["ema_constant"])
            'Weight of a new step in the moving average. In (0, 1]. Only with range=ema.'
        """
        text = str(field.metadata["help"])
        first = text.split(" ", 1)[0]
        if len(first) > 1 and first.isalpha():  # neither a symbol nor a value that is explained
            text = text[0].upper() + text[1:]
        text = text if text.endswith(".") else f"{text}."
        sentences = ["" if " in [" in text else range_text(field.metadata), *cls._needed(field.name, field.metadata)]
        return " ".join([text, *(f"{sentence}." for sentence in sentences if sentence)])

    @classmethod
    def _needed(cls, name: str, rules: Mapping[str, Any]) -> Iterator[str]:
        """Yield what an option, or some of its values, need of other options."""
        for kind in ("at_least", "at_most"):
            if kind in rules:
                yield f"{kind.replace('_', ' ').capitalize()} {rules[kind]}"
        needed = [cls.condition(*pair) for pair in rules.get("only_with", {}).items()]
        needed += [cls.named(other)[1] for others in cls._company("needs", name) for other in others]
        if needed:
            yield f"Only with {', and '.join(needed)}{', where it is needed' if rules.get('required') else ''}"
        alike: dict[str, list[str]] = {}
        for value, others in rules.get("each", {}).items():
            alike.setdefault(", and ".join(cls.condition(*pair) for pair in others.items()), []).append(value)
        if alike:
            yield "; ".join(f"{', '.join(values)} only with {told}" for told, values in alike.items())

    @classmethod
    def _company(cls, kind: str, name: str) -> Iterator[tuple[str, ...]]:
        """Yield the other options that `needs` or `without` has for an option, in this class and its bases."""
        yield from (vars(base)[kind][name] for base in cls.__mro__ if name in vars(base).get(kind, {}))

    def is_given(self, name: str) -> bool:
        """Return True if an option has another value than its default."""
        value, default = getattr(self, name), getattr(type(self), name, dataclasses.MISSING)
        if self.hints()[name] == Position and default is not dataclasses.MISSING:
            value, default = parse_position(value), parse_position(default)  # a flag gives "0.1"; 1 is no 1.0
        return bool(value != default)

    def unmet(self, only_with: Mapping[str, tuple[Any, ...]]) -> list[str]:
        """Return the options that have none of the values that are allowed of them."""
        return [other for other, allowed in only_with.items() if getattr(self, other) not in allowed]

    @classmethod
    @functools.cache
    def hints(cls) -> dict[str, Any]:
        """Return the type of each option, and of each of `conditions`."""
        # of the fields alone: to evaluate what the classes declare beside their options takes longer than these
        annotations: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        annotations |= {name: getattr(cls, name).fget.__annotations__["return"] for name in cls.conditions}
        names: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            names |= vars(sys.modules[base.__module__])
        return typing.get_type_hints(types.SimpleNamespace(__annotations__=annotations), names)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the config with these options; unknown names are errors that name the nearest known one."""
        told = f"{cls.key} must be a mapping of its options, got {values!r}"
        require(isinstance(values, Mapping), "recipe", told)
        cls._check_names(values)
        for field in dataclasses.fields(cls):
            is_given = field.default is not dataclasses.MISSING or field.name in values
            require(is_given, "recipe", f"{cls.key}.{field.name} must be given", "it has no default")
        return cls(**values)

    @classmethod
    def _check_names(cls, options: Mapping[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError("recipe", f"{cls.key}.{name} is not an option{nearest(str(name), known)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values that JSON and YAML can hold and `from_dict` reads."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def changed(self) -> dict[str, str]:
        """Return the options that differ from their defaults, as Python writes them; a module by its class alone.

        Example:
            >>> from shared_core.pruning import PruneConfig
            >>> PruneConfig(sparsity=0.8, skip=["last"], begin=0.0).changed()
            {'sparsity': '0.8', 'skip': "['last']"}
        """
        written = {field.name: _written(getattr(self, field.name)) for field in dataclasses.fields(self)}
        # compared as they are written: position 1 is a step, and 1.0 the end
        defaults = {field.name: _written(field.default) for field in dataclasses.fields(self)}
        return {name: text for name, text in written.items() if text != defaults[name]}

    def __repr__(self) -> str:
        return self.call_text(type(self).__name__)

    def call_text(self, function: str, **others: Any) -> str:
        """Return the call of a function with these options, and others before them, that differ from the defaults."""
        options = {**{name: repr(value) for name, value in others.items()}, **self.changed()}
        return f"{function}({', '.join(f'{name}={text}' for name, text in options.items())})"

    def _error(self, name: str, rule: str) -> ConfigError:
        return ConfigError(self.key, f"{self.named(name)[1]} {rule}, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TechniqueConfig(Options):
    """Base of every ``<Technique>Config``.

    A subclass sets `key` and `switch`. Beside its options it declares what the engine must know of the technique
    before one is made: order, conflicts, logged figures, memory.
    """

    about: ClassVar[str] = ""
    """What the technique does, in one sentence."""
    key: ClassVar[str] = ""
    """The name in a recipe and the prefix of the flags."""
    switch: ClassVar[str] = ""
    """The option whose flag switches the technique on."""
    other_switch: ClassVar[str] = ""
    """Another option that does so as well."""

    after: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques that attach, and act in each step, before this one; else the order of registration counts."""
    before: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques that do so after this one."""
    finishes_after: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques whose `finish` comes before this one's; else the order of registration counts."""
    finishes_before: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques whose `finish` comes after this one's."""

    conflicts: ClassVar[Mapping[str, str]] = {}
    """Another technique's key, or one of `conflicts.RUN_ENVIRONMENTS`, and why both cannot be combined."""
    works_in: ClassVar[tuple[str, ...]] = ()
    """Those of `conflicts.EVERY_TECHNIQUE` in which this technique works all the same."""

    figures: ClassVar[Mapping[str, Figure]] = {}
    """The figures that the technique's `figures` returns, by name, without ``<key>/``."""
    logs_nothing: ClassVar[str] = ""
    """Why there are no figures."""
    saved_structure: ClassVar[tuple[str, str] | None] = None
    """Of a technique whose state is the structure of the saved weights: why they can only be loaded with it, and what
    else can be done."""
    own_checkpoints: ClassVar[tuple[str, str] | None] = None
    """Why a run with the technique cannot go on from a checkpoint of a run without it, and what else can be done."""
    needs_values: ClassVar[bool] = False
    """True if `attach` reads weights, so that a preview needs a model that has them."""

    def check_files(self) -> None:
        """Raise `CheckpointError` where a folder or file that an option names is not there; imports no torch."""

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return how the technique runs on a device, whatever its options."""
        return Ability("native")

    def allows(self, other: str, recipe: Mapping[str, Any]) -> bool:
        """Return True if these options allow an entry of `conflicts` all the same; its reason says which do."""
        return False

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out, or for what they need and `recipe` lacks."""
        yield from ()

    def remarks(self, recipe: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each combination that is allowed and that the user must know about."""
        yield from ()

    def needed_metrics(self) -> Mapping[str, str]:
        """Return by option the metrics that the trainer's evaluation must report; one batch is tried at the start."""
        return {}


class OverridableConfig(TechniqueConfig):
    """Base of configs whose option ``overrides`` sets others of their options for some modules.

    A subclass declares the option itself, and names in `overridable` what it may set.
    """

    overridable: ClassVar[tuple[str, ...]] = ()
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        """Write a mapping of overrides as the list that flags give, then check every option."""
        if isinstance(self.overrides, Mapping):
            pairs = [
                f"{pattern}:{name}={value}"
                for pattern, options in self.overrides.items()
                for name, value in (options.items() if isinstance(options, Mapping) else [(options, "")])
            ]
            object.__setattr__(self, "overrides", tuple(pairs))
        super().__post_init__()

    def override_options(self) -> list[tuple[str, str, str]]:
        """Return (pattern, option, value) of every override.

        Raises:
            ConfigError: If one is not of that form, or names an option that modules cannot differ in.
        """
        found = []
        for entry in self.overrides:
            pattern, colon, rest = entry.rpartition(":")
            name, equals, value = rest.partition("=")
            if not (colon and equals and pattern and value) or name not in self.overridable:
                raise self._error(
                    "overrides", f"must be PATTERN:OPTION=VALUE with an option of {', '.join(self.overridable)}"
                )
            found.append((pattern, name, value))
        return found


def _either(values: Sequence[Any]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return f"<{type(value).__qualname__}>"


def _written(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_written, value))}]"
    return repr(value) if _plain(value) == value else str(_plain(value))


def _check_bounds(value: Any, bounds: Mapping[str, Any], where: str, name: str) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check_bounds(item, bounds, where, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    # written so that a NaN fails every one of them
    holds = {
        "low": lambda bound: value >= bound,
        "high": lambda bound: value <= bound,
        "above": lambda bound: value > bound,
        "below": lambda bound: value < bound,
    }
    if not all(holds[kind](bounds[kind]) for kind in holds if kind in bounds):
        low = f"[{bounds['low']}" if "low" in bounds else f"({bounds.get('above', '-inf')}"
        high = f"{bounds['high']}]" if "high" in bounds else f"{bounds.get('below', 'inf')})"
        hint = as_share(value) if bounds.get("high", bounds.get("below")) == 1 else ""
        raise ConfigError(where, f"{name} must be in {low}, {high}, got {value!r}{hint}")


def coerce(value: Any, hint: Any, where: str, name: str = "") -> Any:
    """Return `value` as the type that `hint` annotates, reading numbers and booleans from strings.

    YAML gives ``1e-3`` as a string and a command line gives everything as one, so strings are read; nothing else is
    bent: ``True`` is no number, ``0.5`` no integer, NaN and infinity no number at all.

    Args:
        value: As YAML, a command line or Python gave it.
        hint: An annotation: of a number, text, path, Literal, tuple, Position, or one of these and None.
        where: ``prune.sparsity``, for the message.
        name: What the message calls it, if not by the last word of `where`.

    Raises:
        ConfigError: If `value` cannot be such a value.

    Example:
        >>> coerce("1e-3", float, "prune.sparsity")
        0.001
        >>> coerce("a, b", tuple[str, ...], "prune.skip")
        ('a', 'b')
    """
    name, kind, more = name or where.rsplit(".", 1)[-1], get_origin(hint) or hint, ""
    if hint in (Position, Position | None):
        if value is not None or hint == Position:
            parse_position(value, where)
        return value
    if hint is Any or hint is Path:
        return value if hint is Any else Path(value)
    if kind in (typing.Union, types.UnionType):
        inner = [arg for arg in get_args(hint) if arg is not type(None)]
        if value is not None and not (isinstance(value, str) and value.lower() in ("none", "null")):
            return coerce(value, inner[0], where, name)
        if len(inner) < len(get_args(hint)):
            return None
        rule = "given"
    elif kind is Literal:
        # True == 1 in Python: a bool is no choice of numbers.
        if value in get_args(hint) and not isinstance(value, bool):
            return value
        choices = [str(choice) for choice in get_args(hint)]
        rule, more = f"one of {', '.join(choices)}", did_you_mean(value, choices) if isinstance(value, str) else ""
    elif kind is tuple:
        items = [item.strip() for item in value.split(",") if item.strip()] if isinstance(value, str) else value
        if isinstance(items, list | tuple):
            return tuple(coerce(item, get_args(hint)[0], where, name) for item in items)
        rule = "a list"
    elif kind is bool:
        if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
            return value is True or str(value).lower() == "true"
        rule = "true or false"
    elif kind is str:
        if isinstance(value, str | Path) and str(value):
            return str(value)
        rule = "a text"
    elif kind in (int, float):
        if (number := _number(value, kind)) is not None:
            return number
        rule = "a whole number" if kind is int else "a finite number"
        more = as_share(value) if kind is float and "%" in str(value) else ""
    else:
        raise TypeError(f"{where}: {hint!r} is not a type that an option may have")
    raise ConfigError(where, f"{name} must be {rule}, got {value!r}{more}")


def checked(value: Any, hint: Any, where: str, name: str, **bounds: float) -> Any:
    """Return an argument of a function, of this type and within bounds that `option` takes too; text is no number.

    Example:
        >>> checked(3.0, int, "soup", "jobs", low=1)
        3
    """
    found = coerce(value, hint, where, name)
    kind = "list" if isinstance(found, tuple) else "number"
    require(isinstance(found, str) or not isinstance(value, str), where, f"{name} must be a {kind}, got {value!r}")
    _check_bounds(found, bounds, where, name)
    return found


def _number(value: Any, kind: Any) -> int | float | None:
    """Return a finite number of this type, None where the value is none."""
    try:
        # NumPy's numbers are real ones too.
        number = float(value) if isinstance(value, Real | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):  # the latter of whole numbers beyond every float
        return None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        return None
    # An int stays exact: float would round numbers beyond 2^53.
    return number if kind is float else value if isinstance(value, int) else int(number)


_UNBOUNDED = 2**31 - 1  # what a number of its type cannot exceed anyway


def range_text(bounds: Mapping[str, Any]) -> str:
    """Return the range that ``low``/``high`` (inclusive) and ``above``/``below`` (exclusive) leave, empty if all.

    Example:
        >>> range_text({"low": 0, "below": 1}), range_text({"above": 0})
        ('In [0, 1)', 'Above 0')
    """
    low, above, high, below = (bounds.get(name) for name in ("low", "above", "high", "below"))
    high = None if high is not None and high >= _UNBOUNDED else high
    if high is None and below is None:
        return f"At least {low:g}" if low is not None else f"Above {above:g}" if above is not None else ""
    start = f"[{low:g}" if low is not None else f"({above:g}" if above is not None else "(-inf"
    return f"In {start}, {high:g}]" if high is not None else f"In {start}, {below:g})"


def default_text(default: Any) -> str:
    """Return a default as it is written on a command line, empty for none."""
    if default in (dataclasses.MISSING, None, ()):
        return ""
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def type_text(hint: Any) -> str:
    """Return an option's type in words.

    Example:
        >>> type_text(float | None), type_text(typing.Literal["a", "b"])
        ('number', 'a | b')
    """
    if hint in (Position, Position | None):
        return "position"
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "list"
    inner = [arg for arg in typing.get_args(hint) if arg is not type(None)]
    name = str(getattr(inner[0] if inner else hint, "__name__", hint))
    return {"str": "text", "int": "integer", "float": "number", "bool": "true | false"}.get(name, name)
