"""One line of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What one thing needs of a device, in bytes.

    Args:
        what: Its name.
        held: Stays from step to step.
        during: Lives within a step only.
        sent: By a rank, in an optimizer step.
        host: Stays in the host's memory, beside the device.
        why: The formula, or the reason that there is no figure.
    """

    what: str
    held: float = 0.0
    during: float = 0.0
    sent: float = 0.0
    host: float = 0.0
    why: str = ""
