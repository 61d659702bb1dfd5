"""What became of the tensors that autograd saved: the figures of the receipt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

WEIGHT, NOTHING = "weights", "nothing to leave out"


class Counts:
    """How many tensors were stored in which form, their bytes before and after, and why others were left alone.

    Example:
        >>> counts = Counts()
        >>> counts.store("bits", 800, 100)
        >>> counts.leave("small", 200)
        >>> counts.share_saved
        0.7
    """

    def __init__(self) -> None:
        self.forwards = self.shared = 0
        self._stored: dict[str, Counter[str]] = {}
        self._left: dict[str, Counter[str]] = {}

    def store(self, kind: str, before: int, after: int) -> None:
        """Count memory that lies in another form or place; `after` are the bytes that the device still holds."""
        self._stored.setdefault(kind, Counter()).update(tensors=1, bytes_before=before, bytes_after=after)

    def leave(self, why: str, nbytes: int) -> None:
        """Count a tensor that autograd keeps as ever."""
        self._left.setdefault(why, Counter()).update(tensors=1, bytes=nbytes)

    @property
    def kinds(self) -> set[str]:
        """The forms that were used."""
        return set(self._stored)

    def _total(self, figure: str) -> int:
        stored = sum(counter[figure] for counter in self._stored.values())
        return stored + sum(counter["bytes"] for why, counter in self._left.items() if why != WEIGHT)

    @property
    def share_saved(self) -> float:
        """Share of the activations' bytes that the device does not hold; weights, which it holds anyway, left out."""
        before = self._total("bytes_before")
        return 1 - self._total("bytes_after") / before if before else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return all counts."""
        stored = {kind: dict(counter) for kind, counter in self._stored.items()}
        left = {why: dict(counter) for why, counter in self._left.items()}
        return {"forwards": self.forwards, "shared": self.shared, "stored": stored, "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.forwards, self.shared = int(state["forwards"]), int(state["shared"])
        self._stored = {kind: Counter(counter) for kind, counter in state["stored"].items()}
        self._left = {why: Counter(counter) for why, counter in state["left"].items()}

    def left_alone(self) -> str:
        """Return in words what was left alone."""
        return ", ".join(f"{counter['tensors']} {why}" for why, counter in sorted(self._left.items())) or "none"

    def report(self) -> dict[str, Any]:
        """Return the means of a forward, and the totals by kind."""
        forwards = max(self.forwards, 1)
        return {
            "forwards": self.forwards,
            "bytes_before": self._total("bytes_before") // forwards,
            "bytes_after": self._total("bytes_after") // forwards,
            "share_saved": round(self.share_saved, 4),
            "saved_again": self.shared,
            "kinds": {kind: dict(counter) for kind, counter in sorted(self._stored.items())},
            "left_alone": {why: dict(counter) for why, counter in sorted(self._left.items())},
        }
