"""Largest magnitudes of past steps: one tensor for all layers, a window inside a step, a history over steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.ranks import all_reduce_

ROLES = ("input", "weight", "gradient")
_UNSEEN = -1.0


class NonFiniteWatch:
    """Whether the open step met NaN or infinity in a recorded operand: one flag on the device for all layers.

    Example:
        >>> watch = NonFiniteWatch()
        >>> watch.see(torch.tensor([1.0, math.inf]))
        >>> watch.take(), watch.take()
        (True, False)
    """

    def __init__(self) -> None:
        self.observing = False
        self.flag = torch.zeros((), dtype=torch.int32)

    def move_(self, device: torch.device) -> None:
        """Move the flag."""
        if device.type != "meta":
            self.flag = self.flag.to(device)

    def see(self, amax: Tensor) -> None:
        """Raise the flag if a magnitude is not finite; no host read."""
        self.flag.copy_(torch.maximum(self.flag, (~torch.isfinite(amax.detach()).all()).to(self.flag)))

    def take(self) -> bool:
        """Return the flag of all ranks and lower it; one collective and one host read."""
        found = bool(all_reduce_(self.flag, "max"))
        if found:
            self.flag.zero_()
        return found


class AmaxBank:
    """The histories of all layers of one model, three rows a layer: a step costs one collective and a few ops.

    Forward and backward only widen the window. `take_window` joins the ranks and empties it; `commit` adds it to the
    histories once the optimizer step was applied, and a window that is never committed leaves no trace. So
    micro-batches, recomputation and skipped steps do no harm.

    Plain attributes, not buffers: DDP would overwrite the other ranks' windows with those of rank 0.

    Args:
        num_layers: Layers.
        length: Steps that a history remembers.

    Example:
        >>> bank = AmaxBank(1, 2)
        >>> for amax in (4.0, 1.0, 2.0):
        ...     bank.widen(0, "input", torch.tensor(amax))
        ...     bank.commit(bank.take_window())
        >>> bank.past(0, "input", torch.device("cpu")).item()
        2.0
    """

    def __init__(self, num_layers: int, length: int) -> None:
        rows = num_layers * len(ROLES)
        self.observing = False
        self.num_updates = 0
        self.window = torch.full((rows,), _UNSEEN)
        self.history = torch.zeros(rows, length)  # newest first; 0: nothing known
        self.largest = torch.zeros(rows)

    def move_(self, device: torch.device) -> None:
        """Move all rows; float32 stays float32 whatever the model is cast to."""
        if device.type != "meta":
            for name in ("window", "history", "largest"):
                setattr(self, name, getattr(self, name).to(device))

    def widen(self, layer: int, role: str, amax: Tensor) -> None:
        """Take a largest magnitude into the open window; NaN stays NaN."""
        row = self.window[layer * len(ROLES) + ROLES.index(role)]
        row.copy_(torch.maximum(row, amax.detach().reshape(()).to(row)))

    def past(self, layer: int, role: str, device: torch.device) -> Tensor:
        """Return the largest magnitude of the remembered steps, 0 if there is none."""
        return self.largest[layer * len(ROLES) + ROLES.index(role)].to(device)

    def take_window(self) -> Tensor:
        """Return the window of all ranks, infinite where it was not finite, and start a new one; a collective."""
        # a maximum over processes may drop a NaN, but never an infinity
        window = all_reduce_(torch.where(torch.isfinite(self.window), self.window, math.inf), "max")
        self.window.fill_(_UNSEEN)
        return window

    def commit(self, window: Tensor) -> None:
        """Put a window in front of the histories; rows that saw nothing, or NaN or infinity, stay as they are."""
        moves = (window != _UNSEEN) & torch.isfinite(window)
        moved = torch.cat([window[:, None], self.history[:, :-1]], 1)
        self.history.copy_(torch.where(moves[:, None], moved, self.history))
        self.largest.copy_(self.history.amax(1))
        self.num_updates += 1

    def forget(self) -> None:
        """Empty the histories: the weights are others now."""
        self.history.zero_()
        self.largest.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the histories and the open window."""
        return {"history": self.history.clone(), "window": self.window.clone(), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises:
            CheckpointError: If the histories are of another length.
        """
        length = self.history.shape[1]
        if state["history"].shape[1] != length:
            raise CheckpointError(
                f"fp8: amax_history must be the saved {state['history'].shape[1]} steps, got {length}; "
                "resume with the saved value"
            )
        self.history.copy_(state["history"])
        self.window.copy_(state["window"])
        self.largest.copy_(self.history.amax(1))
        self.num_updates = int(state["num_updates"])
