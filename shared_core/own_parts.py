"""What processes hold differently from each other, of what a checkpoint holds once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn, uint8
from torch.utils._pytree import tree_flatten_with_path, tree_map_with_path

from shared_core.ranks import local_part, rank, world_size


def everyones(mine: Any) -> list[Any]:
    """Return what each process holds, by rank; each must call it."""
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def differing(mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not the same on every process; each must call it."""
    digests = {name: digest(value) for name, value in mine.items()}
    others = everyones(digests)
    return {name: value for name, value in mine.items() if any(one.get(name) != digests[name] for one in others)}


def own_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be kept beside the main process's state, so that `with_own_state` makes this one of it."""
    places = {_name(place): value for place, value in tree_flatten_with_path(state)[0]}
    is_built_alike = not differing({"places": list(places)})
    parts = differing(places)
    if rank() == 0:
        return {}
    return {"session_parts": parts} if is_built_alike else {"session": state}


def with_own_state(of_main: Any, saved: Mapping[str, Any]) -> Any:
    """Return this process's state."""
    parts = saved.get("session_parts", {})
    return saved.get("session") or tree_map_with_path(lambda place, value: parts.get(_name(place), value), of_main)


def other_processes(saved: int) -> str:
    """Return what to tell of a run that `saved` processes saved and as many as now are go on with."""
    return (
        f"saved by {saved} processes and resumed by {world_size()}: weights, optimizer and what techniques know are "
        "restored, of what processes held differently the main one's; random numbers are not restored, and the epoch "
        "goes on after as many batches as were seen; keep processes times batch size, and these are the same examples"
    )


def own_buffers(model: nn.Module, wrapped: Any, *, is_inside_window: bool = False) -> dict[str, Tensor]:
    """Return the buffers that differ between processes, unless the next forward of DDP sends the main one's to all.

    Inside an accumulation window it does not (torch 2.13): running statistics of a batch norm are each process's until
    the step. In a folder of shards a buffer may be any process's.

    Args:
        model: The user's.
        wrapped: What its forward goes through.
        is_inside_window: Whether gradients of a window that is not over are held.
    """
    if not is_inside_window and getattr(wrapped, "broadcast_buffers", False):
        return {}
    return differing({name: local_part(one).cpu() for name, one in model.named_buffers()})


def put_buffers_(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put back what `own_buffers` returned."""
    buffers = dict(model.named_buffers())
    for name, value in saved.items():
        local_part(buffers[name]).copy_(value)


def _name(place: Sequence[Any]) -> str:
    # files of JSON turn numbers that are keys into texts: both have one name
    return "".join(f"[{getattr(key, 'key', getattr(key, 'idx', key))}]" for key in place)


def digest(value: Any) -> str:
    """Return a text that two values share where they are equal: of a tensor bit for bit."""
    if not isinstance(value, Tensor):
        return repr(value)
    values = value.detach().cpu().contiguous().reshape(-1)
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(values.view(uint8).numpy().data).hexdigest()}"
