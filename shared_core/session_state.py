"""What a checkpoint holds of a session: the step, its generator, and the state of each technique."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared_core.errors import CheckpointError
from shared_core.history import History
from shared_core.recipe import Recipe
from shared_core.technique import Context, Technique


def of(
    context: Context, techniques: Mapping[str, Technique], recipe: Recipe, skipped: int, history: History
) -> dict[str, Any]:
    """Return the state as plain values and tensors."""
    return {
        "step": context.step, "skipped": skipped, "recipe": recipe.to_dict(),
        "generator": context.generator.get_state(), "history": history.state_dict(),
        "techniques": {key: technique.state_dict() for key, technique in techniques.items()},
        "buffers": context.left_out.changed(),
    }  # fmt: skip


def windows(techniques: Mapping[str, Technique]) -> dict[str, dict[str, Any]]:
    """Return what each technique has gathered in an accumulation window that is not over."""
    return {key: state for key, technique in techniques.items() if (state := technique.window_state())}


def restore_windows(state: Mapping[str, Any], techniques: Mapping[str, Technique]) -> None:
    """Put back what `windows` returned, with the gradients of the same window."""
    for key in state.keys() & techniques.keys():
        techniques[key].load_window_state(state[key])


def restore(
    state: Mapping[str, Any], context: Context, techniques: Mapping[str, Technique], history: History
) -> tuple[Mapping[str, Any], int]:
    """Put a saved state back; return the recipe that it was saved with and how many steps had been skipped.

    Raises:
        CheckpointError: If the state is not a session's.
    """
    try:
        saved, recipe = state["techniques"], state["recipe"]
        step, skipped = int(state["step"]), int(state["skipped"])
        context.generator.set_state(state["generator"])
        history.load_state_dict(state.get("history", {}))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"session: state must be one that a session saved, got {error!r}") from error
    context.step = step
    context.left_out.put_back(state.get("buffers", {}))
    for key, technique in techniques.items():
        if key in saved:
            technique.load_state_dict(saved[key])
        else:
            technique.fits(None)
    return recipe, skipped
