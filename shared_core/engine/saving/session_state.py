"""The state of a session in a checkpoint: read and restore it, and check that the model fits the saved weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import (
    all_gather_object,
    digest,
    local_part,
    other_processes,
    own_buffers,
    own_state,
    put_buffers_,
    rank,
    with_own_state,
    world_size,
)
from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.protocols import Bakes, DrawsBatches, KeepsStructure, LoadsByName, offering
from shared_core.engine.registry import REGISTRY
from shared_core.engine.technique import Technique, returned
from shared_core.errors import CheckpointError, EffError

if TYPE_CHECKING:
    from shared_core.engine.session import Session


def state_of(session: Session) -> dict[str, Any]:
    """Return the state as plain values and tensors."""
    context, techniques = session.context_for("state_dict"), session.techniques
    unbaked = [(key, None, "its values are written into the weights") for key, _ in offering(techniques, Bakes)]
    return {
        "step": context.step,
        "skipped": context.skipped,
        "recipe": session.recipe.to_dict(),
        "generator": context.generator.get_state(),
        "history": session.history.state_dict(),
        "techniques": {key: returned(key, "state_dict", one.state_dict(), Mapping) for key, one in techniques.items()},
        "buffers": session.unsaved_buffers.changed(),
        "experts": session.experts.state_dict(),
        "ahead": context.events_after(context.step, with_end=True) + unbaked,
    }


@contextlib.contextmanager
def reading(key: str) -> Iterator[None]:
    """Convert any error while reading saved state into `CheckpointError`, with the original error as its cause.

    Raises:
        CheckpointError: If reading fails. `EffError`, `OSError` and out-of-memory errors are raised unchanged.
    """
    try:
        yield
    except (EffError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged state may hold any value and cause any error
        raise CheckpointError(
            "resume",
            f"cannot read the checkpoint's state of {key}: {error!r}. It is damaged or from another version, or this "
            "is a bug",
            "resume from another checkpoint",
        ) from error


def restore(session: Session, state: Mapping[str, Any]) -> list[str]:
    """Restore everything except what techniques load in `begin`. Return how the recipe differs from the saved run's.

    Raises:
        CheckpointError: If it is not the state of a session.
    """
    context = session.context_for("load_state_dict")
    context.steps_before_load = context.furthest
    with reading("session"):
        saved, recipe = dict(state["techniques"].items()), dict(state["recipe"])  # dict("") would be a dict
        step, skipped = int(state["step"]), int(state["skipped"])
        if step < 0 or skipped < 0:
            raise ValueError(f"step {step}, skipped {skipped}")
        context.generator.set_state(state["generator"])
        session.history.load_state_dict(state.get("history", {}))
        session.unsaved_buffers.put_back(state.get("buffers", {}))
        session.experts.load_state_dict(state.get("experts", {}))
    context.step, context.skipped = step, skipped
    refuse_foreign(saved, context.techniques)
    for key in context.techniques:
        with reading(key):
            if not isinstance(saved.get(key, {}), Mapping):
                raise TypeError(f"{saved[key]!r} is not a mapping")
    for key, drawing in offering(context.techniques, DrawsBatches):
        if key in saved:
            with reading(key):
                drawing.restore(saved[key])
    with reading("session"):
        return session.recipe.changes_since(recipe)


def window_state(session: Session) -> dict[str, dict[str, Any]]:
    """Return what techniques have gathered on this process in an unfinished accumulation window."""
    windows = session.context.windows if session.context is not None else {}
    return {name: state for name, window in windows.items() if (state := window.window_state())}


def load_window_state(session: Session, state: Mapping[str, Any]) -> None:
    """Restore the state returned by `window_state`. Call it after `begin`, with the window's gradients restored."""
    with reading("session"):
        found = dict(state)
    for name, window in session.context.windows.items() if session.context is not None else ():
        if name in found:
            with reading(name):
                window.load_window_state(found[name])


def refuse_foreign(saved: Mapping[str, Any], techniques: Mapping[str, Technique]) -> None:
    """Refuse a checkpoint of a run without a technique that can only resume from its own checkpoints."""
    for key in techniques.keys() - saved.keys():
        if why := techniques[key].config.own_checkpoints:
            raise CheckpointError(key, f"the checkpoint is of a run without {key}, {why[0]}", why[1])


@contextlib.contextmanager
def unstepped(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Return a context manager for saving that keeps a fresh sharded optimizer unstepped.

    torch.distributed.checkpoint (2.13) steps an optimizer without state and gradients once, with rate and gradients 0,
    so that the file has states. Adam would count that step in its bias correction, now and after resuming. So the file
    gets a step count of 0, and the optimizer's state is cleared again.
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
    """Return a context manager for loading plain weights by parameter names, as torch does under FSDP2.

    Args:
        session: The attached session. Its own state is loaded afterwards.
    """
    with contextlib.ExitStack() as stack:
        if session.context is not None:
            for _, adding in offering(session.techniques, LoadsByName):
                stack.enter_context(adding.loading(session.context.model))
        yield


def fits(session: Session, state: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's weights have the same structure as the model.

    Args:
        session: A session that is attached but has not begun.
        state: The saved `Session.state_dict`; empty if the checkpoint is of a run without techniques.

    Raises:
        CheckpointError: If a technique cannot resume from this checkpoint.
    """
    with reading("session"):
        saved: Mapping[str, Any] = dict(state.get("techniques", {}))
    for key in REGISTRY.keys() & saved.keys() - session.techniques.keys():
        if structure := REGISTRY[key].config_class.saved_structure:
            raise CheckpointError(
                "resume", f"the recipe no longer has {key}, {structure[0]}", f"add it again, or {structure[1]}"
            )
    refuse_foreign(saved, session.techniques)
    if session.context is None:
        return True
    with reading("session"):
        return all(one.fits(saved.get(key, {})) for key, one in offering(session.techniques, KeepsStructure))


def fit_to(session: Session, state: Mapping[str, Any], run_environment: Iterable[str]) -> None:
    """Attach again if a checkpoint's weights need a different model structure. No optimizer may exist yet.

    Args:
        session: A session that is attached but has not begun.
        state: As in `fits`.
        run_environment: As in `Session.attach`.

    Raises:
        CheckpointError: If a technique cannot resume from this checkpoint.
    """
    if fits(session, state) or session.context is None:
        return
    model = session.context.model
    # Structure before weights: rebuild the checkpoint's layers, then load them.
    session.detach()
    session.attach(model, run_environment, state["techniques"])


def gathered(session: Session, wrapped: nn.Module, **more: Any) -> dict[str, Any]:
    """Return the session's state and `more`, with the parts in which other processes differ. Every process calls it."""
    state = {**session.state_dict(), **more}
    # own_state and own_buffers gather.
    if world_size() == 1:
        return state
    mine = {**own_state(state), "buffers": own_buffers(cast(Any, session.context).model, wrapped)}
    return {**state, "ranks": all_gather_object(mine)}


def load_of_rank(session: Session, state: Mapping[str, Any]) -> Mapping[str, Any]:
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


class UnsavedBuffers:
    """Buffers that checkpoints lack but a resumed run needs, such as running statistics that a loss reads.

    Constant tables (rotary frequencies, causal masks) are left out.

    Args:
        model: The user's model, before techniques add their own buffers.

    Example:
        >>> import torch
        >>> model = nn.Module()
        >>> model.register_buffer("mean", torch.zeros(1), persistent=False)
        >>> found = UnsavedBuffers(model)
        >>> found.mark()
        >>> _ = model.mean.add_(1)
        >>> found.changed()
        {'mean': tensor([1.])}
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            f"{path}.{name}".lstrip("."): (module, name)
            for path, module in model.named_modules()
            # Sorted: a set has no order, and processes must agree on places.
            for name in sorted(module._non_persistent_buffers_set)
        }
        self._before: dict[str, str] = {}

    def mark(self) -> None:
        """Record the values at the start of training. Buffers that `put_back` has filled count as changed."""
        # The marks of `put_back` override the present digest.
        self._before = {name: digest(value) for name, value in self._now().items()} | self._before

    def changed(self) -> dict[str, Tensor]:
        """Return the buffers that have changed since training began."""
        return {
            name: value.detach().clone()
            for name, value in self._now().items()
            # Digests instead of copies: most buffers (masks, position tables) never change.
            if value is not None and digest(value) != self._before.get(name)
        }

    def put_back(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the values returned by `changed` into the same model. Unknown names are skipped."""
        for name, value in saved.items():
            if name not in self._places:
                continue
            module, own = self._places[name]
            present = self._now()[name]
            if present is not None and present.shape == value.shape:
                present.copy_(value)
            else:  # a table that has grown
                device = next((one.device for one in module.parameters()), value.device)
                module._buffers[own] = value.to(device, copy=True)
            self._before[name] = ""  # always saved again

    def _now(self) -> dict[str, Tensor | None]:
        found = {name: module._buffers.get(own) for name, (module, own) in self._places.items()}
        return {name: None if value is None else local_part(value) for name, value in found.items()}
