"""Check what a technique's config declares when another package registers it."""

from __future__ import annotations

import dataclasses
import difflib
import re
import warnings
from collections.abc import Collection, Mapping
from typing import get_args

from shared_core.config.environments import EVERY_TECHNIQUE, RUN_ENVIRONMENTS
from shared_core.config.options import Figure, TechniqueConfig
from shared_core.errors import ConfigError, did_you_mean, nearest

_ORDER = ("after", "before", "finishes_after", "finishes_before")


def check_names(own: type, where: str) -> None:
    """Warn of names that a class nearly shares with its base, such as `befor_step`: a misspelled hook is never called.

    Args:
        own: A technique or its config.
        where: The start of messages.
    """
    options = {field.name for field in dataclasses.fields(own)} if dataclasses.is_dataclass(own) else set()
    inherited = {name for base in own.__mro__[1:] for name in vars(base)}
    for name in vars(own).keys() - options - inherited:
        close = difflib.get_close_matches(name, inherited, n=1, cutoff=0.85)
        if close and not name.startswith("_"):
            warnings.warn(f"{where}: {own.__name__}.{name} is ignored; did you mean {close[0]!r}?", stacklevel=3)


def check(config: type[TechniqueConfig], known: Collection[str], where: str) -> None:
    """Check the class attributes of a config. Warn if a key in them is similar to a known one.

    Args:
        config: The class.
        known: Keys of all techniques.
        where: The start of messages.

    Raises:
        ConfigError: If the key, the switch, or a declaration of order, conflicts, figures or checkpoints is invalid.
    """
    key = config.key
    if not (isinstance(key, str) and re.fullmatch(r"[a-z][a-z0-9_]*", key)):
        raise ConfigError(where, f"key must be lower-case letters, digits and _, got {key!r}", "set it in the class")
    _check_switches(config, where)
    for name in (*_ORDER, "works_in"):
        if isinstance(keys := getattr(config, name), str):
            raise ConfigError(where, f"{name} must be a tuple of keys, got {keys!r}", f"write ({keys!r},)")
    if unknown := sorted({*config.works_in} - EVERY_TECHNIQUE.keys()):
        raise ConfigError(where, f"works_in: {unknown[0]!r} is not known{nearest(unknown[0], EVERY_TECHNIQUE)}")
    for name, kind in {"conflicts": str, "figures": Figure}.items():
        values = getattr(config, name)
        if not (isinstance(values, Mapping) and all(isinstance(one, kind) for one in values.values())):
            raise ConfigError(where, f"{name} must map names to {kind.__name__}, got {values!r}")
    for name in ("saved_structure", "own_checkpoints"):
        pair = getattr(config, name)
        if pair is not None and not (isinstance(pair, tuple) and [type(text) for text in pair] == [str, str]):
            raise ConfigError(
                where, f"{name} must be a tuple of two strings, the reason and an alternative, got {pair!r}"
            )
    # A key may belong to a package that is not installed, so an unknown one is no error.
    named = {name: getattr(config, name) for name in (*_ORDER, "conflicts")}
    for name, keys in named.items():
        possible = {*known, *(RUN_ENVIRONMENTS if name == "conflicts" else ())}
        for one in {*keys} - possible:
            if hint := did_you_mean(one, possible):
                warnings.warn(f"{where}: {name}: {one!r} is not known{hint}", stacklevel=3)


def _check_switches(config: type[TechniqueConfig], where: str) -> None:
    options = {field.name for field in dataclasses.fields(config)}
    if not config.switch:
        raise ConfigError(where, "has no switch", "set it to the option that switches the technique on")
    for name in (config.switch, *config.other_switches):
        if name not in options:
            undecorated = "__dataclass_fields__" not in vars(config)
            remedy = "decorate the class with @dataclass(frozen=True, kw_only=True)" if undecorated else ""
            raise ConfigError(where, f"the switch {name!r} is not an option{nearest(name, options)}", remedy)
        if bool in {hint := config.hints()[name], *get_args(hint)}:
            rule = f"the switch {name!r} must not be a bool: a technique is on if the flag is given, even with false"
            raise ConfigError(where, rule, "make it a number, or a Literal of the choices")
