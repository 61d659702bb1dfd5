"""A model made to fit a checkpoint before its weights are loaded: techniques may have changed its structure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shared_core.errors import CheckpointError
from shared_core.session import Session


@contextlib.contextmanager
def loading(session: Session) -> Iterator[None]:
    """Surround the loading of plain weights by a trainer that goes by the parameters' names, as torch does under FSDP2.

    Args:
        session: Attached; its own state is loaded afterwards.
    """
    with contextlib.ExitStack() as stack:
        if session.context is not None:
            for technique in session.techniques.values():
                stack.enter_context(technique.loading(session.context.model))
        yield


def fit_to(session: Session, state: Mapping[str, Any], surroundings: Iterable[str]) -> None:
    """Attach anew where a checkpoint's weights need another structure than the model has; no optimizer exists yet.

    Args:
        session: Attached, not begun.
        state: What `Session.state_dict` saved; empty if the checkpoint is of a run without techniques.
        surroundings: As in `Session.attach`.

    Raises:
        CheckpointError: If a technique cannot go on from this checkpoint.
    """
    saved: Mapping[str, Any] = state.get("techniques", {})
    if "low_rank" in saved and "low_rank" not in session.techniques:
        raise CheckpointError(
            "resume: recipe must keep low_rank, whose layers the checkpoint holds in two, got none; keep it, or load "
            "the weights with shared_core.low_rank.load and start a new run"
        )
    # a list: each is asked, also for its refusal
    if session.context is None or all([each.fits(saved.get(key)) for key, each in session.techniques.items()]):
        return
    model = session.context.model
    session.detach()
    session.attach(model, surroundings, saved)
