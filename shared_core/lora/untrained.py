"""Find optimizers that leave every adapter at zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import TrainingError

_PATIENCE = 4
"""Steps with gradients that may leave all of them at zero. SOAP, for example, does not move weights in its first."""


class ZeroAdapters:
    """Checks that the first steps move some matrix B, which starts at zero.

    LAMB and LARS scale an update by the norm of the weights, so they never move a matrix of zeros.

    Args:
        matrices: The matrices B of all layers.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        self._steps = 0

    @torch.no_grad()
    def after_step(self, optimizers: Iterable[Any]) -> bool:
        """Return True if a matrix has moved. The gradients must still be there.

        Raises:
            TrainingError: If four steps with gradients and a learning rate have moved none.
        """
        if any(bool(one.any()) for one in self._matrices):
            return True
        optimizers = [*optimizers]
        has_gradient = any(one.grad is not None and bool(one.grad.any()) for one in self._matrices)
        if has_gradient and all(group.get("lr") != 0 for one in optimizers for group in one.param_groups):
            self._steps += 1
        if self._steps < _PATIENCE:
            return False
        names = " and ".join(type(one).__name__ for one in optimizers)
        raise TrainingError(
            "lora",
            f"{names} has left all adapters at zero for {_PATIENCE} steps, as optimizers do that scale updates by the "
            "norm of the weights",
            "use another optimizer, such as AdamW",
        )
