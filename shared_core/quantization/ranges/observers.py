"""Observers: the range of a stream of values, by one of five criteria, and the scale that follows.

In training a window collects inside a step, and a moving average follows over steps; one tensor holds all layers.
Percentile, KL and MSE use one histogram a layer. After training an observer takes batches and returns a range; its
state makes both repeatable.
"""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from eff_kernels.quantization import affine as kernels
from torch import Tensor

from shared_core.distributed.collectives import all_reduce_, world_size
from shared_core.errors import CheckpointError, ConfigError, TrainingError, nearest
from shared_core.quantization.ranges.clip_search import kl_range, mse_range, percentile_range
from shared_core.quantization.ranges.histogram import Histogram, finite_extrema


class RangeBank:
    """The ranges of all observed layers of one model, one row a layer: a step costs one collective and a few ops.

    A forward only widens the window. `take_window` joins the ranks and empties it; `commit` moves the average
    ``r ← r + c·(w − r)`` by that window once the optimizer step was applied, and a window that is never
    committed leaves no trace. So micro-batches, recomputation and skipped steps all do no harm.

    Plain attributes, not buffers: DDP would overwrite the other ranks' windows with those of rank 0.

    Args:
        codes: Smallest and largest code of each layer.
        ema_constant: ``c``; None: the range is that of all steps.
        rounded_gate: Gate gradients on the rounded code.
        means: Observe mean magnitudes too, from which learned scales start; a second collective a step.
    """

    def __init__(
        self,
        codes: Sequence[tuple[int, int]],
        *,
        ema_constant: float | None = 0.01,
        rounded_gate: bool = False,
        means: bool = False,
    ) -> None:
        num_layers = len(codes)
        self.ema_constant = ema_constant
        self.noise_seed: int | None = None
        """Seeds stochastic rounding of weights; None rounds to nearest."""
        self.num_steps = 0
        self.totals = torch.zeros(num_layers, 2, dtype=torch.float64) if means else None  # (Σ|x|, count) of the window
        self.mean = self.taken_mean = torch.zeros(num_layers, dtype=torch.float64)
        self.rounded_gate = rounded_gate
        self.observing = self.observes_in_eval = False
        self.quantizing = False
        self.num_updates = 0
        self.window = torch.full((num_layers, 2), math.inf)  # (min, -max): both are reduced by a minimum
        self.ranges = torch.zeros(num_layers, 2)  # (min, max)
        self.known = torch.zeros(num_layers, dtype=torch.bool)
        self.non_finite = torch.zeros(num_layers, dtype=torch.int64)
        self.scale = torch.ones(num_layers)
        self.zero_point = torch.zeros(num_layers, dtype=torch.int32)
        self.codes = torch.tensor(list(codes), dtype=torch.float64).view(num_layers, 2)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.window.device

    def move_(self, device: torch.device) -> None:
        """Move all rows; float32 stays float32 whatever the model is cast to."""
        if device != self.device and device.type != "meta":
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(self, name, value.to(device))

    def observe(self, index: int, x: Tensor) -> None:
        """Widen a layer's window by the values of `x`."""
        low, high = torch.aminmax(x.detach())
        window = self.window[index]
        # minimum hands NaN on, so that a bad batch is found when the window is read
        window.copy_(torch.minimum(window, torch.stack([low, -high]).to(window.dtype)))
        # a sum, unlike extrema, feels a recomputation, the only forward that runs inside a backward pass
        if self.totals is not None and (torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1):
            self.totals[index, 0] += x.detach().abs().sum(dtype=torch.float64)
            self.totals[index, 1] += x.numel()

    def noise(self, weight: Tensor, number: int) -> Tensor | None:
        """Return uniform noise for the weight of a layer's `number`, None to round to nearest.

        A function of seed, step and layer, and of no state: a recomputed forward and every rank see the same.
        """
        if self.noise_seed is None:
            return None
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(((self.noise_seed * 1_000_003 + self.num_steps) * 1_000_003 + number) % 2**63)
        return torch.rand(weight.shape, generator=generator, device=weight.device)

    def clear_window(self) -> None:
        """Forget what was observed since the last `take_window`."""
        self.window.fill_(math.inf)
        if self.totals is not None:
            self.totals.zero_()

    def take_window(self) -> Tensor:
        """Return the window of all ranks and start a new one; every rank must call it."""
        window = all_reduce_(self.window.clone(), "min")
        if self.totals is not None:
            totals = all_reduce_(self.totals.clone(), "sum")
            self.taken_mean = torch.where(totals[:, 1] > 0, totals[:, 0] / totals[:, 1], self.mean)
        self.clear_window()
        return window

    def commit(self, window: Tensor) -> None:
        """Move the ranges by one window; a layer's first window is its first range.

        A layer that saw nothing keeps its range, and so does one that saw NaN or infinity, which is counted.
        """
        seen = ~(window == math.inf).all(1)
        finite = torch.isfinite(window).all(1)
        new = torch.stack([window[:, 0], -window[:, 1]], 1)
        if self.ema_constant is None:
            moved = torch.stack(
                [torch.minimum(self.ranges[:, 0], new[:, 0]), torch.maximum(self.ranges[:, 1], new[:, 1])], 1
            )
        else:
            moved = self.ranges + self.ema_constant * (new - self.ranges)
        moved = torch.where(self.known[:, None], moved, new)
        self.set_ranges(torch.where(finite[:, None], moved, self.ranges), self.known | finite)
        self.mean = torch.where(finite, self.taken_mean, self.mean)
        self.non_finite += seen & ~finite
        self.num_updates += 1

    def set_ranges(self, ranges: Tensor, known: Tensor) -> None:
        """Take ranges (layers, 2), valid where `known`, and derive scales and zero points, in place."""
        self.ranges.copy_(ranges)
        self.known.copy_(known)
        qmin, qmax = self.codes.unbind(1)
        scale, zero_point = kernels.affine_qparams(self.ranges[:, 0], self.ranges[:, 1], qmin, qmax)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def refresh(self) -> None:
        """Derive the ranges from all that was committed: they are about to be used for good. Here they always are."""

    def forget(self) -> None:
        """Start anew: no range is known."""
        self.known.zero_()
        self.clear_window()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later ranges depend on."""
        rows = {name: getattr(self, name).clone() for name in self._saved}
        return {**rows, "num_updates": self.num_updates}

    @property
    def _saved(self) -> tuple[str, ...]:
        return ("ranges", "known", "window", "non_finite", *(("totals", "mean") if self.totals is not None else ()))

    def load_state_dict(self, state: Mapping[str, Any], rows: Tensor) -> None:
        """Restore a saved state; `rows` says which saved row is that of each layer."""
        saved = {name: state[name].cpu()[rows].to(self.device) for name in self._saved}
        self.set_ranges(saved.pop("ranges"), saved.pop("known"))
        for name, value in saved.items():
            getattr(self, name).copy_(value)
        self.num_updates = int(state["num_updates"])


_KINDS = ("percentile", "kl", "mse")


class EstimatorBank(RangeBank):
    """A `RangeBank` whose ranges follow from histograms of all committed steps.

    A forward counts into the window. `take_window` joins the ranks (two collectives for all layers: extrema, then
    counts) and empties it; `commit` adds it to the history, once the optimizer step was applied. The ranges are
    derived anew after the commits 1, 2, 4, 8, … of a history and after every `refresh_every` of them; `refresh` does
    so at any time, and should before they are used for good. The window and the history are one float64 tensor
    each, rows as in `Histogram.data`.

    A forward that backward repeats (activation checkpointing) is not counted again. NaN and infinity never move a
    range; a layer whose committed window held one has it counted in `non_finite`.

    Args:
        kind: ``"percentile"``, ``"kl"`` or ``"mse"``; the other kinds are those of `RangeBank`.
        codes: Smallest and largest code of each layer.
        percentile: Share of values inside, in percent, of the kind ``"percentile"``.
        bins: Cells of a layer's histogram, a power of two, for KL at least twice the codes.
        refresh_every: Commits between two derivations, at least 1.
        rounded_gate: Gate gradients on the rounded code.

    Raises:
        ConfigError: If an option breaks its rule.

    Example:
        >>> bank = EstimatorBank("percentile", [(-128, 127)], percentile=90.0)
        >>> bank.observe(0, torch.arange(1.0, 101.0))
        >>> bank.commit(bank.take_window())
        >>> bank.ranges.tolist(), bank.known.tolist()
        ([[6.0, 95.0625]], [True])
    """

    def __init__(
        self,
        kind: Literal["percentile", "kl", "mse"],
        codes: Sequence[tuple[int, int]],
        *,
        percentile: float = 99.99,
        bins: int = 2048,
        refresh_every: int = 20,
        rounded_gate: bool = False,
    ) -> None:
        super().__init__(codes, ema_constant=None, rounded_gate=rounded_gate)
        if kind not in _KINDS:
            raise ConfigError(f"estimator bank: kind must be one that exists, got {kind!r}{nearest(str(kind), _KINDS)}")
        if not 50 < percentile <= 100:
            raise ConfigError(f"estimator bank: percentile must be above 50 and at most 100, got {percentile!r}")
        if isinstance(refresh_every, bool) or not isinstance(refresh_every, int) or refresh_every < 1:
            raise ConfigError(f"estimator bank: refresh_every must be a whole number from 1, got {refresh_every!r}")
        levels = max((qmax - qmin + 1 for qmin, qmax in codes), default=0)
        if kind == "kl" and bins < 2 * levels:
            raise ConfigError(f"estimator bank: bins must be at least twice the {levels} codes, got {bins!r}")
        self.kind, self.percentile, self.refresh_every = kind, percentile, refresh_every
        self.window = Histogram(len(codes), bins).data
        self.history = self.window.clone()
        self.num_commits = 0  # in the history; num_updates goes on when it is forgotten
        self._rows_of: dict[tuple[int, int], list[int]] = {}
        for row, pair in enumerate(codes):
            self._rows_of.setdefault((int(pair[0]), int(pair[1])), []).append(row)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def observe(self, index: int, x: Tensor) -> None:
        """Count the values of `x` in a layer's window."""
        # Counts, unlike extrema, feel a recomputation; it is the only forward that runs inside a backward pass.
        if torch._C._current_graph_task_id() == -1:
            Histogram.of(self.window[index : index + 1]).update(x.reshape(1, -1))

    def clear_window(self) -> None:
        """Forget what was observed since the last `take_window`."""
        Histogram.of(self.window).clear_()

    def take_window(self) -> Tensor:
        """Return the window of all ranks and start a new one; every rank must call it."""
        window = self.window.clone()
        Histogram.of(window).all_reduce()
        self.clear_window()
        return window

    def commit(self, window: Tensor) -> None:
        """Add one window to the history, and derive the ranges if it is their turn."""
        added = Histogram.of(window)
        Histogram.of(self.history).merge(added)
        self.non_finite += added.non_finite > 0
        self.num_updates += 1
        self.num_commits += 1
        if self.num_commits % self.refresh_every == 0 or self.num_commits & (self.num_commits - 1) == 0:
            self.refresh()

    def refresh(self) -> None:
        """Derive the ranges of all layers from the history; a layer that saw no finite value keeps its own."""
        history = Histogram.of(self.history)
        found = torch.zeros(len(self.history), 2, dtype=torch.float64, device=self.history.device)
        for (qmin, qmax), rows in self._rows_of.items():
            index = torch.tensor(rows, device=self.history.device)
            found[index] = self._estimate(Histogram.of(self.history[index]), qmin, qmax)
        seen = torch.isfinite(history.extrema[:, 0])
        self.set_ranges(torch.where(seen[:, None], found.to(self.ranges.dtype), self.ranges), self.known | seen)

    def _estimate(self, histogram: Histogram, qmin: int, qmax: int) -> Tensor:
        if self.kind == "percentile":
            return percentile_range(histogram, self.percentile, False)
        return (kl_range if self.kind == "kl" else mse_range)(histogram, qmin, qmax, False)

    def forget(self) -> None:
        """Start anew: no range is known, and nothing was seen."""
        super().forget()
        Histogram.of(self.history).clear_()
        self.num_commits = 0

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later ranges depend on."""
        return {**super().state_dict(), "num_commits": self.num_commits}

    @property
    def _saved(self) -> tuple[str, ...]:
        return (*super()._saved, "history")

    def load_state_dict(self, state: Mapping[str, Any], rows: Tensor) -> None:
        """Restore a saved state; `rows` says which saved row is that of each layer."""
        super().load_state_dict(state, rows)
        self.num_commits = int(state["num_commits"])


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


Kind = Literal["minmax", "ema", "percentile", "kl", "mse"]


class MinMax(RangeEstimator):
    """The smallest and the largest value; per tensor or channel."""

    kind: ClassVar[str] = "minmax"

    def _new(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        extrema = torch.full((rows, 2), math.inf, dtype=torch.float64, device=device)  # (min, -max)
        counts = torch.zeros(rows, 2, dtype=torch.int64, device=device)  # NaN and infinity: joined, of this rank
        return {"extrema": extrema, "non_finite": counts}

    def _observe(self, x: Tensor) -> None:
        self._tensors["extrema"] = torch.minimum(self._tensors["extrema"], finite_extrema(x))
        self._tensors["non_finite"][:, 1] += x.shape[1] - torch.isfinite(x).sum(1)

    def _seen(self) -> Tensor:
        return torch.isfinite(self._tensors["extrema"][:, 0])

    def _non_finite(self) -> Tensor:
        return self._tensors["non_finite"].sum(1)

    def _estimate(self) -> Tensor:
        return self._bounds(self._tensors["extrema"])

    def _bounds(self, extrema: Tensor) -> Tensor:
        low, high = extrema[:, 0], -extrema[:, 1]
        if self.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        return torch.stack([low, high], 1)

    def _merge(self, other: dict[str, Tensor]) -> None:
        self._tensors["extrema"] = torch.minimum(self._tensors["extrema"], other["extrema"])
        self._tensors["non_finite"] += other["non_finite"]

    def _join(self) -> None:
        self._tensors["extrema"] = all_reduce_(self._tensors["extrema"].clone(), "min")
        joined, own = self._tensors["non_finite"].unbind(1)
        self._tensors["non_finite"] = torch.stack([joined + all_reduce_(own.clone(), "sum"), torch.zeros_like(own)], 1)


class Ema(MinMax):
    """A moving average of each batch's minimum and maximum, ``r ← r + c·(b − r)``; per tensor or channel.

    One update is one step: the first is the first range. Call `all_reduce` after each update, if there are ranks: it
    joins the batch before it enters the average. The average depends on the order of batches by its nature, so that
    two of them cannot be merged.

    Args:
        ema_constant: ``c``, in (0, 1].
        **options: Those of `RangeEstimator`.
    """

    kind: ClassVar[str] = "ema"

    def __init__(self, *, ema_constant: float = 0.01, **options: Any) -> None:
        if not 0 < ema_constant <= 1:
            raise self._error("ema_constant", "must be above 0 and at most 1", ema_constant)
        self.ema_constant = float(ema_constant)
        super().__init__(**options)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "ema_constant": self.ema_constant}

    def _new(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        tensors = super()._new(rows, device)  # its extrema are those of the last batch alone
        return {**tensors, "average": tensors["extrema"].clone()}

    def _moved(self) -> Tensor:
        average, batch = self._tensors["average"], self._tensors["extrema"]
        moved = torch.where(torch.isfinite(average), average + self.ema_constant * (batch - average), batch)
        return torch.where(torch.isfinite(batch), moved, average)

    def _observe(self, x: Tensor) -> None:
        self._tensors["average"] = self._moved()
        self._tensors["extrema"] = torch.full_like(self._tensors["extrema"], math.inf)
        super()._observe(x)

    def _seen(self) -> Tensor:
        return torch.isfinite(self._moved()[:, 0])

    def _estimate(self) -> Tensor:
        return self._bounds(self._moved())

    def merge(self, other: RangeEstimator) -> None:
        """Refuse: an average of steps is not a function of two averages."""
        raise self._error("merge", "must be asked of a kind that knows no order; all_reduce after each update", self)

    def _merge(self, other: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def _join(self) -> None:
        average = self._tensors["average"]
        spread = all_reduce_(torch.stack([average, -average]), "max")
        if not bool((spread[0] == -spread[1]).all()):
            raise TrainingError(
                "observer ema: averages must agree on all ranks, got different ones; call all_reduce after each update"
            )
        super()._join()


class _HistogramEstimator(RangeEstimator):
    def __init__(self, *, bins: int = 2048, **options: Any) -> None:
        self.bins = Histogram(0, bins).bins
        super().__init__(**options)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "bins": self.bins}

    def _new(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        # what all ranks have joined, and what this one has seen since
        return {name: Histogram(rows, self.bins, device).data for name in ("joined", "own")}

    def _observe(self, x: Tensor) -> None:
        Histogram.of(self._tensors["own"]).update(x.abs() if self.symmetric else x)

    def histogram(self) -> Histogram:
        """Return the histogram of all that was seen, of magnitudes if symmetric; a copy."""
        both = Histogram.of(self._tensors["joined"].clone())
        both.merge(Histogram.of(self._tensors["own"]))
        return both

    def _seen(self) -> Tensor:
        return self.histogram().total > 0

    def _non_finite(self) -> Tensor:
        return self.histogram().non_finite.to(torch.int64)

    def _merge(self, other: dict[str, Tensor]) -> None:
        for name, data in self._tensors.items():
            Histogram.of(data).merge(Histogram.of(other[name]))

    def _join(self) -> None:
        own = Histogram.of(self._tensors["own"])
        own.all_reduce()
        Histogram.of(self._tensors["joined"]).merge(own)
        own.clear_()


class Percentile(_HistogramEstimator):
    """The range that leaves out at most ``100 - percentile`` percent; per tensor or channel; see `percentile_range`.

    Args:
        percentile: In (50, 100]; 99, 99.9 and 99.99 are usual.
        bins: Cells of the histogram, a power of two.
        **options: Those of `RangeEstimator`.
    """

    kind: ClassVar[str] = "percentile"

    def __init__(self, *, percentile: float = 99.99, **options: Any) -> None:
        if not 50 < percentile <= 100:
            raise self._error("percentile", "must be above 50 and at most 100", percentile)
        self.percentile = float(percentile)
        super().__init__(**options)

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "percentile": self.percentile}

    def _estimate(self) -> Tensor:
        return percentile_range(self.histogram(), self.percentile, self.symmetric)


class Kl(_HistogramEstimator):
    """The range of least Kullback–Leibler divergence; per tensor or channel; see `kl_range`.

    Args:
        bins: Cells of the histogram, a power of two, at least twice as many as codes.
        **options: Those of `RangeEstimator`.
    """

    kind: ClassVar[str] = "kl"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        levels = self.qmax + 1 if self.symmetric else self.qmax - self.qmin + 1
        if self.bins < 2 * levels:
            raise self._error("bins", f"must be at least twice the {levels} codes", self.bins)

    def _estimate(self) -> Tensor:
        return kl_range(self.histogram(), self.qmin, self.qmax, self.symmetric)


class Mse(_HistogramEstimator):
    """The range of least expected squared error; per tensor or channel; see `mse_range`.

    Args:
        bins: Cells of the histogram, a power of two.
        **options: Those of `RangeEstimator`.
    """

    kind: ClassVar[str] = "mse"

    def _estimate(self) -> Tensor:
        return mse_range(self.histogram(), self.qmin, self.qmax, self.symmetric)


ESTIMATORS: dict[str, type[RangeEstimator]] = {kind.kind: kind for kind in (MinMax, Ema, Percentile, Kl, Mse)}


def make_observer(kind: Kind, **options: Any) -> RangeEstimator:
    """Return a new observer: ``update(x)`` for each batch, then ``range()`` or ``scale_zero_point()``.

    Min–max, percentile, KL and MSE give the same range whatever the order of the values and their split into
    batches; the average of ``"ema"`` takes each update as a step.

    Args:
        kind: ``"minmax"``, ``"ema"``, ``"percentile"``, ``"kl"`` or ``"mse"``.
        **options: ``symmetric``, ``bits``, ``qmin``, ``qmax``, ``axis`` of `RangeEstimator`; ``ema_constant`` of
            `Ema`; ``percentile`` of `Percentile`; ``bins`` of the three that keep a histogram.

    Raises:
        ConfigError: If the kind or an option does not exist, or a value breaks its rule.

    Example:
        >>> observer = make_observer("minmax", qmin=0, qmax=255)
        >>> observer.update(torch.tensor([0.0, 2.55]))
        >>> observer.update(torch.tensor([1.0]))
        >>> observer.range(), observer.scale_zero_point()
        ((tensor(0.), tensor(2.5500)), (tensor(0.0100), tensor(0, dtype=torch.int32)))
    """
    if kind not in ESTIMATORS:
        raise ConfigError(f"make_observer: kind must be one that exists, got {kind!r}{nearest(str(kind), ESTIMATORS)}")
    estimator = ESTIMATORS[kind]
    parameters = [
        parameter
        for cls in (RangeEstimator, _HistogramEstimator, estimator)
        if issubclass(estimator, cls)
        for parameter in inspect.signature(cls).parameters.values()
    ]
    known = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    for name in options:
        if name not in known:
            raise ConfigError(f"make_observer: {kind} has no option {name!r}{nearest(name, known)}")
    return estimator(**options)
