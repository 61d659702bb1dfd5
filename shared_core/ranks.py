"""What a technique needs of the process group: nothing with one process, small collectives with several."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

_IS_BUILT_IN = dist.is_available()
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX} if _IS_BUILT_IN else {}


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if _IS_BUILT_IN and dist.is_initialized() else 1


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if _IS_BUILT_IN and dist.is_initialized() else 0


def is_main() -> bool:
    """Return whether this is the process that writes files and prints."""
    return rank() == 0


def all_reduce_(tensor: Tensor, op: Literal["sum", "min", "max"]) -> Tensor:
    """Reduce `tensor` over all processes in place and return it; every process must call it."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=_OPS[op])
    return tensor


def broadcast_(tensor: Tensor, source: int = 0) -> Tensor:
    """Overwrite `tensor` with process `source`'s in place and return it; every process must call it."""
    if world_size() > 1:
        dist.broadcast(tensor, src=source)
    return tensor


def from_main(text: str) -> str:
    """Return the main process's text; every process must call it."""
    told = [text]
    if world_size() > 1:
        dist.broadcast_object_list(told)
    return told[0]


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it unless FSDP2 has sharded it."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def any_rank(flag: bool, device: torch.device | str = "cpu") -> bool:
    """Return whether `flag` is true on any process; every process must call it."""
    if world_size() == 1:
        return flag
    return bool(all_reduce_(torch.tensor(int(flag), device=device), "max").item())
