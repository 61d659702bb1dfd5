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
    """A front end as `eff run` needs it; found through the entry points of group ``efftrain.front_ends``."""

    name: str
    libraries: tuple[str, ...]
    """Modules of which one is its trainer's."""
    modules: tuple[str, ...]
    """Those whose import `install` waits for; in processes that a script starts it is called with the first of them."""

    def install(self, recipe: Recipe) -> None:
        """Make every trainer that the script builds carry the recipe. Imports no trainer by itself."""
        ...

    def used(self) -> bool:
        """Return True if a trainer took the recipe."""
        ...

    def shorten(self, run: ShortRunConfig) -> None:
        """Make every training that carries the recipe end after the steps of a short run, and conclude it."""
        ...


def front_ends() -> list[FrontEnd]:
    """Return the installed front ends; one whose trainer is missing is left out."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        front_end = entry.load()
        if any(map(find_spec, front_end.libraries)):
            found.append(front_end)
    return found


def own_weights(model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by a model's own names, where its library saves them by others or in other pieces.

    So does transformers with those of ViT and with the experts of Mixtral.
    """
    if not state.keys() <= set(names) and hasattr(model, "save_pretrained"):
        for front_end in front_ends():
            if (find := getattr(front_end, "own_weights", None)) is not None:
                state = find(model, names, state)
    return dict(state)
