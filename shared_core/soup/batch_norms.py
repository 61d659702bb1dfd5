"""The running statistics of batch norms, which an average of weights needs anew or averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from shared_core.errors import TrainingError
from shared_core.ranks import broadcast_

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batch_norms(model: nn.Module) -> list[Any]:
    """Return the batch norms of a model that keep running statistics."""
    return [module for module in model.modules() if isinstance(module, _NORMS) and module.track_running_stats]


def estimate_norms_(model: nn.Module, calibrate: Callable[[int], None], num_batches: int) -> None:
    """Set all running statistics to the plain mean over batches, equal on every process; all must call it.

    Other buffers, and norms that no batch went through, stay as they were.

    Args:
        model: With `batch_norms`.
        calibrate: Runs the model in train mode on so many training batches.
        num_batches: How many, at least 1.

    Raises:
        TrainingError: If there was no batch.
    """
    norms = batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over batches
    try:
        calibrate(num_batches)
        if not any(int(norm.num_batches_tracked) for norm in norms):
            raise TrainingError(
                f"bn_batches: training data must give batches to estimate statistics on, got none of {num_batches}; "
                "let it start anew each time that it is iterated, or leave bn_batches at 0"
            )
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        # what else a forward in train mode counts is the weights' own; so are statistics that no batch went through
        fresh = {id(buffer) for norm in norms if int(norm.num_batches_tracked) for buffer in norm.buffers()}
        for name, buffer in model.named_buffers():
            if id(buffer) not in fresh and name in before:
                buffer.copy_(before[name])
    for norm in norms:
        for buffer in (norm.running_mean, norm.running_var, norm.num_batches_tracked):
            broadcast_(cast(Tensor, buffer))
