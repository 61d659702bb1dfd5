"""How help texts and tables tell an option: its meaning with its range, its type, its default."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from shared_core.positions import Position

_UNBOUNDED = 2**31 - 1  # what a number of its type cannot exceed anyway


def meaning(field: dataclasses.Field[Any]) -> str:
    """Return an option's help text as a sentence, with the range of its values if that does not stand there already.

    Example:
        >>> from shared_core.config import option
        >>> field = option(0.5, help="weight of the task loss", low=0, high=1)
        >>> meaning(field)
        'Weight of the task loss. In [0, 1].'
    """
    text = str(field.metadata["help"])
    first = text.split(" ", 1)[0]
    if len(first) > 1 and first.isalpha():  # neither a symbol nor a value that is explained
        text = text[0].upper() + text[1:]
    text = text if text.endswith(".") else f"{text}."
    told = range_text(field.metadata)
    return text if not told or " in [" in text else f"{text} {told}."


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
