"""The installed front ends, found by their entry points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shared_core.engine.recipe import Recipe
    from shared_core.runs.short_run import ShortRunConfig


GROUP = "efftrain.front_ends"


class FrontEnd(Protocol):
    """Interface of a front end for `eff run`; found through the entry points of group ``efftrain.front_ends``."""

    name: str
    libraries: tuple[str, ...]
    """Names of the trainer's module, one of which must be installed."""
    modules: tuple[str, ...]
    """Modules whose import `install` waits for. In a script's subprocesses it runs at the first of these imports."""

    def install(self, recipe: Recipe) -> None:
        """Apply the recipe to every trainer that the script creates, without importing a trainer."""
        ...

    def used(self) -> bool:
        """Return True if a trainer uses the recipe."""
        ...

    def shorten(self, run: ShortRunConfig) -> None:
        """End every training with the recipe after the steps of a short run, and finish it."""
        ...


def front_ends() -> list[FrontEnd]:
    """Return the front ends whose trainer is installed."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        front_end = entry.load()
        if any(map(find_spec, front_end.libraries)):
            found.append(front_end)
    return found


def own_weights(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under a model's own names if its library saves them under other names or in other pieces.

    For example, transformers does so for ViT and for the experts of Mixtral.
    """
    if not state.keys() <= set(names) and hasattr(model, "save_pretrained"):
        for front_end in front_ends():
            if (find := getattr(front_end, "own_weights", None)) is not None:
                state = find(model, names, state)
    return dict(state)
