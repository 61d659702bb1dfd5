"""Typed options with help texts, the base of all technique configs. Read from flags, YAML and Python alike.

Also the text of an option in help and tables: its meaning with its range, its type, its default.
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

from shared_core.config.environments import Ability, missing
from shared_core.config.training_time import Position, parse_position
from shared_core.errors import ConfigError, MissingExtraError, as_share, did_you_mean, nearest, require

if TYPE_CHECKING:
    import torch

_LISTED = 8  # values in the message about a misspelt one


def option(default: Any = dataclasses.MISSING, help: str = "", **extra: Any) -> Any:
    """Return a dataclass field with help text; `extra` goes into its metadata.

    Args:
        default: Value if not given. Without one, the option is required.
        help: Text for ``--help``, `eff flags` and the documentation.
        extra: ``low``/``high`` bound a number, or the items of a list, inclusively, ``above``/``below`` exclusively.
            ``at_most``/``at_least`` name another option as the bound. With ``only_with={"range": ("ema",)}`` a value
            other than the default needs one of these values of that option, or of a property in `conditions`, because
            it would be ignored otherwise. With ``required=True`` it must be given in that case.
            ``each={"n_m": {"schedule": ("one_shot",)}}`` says what one of its values needs of other options.
            ``flag_type`` is its type on a command line.
    """
    return dataclasses.field(default=default, metadata={"help": help, **extra})


@dataclasses.dataclass(frozen=True)
class Figure:
    """Description of a number that a technique logs.

    Args:
        text: Its meaning in one line, for the documentation.
        in_bar: True to show it in the progress bar; at most two per technique.
        only: When it is logged, if not always.
    """

    text: str
    in_bar: bool = False
    only: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base class for a dataclass of options, which coerces and checks them once, when it is created.

    A subclass sets `key`, the prefix of its errors, and may check options against each other in `validate`. The same
    declaration serves Python, YAML, flags and help texts, for techniques (`TechniqueConfig`) and for commands.

    Raises:
        ConfigError: If an option is invalid, needs others that are not given, or has no effect together with them.

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
        shared_core.errors.ConfigError: bake: glaze needs minutes; add what is missing
    """

    key: ClassVar[str] = ""
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Options that have no effect alone → other options that must be given too. Base classes' entries apply as well."""
    without: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Options → other options that make them pointless."""
    conditions: ClassVar[Mapping[str, str]] = {}
    """Properties that ``only_with`` may name as well as options → their names in messages."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Keep the repr of this class. `dataclass` would give each subclass one with all options."""
        super().__init_subclass__(**options)
        cls.__repr__ = Options.__repr__  # type: ignore[method-assign]

    def __new__(cls, **options: Any) -> Self:
        """Refuse unknown options with a hint, which Python's own error lacks."""
        cls.check_names(options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Coerce every option to its annotation, check its bounds, then check them against each other."""
        hints = self.hints()
        for field in dataclasses.fields(self):
            value = coerce(getattr(self, field.name), hints[field.name], *self.named(field.name))
            _check_bounds(value, field.metadata, *self.named(field.name))
            # The dataclass is frozen, so its own __setattr__ would raise.
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
        """Refuse an option without effect, values that exclude each other, and a missing required option."""
        called, value = self.named(name)[1], getattr(self, name)
        if self.is_given(name):  # a default without effect does no harm
            self._check_others(called, rules.get("only_with", {}), "leave it out")
        elif rules.get("required") and not self.unmet(rules["only_with"]):
            rule = ", ".join(self.condition(other, (getattr(self, other),)) for other in rules["only_with"])
            self.require(False, f"{called} must be given with {rule}")
        if "each" in rules:
            self._check_others(self.written(name, value), rules["each"].get(value, {}), "change one of the two")

    def _check_others(self, subject: str, only_with: Mapping[str, tuple[Any, ...]], remedy: str) -> None:
        for other in self.unmet(only_with):
            found = getattr(self, other)
            if self._excluded(other, only_with[other]):
                self.require(False, f"{subject} cannot be combined with {self.condition(other, (found,))}", remedy)
            got = "" if found is False else f", got {self.condition(other, (found,))}"
            self.require(False, f"{subject} needs {self.condition(other, only_with[other])}{got}", remedy)

    def _check_order(self, name: str, rules: Mapping[str, Any]) -> None:
        value = getattr(self, name)
        for kind, sign in {"at_most": 1, "at_least": -1}.items() if value is not None else ():
            if kind in rules and sign * value > sign * (bound := getattr(self, rules[kind])):
                raise self._error(name, f"must be {kind.replace('_', ' ')} {self.written(rules[kind], bound)}")

    def _check_company(self, name: str) -> None:
        """Refuse an option without others that it needs, or with others that make it pointless."""
        for others in self._company("needs", name):
            rule = f"{self.named(name)[1]} needs {' and '.join(self.named(other)[1] for other in others)}"
            self.require(all(map(self.is_given, others)), rule, "add what is missing")
        for others in self._company("without", name):
            beside = [self.named(other)[1] for other in others if self.is_given(other)]
            rule = f"{self.named(name)[1]} cannot be combined with {', '.join(beside)}"
            self.require(not beside, rule, "leave one of them out")

    def validate(self) -> None:
        """Raise `ConfigError` if options contradict each other."""

    def require(self, holds: object, rule: str, remedy: str = "") -> None:
        """Raise `ConfigError` with this rule unless `holds` is true."""
        require(holds, self.key, rule, remedy)

    @classmethod
    def named(cls, name: str) -> tuple[str, str]:
        """Return the prefix and the name of an option in errors."""
        return f"{cls.key}.{name}", name

    @classmethod
    def written(cls, name: str, value: Any) -> str:
        """Return an option with its value, as the user writes it."""
        return f"{name}={value}"

    @classmethod
    def condition(cls, name: str, values: tuple[Any, ...]) -> str:
        """Return an option with some of its values as text; for a true property, its name in `conditions`."""
        called = cls.conditions.get(name) or cls.named(name)[1]
        return called if values == (True,) else cls.written(cls.conditions.get(name, name), _either(values))

    @classmethod
    def _excluded(cls, name: str, values: tuple[Any, ...]) -> str:
        """Return the other values of an option if they are fewer, as text; else an empty text."""
        hint = cls.hints().get(name)
        others = [choice for choice in get_args(hint) if choice not in values] if get_origin(hint) is Literal else []
        return cls.condition(name, tuple(others)) if 0 < len(others) < len(values) else ""

    @classmethod
    def _company_text(cls, only_with: Mapping[str, tuple[Any, ...]], more: Sequence[str] = ()) -> str:
        """Return the requirements on other options: ``only with a=1, and b, not with c=2``."""
        excluded = [text for pair in only_with.items() if (text := cls._excluded(*pair))]
        needed = [cls.condition(*pair) for pair in only_with.items() if not cls._excluded(*pair)] + [*more]
        parts = [f"only with {', and '.join(needed)}"] if needed else []
        return ", ".join([*parts, *([f"not with {' or '.join(excluded)}"] if excluded else [])])

    @classmethod
    def meaning(cls, field: dataclasses.Field[Any]) -> str:
        """Return an option's help text as sentences, with its range and requirements unless the text has them.

        Example:
            >>> from shared_core.quantization import QatConfig
            >>> QatConfig.meaning(QatConfig.__dataclass_fields__["percentile"])
            'Share of the values inside the range, in percent. In (50, 100]. Only with range=percentile.'
        """
        text = str(field.metadata["help"])
        first = text.split(" ", 1)[0]
        if len(first) > 1 and first.isalpha():  # not a symbol or a value
            text = text[0].upper() + text[1:]
        text = text if text.endswith(".") else f"{text}."
        bounds = range_text(field.metadata)
        sentences = ["" if bounds.lower() in text else bounds, *cls._needed(field.name, field.metadata)]
        return " ".join([text, *(f"{sentence}." for sentence in sentences if sentence)])

    @classmethod
    def _needed(cls, name: str, rules: Mapping[str, Any]) -> Iterator[str]:
        """Yield what an option, or some of its values, require of other options."""
        for kind in ("at_least", "at_most"):
            if kind in rules:
                yield f"{kind.replace('_', ' ').capitalize()} {rules[kind]}"
        more = [cls.named(other)[1] for others in cls._company("needs", name) for other in others]
        if text := cls._company_text(rules.get("only_with", {}), more):
            yield f"Required, but {text}" if rules.get("required") else f"{text[0].upper()}{text[1:]}"
        alike: dict[str, list[str]] = {}
        for value, others in rules.get("each", {}).items():
            alike.setdefault(cls._company_text(others), []).append(value)
        if alike:
            yield "; ".join(f"{', '.join(values)} {text}" for text, values in alike.items())

    @classmethod
    def _company(cls, kind: str, name: str) -> Iterator[tuple[str, ...]]:
        """Yield the entries of `needs` or `without` for an option, from this class and its bases."""
        yield from (vars(base)[kind][name] for base in cls.__mro__ if name in vars(base).get(kind, {}))

    def is_given(self, name: str) -> bool:
        """Return True if an option differs from its default."""
        value, default = getattr(self, name), getattr(type(self), name, dataclasses.MISSING)
        if self.hints()[name] == Position and default is not dataclasses.MISSING:
            value, default = parse_position(value), parse_position(default)  # flags give strings; 1 (a step) is not 1.0
        return bool(value != default)

    def unmet(self, only_with: Mapping[str, tuple[Any, ...]]) -> list[str]:
        """Return the options that have none of their allowed values."""
        return [other for other, allowed in only_with.items() if getattr(self, other) not in allowed]

    @classmethod
    @functools.cache
    def hints(cls) -> dict[str, Any]:
        """Return the type of each option, and of each property in `conditions`."""
        # Only for the fields: evaluating the other annotations of the classes takes longer.
        annotations: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(cls)}
        annotations |= {name: getattr(cls, name).fget.__annotations__["return"] for name in cls.conditions}
        names: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            names |= vars(sys.modules[base.__module__])
        return typing.get_type_hints(types.SimpleNamespace(__annotations__=annotations), names)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the config with these options. An unknown name is an error that suggests the closest known one."""
        rule = f"{cls.key} must be a mapping of its options, got {values!r}"
        require(isinstance(values, Mapping), "recipe", rule)
        cls.check_names(values)
        for field in dataclasses.fields(cls):
            is_given = field.default is not dataclasses.MISSING or field.name in values
            require(is_given, "recipe", f"{cls.key}.{field.name} must be given", "it has no default")
        return cls(**values)

    @classmethod
    def check_names(cls, options: Mapping[str, Any]) -> None:
        """Raise an error for a name that is not an option. It suggests the closest one."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError("recipe", f"{cls.key}.{name} is not an option{nearest(str(name), known)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain values for JSON, YAML and `from_dict`."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def changed(self) -> dict[str, str]:
        """Return the options that differ from their defaults, as Python source. A module is shown by its class name.

        Example:
            >>> from shared_core.pruning import PruneConfig
            >>> PruneConfig(sparsity=0.8, skip=["last"], begin=0.0).changed()
            {'sparsity': '0.8', 'skip': "['last']"}
        """
        written = {field.name: _written(getattr(self, field.name)) for field in dataclasses.fields(self)}
        # Compare the written form: position 1 is a step, 1.0 the end.
        defaults = {field.name: _written(field.default) for field in dataclasses.fields(self)}
        return {name: text for name, text in written.items() if text != defaults[name]}

    def __repr__(self) -> str:
        return self.call_text(type(self).__name__)

    def call_text(self, function: str, **others: Any) -> str:
        """Return a function call as text: `others`, then the options that differ from their defaults."""
        options = {**{name: repr(value) for name, value in others.items()}, **self.changed()}
        return f"{function}({', '.join(f'{name}={text}' for name, text in options.items())})"

    def _error(self, name: str, rule: str) -> ConfigError:
        return ConfigError(self.key, f"{self.named(name)[1]} {rule}, got {getattr(self, name)!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TechniqueConfig(Options):
    """Base class of every ``<Technique>Config``.

    A subclass sets `key` and `switch`. It also declares what the engine must know before it creates the technique:
    order, conflicts, logged figures.
    """

    about: ClassVar[str] = ""
    """One sentence about the technique for ``eff flags``. The default is the first paragraph of the docstring."""
    key: ClassVar[str] = ""
    """The name in a recipe and the prefix of the flags."""
    switch: ClassVar[str] = ""
    """Option whose flag enables the technique."""
    other_switches: ClassVar[tuple[str, ...]] = ()
    """Other options that also enable it."""

    after: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques that attach and act in each step before this one. The default is the registration order."""
    before: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques that attach and act after this one."""
    finishes_after: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques whose `finish` runs before this one's. The default is the registration order."""
    finishes_before: ClassVar[tuple[str, ...]] = ()
    """Keys of techniques whose `finish` runs after this one's."""

    conflicts: ClassVar[Mapping[str, str]] = {}
    """Key of another technique, or of `environments.RUN_ENVIRONMENTS` → why it cannot be combined with this one."""
    works_in: ClassVar[tuple[str, ...]] = ()
    """Keys of `environments.EVERY_TECHNIQUE` in which this technique does work."""

    figures: ClassVar[Mapping[str, Figure]] = {}
    """Figures that the technique's `figures` returns, by name without ``<key>/``."""
    logs_nothing: ClassVar[str] = ""
    """Why there are no figures."""
    saved_structure: ClassVar[tuple[str, str] | None] = None
    """For a technique that changes the structure of saved weights: why they can only be loaded with it, and an
    alternative."""
    libraries: ClassVar[Mapping[str, str]] = {}
    """Optional libraries without which it cannot train, and the extra of efftrain that installs each."""
    own_checkpoints: ClassVar[tuple[str, str] | None] = None
    """Why a run with the technique cannot resume from a checkpoint of a run without it, and an alternative."""
    needs_values: ClassVar[bool] = False
    """True if `attach` reads weights, so that a preview needs a model with loaded weights."""

    def check_files(self) -> None:
        """Raise `CheckpointError` if a folder or file named by an option does not exist. Does not import torch."""

    @classmethod
    def how_to_load(cls, options: Mapping[str, Any]) -> str | None:
        """Return how a model that was saved with these options loads; None: as without the technique."""
        structure = cls.saved_structure
        return structure and f"With `{cls.key}`, {structure[0]}: {structure[1].partition(' and ')[0]}."

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return how the technique runs on a device, regardless of its options."""
        error = cls.missing_library()
        return Ability("refused", str(error)) if error else Ability("native")

    @classmethod
    def missing_library(cls) -> MissingExtraError | None:
        """Return the error for the first of `libraries` that is not installed, None if all are."""
        return missing(cls.libraries, cls.key)

    def allows(self, other: str, recipe: Mapping[str, Any]) -> bool:
        """Return True if these options allow an entry of `conflicts` after all. Its reason names the options."""
        return False

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options exclude, and for each requirement `recipe` lacks."""
        yield from ()

    def remarks(self, recipe: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each allowed combination that the user should know about."""
        yield from ()

    def needed_metrics(self) -> Mapping[str, str]:
        """Return the metrics that evaluation must report, by option. One batch is evaluated at the start to check."""
        return {}


class OverridableConfig(TechniqueConfig):
    """Base class of configs with an option ``overrides``, which sets other options for some modules.

    A subclass declares the option itself, and lists in `overridable` the options that it may set.
    """

    overridable: ClassVar[tuple[str, ...]] = ()
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        """Convert a mapping of overrides to the list form of flags, then check every option."""
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
            ConfigError: If one does not have this form, or names an option that cannot be set per module.
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
    # Written so that NaN fails every comparison.
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
    """Return `value` as the annotated type, and parse numbers and booleans in strings.

    YAML reads ``1e-3`` as a string, and a command line gives only strings, so strings are parsed. Nothing else is
    converted: ``True`` is not a number, ``0.5`` not an integer, and NaN and infinity are not accepted.

    Args:
        value: The value from YAML, a command line or Python.
        hint: An annotation: number, text, path, Literal, tuple, Position, or one of these or None.
        where: Prefix of the message, such as ``prune.sparsity``.
        name: Name in the message; by default the last part of `where`.

    Raises:
        ConfigError: If `value` does not have this type.

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
        # True == 1 in Python, but a bool is not a number here.
        if value in get_args(hint) and not isinstance(value, bool):
            return value
        choices = [str(choice) for choice in get_args(hint)]
        more = did_you_mean(value, choices) if isinstance(value, str) else ""
        rest = f" and {len(choices) - _LISTED} more" if more and len(choices) > _LISTED else ""
        rule = f"one of {', '.join(choices[:_LISTED] if rest else choices)}{rest}"
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
        raise TypeError(f"{where}: an option cannot have the type {hint!r}")
    raise ConfigError(where, f"{name} must be {rule}, got {value!r}{more}")


def checked(value: Any, hint: Any, where: str, name: str, **bounds: float) -> Any:
    """Return a function argument after checking its type and bounds, as `option` does. Strings are not parsed.

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
    """Return the value as a finite number of this type, or None."""
    try:
        # NumPy numbers are `Real` too.
        number = float(value) if isinstance(value, Real | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):  # OverflowError: an integer beyond the float range
        return None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        return None
    # Keep an int exact: float would round numbers above 2^53.
    return number if kind is float else value if isinstance(value, int) else int(number)


_UNBOUNDED = 2**31 - 1  # the limit of its type: not worth showing


def range_text(bounds: Mapping[str, Any]) -> str:
    """Return the range given by ``low``/``high`` (inclusive) and ``above``/``below`` (exclusive), empty if unbounded.

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
    """Return a default as written on a command line, empty if there is none."""
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
    if inner:  # X | None
        return type_text(inner[0])
    name = str(getattr(hint, "__name__", hint))
    return {"str": "text", "int": "integer", "float": "number", "bool": "true | false"}.get(name, name)
