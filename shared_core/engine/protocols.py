"""Optional methods of techniques. `offering` finds who implements them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from shared_core.engine.technique import Context

Offer = TypeVar("Offer")


def offering(techniques: Mapping[str, object], protocol: type[Offer]) -> list[tuple[str, Offer]]:
    """Return the techniques that implement one of the protocols below, with their recipe keys.

    Example:
        >>> class Shares:
        ...     def deployment(self):
        ...         return {"values": 4}
        >>> [(key, one.deployment()) for key, one in offering({"share": Shares(), "other": object()}, Deploys)]
        [('share', {'values': 4})]
    """
    return [(key, one) for key, one in techniques.items() if isinstance(one, protocol)]


@runtime_checkable
class LooksFirst(Protocol):
    """Looks at the user's model, or copies it, before any technique changes it."""

    def before_attach(self, context: Context) -> None:
        """Called before any technique is attached."""


@runtime_checkable
class PreparesOptimizer(Protocol):
    """Changes or checks optimizers before their saved state is loaded."""

    def prepare_optimizers(self, context: Context) -> None:
        """Called when the optimizers exist. On a resume, their saved state is loaded afterwards."""


@runtime_checkable
class MakesScaler(Protocol):
    """Scales the loss with its own scaler."""

    def make_scaler(self, device: str) -> torch.amp.GradScaler | None:
        """Return the scaler for a type of device, which replaces the script's. None keeps the script's."""


@runtime_checkable
class DrawsBatches(Protocol):
    """Draws the training batches itself."""

    def loader(self, loader: Any, accumulate: int = 1, batch_size: int | None = None, **more: Any) -> Any:
        """Return the DataLoader to train on, which replaces the script's.

        Args:
            loader: The script's loader, over the same whole dataset on every process.
            accumulate: Micro-batches per optimizer step.
            batch_size: Examples per micro-batch, by default the batch size of `loader`.
            more: Further arguments, if the loader's class is not DataLoader.
        """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state early: batches are drawn before `begin`, which receives the state again."""


@runtime_checkable
class TrainsPeers(Protocol):
    """Trains more models with the script's optimizer."""

    @property
    def peers(self) -> Sequence[nn.Module]:
        """The other models. A loop clips each by the norm of its own gradients."""

    def write(self, folder: Path) -> None:
        """Write them into the run's folder. Called after the run, on the main process."""


@runtime_checkable
class FollowsWeights(Protocol):
    """Keeps something that depends on the weights, such as ranges or copies."""

    def weights_replaced(self, context: Context) -> None:
        """Called when the weights were replaced (by a soup's candidate) and projected: update what depends on them."""


@runtime_checkable
class SeesMetrics(Protocol):
    """Uses the metrics of the user's validations."""

    def evaluated(self, context: Context, metrics: Mapping[str, float | Tensor]) -> None:
        """Called after the user's validation of the current weights, with metrics by the trainer's names."""


@runtime_checkable
class KeepsStructure(Protocol):
    """Leaves layers in the model that saved weights must fit."""

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return True if the model has the same structure as the weights saved with a state."""


@runtime_checkable
class LoadsByName(Protocol):
    """Adds parameters that a file of plain weights does not have."""

    def loading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which a trainer loads plain weights by parameter names."""


@runtime_checkable
class Bakes(Protocol):
    """Saves weights that differ from those in the model."""

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict that the user's plain model loads, with its names, shapes and dtypes.

        Called for saved models, and for Lightning's checkpoints, in which the model holds the weights to resume from.
        Does not change its input.
        """


@runtime_checkable
class Deploys(Protocol):
    """Has values that a deployment needs in addition to the plain weights."""

    def deployment(self) -> dict[str, Any]:
        """Return them as plain values, for example activation ranges."""


class TrainedPart(Protocol):
    """The trained part of a model, as files that stock libraries load onto the base model."""

    name: ClassVar[str]
    """Name of its folder next to the receipt, if checkpoints hold the whole model."""

    def write(self, folder: Path) -> None:
        """Write the files into a folder, which is created if needed."""

    def differences(self, folder: Path) -> list[str]:
        """Return how the files in a folder differ from this part, one line each."""


@runtime_checkable
class SavesPart(Protocol):
    """Trains a small part of the model, which is saved without the rest."""

    @property
    def saves_part(self) -> bool:
        """True if this part is saved without the rest."""

    def part(self, context: Context) -> TrainedPart | None:
        """Return that part as it is now, None if the whole model is saved; every process calls it."""

    def load_part(self, context: Context, folder: Path) -> bool:
        """Load a part into the model; return False, and load nothing, if the folder holds none of this kind."""


class Window(Protocol):
    """State that a process accumulates during an accumulation window."""

    def window_state(self) -> dict[str, Any]:
        """Return what this process has accumulated in the unfinished window. Empty if nothing."""

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `window_state` returned on the same rank, with the same number of processes."""
