"""Plain PyTorch loops, which call the methods around each step themselves."""

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
from shared_core.errors import TrainingError
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.loop_driver import LoopDriver, LoopPlan


class BareLoop(LoopDriver):
    """A plain loop, created by `training`."""

    name = "bare"
    owner = "loop"
    accumulates = "pass accumulate= to training"
    gives_batches = "pass calibration= to training"
    trainer = "use hf_eff or lightning_eff, or pass services= to training"
    divides_loss = True

    loader: DataLoader[Any] | None = None
    """The data to train on; None if `training` was given none."""

    def prepare(self, resumed: Mapping[str, Any] | None, loader: DataLoader[Any] | None) -> None:
        """Begin, or resume from a saved state."""
        self._scaler: Any = self.make_scaler(next(self.inner.parameters()).device.type)
        self.watch_steps()
        if resumed is not None:
            self.session.prepare_optimizers([self.optimizer])
            self.session.load_state_dict(resumed)
        self.loader = loader if loader is None else self.draw(loader)
        self.begin()

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for one micro-batch's forward pass and loss."""
        return self.session.forward()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run backward on a micro-batch's loss, already divided by `accumulate`, with the terms that techniques add."""
        self.on_backward(self._backward, loss, **options)

    def step(self, method: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer. Techniques process the gradients first, unless `complete` has been called.

        Args:
            method: Called instead of ``optimizer.step``. If it does not step the optimizer, the step counts as skipped.
        """
        return self.on_step(method or self._step)

    def zero_grad(self) -> None:
        """Clear gradients. After `complete` without a step, this counts as a skipped step."""
        self.on_zero_grad(self.optimizer.zero_grad)

    def note_no_steps(self) -> None:
        """Note that the loop never called `step`, most likely because it steps the optimizer itself."""
        context = self.session.context
        if context is not None and not any(context.furthest):
            self.session.note(
                "no step was seen, so nothing was applied: write loop.backward(loss) and loop.step() instead of "
                "loss.backward() and optimizer.step()"
            )

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, if a technique has a scaler."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)

    def _backward(self, loss: Tensor, **options: Any) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)

    def _step(self) -> Any:
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise TrainingError(
                self.name,
                "LBFGS needs a closure that evaluates the loss",
                "call the closure, then loop.step(lambda: optimizer.step(closure)); write loop.backward(loss) in it",
            )
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
    """Return a context manager that applies a recipe to a plain loop.

    When the block ends, the model is final. If it raises, your model is restored.

    Args:
        recipe: A recipe, a dict, or the path of a YAML or JSON file.
        model: The unwrapped model, with the weights that training starts or resumes from.
        optimizer: The optimizer of its parameters. Parameters that techniques add or replace join its groups until the
            end.
        total_steps: Optimizer steps of the whole run.
        steps_per_epoch: Optimizer steps per epoch, for positions such as ``2ep``.
        accumulate: Micro-batches per step. Divide the loss by this number in your loop.
        clips_gradients: True if the loop clips gradients by norm, after ``loop.complete()``.
        loader: The data loader, for techniques that draw batches themselves (``dp``). Then train on ``loop.loader``.
        calibration: Batches for techniques that need some. A mapping is passed to the model as keywords, of a sequence
            the first element.
        resumed: The saved ``loop.session.state_dict()`` to resume from. Load the optimizer's own state inside the
            block.
        services: Services for techniques, such as the loss of another model; by default those of a plain loop.
        seed: Seed for the random numbers of techniques. Trainers use their own.

    Raises:
        ConfigError: If an option or a position is invalid.
        CompatibilityError: If the techniques cannot be combined or cannot run in this environment.
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
        loop.note_no_steps()
        loop.finish()
    except BaseException:
        loop.cut_short()
        raise
