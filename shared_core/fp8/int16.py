"""int16 training: dynamic fixed point, one exponent a tensor, moved by how often the last step overflowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_, rank, world_size
from shared_core.errors import CheckpointError
from shared_core.fp8.scaling import ROLES
from shared_core.numerics import FORMATS, round_to

_UNKNOWN = -(2**30)  # an exponent, where there is none
_SMALLEST, _LARGEST = -126, 112  # of a step that is normal, with codes that are finite, in float32
_BEYOND = FORMATS["int16"].qmax + 0.5  # in steps: what rounds past the largest code, an overflow of either sign
_ELEMENTS_PER_OVERFLOW = 10_000  # the paper's largest overflow rate, 0.01 %, as integers


def needed_exponent(x: Tensor) -> Tensor:
    """Return the smallest exponent e for which no finite element of ``x/2^e`` rounds past int16's largest code.

    Args:
        x: Any shape, float32 or float64.

    Returns:
        int64, no dimensions, in [-126, 112]; far below that where there is nothing but zeros, NaN and infinities.

    Example:
        >>> [needed_exponent(torch.tensor([0.0, amax])).item() for amax in (32767.0, 32767.5, 1.0)]
        [0, 1, -14]
    """
    magnitude = torch.where(x.isfinite(), x.abs(), 0.0)
    amax = magnitude.amax() if x.numel() else magnitude.new_zeros(())
    fraction, exponent = torch.frexp(amax)
    needed = exponent.long() - 15 + (fraction >= math.ldexp(_BEYOND, -15)).long()
    return torch.where(amax > 0, needed.clamp(_SMALLEST, _LARGEST), _UNKNOWN)


def fixed_point_round_to(x: Tensor, exponent: Tensor) -> Tensor:
    """Return ``2^e·clamp(round(x/2^e), -32768, 32767)``: halves to even; NaN and infinities pass.

    Args:
        x: Any shape, float32 or float64.
        exponent: e, an integer, one for all; below -126 and beyond 112 as these.

    Example:
        >>> fixed_point_round_to(torch.tensor([1.3, 1e5, float("inf")]), torch.tensor(-1)).tolist()
        [1.5, 16383.5, inf]
    """
    step = _step(exponent)
    return torch.where(x.isfinite(), round_to(x / step, "int16") * step, x)


def count_overflows(x: Tensor, needed: Tensor, exponent: Tensor) -> Tensor:
    """Return what a window counts of a tensor: (needed exponent, elements, overflows, of the doubled tensor, odd ones).

    Args:
        x: Any shape, float32 or float64.
        needed: Its `needed_exponent`.
        exponent: That it is cast with.

    Returns:
        Five int64; the last is 1 if `x` holds NaN or infinity, which is no overflow.

    Example:
        >>> x = torch.tensor([1.0, 20000.0, -40000.0])
        >>> count_overflows(x, needed_exponent(x), torch.tensor(0)).tolist()
        [1, 3, 1, 2, 0]
    """
    finite = x.isfinite()
    steps = torch.where(finite, x.abs(), 0.0) / _step(exponent)
    elements = torch.full_like(needed, x.numel())
    overflows, of_double = (steps >= _BEYOND).sum(), (steps >= _BEYOND / 2).sum()
    return torch.stack([needed, elements, overflows, of_double, (~finite).any().long()])


class SharedExponentBank:
    """The exponents of all layers of one model, three a layer: a step costs one collective and a few ops.

    Forward and backward only count into the window. `take_window` joins the ranks and empties it; `commit` moves the
    exponents by it once the optimizer step was applied, and a window that is never committed leaves no trace. With an
    overflow rate above 0.01 % an exponent rises by one; if it would be at most that with all values doubled, it falls
    by one. A row without an exponent takes what its first committed window needs; until then, every tensor is cast with
    what it needs itself, so nothing overflows at the start. Zeros alone say nothing, and a window that saw NaN or
    infinity moves nothing.

    Plain attributes, not buffers: DDP would overwrite the other ranks' windows with those of rank 0.

    Source: Courbariaux et al. 2014, *Training Deep Neural Networks with Low Precision Multiplications*,
    arXiv:1412.7024, algorithm 1; Das et al. 2018, *Mixed Precision Training of Convolutional Neural Networks using
    Integer Operations*, arXiv:1802.00930.

    Example:
        >>> bank = SharedExponentBank(1)
        >>> for largest in (1.0, 3.0, 1.0):
        ...     _ = Int16Cast(bank, 0).cast(torch.tensor([[largest, 0.5]]), "input", record=True)
        ...     bank.commit(bank.take_window())
        ...     print(bank.exponent(0, "input", torch.device("cpu")).item())
        -14
        -13
        -14
    """

    def __init__(self, num_layers: int) -> None:
        rows = num_layers * len(ROLES)
        self.observing = False
        self.num_updates = 0
        self.exponents = torch.full((rows,), _UNKNOWN, dtype=torch.int64)
        self.window = torch.tensor([[_UNKNOWN, 0, 0, 0, 0]]).repeat(rows, 1)
        self.overflows = torch.zeros(rows, dtype=torch.int64)  # of all applied steps

    def move_(self, device: torch.device) -> None:
        """Move all rows."""
        if device.type != "meta":
            for name in ("exponents", "window", "overflows"):
                setattr(self, name, getattr(self, name).to(device))

    def widen(self, layer: int, role: str, counts: Tensor) -> None:
        """Take the counts of a tensor, those of `count_overflows`, into the open window."""
        row = self.window[layer * len(ROLES) + ROLES.index(role)]
        counts = counts.to(row)
        row.copy_(torch.cat([torch.maximum(row[:1], counts[:1]), row[1:] + counts[1:]]))

    def exponent(self, layer: int, role: str, device: torch.device) -> Tensor:
        """Return the exponent of the last applied step; far below every real one if there is none."""
        return self.exponents[layer * len(ROLES) + ROLES.index(role)].to(device)

    def take_window(self) -> Tensor:
        """Return the window of all ranks and start a new one; a collective."""
        # each rank adds its own slot, so that one collective carries sums and a maximum
        slots = self.window.new_zeros(world_size(), *self.window.shape)
        slots[rank()] = self.window
        slots = all_reduce_(slots, "sum")
        self.window.zero_()
        self.window[:, 0] = _UNKNOWN
        return torch.cat([slots[:, :, :1].amax(0), slots[:, :, 1:].sum(0)], 1)

    def commit(self, window: Tensor) -> None:
        """Move the exponents by a window; rows that saw only zeros, or NaN or infinity, stay as they are."""
        needed, elements, overflows, of_double, non_finite = window.unbind(1)
        rises = (overflows * _ELEMENTS_PER_OVERFLOW > elements).long()
        falls = (of_double * _ELEMENTS_PER_OVERFLOW <= elements).long()
        moved = (self.exponents + rises - falls).clamp(_SMALLEST, _LARGEST)
        after = torch.where(self.exponents == _UNKNOWN, needed, moved)
        usable = (needed != _UNKNOWN) & (non_finite == 0)
        self.exponents.copy_(torch.where(usable, after, self.exponents))
        self.overflows += overflows
        self.num_updates += 1

    def forget(self) -> None:
        """Forget the exponents: the weights are others now."""
        self.exponents.fill_(_UNKNOWN)

    def state_dict(self) -> dict[str, Any]:
        """Return all rows, three for each layer in the order of the layers, and the number of applied steps."""
        return {
            "exponents": self.exponents.clone(),
            "window": self.window.clone(),
            "overflows": self.overflows.clone(),
            "num_updates": self.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take saved rows."""
        try:
            rows = {name: state[name] for name in ("exponents", "window", "overflows")}
            num_updates = int(state["num_updates"])
            for name, saved in rows.items():
                own = getattr(self, name)
                if saved.shape != own.shape or saved.dtype != own.dtype:
                    raise CheckpointError(
                        "fp8",
                        f"saved {name} must be {own.dtype} of shape {tuple(own.shape)}, got {saved.dtype} of "
                        f"{tuple(saved.shape)}",
                        "resume with the layers of the saved run",
                    )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError("fp8", f"state must be one that int16 saved, got {error!r}") from error
        for name, saved in rows.items():
            getattr(self, name).copy_(saved)
        self.num_updates = num_updates


class Int16Cast:
    """Every operand in int16 with the exponent of its layer and role; products accumulate in float32, not in int32."""

    def __init__(self, bank: SharedExponentBank, index: int) -> None:
        self.bank, self.index = bank, index

    def cast(self, matrix: Tensor, role: str, record: bool) -> Tensor:
        """Return the values that int16 holds; NaN and infinities pass.

        Example:
            >>> Int16Cast(SharedExponentBank(1), 0).cast(torch.tensor([[1.0, 0.3]]), "input", True).tolist()
            [[1.0, 0.29998779296875]]
        """
        x = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
        needed, shared = needed_exponent(x), self.bank.exponent(self.index, role, x.device)
        # before the first applied step there is no shared one
        exponent = torch.where(shared == _UNKNOWN, needed, shared)
        if record:
            self.bank.widen(self.index, role, count_overflows(x, needed, exponent))
        return fixed_point_round_to(x, exponent)


def _step(exponent: Tensor) -> Tensor:
    # from the bit pattern: exp2 of vector libraries is not exact at integers
    return ((exponent.clamp(_SMALLEST, _LARGEST).int() + 127) << 23).view(torch.float32)
