"""The state of a session in a checkpoint: read and put back, and whether the model fits the weights beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.observers.expert_use import ExpertUse
from shared_core.engine.observers.history import History
from shared_core.engine.protocols import DrawsBatches, KeepsStructure, LoadsByName, offering
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import REGISTRY
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CheckpointError, EffError

if TYPE_CHECKING:
    from shared_core.engine.session import Session


def state_of(context: Context, recipe: Recipe, history: History, experts: ExpertUse) -> dict[str, Any]:
    """Return the state as plain values and tensors."""
    return {
        "step": context.step, "skipped": context.skipped, "recipe": recipe.to_dict(),
        "generator": context.generator.get_state(), "history": history.state_dict(),
        "techniques": {key: technique.state_dict() for key, technique in context.techniques.items()},
        "buffers": context.left_out.changed(), "experts": experts.state_dict(),
    }  # fmt: skip


@contextlib.contextmanager
def reading(key: str) -> Iterator[None]:
    """Tell whatever a reader of a saved state trips over as damage of that state; the reader's own error is the cause.

    Raises:
        CheckpointError: If reading fails, other than for want of memory or of a file, or with an error of ours.
    """
    try:
        yield
    except (EffError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged state holds any value, and a reader may do anything with it
        raise CheckpointError(
            "resume",
            f"checkpoint's state of {key} must be one that a session saved, got {error!r} from it: it is damaged or "
            "of another version, or this error is a bug",
            "go on from another checkpoint",
        ) from error


def restore(state: Mapping[str, Any], context: Context, history: History, experts: ExpertUse) -> Mapping[str, Any]:
    """Put back all but what techniques get in `begin`; return the recipe that a state was saved with.

    Raises:
        CheckpointError: If the state is not a session's.
    """
    with reading("session"):
        saved, recipe = dict(state["techniques"]), dict(state["recipe"])
        step, skipped = int(state["step"]), int(state["skipped"])
        if step < 0 or skipped < 0:
            raise ValueError(f"step {step}, skipped {skipped}")
        context.generator.set_state(state["generator"])
        history.load_state_dict(state.get("history", {}))
        context.left_out.put_back(state.get("buffers", {}))
        experts.load_state_dict(state.get("experts", {}))
    context.step, context.skipped = step, skipped
    refuse_foreign(saved, context.techniques)
    for key in context.techniques:
        with reading(key):
            if not isinstance(saved.get(key, {}), Mapping):
                raise TypeError(f"{saved[key]!r} is no mapping")
    for key, drawing in offering(context.techniques, DrawsBatches):
        if key in saved:
            with reading(key):
                drawing.restore(saved[key])
    return recipe


def window_state(session: Session) -> dict[str, dict[str, Any]]:
    """Return what techniques have gathered on this process in an accumulation window that is not over."""
    windows = session.context.windows if session.context is not None else {}
    return {name: state for name, window in windows.items() if (state := window.window_state())}


def load_window_state(session: Session, state: Mapping[str, Any]) -> None:
    """Restore the state returned by `window_state`, with the gradients of the same window, after `begin`."""
    with reading("session"):
        found = dict(state)
    for name, window in session.context.windows.items() if session.context is not None else ():
        if name in found:
            with reading(name):
                window.load_window_state(found[name])


def refuse_foreign(saved: Mapping[str, Any], techniques: Mapping[str, Technique]) -> None:
    """Refuse a checkpoint of a run without a technique that goes on from its own alone."""
    for key in techniques.keys() - saved.keys():
        if why := techniques[key].config.own_checkpoints:
            raise CheckpointError(key, f"checkpoint must be of a run with {key}, got one without, {why[0]}", why[1])


@contextlib.contextmanager
def unstepped(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Surround saving: an optimizer of shards that has not stepped yet is not stepped by it.

    torch.distributed.checkpoint (2.13) steps one that has neither state nor gradients, with a rate and gradients of 0,
    so that the file has states. Adam would count that step in its bias correction, in this run and in a resumed one. So
    the file gets a count of 0, and the optimizer no state.
    """

    def count_none(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] *= 0

    fresh = [
        optimizer
        for optimizer in optimizers
        if any(is_sharded(value) for group in optimizer.param_groups for value in group["params"])
        and not optimizer.state
    ]
    handles = [optimizer.register_step_post_hook(count_none) for optimizer in fresh]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for optimizer in fresh:
            optimizer.state.clear()


@contextlib.contextmanager
def loading(session: Session) -> Iterator[None]:
    """Surround the loading of plain weights by a trainer that goes by the parameters' names, as torch does under FSDP2.

    Args:
        session: Attached; its own state is loaded afterwards.
    """
    with contextlib.ExitStack() as stack:
        if session.context is not None:
            for _, adding in offering(session.techniques, LoadsByName):
                stack.enter_context(adding.loading(session.context.model))
        yield


def fits(session: Session, state: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's weights have the structure that the model has now.

    Args:
        session: Attached, not begun.
        state: What `Session.state_dict` saved; empty if the checkpoint is of a run without techniques.

    Raises:
        CheckpointError: If a technique cannot go on from this checkpoint.
    """
    with reading("session"):
        saved: Mapping[str, Any] = dict(state.get("techniques", {}))
    for key in REGISTRY.keys() & saved.keys() - session.techniques.keys():
        if structure := REGISTRY[key].config_class.saved_structure:
            raise CheckpointError(
                "resume", f"recipe must keep {key}, {structure[0]}, got none", f"keep it, or {structure[1]}"
            )
    refuse_foreign(saved, session.techniques)
    if session.context is None:
        return True
    with reading("session"):
        return all(one.fits(saved.get(key, {})) for key, one in offering(session.techniques, KeepsStructure))


def fit_to(session: Session, state: Mapping[str, Any], run_environment: Iterable[str]) -> None:
    """Attach anew where a checkpoint's weights need another structure than the model has; no optimizer exists yet.

    Args:
        session: Attached, not begun.
        state: As in `fits`.
        run_environment: As in `Session.attach`.

    Raises:
        CheckpointError: If a technique cannot go on from this checkpoint.
    """
    if fits(session, state) or session.context is None:
        return
    model = session.context.model
    # Structure before weights: layers are put in as the checkpoint has them, then loaded.
    session.detach()
    session.attach(model, run_environment, state["techniques"])
