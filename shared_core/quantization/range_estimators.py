"""Observers: the range of the values of a stream, by one of five criteria, and the scale that follows."""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from shared_core.errors import ConfigError, TrainingError, nearest
from shared_core.quantization.clip_search import kl_range, mse_range, percentile_range
from shared_core.quantization.histogram import Histogram, finite_extrema
from shared_core.quantization.range_estimator import RangeEstimator
from shared_core.ranks import all_reduce_

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
