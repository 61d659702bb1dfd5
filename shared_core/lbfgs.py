"""LBFGS moves weights many times in one step, where nothing that a technique promises holds in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shared_core.errors import CompatibilityError


def refuse_lbfgs(optimizers: Iterable[Any], where: str, why: str) -> None:
    """Refuse an optimizer that is LBFGS, beneath a wrapper too.

    Raises:
        CompatibilityError: If one is.
    """
    for optimizer in optimizers:
        if isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.LBFGS):
            raise CompatibilityError(f"{where}: optimizer must not be LBFGS, {why}; use SGD or AdamW")
