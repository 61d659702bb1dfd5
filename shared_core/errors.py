"""Every error a user can meet, one class a kind, all under `EffError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from shared_core.printing import printable

_LONGEST = 2000
_LISTED = 30  # all techniques, formats and a technique's options; not all modules of a model


class EffError(Exception):
    """Base of all errors raised on purpose, shown as ``<where>: <rule>; <remedy>``.

    A value in it may be anything that a file holds: what is too long to be read is cut, what no terminal takes escaped.

    Args:
        where: The technique, option, tool or file; or the whole text, which is split at its first colon.
        rule: What must hold and what was found instead, as ``sparsity must be in (0, 1], got 2``.
        remedy: What to do, where there is something to say.

    Example:
        >>> error = ConfigError("prune", "sparsity must be in (0, 1], got 80", "80 % is written 0.8")
        >>> str(error)
        'prune: sparsity must be in (0, 1], got 80; 80 % is written 0.8'
        >>> error.where, error.option, error.remedy
        ('prune', 'sparsity', '80 % is written 0.8')
    """

    def __init__(self, where: object, rule: object = "", remedy: str = "") -> None:
        super().__init__(*(text for text in (where, rule, remedy) if text))
        self.where, self.rule, self.remedy = str(where), str(rule), remedy
        if not rule:
            self.where, _, self.rule = self.where.partition(": ")

    @property
    def option(self) -> str:
        """The subject of the rule: the words before its *must*; empty where it has none."""
        name, must, _ = self.rule.partition(" must ")
        return name if must else ""

    def __str__(self) -> str:
        text = ": ".join(filter(None, (self.where, self.rule))) + (f"; {self.remedy}" if self.remedy else "")
        text = printable(text)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 700]} […] {text[-600:]}"


class ConfigError(EffError, ValueError):
    """An option has a value that breaks its rule, or does not exist."""


class UnknownLengthError(ConfigError):
    """A position is a share or an epoch of a run whose length nobody knows."""


class MatchError(EffError, ValueError):
    """A technique matched no module: it would have been a silent no-op."""


class CompatibilityError(EffError, ValueError):
    """Two techniques, or a technique and its run environment, cannot be combined."""


class CheckpointError(EffError, RuntimeError):
    """A file is missing, damaged, unsafe, or not what it was taken for."""


class TrainingError(EffError, RuntimeError):
    """Training reached a state that no technique can go on from."""


class ReceiptError(EffError, RuntimeError):
    """A final model, or a file of it, is not what the receipt says of it."""


class MissingExtraError(EffError, ImportError):
    """An optional library is not installed."""

    def __init__(self, where: str, library: str, extra: str) -> None:
        super().__init__(where, f"needs {library}, which is not installed", f"pip install 'efftrain[{extra}]'")
        self.args = (where, library, extra)  # what unpickling calls it with


def require(holds: object, where: object, rule: str, remedy: str = "", error: type[EffError] = ConfigError) -> None:
    """Raise an error unless its rule holds.

    Example:
        >>> require(2 > 1, "soup", "jobs must be above 1, got 2")
    """
    if not holds:
        raise error(where, rule, remedy)


def by_reason(left_out: Mapping[str, str]) -> str:
    """Return each reason once, rare ones first, with a name that it holds for and how many more there are.

    Args:
        left_out: The reason of each name.

    Example:
        >>> by_reason({"a": "frozen", "b": "frozen", "c": "tied"})
        'c: tied; a and 1 more: frozen'
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    told = sorted(names.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {reason}" for reason, of in told)


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
