"""Small collectives for techniques, and state that differs between processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn, uint8
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return True if every element of every dense tensor is finite, with one device sync for all of them."""
    # Empty tensors (a process's part of a small parameter) have no maximum.
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not filled:
        return True
    # One fused kernel and one sync. isfinite would allocate a mask per tensor.
    largest = torch._foreach_norm(filled, math.inf)
    return bool(torch.stack([one.isfinite().to(filled[0].device) for one in largest]).all())


_IS_BUILT_IN = dist.is_available()
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX} if _IS_BUILT_IN else {}


def has_group() -> bool:
    """Return True if there is a process group, even with one process."""
    return _IS_BUILT_IN and dist.is_initialized()


def world_size() -> int:
    """Return the number of processes, 1 without a process group."""
    return dist.get_world_size() if has_group() else 1


def rank() -> int:
    """Return this process's rank, 0 without a process group."""
    return dist.get_rank() if has_group() else 0


def is_main() -> bool:
    """Return True if this is the process that writes files and prints."""
    return rank() == 0


def all_reduce_(tensor: Tensor, op: Literal["sum", "min", "max"]) -> Tensor:
    """Reduce `tensor` over all processes in place and return it; every process must call it."""
    if world_size() > 1:
        dist.all_reduce(tensor, op=_OPS[op])
    return tensor


def broadcast_(tensor: Tensor) -> Tensor:
    """Overwrite `tensor` with the main process's in place and return it; every process must call it."""
    if world_size() > 1:
        dist.broadcast(tensor, src=0)
    return tensor


def from_main(text: str) -> str:
    """Return the main process's text; every process must call it."""
    lines = [text]
    if world_size() > 1:
        dist.broadcast_object_list(lines)
    return lines[0]


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it unless FSDP2 has sharded it.

    Args:
        tensor: Any tensor. The result shares its memory.
    """
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def any_rank(flag: bool, device: torch.device | str = "cpu") -> bool:
    """Return True if `flag` is true on any process; every process must call it."""
    if world_size() == 1:
        return flag
    # max of 0 and 1: true if any is.
    return bool(all_reduce_(torch.tensor(int(flag), device=device), "max").item())


def all_gather_object(mine: Any) -> list[Any]:
    """Return the objects of all processes, by rank; every process must call it."""
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def differing(mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that differ between processes; every process must call it."""
    # Only digests cross the network, not values.
    digests = {name: digest(value) for name, value in mine.items()}
    others = all_gather_object(digests)
    return {name: value for name, value in mine.items() if any(one.get(name) != digests[name] for one in others)}


def own_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this process's differences from the main one's state, for `with_own_state`. Every process calls it."""
    places = {_name(place): value for place, value in tree_flatten_with_path(state)[0]}
    # The structures must agree before leaves can be told apart by place.
    is_built_alike = not differing({"places": list(places)})
    parts = differing(places)
    # The main process's state is saved whole.
    if rank() == 0:
        return {}
    return {"session_parts": parts} if is_built_alike else {"session": state}


def with_own_state(of_main: Any, saved: Mapping[str, Any]) -> Any:
    """Return this process's state from the main one's and the result of `own_state`."""
    parts = saved.get("session_parts", {})
    return saved.get("session") or tree_map_with_path(lambda place, value: parts.get(_name(place), value), of_main)


def other_processes(saved: int) -> str:
    """Return a note for a run that `saved` processes saved and another number of processes resumes."""
    return (
        f"saved by {saved} processes and resumed by {world_size()}: weights, optimizer and technique states are "
        "restored, from the main process where processes differed; random states are not restored; the epoch "
        "continues after the number of batches seen (keep processes times batch size to skip the same examples)"
    )


def own_buffers(model: nn.Module, wrapped: Any, *, is_inside_window: bool = False) -> dict[str, Tensor]:
    """Return the buffers that differ between processes, unless DDP's next forward broadcasts the main one's.

    Inside an accumulation window DDP does not broadcast (torch 2.13), so batch norm statistics differ until the step.
    In a folder of shards, a buffer may come from any process.
    """
    if not is_inside_window and getattr(wrapped, "broadcast_buffers", False):
        return {}
    return differing({name: local_part(one).cpu() for name, one in model.named_buffers()})


def put_buffers_(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore the buffers returned by `own_buffers`."""
    buffers = dict(model.named_buffers())
    for name, value in saved.items():
        local_part(buffers[name]).copy_(value)


def _name(place: Sequence[Any]) -> str:
    # JSON files turn integer keys into strings, so both get the same name.
    return "".join(f"[{getattr(key, 'key', getattr(key, 'idx', key))}]" for key in place)


def digest(value: Any) -> str:
    """Return a text that is the same for equal values. Tensors are compared bit for bit."""
    if not isinstance(value, Tensor):
        return repr(value)
    # As bytes: NaN equals itself, and bfloat16 has no numpy dtype.
    values = value.detach().cpu().contiguous().reshape(-1)
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(values.view(uint8).numpy().data).hexdigest()}"
