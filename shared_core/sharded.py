"""Tensors that FSDP2 has sharded: gathered whole to decide on and to save, cut again into what a process holds."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as it is on one device: gathered if it is sharded; then every process must call it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else cast("Tensor", gather())


def whole_of(part: Tensor, like: Any) -> Tensor:
    """Return the whole of which `part` is this process's, placed as `like` is; then every process must call it."""
    if not hasattr(like, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor

    placed = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return placed.full_tensor()


def part_of(full: Tensor, like: Any) -> Tensor:
    """Return the part of a whole tensor that `like`'s placement gives this process, without communication."""
    if not hasattr(like, "device_mesh"):
        return full
    from torch.distributed.tensor import distribute_tensor

    sharded = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return sharded.to_local()
