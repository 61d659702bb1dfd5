"""efftrain in ultralytics: ``attach(model, {"prune": {"sparsity": 0.8}})``, then ``model.train(...)``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from ultralytics.utils.torch_utils import unwrap_model

from shared_core.engine.recipe import Recipe
from shared_core.errors import CompatibilityError
from shared_core.front_ends.library_run import LibraryRun

_REFUSED = {
    "time": "pass epochs=, so that the number of steps is known",
    "compile": "leave it out",
    "distill_model": "leave it out, or train without efftrain",
}


def attach(model: Any, recipe: Recipe | Mapping[str, Any] | str | Path) -> None:
    """Apply a recipe to each ``model.train(...)`` on one device.

    ``best.pt`` and ``last.pt`` hold the average that ultralytics keeps, with the recipe's zeros and grids. Validation
    during training uses the same weights. The receipt is written into the run's folder.

    Args:
        model: A ``YOLO`` or another ultralytics model.
        recipe: A recipe, a dict, or the path of a YAML or JSON file.

    Raises:
        ConfigError: If an option is wrong.

    Example:
        ``model = YOLO("yolo11n.yaml"); attach(model, {"qat": {"scheme": "int8"}}); model.train(data="coco8.yaml")``
    """
    callback = _Callback(recipe)
    if adding := [key for key, _ in callback.session.hooks.loss]:
        rule = "ultralytics models return their loss, not the outputs to compare with a teacher"
        raise CompatibilityError(adding[0], rule, "leave it out, or train with distill_model= and without efftrain")
    for event in ("on_pretrain_routine_end", "on_train_epoch_end", "on_train_end", "teardown"):
        model.add_callback(event, getattr(callback, event))


class _Callback:
    def __init__(self, recipe: Recipe | Mapping[str, Any] | str | Path) -> None:
        self._recipe, self._has_stepped, self._is_merged = recipe, False, False
        self._trainer: Any = None
        self._run = LibraryRun(recipe, "ultralytics", self._forwards)
        self.session = self._run.session

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._recipe,)  # for processes of other devices, which then refuse

    def on_pretrain_routine_end(self, trainer: Any) -> None:
        """Start, when the optimizer and the average exist."""
        for name, remedy in _REFUSED.items():
            if getattr(trainer.args, name, None):
                raise CompatibilityError("ultralytics", f"{name}= is not supported", remedy)
        self._trainer, model, per_epoch = trainer, unwrap_model(trainer.model), _steps(trainer)
        self._resumes_from = trainer.wdir / "last.eff.pt"
        if trainer.args.resume and Path(trainer.args.resume).name != trainer.last.name:
            raise CompatibilityError("ultralytics", "resume= must be last.pt", "earlier epochs cannot be resumed")
        state = self._run.start(
            model,
            trainer.optimizer,
            total_steps=sum(per_epoch),
            steps_per_epoch=per_epoch,
            resumed=self._resumes_from if trainer.args.resume else None,
        )
        if state:
            trainer.ema.ema.load_state_dict(state["average"])
        self.session.bake(trainer.ema.ema.state_dict())  # raises an error if the average does not fit
        own = {*map(id, [*model.parameters(), *model.buffers()])}
        self._is_merged = any(id(value) not in own for value in model.state_dict(keep_vars=True).values())
        self._run.until_end(trainer.optimizer.register_step_post_hook(self._stepped).remove)
        self._run.wrap(trainer.scaler, scale=self._scale, unscale_=self._unscale, step=self._step)
        self._run.wrap(trainer, validate=self._with_baked, save_model=self._save)

    def on_train_epoch_end(self, trainer: Any) -> None:
        if self._run.forgets_best():
            trainer.best_fitness = None

    def on_train_end(self, trainer: Any) -> None:
        self._run.finish(trainer.save_dir)
        self._resumes_from.unlink(missing_ok=True)

    def teardown(self, trainer: Any) -> None:
        self._run.cut_short()

    def _scale(self, scale: Any, loss: Tensor) -> Any:
        return scale(self.session.loss(loss))

    def _unscale(self, unscale: Any, optimizer: Any) -> None:
        unscale(optimizer)
        self.session.before_step()

    def _step(self, step: Any, optimizer: Any) -> None:
        self._has_stepped = False
        step(optimizer)
        self.session.after_step(applied=self._has_stepped)
        if self._is_merged:
            self._trainer.ema._pairs = None  # it keeps tensors of the state dict, which adapters make anew each time

    def _stepped(self, *_: Any) -> None:
        self._has_stepped = True

    def _with_baked(self, method: Any) -> Any:
        """Call a method with a finished copy in the place of the average."""
        ema = self._trainer.ema
        average = ema.ema
        ema.ema = copy.deepcopy(average)
        ema.ema.load_state_dict(self.session.bake(average.state_dict()))
        try:
            return method()
        finally:
            ema.ema = average

    def _save(self, save: Any) -> Any:
        trainer = self._trainer
        files = [trainer.last.name]
        if trainer.best_fitness == trainer.fitness:
            files.append(trainer.best.name)
        if trainer.save_period > 0 and trainer.epoch % trainer.save_period == 0:
            files.append(f"epoch{trainer.epoch}.pt")
        for file in files:
            self._run.saved(file, "the finished average that ultralytics keeps,")
        saved = self._with_baked(save)
        self._run.save(self._resumes_from, average=trainer.ema.ema.state_dict())
        return saved

    def _forwards(self) -> Iterator[object]:
        trainer = self._trainer
        loader = trainer.get_dataloader(trainer.data["train"], batch_size=trainer.batch_size, rank=-1, mode="train")
        for batch in loader:
            yield unwrap_model(trainer.model)(trainer.preprocess_batch(batch)["img"])


def _steps(trainer: Any) -> list[int]:
    """Return the optimizer steps of each epoch, as ultralytics decides them: accumulation grows during warm-up."""
    batches, last = len(trainer.train_loader), -1
    warm = trainer._get_warmup_iterations(batches)
    steps = [0] * trainer.epochs
    for number in range(batches * trainer.epochs):
        if number == batches * trainer.start_epoch:
            last = -1  # a resumed run steps at its first batch
        every = trainer.accumulate
        if warm and number <= warm:
            every = max(1, int(np.interp(number, [0, warm], [1, every]).round()))
        if number - last >= every:
            steps[number // batches] += 1
            last = number
    return steps
