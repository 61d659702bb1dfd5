"""Every error a user can meet, one class a kind, all under `EffError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 2000
_LISTED = 30  # all techniques, formats and a technique's options; not all modules of a model


class EffError(Exception):
    """Base of all errors raised on purpose: the message says where, what, and what to do.

    A value in it may be anything that a file holds: what is too long to be read is cut, what no terminal takes escaped.
    """

    def __init__(self, message: str = "") -> None:
        text = str(message).encode("utf-8", "backslashreplace").decode()
        super().__init__(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 700]} […] {text[-600:]}")


class ConfigError(EffError, ValueError):
    """An option has a value that breaks its rule, or does not exist."""


class UnknownLengthError(ConfigError):
    """A position is a share or an epoch of a run whose length nobody knows."""


class MatchError(EffError, ValueError):
    """A technique matched no module: it would have been a silent no-op."""


class CompatibilityError(EffError, ValueError):
    """Two techniques, or a technique and its surroundings, cannot be combined."""


class CheckpointError(EffError, RuntimeError):
    """A file is missing, damaged, unsafe, or not what it was taken for."""


class TrainingError(EffError, RuntimeError):
    """Training reached a state that no technique can go on from."""


class ReceiptError(EffError, RuntimeError):
    """A final model, or a file of it, is not what the receipt says of it."""


class MissingExtraError(EffError, ImportError):
    """An optional library is not installed."""

    def __init__(self, where: str, library: str, extra: str) -> None:
        super().__init__(f"{where}: needs {library}, which is not installed; pip install 'efftrain[{extra}]'")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name nearest to `name`, or the first known names if any.

    Args:
        name: What was given.
        known: What could have been.

    Example:
        >>> nearest("sparsitty", ["sparsity", "begin"])
        "; did you mean 'sparsity'?"
        >>> nearest("zzz", ["b", "a"])
        '; known: a, b'
    """
    known = sorted(known)
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return did_you_mean(name, known) or (f"; known: {', '.join(known[:_LISTED])}{more}" if known else "")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name nearest to `name`, whatever its case, or nothing.

    Example:
        >>> did_you_mean("EMA", ["ema", "swa"]), did_you_mean("zzz", ["ema", "swa"])
        ("; did you mean 'ema'?", '')
    """
    lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean '{lower[close[0]]}'?" if close else ""


def as_share(value: object) -> str:
    """Return how a percentage that was given for a share is written, or nothing.

    Example:
        >>> as_share("80%"), as_share(80), as_share("half"), as_share(800)
        ('; 80 % is written 0.8', '; 80 % is written 0.8', '', '')
    """
    try:
        percent = float(str(value).rstrip("% "))
    except ValueError:
        return ""
    return f"; {percent:g} % is written {percent / 100:g}" if 1 < percent <= 100 else ""
