"""Positions in a training run: ``0.3`` (a fraction), ``500`` (a step), ``"2ep"`` (epochs) become optimizer steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shared_core.errors import ConfigError, UnknownLengthError, as_share

Position = int | float | str
StepsPerEpoch = float | Sequence[float]
"""Optimizer steps per epoch: one number, or a list if epochs differ. Later epochs are like the last one."""


def steps_until(epochs: float, steps_per_epoch: StepsPerEpoch) -> float:
    """Return the number of steps in a number of epochs.

    Args:
        epochs: Epochs from the start of the run; may be fractional.
        steps_per_epoch: Steps of every epoch, or a list with those of each.

    Example:
        >>> steps_until(2.5, 10), steps_until(2.5, (10, 10, 4)), steps_until(4, (10, 10, 4))
        (25.0, 22.0, 28)
    """
    if not isinstance(steps_per_epoch, Sequence):
        return epochs * steps_per_epoch
    whole, last = int(epochs), len(steps_per_epoch) - 1
    steps = sum(steps_per_epoch[min(epoch, last)] for epoch in range(whole))
    # Epochs beyond the list are like its last one.
    return steps + (epochs - whole) * steps_per_epoch[min(whole, last)]


@dataclass(frozen=True)
class ParsedPosition:
    """A parsed position that is not yet resolved to a step: `value` in units of `unit`."""

    value: float
    unit: Literal["step", "fraction", "epoch"]

    def resolve(self, where: str, *, total_steps: int | None, steps_per_epoch: StepsPerEpoch | None) -> int:
        """Return the optimizer step of this position (0 = before the first). Halves round up."""
        if self.unit == "step" or not self.value:  # position 0 needs no known length
            return int(self.value)
        # floor(x + 0.5): round() would round halves to the even step.
        if self.unit == "epoch" and steps_per_epoch is not None:
            return math.floor(steps_until(self.value, steps_per_epoch) + 0.5)
        if self.unit == "fraction" and total_steps is not None:
            return math.floor(self.value * total_steps + 0.5)
        words = f"'{self.value:g}ep'", "length of an epoch"
        remedy = "write a step, or pass a data loader with a length (in your own loop: steps_per_epoch)"
        if self.unit == "fraction":
            words = str(self.value), "number of training steps"
            remedy = "write a step, or set the length of the run: max_steps, or total_steps in your own loop"
        rule = "{} must be a step number here, because the {} is unknown".format(*words)
        raise UnknownLengthError(where, rule, remedy)


def parse_position(value: Position, where: str = "position") -> ParsedPosition:
    """Return `value` as a `ParsedPosition`.

    An ``int`` is a step, a ``float`` a fraction of the run in [0, 1]. In a string (flags), a dot or an exponent means
    a fraction, digits alone a step, and the suffix ``ep`` epochs. So ``1`` is step 1 and ``1.0`` the end.

    Args:
        value: The position as the user wrote it.
        where: Its name in errors, for example ``"prune.begin"``.

    Raises:
        ConfigError: If it is none of these, negative, not finite, or a fraction above 1.

    Example:
        >>> parse_position("0.3")
        ParsedPosition(value=0.3, unit='fraction')
        >>> parse_position("2ep").resolve("prune.end", total_steps=100, steps_per_epoch=12)
        24
        >>> parse_position(1).unit, parse_position(1.0).unit
        ('step', 'fraction')
    """
    rule = "must be a step (500), a fraction of the run in [0, 1] (0.3) or epochs ('2ep')"
    hint = as_share(value) if isinstance(value, float) or "%" in str(value) else ""
    parsed = ParsedPosition(math.nan, "step")
    # Integers may exceed the float range.
    with contextlib.suppress(ValueError, OverflowError):
        if isinstance(value, str):
            text = value.strip().lower()
            if text.endswith("ep"):
                parsed = ParsedPosition(float(text[:-2]), "epoch")
            # As in YAML, "0.3" or "1e-1" is a fraction and "500" a step.
            elif "." in text or "e" in text:
                parsed = ParsedPosition(float(text), "fraction")
            else:
                parsed = ParsedPosition(int(text), "step")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            parsed = ParsedPosition(value, "step" if isinstance(value, int) else "fraction")
        if math.isfinite(parsed.value) and 0 <= parsed.value <= (1 if parsed.unit == "fraction" else math.inf):
            return parsed
    raise ConfigError(where, f"{where.rsplit('.', 1)[-1]} {rule}, got {value!r}{hint}")
