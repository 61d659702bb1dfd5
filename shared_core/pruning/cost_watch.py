"""What a weight of each layer costs, measured while the user's own first micro-batches pass."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Literal

from torch import nn

from shared_core.pruning.scorers import layer_costs, observe_positions


class CostWatch:
    """Counts at how many positions each layer is used, from `begin` until the first step is complete.

    Args:
        kind: ``flops``, ``bytes`` or ``energy``.
        modules: Weight name to layer.
    """

    def __init__(self, kind: Literal["flops", "bytes", "energy"], modules: Mapping[str, nn.Module]) -> None:
        self._kind, self._modules = kind, dict(modules)
        self._open = contextlib.ExitStack()
        self._positions: dict[str, float] = {}
        if kind != "bytes":
            # relative to the calls of one layer: which module a trainer calls is not known, and costs are relative
            first = next(iter(self._modules.values()))
            self._positions = self._open.enter_context(observe_positions(first, self._modules))

    def read(self) -> dict[str, float]:
        """Return the costs by weight name, and stop watching.

        Raises:
            TrainingError: If a layer was not called yet.
        """
        self._open.close()
        return layer_costs(self._modules, self._kind, positions=self._positions)

    def close(self) -> None:
        """Stop watching, whatever was seen."""
        with contextlib.suppress(Exception):
            self._open.close()
