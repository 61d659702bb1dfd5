"""Observers: the ranges of all layers' inputs, by one of five criteria, and the scales that follow.

A window collects inside a step, and a moving average, or the extrema of all steps, follow over steps; one tensor holds
all layers. Percentile, KL and MSE use one histogram a layer.
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


# a replayed CUDA graph would draw the same again
@torch.library.custom_op("efftrain::step_noise", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def step_noise(like: Tensor, seed: int, step: Tensor, number: int) -> Tensor:
    """Return numbers in [0, 1), a function of seed, step and layer, and of no state.

    One operator, since a graph can hold no generator; the step is a tensor, since a number would be a constant of the
    graph, which would be compiled anew for each.

    Args:
        like: Of their shape, and on their device.
        seed: Of the run.
        step: int64, no axes, on the CPU.
        number: Of the layer.
    """
    generator = torch.Generator(device=like.device)
    generator.manual_seed(((seed * 1_000_003 + int(step)) * 1_000_003 + number) % 2**63)
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float32)


@step_noise.register_fake
def _(like: Tensor, seed: int, step: Tensor, number: int) -> Tensor:
    return like.new_empty(like.shape, dtype=torch.float32)


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
        self.step = torch.zeros((), dtype=torch.int64)
        """Applied steps; on the CPU, where reading it waits for nothing."""
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
                if isinstance(value, Tensor) and name != "step":
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
            # The mean of a layer that nothing reached stays what it was.
            self.taken_mean = torch.where(totals[:, 1] > 0, totals[:, 0] / totals[:, 1], self.mean)
        self.clear_window()
        return window

    def commit(self, window: Tensor) -> None:
        """Move the ranges by one window; a layer's first window is its first range.

        A layer that saw nothing keeps its range, and so does one that saw NaN or infinity, which is counted.
        """
        # A window that is still infinite: no input came in this step.
        seen = ~(window == math.inf).all(1)
        # NaN or infinity in a step: it is counted and moves no range.
        finite = torch.isfinite(window).all(1)
        new = torch.stack([window[:, 0], -window[:, 1]], 1)
        if self.ema_constant is None:
            moved = torch.stack(
                [torch.minimum(self.ranges[:, 0], new[:, 0]), torch.maximum(self.ranges[:, 1], new[:, 1])], 1
            )
        else:
            moved = self.ranges + self.ema_constant * (new - self.ranges)
        # The first window is the first range: an average with the initial 0 would be too narrow for long.
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
        # Scales for all layers at once, on the device.
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
        checked(kind, Literal["percentile", "kl", "mse"], "estimator bank", "kind")
        checked(percentile, float, "estimator bank", "percentile", above=50, high=100)
        checked(refresh_every, int, "estimator bank", "refresh_every", low=1)
        levels = max((qmax - qmin + 1 for qmin, qmax in codes), default=0)
        if kind == "kl" and bins < 2 * levels:
            raise ConfigError("estimator bank", f"bins must be at least twice the {levels} codes, got {bins!r}")
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
            # One row of the bank's memory: counts of a layer land in it directly.
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
        # After 1, 2, 4, 8, ... commits too: early ranges follow quickly, later ones every `refresh_every`.
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
