"""A session's state with what each process alone holds of it: gathered to be saved, dealt out again."""

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
    """Return the session's state and `more` with what the other processes hold otherwise; each must call it."""
    state = {**session.state_dict(), **more}
    # Every process: own_state and own_buffers gather.
    if world_size() == 1:
        return state
    mine = {**own_state(state), "buffers": own_buffers(cast(Any, session.context).model, wrapped)}
    return {**state, "ranks": all_gather_object(mine)}


def load(session: Session, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put back this process's state and buffers; where another number saved them, the main process's, which is told.

    Returns:
        What was saved of this process, empty where another number did.
    """
    ranks = state.get("ranks", ())
    # Another number of processes: what each held for itself has no place now.
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
