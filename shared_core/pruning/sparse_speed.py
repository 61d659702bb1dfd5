"""From which density on a sparse product is slower than the dense one, measured on this machine."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared_core.errors import ConfigError
from shared_core.pruning.sparse_layers import Layout, SparseLinear

DENSITIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
_FEWEST, _MOST, _SECONDS = 3, 25, 0.1


@dataclass(frozen=True)
class SparseSpeed:
    """How much faster than the dense layer a sparse one is, by density.

    Attributes:
        densities: Rising; the last is 0.5, or the first at which the sparse layer is slower.
        speedups: At each density, the median of paired ratios: dense seconds over sparse seconds.
        dense_seconds: Median of one call of the dense layer.
        num_threads: With which it was measured.

    Example:
        >>> speed = SparseSpeed((0.01, 0.1), (4.0, 0.25), 1e-3, 1)
        >>> round(speed.break_even, 4), round(speed.at(0.01), 4)
        (0.0316, 4.0)
    """

    densities: tuple[float, ...]
    speedups: tuple[float, ...]
    dense_seconds: float
    num_threads: int

    @property
    def break_even(self) -> float:
        """The density at which both are equally fast; 0 where sparse is never faster, at most the last measured."""
        if self.speedups[0] <= 1:
            return 0.0
        for i in range(1, len(self.densities)):
            if self.speedups[i] <= 1:
                above, below = math.log(self.speedups[i - 1]), math.log(self.speedups[i])
                return _between(self.densities[i - 1], self.densities[i], above / (above - below))
        return self.densities[-1]

    def at(self, density: float) -> float:
        """Return the speed-up at a density, interpolated between the logarithms of those measured."""
        if density <= self.densities[0]:
            return self.speedups[0]
        for i in range(1, len(self.densities)):
            if density <= self.densities[i]:
                low, high = math.log(self.densities[i - 1]), math.log(self.densities[i])
                part = (math.log(density) - low) / (high - low)
                return _between(self.speedups[i - 1], self.speedups[i], part)
        return self.speedups[-1]


def _between(low: float, high: float, part: float) -> float:
    return math.exp((1 - part) * math.log(low) + part * math.log(high))


def measure_sparse_speed(
    num_outputs: int,
    num_inputs: int,
    *,
    batch: int = 1,
    layout: Layout = "csr",
    block: int | None = None,
    dtype: torch.dtype = torch.float32,
    densities: tuple[float, ...] = DENSITIES,
    clock: Callable[[], float] = time.perf_counter,
) -> SparseSpeed:
    """Return how fast a sparse linear layer of this shape is beside the dense one, with the threads torch uses now.

    Random weights of rising density are measured, dense and sparse in turn, until sparse is slower: at least three
    calls each, for about 0.1 seconds. Asked again, the answer is remembered.

    Args:
        num_outputs: Rows of the weight.
        num_inputs: Its columns.
        batch: Rows of the input: sequences times positions.
        layout: ``csr`` or ``bsr``.
        block: Of ``bsr``: side of a square block; it divides the shape.
        dtype: Of weight and input.
        densities: To measure, rising; of ``bsr`` the share of blocks.
        clock: ``time.process_time`` leaves other programs out, but adds the threads up.

    Raises:
        ConfigError: If `batch` is less than 1, or a block does not divide the shape.
    """
    if batch < 1:
        raise ConfigError(f"sparse_layers: batch must be at least 1, got {batch!r}")
    if layout not in ("csr", "bsr"):
        raise ConfigError(f"sparse_layers: layout must be csr or bsr, got {layout!r}")
    if layout == "bsr" and (block is None or block < 1 or num_outputs % block or num_inputs % block):
        raise ConfigError(f"sparse_layers: block must divide {num_outputs} and {num_inputs}, got {block}")
    return _measured(
        num_outputs, num_inputs, batch, layout, block, dtype, tuple(densities), clock, torch.get_num_threads()
    )


@functools.cache
def _measured(
    num_outputs: int, num_inputs: int, batch: int, layout: Layout, block: int | None, dtype: torch.dtype,
    densities: tuple[float, ...], clock: Callable[[], float], num_threads: int,
) -> SparseSpeed:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    dense = nn.Linear(num_inputs, num_outputs, device="meta").to_empty(device="cpu")
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    bias = nn.Parameter(torch.zeros(num_outputs, dtype=dtype), requires_grad=False)
    dense.weight, dense.bias = nn.Parameter(weight.to(dtype), requires_grad=False), bias
    x = torch.randn(batch, num_inputs, generator=generator).to(dtype)
    side = block or 1
    tiles = torch.rand(num_outputs // side, num_inputs // side, generator=generator)

    speedups: list[float] = []
    seconds: list[float] = []
    with torch.inference_mode():
        for density in densities:
            keep = (tiles < density).repeat_interleave(side, 0).repeat_interleave(side, 1)
            sparse = SparseLinear((weight * keep).to(dtype), bias, layout, block)
            dense_seconds, sparse_seconds = _in_turn(dense, sparse, x, clock)
            seconds += dense_seconds
            speedups.append(statistics.median(a / b for a, b in zip(dense_seconds, sparse_seconds, strict=True)))
            if speedups[-1] <= 1:
                break
    return SparseSpeed(densities[: len(speedups)], tuple(speedups), statistics.median(seconds), num_threads)


def _in_turn(
    dense: nn.Module, sparse: nn.Module, x: Tensor, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    times: tuple[list[float], list[float]] = ([], [])
    dense(x), sparse(x)
    spent = 0.0
    while len(times[0]) < _FEWEST or (spent < _SECONDS and len(times[0]) < _MOST):
        for layer, its_times in zip((dense, sparse), times, strict=True):
            start = clock()
            layer(x)
            # a clock that has not moved must not divide by zero
            its_times.append(max(clock() - start, 1e-9))
            spent += its_times[-1]
    return times
