"""Scales of FP8: the history of amax over past steps, and the memory layouts of block scales.

One tensor holds the amax of all layers: a window within a step, a history over steps. torch's block-scaled matmul needs
special layouts of scales. The functions for them only rearrange values.

Sources: cuBLAS documentation, "Scaling factors layouts"; the checks of torch's ``ScaledBlas.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from eff_kernels.fp8 import Scaled, note_
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import CheckpointError

_ALIGNED = 4  # scales along K in one 16-byte unit of float32, and in one tile of e8m0


def whole_blocks(matrix: Scaled, multiple: int) -> Scaled:
    """Return a matrix padded with zeros on both axes to a multiple. New blocks have scale 1.

    Zeros do not change a product, and cuBLAS is known to support products of whole blocks.
    """
    down, right = (-size % multiple for size in matrix.codes.shape)
    if not (down or right):
        return matrix
    # as bytes, because not every device can pad float8; the code of zero is zero
    codes = F.pad(matrix.codes.view(torch.uint8), (0, right, 0, down)).view(matrix.codes.dtype)
    if matrix.scale.dtype == torch.uint8:  # already whole tiles
        return matrix._replace(codes=codes)
    rows, columns = (size // side for size, side in zip(codes.shape, matrix.block, strict=True))
    below, beside = rows - matrix.scale.shape[0], columns - matrix.scale.shape[1]
    return Scaled(codes, F.pad(matrix.scale, (0, beside, 0, below), value=1.0), matrix.block)


def outer_major(scale: Tensor) -> Tensor:
    """Return scales of 1x128 blocks, (R, L), with strides (1, R).

    Scales that already have this layout, such as those of Triton casts, are not copied.
    """
    rows, along = scale.shape
    if scale.stride() == (1, rows):
        return scale
    # a new tensor, because with one block along K contiguous() would keep any stride
    return scale.new_empty(along, rows).copy_(scale.t()).t()


def inner_major(scale: Tensor) -> Tensor:
    """Return scales of 128x128 blocks, (T, L), as (L4, T) of strides (1, L4), L4 = L rounded up to a multiple of 4.

    Without the padding cuBLAS silently reads wrong scales. Scales that already have this layout, such as those of
    Triton casts, are not copied.
    """
    tiles, along = scale.shape
    wide = along + -along % _ALIGNED
    if scale.stride() == (wide, 1):
        return scale.as_strided((wide, tiles), (1, wide))
    padded = scale.new_ones(tiles, wide)
    padded[:, :along] = scale
    return padded.t()


ROLES = ("input", "weight", "gradient")
_UNSEEN = -1.0


class NonFiniteWatch:
    """Watches for NaN or infinity in recorded operands of the current step: one flag on the device for all layers."""

    def __init__(self) -> None:
        self.observing = False
        self.casts = 0
        """Incremented when weights must be cast again. Codes of an earlier count are not used."""
        self.flag = torch.zeros((), dtype=torch.int32)

    def move_(self, device: torch.device) -> None:
        """Move the flag."""
        if device.type != "meta":
            self.flag = self.flag.to(device)

    def see(self, amax: Tensor) -> None:
        """Set the flag if a value is not finite, without a host read."""
        note_(self.flag, amax)

    def take(self) -> bool:
        """Return the flag of all ranks and clear it, with one collective and one host read."""
        found = bool(all_reduce_(self.flag, "max"))
        if found:
            self.flag.zero_()
        return found


class AmaxBank:
    """The histories of all layers of a model, three rows per layer. A step costs one collective and a few ops.

    Forward and backward only widen the window. `take_window` joins the ranks and empties it. `commit` adds it to the
    histories after the optimizer step was applied. A window that is never committed has no effect, so
    micro-batches, recomputation and skipped steps do no harm.

    Rows are plain attributes, not buffers, because DDP would overwrite the other ranks' windows with those of rank 0.
    """

    def __init__(self, num_layers: int, length: int) -> None:
        rows = num_layers * len(ROLES)
        self.observing = False
        self.num_updates = 0
        self.window = torch.full((rows,), _UNSEEN)
        self.history = torch.zeros(rows, length)  # newest first; 0: unknown
        self.largest = torch.zeros(rows)

    def move_(self, device: torch.device) -> None:
        """Move all rows. They stay float32 when the model is cast."""
        if device.type != "meta":
            for name in ("window", "history", "largest"):
                setattr(self, name, getattr(self, name).to(device))

    def seen(self, layer: int, role: str) -> Tensor:
        """Return the largest magnitude of the current window, which `eff_kernels.fp8.note_` updates in place."""
        return self.window[layer * len(ROLES) + ROLES.index(role)]

    def past(self, layer: int, role: str, device: torch.device) -> Tensor:
        """Return the largest magnitude of the remembered steps, 0 if there is none."""
        return self.largest[layer * len(ROLES) + ROLES.index(role)].to(device)

    def take_window(self) -> Tensor:
        """Return the window of all ranks, infinite for non-finite values, and start a new one; a collective."""
        # a maximum over processes may drop a NaN, but never an infinity
        window = all_reduce_(torch.where(torch.isfinite(self.window), self.window, math.inf), "max")
        self.window.fill_(_UNSEEN)
        return window

    def commit(self, window: Tensor) -> None:
        """Prepend a window to the histories. Rows without values, or with NaN or infinity, stay as they are."""
        moves = (window != _UNSEEN) & torch.isfinite(window)
        moved = torch.cat([window[:, None], self.history[:, :-1]], 1)
        self.history.copy_(torch.where(moves[:, None], moved, self.history))
        self.largest.copy_(self.history.amax(1))
        self.num_updates += 1

    def forget(self) -> None:
        """Empty the histories, after weights were replaced."""
        self.history.zero_()
        self.largest.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the histories and the current window."""
        return {"history": self.history.clone(), "window": self.window.clone(), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        length = self.history.shape[1]
        if state["history"].shape[1] != length:
            raise CheckpointError(
                "fp8",
                f"amax_history must be the saved {state['history'].shape[1]} steps, got {length}",
                "resume with the saved value",
            )
        self.history.copy_(state["history"])
        self.window.copy_(state["window"])
        self.largest.copy_(self.history.amax(1))
        self.num_updates = int(state["num_updates"])
