"""What all observers share: batches in, a range out, and the state that makes both repeatable."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from eff_kernels import quantization as kernels
from torch import Tensor

from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.ranks import all_reduce_, world_size


class RangeEstimator(abc.ABC):
    """An observer: `update` with each batch, then `range` or `scale_zero_point`.

    NaN and infinity are counted in `non_finite` and never move a range. Arithmetic is float64 whatever the batches
    are, on the device of the last one, and a range is float32, or float64 once a float64 batch was seen.

    Args:
        symmetric: The range is ``[-v, v]`` and the zero point 0.
        bits: Width of a code, 2 to 16: ``-2^(b-1)`` to ``2^(b-1) - 1``, symmetric one less.
        qmin: Smallest code, in place of `bits`; with symmetric ``-qmax`` or ``-qmax - 1``.
        qmax: Largest code, with `qmin`. Codes 0 to 255 hold non-negative values with zero point 0.
        axis: One range for each channel along this axis; None: one range.

    Raises:
        ConfigError: If an option breaks its rule.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        *,
        symmetric: bool = False,
        bits: int = 8,
        qmin: int | None = None,
        qmax: int | None = None,
        axis: int | None = None,
    ) -> None:
        self.symmetric, self.axis = bool(symmetric), axis
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise self._error("axis", "must be a whole number or None", axis)
        self.qmin, self.qmax = self._codes(bits, qmin, qmax)
        self._dtype = torch.float32
        # with an axis the first batch says how many channels there are
        self._tensors = self._new(0 if axis is not None else 1, torch.device("cpu"))

    def _codes(self, bits: int, qmin: int | None, qmax: int | None) -> tuple[int, int]:
        if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 16:
            raise self._error("bits", "must be a whole number from 2 to 16", bits)
        top = 2 ** (bits - 1) - 1
        if qmin is None and qmax is None:
            return (-top if self.symmetric else -top - 1), top
        if not all(isinstance(q, int) and not isinstance(q, bool) and abs(q) <= 2**16 for q in (qmin, qmax)):
            raise self._error("qmin and qmax", "must both be whole numbers of at most 16 bits", (qmin, qmax))
        if qmin is None or qmax is None or not qmin < qmax:
            raise self._error("qmin", "must be below qmax", (qmin, qmax))
        if self.symmetric and (qmax < 1 or qmin not in (-qmax, -qmax - 1)):
            raise self._error("qmin", "must be -qmax or -qmax - 1 with symmetric=True", (qmin, qmax))
        return qmin, qmax

    def _error(self, name: str, rule: str, value: object) -> ConfigError:
        return ConfigError(f"observer {self.kind}: {name} {rule}, got {value!r}")

    @property
    def non_finite(self) -> Tensor:
        """How many NaN and infinite values were seen: (), or (channels,)."""
        return self._shaped(self._non_finite())

    def update(self, x: Tensor) -> None:
        """Observe a batch.

        Args:
            x: Values of any shape and floating type, also none; with an axis as many channels as before.

        Raises:
            ConfigError: If `x` is no floating-point tensor or its channels differ from those before.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise self._error("x", "must be a floating-point tensor", got)
        channels = 1
        if self.axis is not None:
            if not -x.dim() <= self.axis < x.dim():
                raise self._error("x", f"must have the axis {self.axis} of the channels", tuple(x.shape))
            channels = x.shape[self.axis]
        if not channels:
            return
        if self._num_rows == 0:
            self._tensors = self._new(channels, x.device)
        if channels != self._num_rows:
            raise self._error("x", f"must have {self._num_rows} channels along axis {self.axis}", channels)
        x = x.detach()
        self._to(x.device)
        if x.dtype == torch.float64:
            self._dtype = torch.float64
        # an empty batch too: it is a step of a moving average
        self._observe((x if self.axis is None else x.movedim(self.axis, 0)).reshape(channels, x.numel() // channels))

    def range(self) -> tuple[Tensor, Tensor]:
        """Return (min, max): of shape (), or (channels,) with an axis. The minimum may lie above 0.

        Raises:
            TrainingError: If no finite value was seen, of a channel or of all.
        """
        seen = self._seen()
        if not seen.numel() or not bool(seen.all()):
            missing = "" if self.axis is None else f" in channels {(~seen).nonzero().flatten()[:5].tolist()}"
            raise TrainingError(
                f"observer {self.kind}: a range must come from finite values, got none{missing} "
                f"({int(self._non_finite().sum())} NaN or infinite); update it with batches, or look for NaN"
            )
        low, high = self._estimate().to(self._dtype).unbind(1)
        return self._shaped(low), self._shaped(high)

    def scale_zero_point(self) -> tuple[Tensor, Tensor]:
        """Return (scale, zero point in int32) of the range, widened to contain 0; of the shapes of `range`.

        Raises:
            TrainingError: As `range`.
        """
        low, high = self.range()
        if not self.symmetric:
            return kernels.affine_qparams(low, high, self.qmin, self.qmax)
        scale = kernels.symmetric_scale(torch.stack([low.reshape(-1), high.reshape(-1)], 1), 0, self.qmax)
        return self._shaped(scale), torch.zeros_like(low, dtype=torch.int32)

    def merge(self, other: RangeEstimator) -> None:
        """Add what another observer has seen: as if this one had seen both.

        Raises:
            ConfigError: If it is of another kind or has other options, or of the kind ``"ema"``.
        """
        if type(other) is not type(self) or other._options() != self._options():
            raise self._error("other", "must be an observer of the same kind and options", other)
        if other._num_rows and not self._num_rows:
            self._tensors = self._new(other._num_rows, other._device)
        if other._num_rows not in (0, self._num_rows):
            raise self._error("other", f"must have {self._num_rows} channels", other._num_rows)
        if other._num_rows:
            self._merge({name: value.to(self._device) for name, value in other._tensors.items()})
        if other._dtype == torch.float64:
            self._dtype = torch.float64

    def all_reduce(self) -> None:
        """Make every rank hold what all have seen; every rank must call it, as often as it likes.

        What was joined before is not counted again. Channels and type are agreed first, then extrema, then counts:
        three small collectives. A rank without data has its tensors on the CPU until its first batch; with NCCL
        give each rank one.

        Raises:
            ConfigError: On every rank, if their channels differ.
            TrainingError: On every rank, of the kind ``"ema"``, if it was not called after each update.
        """
        if world_size() == 1:
            return
        rows = self._num_rows
        agreed = torch.tensor([int(self._dtype == torch.float64), rows, -rows if rows else -(2**31)])
        double, most, fewest = all_reduce_(agreed.to(self._device), "max").tolist()
        if most == 0:
            return
        if most != -fewest:
            raise self._error("x", f"must have as many channels on every rank, {most} on one", -fewest)
        if not rows:
            self._tensors = self._new(most, self._device)
        if double:
            self._dtype = torch.float64
        self._join()

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values from which `load_state_dict` goes on bit for bit."""
        tensors = {name: value.clone() for name, value in self._tensors.items()}
        return {"kind": self.kind, **self._options(), "double": self._dtype == torch.float64, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state.

        Raises:
            CheckpointError: If it is of another kind or other options, or damaged.
        """
        where = f"observer {self.kind}"
        for name, mine in {"kind": self.kind, **self._options()}.items():
            if state.get(name) != mine:
                raise CheckpointError(
                    f"{where}: saved {name} must be {mine!r}, got {state.get(name)!r}; load with the saved options"
                )
        rows = {len(state[name]) if isinstance(state.get(name), Tensor) else -1 for name in self._tensors}
        channels = rows.pop()
        wanted = self._new(max(channels, 0), self._device)
        if rows or channels < 0 or (self.axis is None and channels != 1):
            raise CheckpointError(f"{where}: saved tensors {', '.join(wanted)} must be there, one row a channel")
        for name, like in wanted.items():
            saved = state[name]
            if saved.shape != like.shape or saved.dtype != like.dtype:
                got = f"{tuple(saved.shape)} {saved.dtype}"
                raise CheckpointError(f"{where}: saved {name} must be {tuple(like.shape)} {like.dtype}, got {got}")
            like.copy_(saved)
        self._tensors = wanted
        self._dtype = torch.float64 if state.get("double") else torch.float32

    def _options(self) -> dict[str, Any]:
        return {"symmetric": self.symmetric, "qmin": self.qmin, "qmax": self.qmax, "axis": self.axis}

    @property
    def _num_rows(self) -> int:
        return len(next(iter(self._tensors.values())))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._tensors.values())).device

    def _to(self, device: torch.device) -> None:
        if device != self._device:
            self._tensors = {name: value.to(device) for name, value in self._tensors.items()}

    def _shaped(self, values: Tensor) -> Tensor:
        return values.reshape(()) if self.axis is None else values

    @abc.abstractmethod
    def _new(self, rows: int, device: torch.device) -> dict[str, Tensor]: ...
    @abc.abstractmethod
    def _observe(self, x: Tensor) -> None: ...
    @abc.abstractmethod
    def _seen(self) -> Tensor: ...
    @abc.abstractmethod
    def _non_finite(self) -> Tensor: ...
    @abc.abstractmethod
    def _estimate(self) -> Tensor: ...
    @abc.abstractmethod
    def _merge(self, other: dict[str, Tensor]) -> None: ...
    @abc.abstractmethod
    def _join(self) -> None: ...
