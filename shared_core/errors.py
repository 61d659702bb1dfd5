"""Every error a user can meet, one class per kind, all derived from `EffError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from shared_core.printing import printable

_LONGEST = 2000
_LISTED = 30  # all techniques, formats and a technique's options; not all modules of a model


class EffError(Exception):
    """Base class of all errors raised on purpose, shown as ``<where>: <rule>; <remedy>``.

    Texts may quote untrusted files, so long ones are cut and unprintable characters escaped.

    Args:
        where: The technique, option, tool or file; or the whole text, which is split at its first colon.
        rule: What is wrong, such as ``sparsity must be in (0, 1], got 2``.
        remedy: What to do, if known.

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
        """The option that the rule is about: the words before *must*; empty without one."""
        name, must, _ = self.rule.partition(" must ")
        return name if must else ""

    def __str__(self) -> str:
        text, remedy = ": ".join(filter(None, (self.where, self.rule))), self.remedy
        if remedy:
            text += f" {remedy[:1].upper()}{remedy[1:]}" if text.endswith("?") else f"; {remedy}"
        text = printable(text)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 700]} […] {text[-600:]}"


class ConfigError(EffError, ValueError):
    """An option has a value that breaks its rule, or does not exist."""


class UnknownLengthError(ConfigError):
    """A position is given as a fraction or in epochs, but the length of the run is unknown."""


class MatchError(EffError, ValueError):
    """A technique matches no module, or too few, and would silently do little or nothing."""


class CompatibilityError(EffError, ValueError):
    """Two techniques, or a technique and its run environment, cannot be combined."""


class CheckpointError(EffError, RuntimeError):
    """A file is missing, damaged, unsafe, or of the wrong kind."""


class TrainingError(EffError, RuntimeError):
    """Training reached a state from which it cannot continue."""


class ReceiptError(EffError, RuntimeError):
    """A final model or its file differs from the receipt."""


class MissingExtraError(EffError, ImportError):
    """An optional library is not installed."""

    def __init__(self, where: str, library: str, extra: str) -> None:
        super().__init__(where, f"needs {library}, which is not installed", f"pip install 'efftrain[{extra}]'")
        self.args = (where, library, extra)  # arguments for unpickling


def require(holds: object, where: object, rule: str, remedy: str = "", error: type[EffError] = ConfigError) -> None:
    """Raise an error with this rule unless `holds` is true.

    Example:
        >>> require(2 > 1, "soup", "jobs must be above 1, got 2")
    """
    if not holds:
        raise error(where, rule, remedy)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 300 characters of it, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def in_short(error: BaseException) -> str:
    """Return an error's type and the first line of its text."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def by_reason(left_out: Mapping[str, str]) -> str:
    """Return each reason once, rare ones first, with one of its names and the number of others.

    Args:
        left_out: Name → reason.

    Example:
        >>> by_reason({"a": "frozen", "b": "frozen", "c": "tied"})
        'c: tied; a and 1 more: frozen'
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    ordered = sorted(names.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}: {reason}" for reason, of in ordered)


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, or a list of the first known names.

    Args:
        name: The given name.
        known: All valid names.
        prefix: Put before each shown name, such as ``--``.

    Example:
        >>> nearest("sparsitty", ["sparsity", "begin"])
        "; did you mean 'sparsity'?"
        >>> nearest("zzz", ["b", "a"])
        '; known: a, b'
    """
    known = sorted(known)
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    listed = ", ".join(f"{prefix}{one}" for one in known[:_LISTED])
    return did_you_mean(name, known, prefix) or (f"; known: {listed}{more}" if known else "")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to `name`, ignoring case, or "".

    Example:
        >>> did_you_mean("EMA", ["ema", "swa"]), did_you_mean("zzz", ["ema", "swa"])
        ("; did you mean 'ema'?", '')
    """
    lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return f"; did you mean '{prefix}{lower[close[0]]}'?" if close else ""


def as_share(value: object) -> str:
    """Return a hint how to write a percentage as a share, or "".

    Example:
        >>> as_share("80%"), as_share(80), as_share("half"), as_share(800)
        ('; 80 % is written 0.8', '; 80 % is written 0.8', '', '')
    """
    try:
        percent = float(str(value).rstrip("% "))
    except ValueError:
        return ""
    return f"; {percent:g} % is written {percent / 100:g}" if 1 < percent <= 100 else ""
