"""Buffers that processes hold alike."""

from __future__ import annotations

import torch
from torch import nn

from shared_core.distributed.collectives import broadcast_, world_size
from shared_core.distributed.sharded_tensors import is_sharded


@torch.no_grad()
def join_buffers_(model: nn.Module) -> None:
    """Give every process the main one's buffers; each must call it.

    DDP does so as the next forward begins, so that those of the last one (statistics of batch norms) differ.

    Args:
        model: The module inside DDP.
    """
    if world_size() == 1:
        return
    own = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    for name, buffer in model.named_buffers():
        if name not in own and not (buffer.is_meta or is_sharded(buffer) or buffer.dtype == torch.bool):
            broadcast_(buffer)
