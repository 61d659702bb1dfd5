"""Which sessions have their techniques on which model: no weight is masked, quantised or averaged by two."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from shared_core.errors import TrainingError

if TYPE_CHECKING:
    from shared_core.engine.session import Session

# of sessions, not of models: a copy of a model, or one that was pickled, has none
_ATTACHED: weakref.WeakSet[Session] = weakref.WeakSet()


def claim(session: Session, model: nn.Module) -> None:
    """Note that a session attaches to a model.

    A trainer's session that has not begun gives way: it attaches again when its trainer trains.

    Raises:
        TrainingError: If the model, one of its parts, or one that it is a part of, is another session's.
    """
    if not session.techniques:
        return
    if any(True for _ in _others(session, model)):
        gc.collect()  # sessions are in cycles with what they drive, so that one nobody holds may still be there
    for other in _others(session, model):
        if other.front_end == "bare" or other.has_begun:
            raise TrainingError(
                "session",
                f"a model must have one session, got {type(model).__name__}, which a {other.front_end} session with "
                f"{', '.join(other.recipe)} is attached to",
                "put all techniques into one recipe, or call finish or detach of the other one first",
            )
        other.detach()
    _ATTACHED.add(session)


def _others(session: Session, model: nn.Module) -> Iterator[Session]:
    # Also a part of a model, or a model around it: they share modules.
    parts = {*map(id, model.modules())}
    for other in list(_ATTACHED):
        if other is session or not other.is_attached or other.context is None:
            continue
        theirs = other.context.model
        if id(theirs) in parts or any(part is model for part in theirs.modules()):
            yield other
