"""efftrain in fastai: ``Learner(..., cbs=EffCallback({"prune": {"sparsity": 0.8}}))``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fastai.callback import core
from fastai.callback.core import Callback
from fastai.callback.tracker import TrackerCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import SkipToEpoch

from efftrain._fastai_optimizer import NativeOptimizer, wrapped
from shared_core.engine.recipe import Recipe
from shared_core.front_ends.library_run import LibraryRun

_CONTROL = tuple(kind for name, kind in vars(core).items() if name.startswith("Cancel"))


class EffCallback(Callback):
    """Applies a recipe to each ``fit`` of a Learner. ``lr_find`` runs without it.

    Files that ``learn.save`` and `SaveModelCallback` write during ``fit`` hold finished weights. With the optimizer's
    state (``with_opt=True``), ``NAME.eff.pt`` beside them holds what ``resume`` needs.

    Args:
        recipe: A recipe, a dict, or the path of a YAML or JSON file.
        folder: Where the receipt is written, by default ``learn.path / learn.model_dir``.
        resume: Name of a saved file from which the next ``fit(..., start_epoch=...)`` resumes.

    Example:
        ``Learner(dls, model, cbs=EffCallback({"prune": {"sparsity": 0.8}})).fit_one_cycle(5)``
    """

    order, run_valid = GradientAccumulation.order - 1, False  # the undivided loss

    def __init__(
        self,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        folder: Path | str | None = None,
        resume: str | None = None,
    ) -> None:
        self.recipe, self.folder, self.resume = recipe, folder, resume
        self.eff = LibraryRun(recipe, "fastai", self._forwards)
        self._completes, self._is_cancelled = _BeforeClipping(self.eff), False

    def __reduce__(self) -> tuple[Any, ...]:
        # `learn.export` keeps the recipe, not the run.
        return type(self), (self.recipe, self.folder), {"learn": self.learn}

    def before_fit(self) -> None:
        """Start the session."""
        if hasattr(self.learn, "lr_finder"):
            return
        self._leave()  # a `fit` that another callback stopped at its start
        resumed, first = None, max((skip._skip_to for skip in self.learn._grab_cbs(SkipToEpoch)), default=0)
        if self.resume is not None:
            resumed, self.resume, first = self._models / f"{self.resume}.eff.pt", None, 0
        batches, every = len(self.dls.train), 1
        for accumulation in self.learn._grab_cbs(GradientAccumulation):
            every = math.ceil(accumulation.n_acc / self.dls.train.bs)
        ends = [batches * epoch // every for epoch in range(self.n_epoch - first + 1)]
        opt = wrapped(self.opt)
        per_epoch = [end - start for start, end in itertools.pairwise(ends)]
        self.eff.start(self.model, opt.opt, total_steps=ends[-1], steps_per_epoch=per_epoch, resumed=resumed)
        self.learn.opt = opt
        self.eff.wrap(self.learn, save=self._save, _with_events=self._guard)
        self.learn.add_cb(self._completes)

    def after_loss(self) -> None:
        """Train on the loss with the techniques' terms. ``learn.loss`` stays the task's."""
        self.learn.loss_grad = self.eff.session.loss(self.loss_grad)

    def after_cancel_step(self) -> None:
        """Remember that the step is skipped, for example by a gradient scaler."""
        self._is_cancelled = True
        if self.eff.session.is_live and not self._completes.is_complete:
            self.eff.session.before_step()

    def after_step(self) -> None:
        """Count the step."""
        if self.eff.session.is_live:
            self.eff.session.after_step(applied=not self._is_cancelled)
        self._is_cancelled = self._completes.is_complete = False

    def before_validate(self) -> None:
        """Validate the weights that a finished model would have."""
        self.eff.session.swaps.begin_evaluation()

    def after_validate(self) -> None:
        """Train on."""
        self.eff.session.swaps.leave_evaluation()

    def after_epoch(self) -> None:
        """Let only models that have what the recipe asks for be the best one."""
        if self.eff.session.is_live and self.eff.forgets_best():
            for tracker in self.learn._grab_cbs(TrackerCallback):
                tracker.best = math.inf if tracker.comp is np.less else -math.inf

    def after_fit(self) -> None:
        """Finish the model. `SaveModelCallback` loads its best one, which is finished too, after this."""
        if self.eff.session.is_live:
            self.eff.finish(self.folder or self._models)
            self._leave()

    @property
    def _models(self) -> Path:
        folder: Path = Path(self.path) / self.model_dir
        return folder

    def _leave(self) -> None:
        self.learn.remove_cb(self._completes)
        if isinstance(native := getattr(self.opt, "opt", None), NativeOptimizer):
            self.learn.opt = native.give_back()

    def _save(self, save: Any, file: Any, **options: Any) -> Any:
        with self.eff.publishing():
            written = save(file, **options)
        self.eff.saved(written.name)
        if self.eff.session.is_live and options.get("with_opt", True):
            self.eff.save(written.with_suffix(".eff.pt"))
        return written

    def _guard(self, with_events: Any, *arguments: Any) -> Any:
        try:
            return with_events(*arguments)
        except _CONTROL:
            raise
        except BaseException:
            if self.eff.session.is_live:
                self.eff.cut_short()
                self._leave()
            raise

    def _forwards(self) -> Iterator[object]:
        for batch in self.dls.train.new():
            yield self.model(*batch[: getattr(self.dls, "n_inp", 1)])


class _BeforeClipping(Callback):
    """Passes gradients to the techniques between the unscaling and the clipping."""

    order, run_valid = GradientClip.order - 0.5, False

    def __init__(self, eff: LibraryRun) -> None:
        self.eff, self.is_complete = eff, False

    def before_step(self) -> None:
        """Pass on complete gradients. A batch that only accumulates does not come here."""
        self.is_complete = True
        self.eff.session.before_step()
