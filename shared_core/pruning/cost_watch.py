"""What a weight of each layer costs, measured while the user's own micro-batches pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from shared_core.distributed.collectives import all_reduce_
from shared_core.modules.weight_views import weight_of
from shared_core.pruning.scorers.layer_costs import LayerUses, layer_costs


class CostWatch:
    """Counts at how many positions layers are used. A layer costs what it did in the first step that reached it.

    An expert may wait for its first token: until then its cost is not known. Positions are those of all processes,
    whose batches may be padded to other lengths: costs are equal, and with them the masks. They are counted per call
    of the first layer that was called, since which module a trainer calls is not known.

    Args:
        kind: ``flops``, ``bytes`` or ``energy``; ``none``: nothing is counted.
        modules: Weight name to layer.
    """

    def __init__(self, kind: Literal["none", "flops", "bytes", "energy"], modules: Mapping[str, nn.Module]) -> None:
        self._kind: Literal["flops", "bytes", "energy"] = "bytes" if kind == "none" else kind
        self._modules = {} if kind == "none" else dict(modules)
        self._uses: LayerUses | None = None
        self.costs: dict[str, float] = layer_costs(self._modules, "bytes") if kind == "bytes" else {}
        """Weight name to the cost of one weight there, of the layers whose cost is known; one object for good."""

    def watch(self) -> None:
        """Watch the layers, if the cost of one is not known."""
        if self._uses is None and not self._is_complete:
            self._uses = LayerUses(self._modules)

    @property
    def _is_complete(self) -> bool:
        return self.costs.keys() >= self._modules.keys()

    def end_step(self) -> None:
        """Note what layers cost that no step reached before; every process must call it."""
        if self._uses is None:
            return
        uses = [(self._uses.positions.get(name, 0.0), self._uses.calls.get(name, 0)) for name in self._modules]
        weight = weight_of(*next(iter(self._modules.items())))
        # where the weights are: NCCL takes no tensor of the CPU
        joined = all_reduce_(torch.tensor(uses, dtype=torch.float64).to(weight.device), "sum").tolist()
        forwards = next((calls for _, calls in joined if calls), 1)
        positions = {
            name: total / forwards
            for name, (total, _) in zip(self._modules, joined, strict=True)
            if total and name not in self.costs
        }
        self.costs |= layer_costs({name: self._modules[name] for name in positions}, self._kind, positions=positions)
        self._uses.positions, self._uses.calls = {}, {}
        if self._is_complete:
            self.close()

    def close(self) -> None:
        """Stop watching."""
        if self._uses is not None:
            self._uses.close()
            self._uses = None

    def window_state(self) -> dict[str, Any]:
        """Return what was counted in the step that is not over, by this process."""
        uses = self._uses
        return {"positions": dict(uses.positions), "calls": dict(uses.calls)} if uses and uses.calls else {}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        if self._uses is not None:
            self._uses.positions = {name: float(total) for name, total in state["positions"].items()}
            self._uses.calls = {name: int(count) for name, count in state["calls"].items()}
