"""Ranges of all layers by percentile, KL or MSE while a model trains: one histogram a layer, in one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shared_core.errors import ConfigError, nearest
from shared_core.quantization.clip_search import kl_range, mse_range, percentile_range
from shared_core.quantization.histogram import Histogram
from shared_core.quantization.observers import RangeBank

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
        """Take back a saved state; `rows` says which saved row is that of each layer."""
        super().load_state_dict(state, rows)
        self.num_commits = int(state["num_commits"])
