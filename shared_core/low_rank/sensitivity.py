"""What low ranks cost, measured: the loss on calibration batches with one layer at a time truncated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shared_core.errors import TrainingError
from shared_core.low_rank.matrices import from_matrix, is_transposed
from shared_core.low_rank.selection import Candidate

_SHARES = (0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Of the largest rank that saves: the ranks that are tried."""


def measure_worth(
    found: Mapping[str, Candidate],
    loss: Callable[[], float],
    multiple_of: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[int, float]]:
    """Return by layer and rank by how much the loss falls short of rising: minus its increase, 0 at full rank.

    Args:
        found: The layers, whose weights are truncated one at a time and put back.
        loss: Returns the loss of the model as it is.
        multiple_of: What ranks are multiples of.
        progress: Called with (ranks tried, ranks).

    Raises:
        TrainingError: If the loss of the whole model is not finite.
    """
    before = loss()
    if not before < float("inf"):
        raise TrainingError(f"low_rank: loss on calibration batches must be finite, got {before}; look at the batches")
    tried = {
        name: sorted({max(round(share * (each.largest // multiple_of)), 1) * multiple_of for share in _SHARES})
        if each.largest >= multiple_of
        else []
        for name, each in found.items()
    }
    done, total = 0, sum(map(len, tried.values()))
    worth: dict[str, dict[int, float]] = {}
    for name, each in found.items():
        worth[name] = {}
        for rank in tried[name]:
            with truncated(each, rank):
                after = loss()
            worth[name][rank] = before - after if after < float("inf") else -1e30
            done += 1
            if progress:
                progress(done, total)
        worth[name][each.full] = 0.0
    return worth


@contextmanager
def truncated(each: Candidate, rank: int) -> Iterator[None]:
    """Give a layer the best weight of a rank while the block runs."""
    weight: nn.Parameter = each.module.weight
    kept = weight.detach().clone()
    a, b = each.spectrum.factors(rank)
    with torch.no_grad():
        weight.copy_(from_matrix(b @ a, each.scheme, is_transposed(each.module), tuple(weight.shape)))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)
