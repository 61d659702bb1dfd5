"""What a user wrapped or sharded himself before a trainer got the model."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def wrapped_by_user(model: nn.Module) -> set[str]:
    """Return the keys of `shared_core.compatibility.SURROUNDINGS` that a model's own modules and weights tell of.

    Args:
        model: As the trainer was given it. Under a trainer that shards, weights are in parts anyway.

    Example:
        >>> from torch import nn
        >>> wrapped_by_user(nn.DataParallel(nn.Linear(2, 2)))
        {'data_parallel'}
    """
    found = set()
    for module in model.modules():
        if isinstance(module, nn.DataParallel):
            found.add("data_parallel")
        if isinstance(module, FullyShardedDataParallel):
            found.add("fsdp1")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        found.add("tensor_parallel")
    return found


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy that computes with its own weights.

    Lightning sets the compiled ``forward`` of a `torch.compile`d module on the instance, and its copy would call the
    original's.

    Args:
        model: Compiled or not.
        memo: As `copy.deepcopy` takes it.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 2)
        >>> model.forward = torch.compile(model.forward, backend="eager")
        >>> "forward" in vars(copied(model))
        False
    """
    other = copy.deepcopy(model, memo)
    for module in other.modules():
        if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
            del module.forward
    return other
