"""`Session` with what users call: start with a model and its optimizer, and the finished weights at any time."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.config.training_time import StepsPerEpoch
from shared_core.engine import session
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.engine.protocols import MakesScaler, TrainsPeers, offering
from shared_core.errors import CompatibilityError
from shared_core.modules.calls import around_forwards


class Session(session.Session):
    """One run of a recipe. A trainer drives it, or your code: `start`, and then in each step the calls below.

    Args:
        recipe: Techniques and their options. An empty recipe changes nothing.
        front_end: Who drives: ``"bare"`` (you), ``"accelerate"``, ``"fabric"``, ``"hf"`` or ``"lightning"``.
        services: What only a trainer can do, such as evaluating or loading a teacher.
        seed: Seed of the techniques' own generator. Global generators are never seeded.

    Example:
        >>> model, session = nn.Linear(8, 4), Session({"prune": {"sparsity": 0.5, "end": 1}})
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> session.start(model, optimizer, total_steps=2)
        >>> for _ in range(2):
        ...     session.loss(model(torch.ones(2, 8)).square().mean()).backward()
        ...     session.before_step()
        ...     optimizer.step()
        ...     _ = session.after_step()
        >>> int((session.bake()["weight"] == 0).sum())
        16
        >>> session.finish()
        >>> int((model.weight == 0).sum())
        16
    """

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        steps_per_epoch: StepsPerEpoch | None = None,
        clips_gradients: bool = True,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        """Attach to a model whose optimizer exists, and begin. Training forwards then need no `forward`.

        A run that was neither finished nor detached is detached first. After an error, call `detach`.

        Args:
            model: The unwrapped model, with the weights that training starts or resumes from.
            optimizer: The optimizer of its parameters, as for `efftrain.training`.
            total_steps: As in `begin`.
            steps_per_epoch: As in `begin`.
            clips_gradients: As in `begin`.
            resumed: The saved `state_dict` to resume from. Load the optimizer's own state after `start`.

        Raises:
            CompatibilityError: If a technique scales the loss, or the recipe cannot run in this environment.
            MatchError: If a technique matches nothing or too little.
        """
        self.detach()
        for key, _ in offering(self.techniques, MakesScaler):
            rule = "needs a loop that calls its scaler, which Session.start does not see"
            remedy = "use efftrain.training, or the trainer's own scaler without this technique"
            raise CompatibilityError(key, rule, remedy)
        attach_with(self, model, [optimizer])
        try:
            if resumed is not None:
                self.prepare_optimizers([optimizer])
                self.load_state_dict(resumed)
            self.begin(
                [optimizer], total_steps=total_steps, steps_per_epoch=steps_per_epoch, clips_gradients=clips_gradients
            )
        except BaseException:
            self.detach()
            raise
        undo = self.context_for("start").undo
        warn = functools.partial(self.progress.note_unfinished, " without session.finish()")
        undo.callback(around_forwards(model, lambda *_: self.forward()))
        atexit.register(warn)
        undo.callback(atexit.unregister, warn)

    @property
    def peers(self) -> list[nn.Module]:
        """Models that techniques train together with the script's model, by the same optimizer."""
        return [peer for _, one in offering(self.techniques, TrainsPeers) for peer in one.peers]

    def bake(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the state dict of the finished model, as if training ended now. Training goes on unchanged.

        Call it between steps. Activation ranges are not part of it.

        Args:
            weights: The state dict of an average that other code keeps, by default the model's. It gets the present
                masks and grids.

        Raises:
            CheckpointError: If a technique replaced some of these weights in training, for example by factors.
        """
        if weights is not None:
            return self.files.bake_average(weights)
        with self.swapped("export"):
            baked = self.files.bake(self.context_for("bake").model.state_dict())
            # These may be the tensors of the model, which gets its training weights again.
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in baked.items()}
