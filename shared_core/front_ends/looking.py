"""Batches that are only looked at: they train nothing and leave no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.state_file import rng_state, set_rng_state


@contextlib.contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Surround forwards in train mode without gradients; random numbers and the model's mode stay as they were."""
    random, was_training = rng_state(), model.training
    type(model).train(model)  # not the instance's own, where loops see validations begin and end
    try:
        with torch.no_grad():
            yield
    finally:
        type(model).train(model, was_training)
        set_rng_state(random)
        reshard_(model)
