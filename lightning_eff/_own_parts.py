"""What processes hold differently from each other, of what a checkpoint holds once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, uint8
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from shared_core.ranks import rank, world_size


def differing(mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not the same on every process; each must call it."""
    digests = {name: _digest(value) for name, value in mine.items()}
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, digests)
    return {name: value for name, value in mine.items() if any(one.get(name) != digests[name] for one in everyone)}


def own_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what must be kept beside the main process's state, so that `with_own_state` makes this one of it."""
    places = {keystr(place): value for place, value in tree_flatten_with_path(state)[0]}
    is_built_alike = not differing({"places": list(places)})
    parts = differing(places)
    if rank() == 0:
        return {}
    return {"session_parts": parts} if is_built_alike else {"session": state}


def with_own_state(of_main: Any, saved: Mapping[str, Any]) -> Any:
    """Return this process's state."""
    parts = saved.get("session_parts", {})
    return saved.get("session") or tree_map_with_path(lambda place, value: parts.get(keystr(place), value), of_main)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    values = value.detach().cpu().contiguous().reshape(-1)
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(values.view(uint8).numpy().data).hexdigest()}"
