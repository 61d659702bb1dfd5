"""`Recipe`: the techniques of a run with their options, read from flags, YAML, JSON or Python."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shared_core.config.options import TechniqueConfig, coerce
from shared_core.engine.registry import REGISTRY, flags, in_order, registration
from shared_core.errors import ConfigError, nearest
from shared_core.files.json_yaml import parse_json, parse_yaml

PARTIAL, PARTIAL_FLAG = "allow_partial", "eff_allow_partial"
"""The one entry of a recipe that is not a technique, and its flag."""


class Recipe(Mapping[str, TechniqueConfig]):
    """The techniques of one run with their options, in the order in which they compose. Immutable.

    A key's presence switches its technique on. Use `from_dict`, `from_yaml`, `from_json` or `from_flags`.
    `Recipe({})` switches nothing on.

    Args:
        configs: Recipe key → config.
        allow_partial: Allow techniques that reach less than half of a model (`engine.checks.coverage`).

    Example:
        >>> recipe = Recipe.from_dict({"prune": {"sparsity": "8e-1"}})
        >>> recipe["prune"].sparsity
        0.8
        >>> Recipe.from_dict({"prune": {"sparsitty": 0.8}})
        Traceback (most recent call last):
        shared_core.errors.ConfigError: recipe: prune.sparsitty is not an option; did you mean 'sparsity'?
    """

    def __init__(self, configs: Mapping[str, TechniqueConfig], *, allow_partial: bool = False) -> None:
        for key, config in configs.items():
            known = registration(key)
            if not isinstance(config, known.config_class):
                raise ConfigError(
                    "recipe", f"{key} must be a {known.config_name}, got {config!r}", "Recipe.from_dict takes options"
                )
        self._configs = {key: configs[key] for key in in_order(configs)}
        self.allow_partial = allow_partial

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe of ``{"prune": {"sparsity": 0.8}, …}``. A value may also be a config.

        The key ``"allow_partial"`` is allowed, too.

        Raises:
            ConfigError: If a key, an option or a value is wrong. The message suggests the nearest known name.
        """
        if not isinstance(values, Mapping):
            rule = f"must be a mapping of techniques, got {values!r}"
            raise ConfigError("recipe", rule, 'write {"TECHNIQUE": {"OPTION": VALUE}}, or the path of a recipe')
        if isinstance(values, Recipe):
            return values
        configs = {}
        for key, options in values.items():
            if key == PARTIAL:
                continue
            config_class = registration(key).config_class
            if isinstance(options, config_class):
                configs[key] = options
                continue
            configs[key] = config_class.from_dict({} if options is None else options)
        return cls(configs, allow_partial=coerce(values.get(PARTIAL, False), bool, f"recipe.{PARTIAL}"))

    @classmethod
    def from_yaml(cls, source: str | Path) -> Recipe:
        """Return the recipe in a YAML file or text. A text has a line break, or a colon followed by a space."""
        return cls.from_dict(_mapping(parse_yaml, "YAML", source))

    @classmethod
    def from_json(cls, source: str | Path) -> Recipe:
        """Return the recipe in a JSON file or text. A text starts with a brace."""
        return cls.from_dict(_mapping(functools.partial(parse_json, unique=True), "JSON", source))

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> Recipe:
        """Return the recipe of ``{"prune_sparsity": 0.8, …}``. None means that a flag was not given.

        Raises:
            ConfigError: If a flag is unknown, or the flag that switches its technique on is missing.
        """
        known = flags()
        options: dict[str, Any] = {}
        for flag, value in values.items():
            if flag == PARTIAL_FLAG:
                continue
            if flag not in known:
                raise ConfigError("flags", f"--{flag} is not a flag{nearest(flag, known, '--')}")
            if value is not None:
                key, field = known[flag]
                options.setdefault(key, {})[field.name] = value
        for key, given in options.items():
            config_class = REGISTRY[key].config_class
            switches = [config_class.switch, *config_class.other_switches]
            # Options without a switch: the technique would silently stay off.
            if given.keys().isdisjoint(switches):
                other, switch = next(iter(given)), f" or --{key}_".join(switches)
                raise ConfigError(
                    "flags",
                    f"--{key}_{other} needs --{key}_{switch}, which switches the technique on",
                    "add it",
                )
        if (partial := values.get(PARTIAL_FLAG)) is not None:
            options[PARTIAL] = coerce(partial, bool, f"flags.{PARTIAL_FLAG}")
        return cls.from_dict(options)

    def changes_since(self, saved: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return what differs from a saved recipe, in words.

        Args:
            saved: What `to_dict` returned.

        Example:
            >>> Recipe.from_dict({"prune": {"sparsity": 0.8}}).changes_since({})
            ['with prune, which the saved run did not have']
        """
        mine, changes = self.to_dict(), []
        for key in sorted({*saved, *mine}):
            if key not in saved:
                changes.append(f"with {key}, which the saved run did not have")
            elif key not in mine:
                changes.append(f"without {key}, which the saved run had")
            elif _text(saved[key]) != _text(mine[key]):
                # an option that the saved run did not know had no effect there, as the default has
                fields = dataclasses.fields(self._configs[key])
                then = {at.name: at.default for at in fields if at.default is not dataclasses.MISSING} | dict(
                    saved[key]
                )
                changed = [
                    f"{name} is {value} from now on, was {then.get(name)}"
                    for name, value in mine[key].items()
                    if _text(then.get(name)) != _text(value)
                ]
                if changed:
                    changes.append(f"with other options of {key} than the saved run's: {'; '.join(changed)}")
        return changes

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the techniques as plain values for `from_dict`, with every default."""
        return {key: config.to_dict() for key, config in self._configs.items()}

    def to_yaml(self) -> str:
        """Return the recipe as YAML text, including `allow_partial`."""
        partial = {PARTIAL: True} if self.allow_partial else {}
        return yaml.safe_dump({**partial, **self.to_dict()}, sort_keys=False)

    def needed_metrics(self) -> dict[str, str]:
        """Return the metrics that the trainer's evaluation must report, by option."""
        return {option: name for config in self.values() for option, name in config.needed_metrics().items()}

    def merged(self, other: Recipe) -> Recipe:
        """Return both recipes in one.

        Raises:
            ConfigError: If both name the same technique.
        """
        twice = self.keys() & other.keys()
        if twice:
            names, remedy = ", ".join(sorted(twice)), "give it once: as a callback, in a recipe or by flags"
            raise ConfigError("recipe", f"{names} was given twice", remedy)
        return Recipe({**self, **other}, allow_partial=self.allow_partial or other.allow_partial)

    def __getitem__(self, key: str) -> TechniqueConfig:
        return self._configs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._configs)

    def __len__(self) -> int:
        return len(self._configs)

    def __hash__(self) -> int:
        return hash(self._identity())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._identity() == other._identity()

    def _identity(self) -> tuple[bool, str]:
        return self.allow_partial, _text(self.to_dict())

    def __repr__(self) -> str:
        changed = {key: config.changed().items() for key, config in self._configs.items()}
        options = {key: ", ".join(f"{name!r}: {text}" for name, text in items) for key, items in changed.items()}
        texts = [f"{key!r}: {{{text}}}" for key, text in options.items()]
        texts += [f"{PARTIAL!r}: True"] if self.allow_partial else []
        return f"Recipe.from_dict({{{', '.join(texts)}}})"


def _text(values: Any) -> str:
    # Compared as text: position 1 is a step, and 1.0 the end of the run.
    return json.dumps(values, sort_keys=True)


def _mapping(read: Callable[[str], Any], kind: str, source: str | Path) -> Mapping[str, Any]:
    text, name = str(source), ""
    if isinstance(source, Path) or not ("\n" in text or ": " in text or text.lstrip().startswith("{")):
        try:
            text, name = Path(source).read_text(encoding="utf-8"), f"{source} "
        except (OSError, ValueError) as error:  # ValueError: another encoding, or a name with a NUL
            why = getattr(error, "strerror", None) or error  # without the name, which may be a whole text
            remedy = "check the path" if isinstance(error, FileNotFoundError) else ""
            raise ConfigError("recipe", f"cannot read {str(source)[:300]}: {why}", remedy) from error
    try:
        values = read(text)
    except ValueError as error:
        raise ConfigError("recipe", f"{name}is not valid {kind}: {str(error)[:300]}") from error
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError("recipe", f"{name}must be a mapping of techniques to options, got {values!r}")
    return values
