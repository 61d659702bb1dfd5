"""What ran of a model with recomputed blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch


@dataclass
class Tally:
    """What ran: counted where it happens, for the receipt."""

    recomputations: int = 0
    """Times that backward ran a region again."""
    blocks: Counter[str] = field(default_factory=Counter)
    """Times that each block was run again."""
    saved_bytes: int = 0
    """Bytes that the first backward found dropped: what autograd would have held, less what was held instead. What a
    region hands on is not counted: whatever runs next may hold it."""
    reached: bool = False
    """Whether a block ran with gradients on, in train mode or not."""
    compiled: bool = False
    """Whether a block was traced by torch.compile, which recomputes inside its own backward, uncounted."""
    uncompiled: bool = False
    """Whether torch.compile met a segment of several blocks, whose calls it cannot trace as one: they run eagerly."""
    notes: list[str] = field(default_factory=list)
    """What the user should be told, each line once."""
    _first_backward: int | None = None

    @property
    def has_measured(self) -> bool:
        """Whether there was a backward whose bytes were counted."""
        return self._first_backward is not None

    def note(self, text: str) -> None:
        """Keep a line, once."""
        if text not in self.notes:
            self.notes.append(text)

    def recomputed(self, names: list[str], num_bytes: int) -> None:
        """Count one recomputation of a region."""
        self.recomputations += 1
        self.blocks.update(names)
        backward = torch._C._current_graph_task_id()
        if self._first_backward is None:
            self._first_backward = backward
        if self._first_backward == backward:
            self.saved_bytes += num_bytes
