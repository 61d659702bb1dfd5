"""Optional methods that few techniques need: `offering` returns those that have the methods of a protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from shared_core.engine.plan import Touched
    from shared_core.engine.saving.trained_part import TrainedPart
    from shared_core.engine.technique import Context

Offer = TypeVar("Offer")


def offering(techniques: Mapping[str, object], protocol: type[Offer]) -> list[tuple[str, Offer]]:
    """Return the techniques that have the methods of one of the protocols below, with their recipe keys.

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
    """Looks at the user's model, or copies it, before any technique has touched it."""

    def before_attach(self, context: Context) -> None:
        """No technique is attached yet."""
        ...


@runtime_checkable
class LeavesUnheld(Protocol):
    """Works on single parameters, and leaves alone, as frozen, those that no optimizer holds."""

    def leave_unheld(self, context: Context) -> Touched:
        """Leave alone those in `context.unheld`, and return what is left; once, before saved state is restored."""
        ...


@runtime_checkable
class PreparesOptimizer(Protocol):
    """Changes or checks optimizers before their saved state is loaded."""

    def prepare_optimizers(self, context: Context) -> None:
        """The optimizers exist; their saved state, if this is a resume, has not been loaded yet."""
        ...


@runtime_checkable
class MakesScaler(Protocol):
    """Scales the loss by a scaler of its own."""

    def make_scaler(self, device: str) -> torch.amp.GradScaler | None:
        """Return the scaler to train with on a type of device, in place of the script's; None: the script's own."""
        ...


@runtime_checkable
class DrawsBatches(Protocol):
    """Draws the training batches itself."""

    def loader(self, loader: Any, accumulate: int = 1, batch_size: int | None = None, **more: Any) -> Any:
        """Return the DataLoader to train on, in place of the script's.

        Args:
            loader: The script's, over the same whole data set on every process.
            accumulate: Micro-batches of an optimizer step.
            batch_size: Examples of a micro-batch, by default as many as a batch of `loader` has.
            more: Arguments of a class other than DataLoader, if `loader` is of one.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state at once: batches are drawn before `begin`, which gets it again."""
        ...


@runtime_checkable
class TrainsPeers(Protocol):
    """Trains further models with the script's optimizer."""

    @property
    def peers(self) -> Sequence[nn.Module]:
        """The others: a loop clips the gradients of each by their own norm."""
        ...

    def write(self, folder: Path) -> None:
        """Write them into the run's folder; called once it is over, on the main process."""
        ...


@runtime_checkable
class FollowsWeights(Protocol):
    """Keeps something that belongs to weights, such as ranges or copies."""

    def weights_replaced(self, context: Context) -> None:
        """Weights came from elsewhere (a soup's candidate), and were projected: restore what else belongs to them."""
        ...


@runtime_checkable
class SeesMetrics(Protocol):
    """Wants to know what validations find."""

    def evaluated(self, context: Context, metrics: Mapping[str, float | Tensor]) -> None:
        """The user's own validation reported these metrics, by the trainer's names, for the weights of this step."""
        ...


@runtime_checkable
class KeepsStructure(Protocol):
    """Leaves layers in the model that saved weights must fit."""

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Return True if the model has the structure of the weights that were saved with a state."""
        ...


@runtime_checkable
class LoadsByName(Protocol):
    """Adds parameters that a file of plain weights does not have."""

    def loading(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return what surrounds the loading of plain weights by a trainer that goes by the parameters' names."""
        ...


@runtime_checkable
class Bakes(Protocol):
    """Saves other weights than those in the model."""

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's state dict as the user's plain model should load it; the input stays as it is."""
        ...


@runtime_checkable
class Deploys(Protocol):
    """Has values that a deployment needs in addition to the plain weights."""

    def deployment(self) -> dict[str, Any]:
        """Return it, such as activation ranges, as plain values."""
        ...


@runtime_checkable
class SavesPart(Protocol):
    """Trains a small part of the model, which is saved without the rest."""

    @property
    def saves_part(self) -> bool:
        """True if this part is saved without the rest."""
        ...

    def part(self, context: Context) -> TrainedPart | None:
        """Return that part as it is now, None if the whole model is saved; every process calls it."""
        ...

    def load_part(self, context: Context, folder: Path) -> bool:
        """Load a part into the model; return False, and load nothing, if the folder holds none of this kind."""
        ...


class Window(Protocol):
    """State that a process gathers in an accumulation window."""

    def window_state(self) -> dict[str, Any]:
        """Return what this process has gathered in the window that is not over; empty: nothing."""
        ...

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `window_state`, by the same process of as many."""
        ...
