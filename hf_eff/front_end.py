"""The front end for `eff run`. It imports transformers only after the script has done so."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shared_core.engine.recipe import Recipe
from shared_core.front_ends.after_import import after_import
from shared_core.front_ends.flags import asked_steps

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shared_core.runs.short_run import ShortRunConfig

_MODULE, _LOOPS_MODULE = "transformers.trainer", "accelerate.accelerator"
_ARGUMENTS_MODULE = "transformers.training_args"


class HuggingFace:
    """Adds a recipe to every Trainer that a script trains with, and to Accelerate loops."""

    name = "hf"
    libraries = ("transformers",)
    modules = (_MODULE, _LOOPS_MODULE)

    def __init__(self) -> None:
        self._recipe = Recipe({})
        self._used = False
        self._short_run: ShortRunConfig | None = None
        self._passes_by = 0  # nested calls of `Accelerator.prepare` from a Trainer or from us

    def install(self, recipe: Recipe) -> None:
        """Make every ``Trainer.train`` attach the recipe, and ``Accelerator.prepare`` outside a Trainer."""
        self._recipe, self._used = recipe, False
        # Not imported here: `eff run` must not load transformers for a Lightning script.
        after_import(_MODULE, self.patch)
        after_import(_LOOPS_MODULE, self.patch_loops)

    def shorten(self, run: ShortRunConfig) -> None:
        """Make every training with the recipe a short run."""
        from hf_eff._short_run import redirect_arguments, silence_accelerator

        self._short_run = run
        after_import(_ARGUMENTS_MODULE, functools.partial(redirect_arguments, run))
        after_import(_LOOPS_MODULE, silence_accelerator)

    def used(self) -> bool:
        """Return True if a trainer took the recipe."""
        return self._used

    def load_teacher(
        self, name: str, student: nn.Module, *, trust_remote_code: bool = False, dequantize: bool = False
    ) -> nn.Module:
        """Return the transformers model in a folder or on the Hub. The other front end uses it too."""
        from hf_eff._adapters.distillation import load_teacher

        return load_teacher(name, student, trust_remote_code=trust_remote_code, dequantize=dequantize)

    def empty_model(self, folder: str) -> nn.Module:
        """Return the transformers model that a folder's config describes, without values (on the meta device)."""
        from hf_eff._adapters.distillation import empty_model

        return empty_model(folder)

    def own_weights(self, model: nn.Module, names: Sequence[str], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights that transformers saved, under the model's own names."""
        from hf_eff._checkpoints import own_weights

        return own_weights(model, names, state)

    def evaluator(self, task: str, folder: Path, data: Path, **options: Any) -> Any:
        """Return a function from a state dict of the model in a folder to its metric; see `FolderEvaluator`."""
        from hf_eff.evaluation import FolderEvaluator

        return FolderEvaluator(task, folder, data, **options)

    def patch(self, module: ModuleType) -> None:
        """Replace ``Trainer.train`` in the module that defines it."""
        stock = module.Trainer.train
        if hasattr(stock, "eff_stock"):
            return

        @functools.wraps(stock)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            return self.train(stock, trainer, *args, **kwargs)

        train.eff_stock = stock  # type: ignore[attr-defined]
        train.eff_join = self.join  # type: ignore[attr-defined]
        module.Trainer.train = train  # type: ignore[attr-defined]

    def train(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Train with the recipe attached."""
        from hf_eff.callbacks import session_callback_of

        run = self._short_run
        if run is not None:
            from hf_eff._short_run import conclude_trainer, shorten_trainer

            shorten_trainer(trainer, run)
            args, kwargs = (), {}  # no resuming
        self.join(trainer)
        driver = session_callback_of(trainer)
        method = functools.partial(stock, trainer)
        with self._passing_by():
            result = method(*args, **kwargs) if driver is None else driver.train(method, *args, **kwargs)
            if run is not None:
                conclude_trainer(trainer)
        return result

    def join(self, trainer: Any) -> None:
        """Attach the recipe, once per trainer: `train` may be called again, and subclasses call it through super."""
        from hf_eff.callbacks import attach

        if self._recipe and not getattr(trainer, "_eff_installed", False):
            trainer._eff_installed = True
            attach(trainer, self._recipe)
            self._used = True

    @contextlib.contextmanager
    def _passing_by(self) -> Iterator[None]:
        self._passes_by += 1
        try:
            yield
        finally:
            self._passes_by -= 1

    def patch_loops(self, module: ModuleType) -> None:
        """Replace ``Accelerator.prepare`` in the module that defines it."""
        stock = module.Accelerator.prepare
        if hasattr(stock, "eff_stock"):
            return

        @functools.wraps(stock)
        def prepare(accelerator: Any, *objects: Any, **options: Any) -> Any:
            from torch.optim import Optimizer

            trains = any(isinstance(one, Optimizer) for one in objects)
            if not self._recipe or self._passes_by or not trains:
                return stock(accelerator, *objects, **options)
            from hf_eff.accelerate_loop import planned_steps
            from hf_eff.accelerate_loop import prepare as prepare_loop

            run = self._short_run
            with self._passing_by():
                planned = asked_steps() or planned_steps(accelerator, objects)
                steps = planned if run is None else min(run.steps, planned or run.steps)
                prepared = prepare_loop(accelerator, *objects, recipe=self._recipe, total_steps=steps, **options)
            self._used = True
            if run is not None:
                from hf_eff._short_run import conclude_loop

                conclude_loop(next(one.eff_loop for one in prepared if hasattr(one, "eff_loop")))
            return prepared

        prepare.eff_stock = stock  # type: ignore[attr-defined]
        module.Accelerator.prepare = prepare  # type: ignore[attr-defined]


FRONT_END = HuggingFace()
