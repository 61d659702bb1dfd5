"""A session's state with the parts that differ between processes: gathered for saving, distributed on loading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from shared_core.distributed.collectives import (
    all_gather_object,
    other_processes,
    own_buffers,
    own_state,
    put_buffers_,
    rank,
    with_own_state,
    world_size,
)
from shared_core.engine.session import Session


def gathered(session: Session, wrapped: nn.Module, **more: Any) -> dict[str, Any]:
    """Return the session's state and `more`, with the parts in which other processes differ. Every process calls it."""
    state = {**session.state_dict(), **more}
    # own_state and own_buffers gather.
    if world_size() == 1:
        return state
    mine = {**own_state(state), "buffers": own_buffers(cast(Any, session.context).model, wrapped)}
    return {**state, "ranks": all_gather_object(mine)}


def load(session: Session, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Restore this process's state and buffers. If the number of processes changed, use the main one's and note it.

    Returns:
        The state saved for this process, empty if the number of processes changed.
    """
    ranks = state.get("ranks", ())
    # The number of processes changed, so the parts of single processes do not apply.
    if len(ranks) != world_size():
        session.load_state_dict(state)
        if max(len(ranks), 1) != world_size():
            session.note(other_processes(max(len(ranks), 1)))
            return {}
        return state
    mine = ranks[rank()]
    of_main = {name: value for name, value in state.items() if name != "ranks"}
    own: Mapping[str, Any] = with_own_state(of_main, mine)
    session.load_state_dict(own)
    put_buffers_(cast(Any, session.context).model, mine["buffers"])
    return own
