"""efftrain in skorch: ``NeuralNetClassifier(..., callbacks=[EffCallback({"prune": {"sparsity": 0.8}})])``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skorch import NeuralNet
from skorch.callbacks import Callback, Checkpoint
from skorch.dataset import unpack_data

from shared_core.engine.recipe import Recipe
from shared_core.errors import CompatibilityError
from shared_core.front_ends.library_run import LibraryRun
from shared_core.front_ends.wrapped_method import Wrapped


class EffCallback(Callback):
    """Applies a recipe to each ``fit`` or ``partial_fit`` of a net.

    What other callbacks save or keep during training, such as `Checkpoint` and `EarlyStopping`, are finished weights.

    Args:
        recipe: A recipe, a dict, or the path of a YAML or JSON file.
        folder: Where the receipt is written.

    Example:
        ``NeuralNetClassifier(Module, callbacks=[EffCallback({"prune": {"sparsity": 0.8}})]).fit(X, y)``
    """

    def __init__(self, recipe: Recipe | Mapping[str, Any] | str | Path, folder: Path | str = ".") -> None:
        # `clone` requires these unchanged, and a final underscore in all other names.
        self.recipe, self.folder = recipe, folder

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "folder": self.folder}  # nets are pickled and copied without the run

    def on_train_begin(self, net: Any, **kwargs: Any) -> None:
        """Check the net, and see the whole training."""
        if type(net).train_step is not NeuralNet.train_step:
            rule = f"{type(net).__name__} has its own train_step, whose optimizer steps cannot be counted"
            raise CompatibilityError("skorch", rule, "leave it out, or call efftrain.Session in it")
        if net.compile:
            raise CompatibilityError("skorch", "compile=True is not supported", "leave it out")
        self.net_, self.run_ = net, LibraryRun(self.recipe, "skorch", self._forwards)
        self.whole_ = Wrapped(net, "fit_loop", self._fit_loop)

    def on_epoch_begin(self, net: Any, dataset_train: Any, **kwargs: Any) -> None:
        """Start in the first epoch, which has the training data."""
        self.data_ = dataset_train
        if self.run_.session.has_begun:
            return
        batches = len(net.get_iterator(dataset_train, training=True))
        self.run_.start(net.module_, net.optimizer_, total_steps=batches * self.epochs_, steps_per_epoch=batches)
        checkpoints = [one for _, one in net.callbacks_ if isinstance(one, Checkpoint)]
        if self.run_.session.context_for("start").adds_parameters and any(
            one.load_best and one.f_optimizer for one in checkpoints
        ):
            self.run_.cut_short()
            rule = "Checkpoint(load_best=True) cannot load the optimizer of a model to which techniques add parameters"
            raise CompatibilityError("skorch", rule, "pass f_optimizer=None to Checkpoint")
        self.run_.wrap(
            net,
            get_loss=self._get_loss,
            train_step_single=self._train_step_single,
            run_single_epoch=self._run_single_epoch,
            notify=self._notify,
            save_params=self._save_params,
        )

    def on_batch_end(self, net: Any, batch: Any = None, training: bool | None = None, **kwargs: Any) -> None:
        """Count the step."""
        if training and self.run_.session.is_live:
            self.run_.session.after_step()

    def _fit_loop(self, fit_loop: Any, *args: Any, epochs: int | None = None, **options: Any) -> Any:
        self.whole_.undo()
        self.epochs_ = self.net_.max_epochs if epochs is None else epochs
        try:
            result = fit_loop(*args, epochs=epochs, **options)
        except KeyboardInterrupt:  # skorch goes on, for example after `EarlyStopping`
            self.run_.finish(self.folder)
            raise
        except BaseException:
            self.run_.cut_short()
            raise
        # Before other callbacks load their best weights, which are finished too.
        self.run_.finish(self.folder)
        return result

    def _get_loss(self, get_loss: Any, *args: Any, training: bool = False, **options: Any) -> Any:
        loss = get_loss(*args, training=training, **options)
        return self.run_.session.loss(loss) if training else loss

    def _train_step_single(self, train_step_single: Any, batch: Any, **options: Any) -> Any:
        step = train_step_single(batch, **options)
        self.run_.session.before_step()
        return step

    def _run_single_epoch(self, run_single_epoch: Any, iterator: Any, training: bool, **options: Any) -> Any:
        if training:
            return run_single_epoch(iterator, training=training, **options)
        with self.run_.session.swapped("evaluate"):
            return run_single_epoch(iterator, training=training, **options)

    def _notify(self, notify: Any, event: str, **options: Any) -> Any:
        if event != "on_epoch_end":
            return notify(event, **options)
        if self.run_.forgets_best():
            for _, callback in self.net_.callbacks_:
                for best in ("best_score_", "dynamic_threshold_"):
                    if getattr(callback, "lower_is_better", None) is not None and hasattr(callback, best):
                        setattr(callback, best, math.inf if callback.lower_is_better else -math.inf)
        with self.run_.publishing():
            return notify(event, **options)

    def _save_params(self, save_params: Any, f_params: Any = None, f_module: Any = None, **options: Any) -> Any:
        file = f_params or f_module
        if file is not None:
            self.run_.saved(Path(file).name if isinstance(file, str | Path) else "a file-like object")
        with self.run_.publishing():
            return save_params(f_params=f_params, f_module=f_module, **options)

    def _forwards(self) -> Iterator[object]:
        for batch in self.net_.get_iterator(self.data_, training=True):
            yield self.net_.infer(unpack_data(batch)[0])
