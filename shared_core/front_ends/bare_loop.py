"""Plain loops of torch, which call what surrounds a step themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shared_core.config.training_time import StepsPerEpoch
from shared_core.engine.recipe import Recipe
from shared_core.engine.services import Services
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.loop_driver import LoopDriver, LoopPlan


class BareLoop(LoopDriver):
    """A plain loop; `training` makes one."""

    name = "bare"
    owner = "loop"
    accumulates = "pass accumulate= to training"
    gives_batches = "pass calibration= to training"
    trainer = "use hf_eff or lightning_eff, or pass services= to training"
    divides_loss = True

    loader: DataLoader[Any] | None = None
    """The data to train on; None if `training` was given none."""

    def prepare(self, resumed: Mapping[str, Any] | None, loader: DataLoader[Any] | None) -> None:
        """Begin, or go on from a saved state."""
        self._scaler: Any = self.make_scaler(next(self.inner.parameters()).device.type)
        self.watch_steps()
        if resumed is not None:
            self.session.prepare_optimizers([self.optimizer])
            self.session.load_state_dict(resumed)
        self.loader = loader if loader is None else self.draw(loader)
        self.begin()

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return what surrounds the forward and the loss of a micro-batch."""
        return self.session.forward()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward with what techniques add to a micro-batch's loss, which is divided by their number already."""
        self.on_backward(self._backward, loss, **options)

    def step(self, method: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer; gradients are shown to the techniques first, unless `complete` has done so.

        Args:
            method: What makes the step in place of ``optimizer.step``; it counts as skipped if that does not step.
        """
        return self.on_step(method or self._step)

    def zero_grad(self) -> None:
        """Drop gradients; those that `complete` has shown, and no step was made with, count as a skipped step."""
        self.on_zero_grad(self.optimizer.zero_grad)

    def unscale(self) -> None:
        """Divide the gradients by the scale of a technique that has a scaler."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)

    def _backward(self, loss: Tensor, **options: Any) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)

    def _step(self) -> Any:
        if self._scaler is None:
            return self.optimizer.step()
        result = self._scaler.step(self.optimizer)
        self._scaler.update()
        return result


@contextlib.contextmanager
def training(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: StepsPerEpoch | None = None,
    accumulate: int = 1,
    clips_gradients: bool = True,
    loader: DataLoader[Any] | None = None,
    calibration: Iterable[Any] | None = None,
    resumed: Mapping[str, Any] | None = None,
    services: Services | None = None,
    seed: int = 0,
) -> Iterator[BareLoop]:
    """Surround a plain loop: the model is finished where it ends, and the user's again where it fails.

    Args:
        recipe: A recipe, a dict of one, or a path to a YAML or JSON file of one.
        model: The user's unwrapped model, with the weights that training starts or goes on from.
        optimizer: Of its parameters; parameters that techniques add or replace join its groups until the end.
        total_steps: Optimizer steps of the whole run.
        steps_per_epoch: Those of an epoch, for positions such as ``2ep``.
        accumulate: Micro-batches of a step, by whose number the loop divides the loss.
        clips_gradients: Whether gradients are clipped by norm, after ``loop.complete()``.
        loader: The data, for techniques that draw batches themselves (``dp``): train on ``loop.loader`` then.
        calibration: Batches that the model is called with where a technique looks at some: mappings as keywords, of
            sequences the first element.
        resumed: What ``loop.session.state_dict()`` returned in the run that goes on; load the optimizer's own state
            inside.
        services: What techniques may ask for, such as the loss of another model; by default what a loop can do.
        seed: Of what techniques draw; both trainers take theirs.

    Raises:
        ConfigError: If an option or a position is wrong.
        CompatibilityError: If the techniques cannot run like this.
        MatchError: If a technique matches no module.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with training({"prune": {"sparsity": 0.5, "end": 1}}, model, optimizer, total_steps=2) as loop:
        ...     for _ in range(2):
        ...         with loop.forward():
        ...             loss = model(torch.ones(2, 8)).square().mean()
        ...         loop.backward(loss)
        ...         loop.step()
        ...         optimizer.zero_grad()
        >>> int((model.weight == 0).sum())
        16
    """
    plan = LoopPlan(
        total_steps=total_steps, steps_per_epoch=steps_per_epoch, accumulate=accumulate, clips_gradients=clips_gradients
    )
    loop = BareLoop(as_recipe(recipe), model, optimizer, plan, services, seed)
    loop.batches = calibration
    loop.attach(())
    try:
        loop.prepare(resumed, loader)
        yield loop
        loop.finish()
    except BaseException:
        loop.cut_short()
        raise
