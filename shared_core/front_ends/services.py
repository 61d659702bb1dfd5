"""Services for techniques: forwards without training in each front end, and the services of the user's own loop."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.saving.own_generators import OwnGenerators
from shared_core.engine.saving.state_file import rng_restored
from shared_core.engine.services import Services
from shared_core.errors import CompatibilityError

if TYPE_CHECKING:
    from shared_core.front_ends.loop_driver import LoopDriver


@contextlib.contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """Return a context manager for forwards in train mode without gradients. Restores random state and mode."""
    was_training = model.training
    type(model).train(model)  # not the instance's method, by which loops detect validations
    try:
        with rng_restored(), torch.no_grad():
            yield
    finally:
        type(model).train(model, was_training)
        reshard_(model)


class LoopServices(Services):
    """Services of a training loop for techniques."""

    def __init__(self, loop: LoopDriver) -> None:
        self._loop = loop

    @property
    def lacks_batches(self) -> str:
        """How the user can give `calibrate` training batches; empty if it has some."""
        return self._loop.gives_batches if self._loop.batches is None else ""

    def calibrate(self, num_batches: int) -> None:
        """Run the first batches without gradients. Random state and the order of the data do not change."""
        loop, model = self._loop, self._loop.inner
        if loop.batches is None:
            raise CompatibilityError(loop.name, "calibration needs training batches, but has none", loop.gives_batches)
        own = OwnGenerators(loop.batches)
        drawn = own.states()
        try:
            with looking(model), loop.autocast():
                for batch in itertools.islice(loop.batches, num_batches):
                    batch = loop.to_device(batch)
                    model(**batch) if isinstance(batch, Mapping) else model(batch[0])
        finally:
            own.restore(drawn)

    def wrapped_model(self) -> nn.Module | None:
        """Return the library's wrapper of the model."""
        wrapped: nn.Module | None = self._loop.wrapped
        return wrapped

    def _needs_trainer(self, what: str) -> CompatibilityError:
        return CompatibilityError(self._loop.name, f"{what} needs a trainer", self._loop.trainer)
