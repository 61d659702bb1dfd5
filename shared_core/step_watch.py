"""Whether it is still the optimizers of a plain loop's session that step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shared_core.errors import TrainingError


class StepWatch:
    """Notices a step that none of the watched optimizers made: another one was put in their place."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._stepped = self._has_stepped = False

    def watch(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Watch these, and no others."""
        self.close()
        self._handles = [optimizer.register_step_post_hook(self._note) for optimizer in optimizers]

    def _note(self, *_: Any) -> None:
        self._stepped = True

    def check(self) -> None:
        """Refuse a step that another optimizer made.

        Raises:
            TrainingError: If none of them has stepped since the last call, and one did before.
        """
        stepped, self._stepped = self._stepped, False
        if self._has_stepped and not stepped:
            raise TrainingError(
                "session: steps must be those of the optimizers that begin was given, got one that none of them made; "
                "change their param_groups instead, or finish this session and make another for the new optimizer"
            )
        self._has_stepped = stepped

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._stepped, self._has_stepped = [], False, False
