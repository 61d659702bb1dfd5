"""Observe the ranges of all layers' inputs, by one of five criteria, and derive scales.

A window collects values within a step. A moving average, or the extrema of all steps, follow over steps. One tensor
holds all layers. Percentile, KL and MSE use one histogram per layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from eff_kernels.quantization import affine as kernels
from torch import Tensor

from shared_core.config.options import checked
from shared_core.distributed.collectives import all_reduce_
from shared_core.errors import ConfigError
from shared_core.quantization.ranges.clip_search import kl_range, mse_range, percentile_range
from shared_core.quantization.ranges.histogram import Histogram


# a replayed CUDA graph would draw the same numbers again
@torch.library.custom_op("efftrain::step_noise", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def step_noise(like: Tensor, seed: int, step: Tensor, number: int) -> Tensor:
    """Return random numbers in [0, 1) that depend only on seed, step and layer.

    It is one operator, because a compiled graph cannot hold a generator. The step is a tensor, because a number would
    be a constant of the graph, which would be recompiled in each step.

    Args:
        like: Gives the shape and device.
        seed: Seed of the run.
        step: int64 scalar on the CPU.
        number: Number of the layer.
    """
    generator = torch.Generator(device=like.device)
    generator.manual_seed(((seed * 1_000_003 + int(step)) * 1_000_003 + number) % 2**63)
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)


@step_noise.register_fake
def _(like: Tensor, seed: int, step: Tensor, number: int) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.float32)


def _is_first_forward() -> bool:
    """Return False in a recomputation, which is the only forward inside a backward pass."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1


def range_qparams(ranges: Tensor, codes: Tensor, symmetric: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scales and zero points of ranges (rows, 2), with the smallest and largest code of each.

    A symmetric row has ``s = max(|min|, |max|) / qmax`` and zero point 0. None: no row is symmetric.

    Example:
        >>> range_qparams(torch.tensor([[-1.0, 2.54]]), torch.tensor([[-128, 127]]), torch.tensor([True]))
        (tensor([0.0200]), tensor([0], dtype=torch.int32))
    """
    qmin, qmax = codes.unbind(1)
    if symmetric is not None:
        largest = ranges.abs().amax(1, keepdim=True)
        ranges = torch.where(symmetric[:, None], torch.cat([-largest, largest], 1), ranges)
        qmin = torch.where(symmetric, -qmax, qmin)
    return kernels.affine_qparams(ranges[:, 0], ranges[:, 1], qmin, qmax)


class RangeBank:
    """The ranges of all observed layers of a model, one row per layer. A step costs one collective and a few ops.

    A forward only widens the window. `take_window` joins the ranks and empties it. `commit` updates the average
    ``r ← r + max(c, 9/(n + 10))·(w − r)`` with that window after the optimizer step was applied. ``n`` counts the
    earlier windows in the layer's average. So the range follows about the last ninth of the windows, until ``c`` is the
    larger weight. A window that is never committed has no effect, so micro-batches, recomputation and skipped steps do
    no harm.

    Rows are plain attributes, not buffers, because DDP would overwrite the other ranks' windows with those of rank 0.

    Args:
        codes: Smallest and largest code of each layer.
        ema_constant: ``c``; None: the range is that of all steps.
        rounded_gate: Gate gradients on the rounded code.
        symmetric: Layers whose codes have no zero point.
        means: Observe mean magnitudes too, from which learned scales start. Costs a second collective per step.

    Source: the warm-up of TensorFlow's ``ExponentialMovingAverage(num_updates=...)``, Abadi et al., 2016,
    arXiv:1605.08695.

    Example:
        >>> bank = RangeBank([(-128, 127)])
        >>> for largest in (1.0, 12.0, 12.0):
        ...     bank.observe(0, torch.tensor([0.0, largest]))
        ...     bank.commit(bank.take_window())
        >>> bank.ranges.tolist()
        [[0.0, 11.5]]
    """

    def __init__(
        self,
        codes: Sequence[tuple[int, int]],
        *,
        ema_constant: float | None = 0.01,
        rounded_gate: bool = False,
        symmetric: Sequence[bool] = (),
        means: bool = False,
    ) -> None:
        num_layers = len(codes)
        self.ema_constant = ema_constant
        self.noise_seed: int | None = None
        """Seed of stochastic rounding of weights; None rounds to nearest."""
        self.step = torch.zeros((), dtype=torch.int64)
        """Applied steps, on the CPU, where reading does not wait."""
        self.totals = torch.zeros(num_layers, 2, dtype=torch.float64) if means else None  # (Σ|x|, count) of the window
        self.mean = self.taken_mean = torch.zeros(num_layers, dtype=torch.float64)
        self.rounded_gate = rounded_gate
        self.observing = self.observes_in_eval = False
        self.quantizing = False
        self.recomputes = False
        """True if backward rounds weights again instead of keeping the rounded ones."""
        self.num_updates = 0
        self.window = torch.full((num_layers, 2), math.inf)  # (min, -max): both are reduced by a minimum
        self.ranges = torch.zeros(num_layers, 2)  # (min, max)
        self.known = torch.zeros(num_layers, dtype=torch.bool)
        self.averaged = torch.zeros(num_layers, dtype=torch.int64)
        """Windows in each layer's average."""
        self.counts_clipped = self.counts_this_step = False
        self.count_window = torch.zeros(num_layers, 2, dtype=torch.int64)
        self.clipped = torch.zeros(num_layers, 2, dtype=torch.int64)
        """(clipped values, all values) of each layer's input in the last counted step that was applied."""
        self.counted_step = 0
        """Number of that step, counted from 1."""
        self.non_finite = torch.zeros(num_layers, dtype=torch.int64)
        self.scale = torch.ones(num_layers)
        self.zero_point = torch.zeros(num_layers, dtype=torch.int32)
        self.codes = torch.tensor(list(codes), dtype=torch.float64).view(num_layers, 2)
        self.has_symmetric = [*symmetric, *[False] * (num_layers - len(symmetric))]
        """True for each layer whose codes have no zero point."""
        self.symmetric = torch.tensor(self.has_symmetric) if any(symmetric) else None

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.window.device

    def move_(self, device: torch.device) -> None:
        """Move all rows. They stay float32 when the model is cast."""
        if device != self.device and device.type != "meta":
            for name, value in vars(self).items():
                if isinstance(value, Tensor) and name != "step":
                    setattr(self, name, value.to(device))

    def observe(self, index: int, x: Tensor, *, mean: bool = True) -> None:
        """Widen a layer's window by the values of `x`, and with `mean` add to its mean magnitude if these are kept."""
        low, high = torch.aminmax(x.detach())
        window = self.window[index]
        # minimum propagates NaN, so that a bad batch is found when the window is read
        window.copy_(torch.minimum(window, torch.stack([low, -high]).to(window.dtype)))
        if not mean or self.totals is None:
            return
        if _is_first_forward():  # a recomputation would change a sum, unlike extrema
            self.totals[index, 0] += x.detach().abs().sum(dtype=torch.float64)
            self.totals[index, 1] += x.numel()

    @property
    def counts(self) -> bool:
        """True if a forward in training must count clipped values."""
        # A compiled graph counts in every step, fused with other passes: a switch would compile a second graph.
        if not self.counts_clipped or not (torch.compiler.is_compiling() or self.counts_this_step):
            return False
        return _is_first_forward()

    def limits(self, index: int) -> Tensor:
        """Return the two values of a layer between which inputs are rounded to the nearest code, not clipped."""
        half = torch.tensor([-0.5, 0.5], dtype=torch.float64, device=self.device)
        return ((self.codes[index] + half - self.zero_point[index]) * self.scale[index]).to(self.scale.dtype)

    def count(self, index: int, x: Tensor, limits: Tensor) -> None:
        """Count the values of an input, and those outside its limits."""
        low, high = limits[:1], limits[1:]  # of one axis: numbers would be rounded to the type of x
        self.count_window[index, 0] += ((x < low) | (x > high)).sum()
        self.count_window[index, 1] += x.numel()

    def take_counts(self) -> Tensor | None:
        """Return the counts of all ranks if this step is counted, and start new ones; every rank must call it."""
        if not self.counts_clipped:
            return None
        counts = all_reduce_(self.count_window.clone(), "sum") if self.counts_this_step else None
        self.count_window.zero_()
        return counts

    def commit_counts(self, counts: Tensor) -> None:
        """Keep the counts of an applied step."""
        self.clipped, self.counted_step = counts, int(self.step) + 1

    def noise(self, weight: Tensor, number: int) -> Tensor | None:
        """Return uniform noise for the weight of layer `number`, or None to round to nearest.

        It depends only on seed, step and layer, so that a recomputed forward and every rank see the same noise.
        """
        if self.noise_seed is None:
            return None
        noise: Tensor = step_noise(weight.detach(), self.noise_seed, self.step, number)
        return noise

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
            # A layer without input keeps its mean.
            self.taken_mean = torch.where(totals[:, 1] > 0, totals[:, 0] / totals[:, 1], self.mean)
        self.clear_window()
        return window

    def commit(self, window: Tensor) -> None:
        """Update the ranges with one window. A layer's first window is its first range.

        A layer without input keeps its range, and so does one that saw NaN or infinity, which is counted.
        """
        # A window that is still infinite: no input came in this step.
        seen = ~(window == math.inf).all(1)
        # NaN or infinity in a step is counted and changes no range.
        finite = torch.isfinite(window).all(1)
        new = torch.stack([window[:, 0], -window[:, 1]], 1)
        if self.ema_constant is None:
            moved = torch.stack(
                [torch.minimum(self.ranges[:, 0], new[:, 0]), torch.maximum(self.ranges[:, 1], new[:, 1])], 1
            )
        else:
            # With weight c from the start, the first window would keep (1 - c)^n of the average, most of it in a run
            # of fewer than 1/c steps. A plain mean of those steps would lag too: activations grow while a net learns.
            weight = (9 / (self.averaged + 10)).clamp_min(self.ema_constant)
            moved = self.ranges + weight[:, None] * (new - self.ranges)
        # exactly the first window, not 0 + 1·(w - 0) of whatever the row held before
        moved = torch.where(self.known[:, None], moved, new)
        self.set_ranges(torch.where(finite[:, None], moved, self.ranges), self.known | finite)
        self.averaged += finite
        self.mean = torch.where(finite, self.taken_mean, self.mean)
        self.non_finite += seen & ~finite
        self.num_updates += 1

    def set_ranges(self, ranges: Tensor, known: Tensor) -> None:
        """Set ranges (layers, 2), valid where `known`, and derive scales and zero points, in place."""
        self.ranges.copy_(ranges)
        self.known.copy_(known)
        # Scales for all layers at once, on the device.
        scale, zero_point = range_qparams(self.ranges, self.codes, self.symmetric)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def refresh(self) -> None:
        """Derive the ranges from all commits, before they are final. Here they are always up to date."""

    def forget(self) -> None:
        """Start over without known ranges."""
        self.known.zero_()
        self.averaged.zero_()
        self.clipped.zero_()
        self.clear_window()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later ranges depend on."""
        rows = {name: getattr(self, name).clone() for name in self._saved}
        return {**rows, "num_updates": self.num_updates, "counted_step": self.counted_step}

    @property
    def _saved(self) -> tuple[str, ...]:
        means = ("totals", "mean") if self.totals is not None else ()
        return ("ranges", "known", "averaged", "window", "count_window", "clipped", "non_finite", *means)

    def load_state_dict(self, state: Mapping[str, Any], rows: Tensor) -> None:
        """Restore a saved state; `rows` says which saved row is that of each layer."""
        saved = {name: state[name].cpu()[rows].to(self.device) for name in self._saved}
        self.set_ranges(saved.pop("ranges"), saved.pop("known"))
        for name, value in saved.items():
            getattr(self, name).copy_(value)
        self.num_updates, self.counted_step = int(state["num_updates"]), int(state["counted_step"])


class EstimatorBank(RangeBank):
    """A `RangeBank` whose ranges follow from histograms of all committed steps.

    A forward counts into the window. `take_window` joins the ranks (two collectives for all layers: extrema, then
    counts) and empties it. `commit` adds it to the history after the optimizer step was applied. The ranges are
    recomputed after commits 1, 2, 4, 8, … of a history and after every `refresh_every` commits. `refresh` does
    so at any time: call it before the ranges are final. Window and history are one float64 tensor
    each, with rows as in `Histogram.data`.

    A forward that backward repeats (activation checkpointing) is not counted again. NaN and infinity never change a
    range. `non_finite` counts committed windows with such values per layer.

    Args:
        kind: ``"percentile"``, ``"kl"`` or ``"mse"``. `RangeBank` handles the other kinds.
        codes: Smallest and largest code of each layer.
        percentile: Share of values inside, in percent, for ``"percentile"``.
        bins: Cells of a layer's histogram, a power of two, for KL at least twice the codes.
        refresh_every: Commits between two updates of the ranges, at least 1.
        rounded_gate: Gate gradients on the rounded code.
        symmetric: Layers whose codes have no zero point. They count magnitudes.

    Raises:
        ConfigError: If an option is invalid.

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
        symmetric: Sequence[bool] = (),
    ) -> None:
        super().__init__(codes, ema_constant=None, rounded_gate=rounded_gate, symmetric=symmetric)
        checked(kind, Literal["percentile", "kl", "mse"], "estimator bank", "kind")
        checked(percentile, float, "estimator bank", "percentile", above=50, high=100)
        checked(refresh_every, int, "estimator bank", "refresh_every", low=1)
        levels = max((qmax - qmin + 1 for qmin, qmax in codes), default=0)
        if kind == "kl" and bins < 2 * levels:
            raise ConfigError("estimator bank", f"bins must be at least twice the {levels} codes, got {bins!r}")
        self.kind, self.percentile, self.refresh_every = kind, percentile, refresh_every
        self.window = Histogram(len(codes), bins).data
        self.history = self.window.clone()
        self.num_commits = 0  # in the history; unlike num_updates it restarts with `forget`
        self._rows_of: dict[tuple[int, int, bool], list[int]] = {}
        for row, (pair, is_symmetric) in enumerate(zip(codes, self.has_symmetric, strict=True)):
            self._rows_of.setdefault((int(pair[0]), int(pair[1]), is_symmetric), []).append(row)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def observe(self, index: int, x: Tensor, *, mean: bool = True) -> None:
        """Count the values of `x` in a layer's window. There are no means."""
        if _is_first_forward():  # a recomputation would change counts, unlike extrema
            x = x.detach().abs() if self.has_symmetric[index] else x
            # A layer counts directly into its row of the bank.
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
        """Add one window to the history, and derive the ranges if due."""
        added = Histogram.of(window)
        Histogram.of(self.history).merge(added)
        self.non_finite += added.non_finite > 0
        self.num_updates += 1
        self.num_commits += 1
        # Also after 1, 2, 4, 8, ... commits, so that early ranges follow quickly.
        if self.num_commits % self.refresh_every == 0 or self.num_commits & (self.num_commits - 1) == 0:
            self.refresh()

    def refresh(self) -> None:
        """Derive the ranges of all layers from the history. Layers without finite values keep their range."""
        history = Histogram.of(self.history)
        found = torch.zeros(len(self.history), 2, dtype=torch.float64, device=self.history.device)
        for (qmin, qmax, symmetric), rows in self._rows_of.items():
            index = torch.tensor(rows, device=self.history.device)
            found[index] = self._estimate(Histogram.of(self.history[index]), qmin, qmax, symmetric)
        seen = torch.isfinite(history.extrema[:, 0])
        self.set_ranges(torch.where(seen[:, None], found.to(self.ranges.dtype), self.ranges), self.known | seen)

    def _estimate(self, histogram: Histogram, qmin: int, qmax: int, symmetric: bool) -> Tensor:
        if self.kind == "percentile":
            return percentile_range(histogram, self.percentile, symmetric)
        return (kl_range if self.kind == "kl" else mse_range)(histogram, qmin, qmax, symmetric)

    def forget(self) -> None:
        """Start over without known ranges and without history."""
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
