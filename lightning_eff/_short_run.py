"""A short run of a script that trains with Lightning."""

from __future__ import annotations

import functools
from importlib import import_module
from types import ModuleType
from typing import Any

from shared_core.runs.short_run import ShortRunConfig, check_one_process, short_run_of


def shorten_fit(run: ShortRunConfig, module: ModuleType) -> None:
    """Make every `Trainer.fit` end after the run's steps, write only into its folder, and conclude it."""
    stock = module.Trainer.fit

    @functools.wraps(stock)
    def fit(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        _shorten(trainer, run)
        data = _data(*args, **kwargs)
        stock(trainer, model, **data)  # without a checkpoint to resume from
        _conclude(trainer, model, data)

    module.Trainer.fit = fit  # type: ignore[attr-defined]
    module.Trainer.default_root_dir = run.output  # type: ignore[attr-defined]


def _data(
    train_dataloaders: Any = None, val_dataloaders: Any = None, datamodule: Any = None, *_: Any, **__: Any
) -> dict[str, Any]:
    return {"train_dataloaders": train_dataloaders, "val_dataloaders": val_dataloaders, "datamodule": datamodule}


def _shorten(trainer: Any, run: ShortRunConfig) -> None:
    from lightning_eff._run_environment import namespace_of

    check_one_process(trainer.world_size)
    trainer.fit_loop.epoch_loop.max_steps, trainer.fit_loop.max_epochs = run.steps, -1
    trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = None, None
    trainer.num_sanity_val_steps = 0
    most, asked = run.eval_batches, trainer.limit_val_batches
    if most and (isinstance(asked, int) or asked == 1.0):  # other shares of the data are unchanged
        trainer.limit_val_batches = min(asked, most) if isinstance(asked, int) else most
    loggers = import_module(f"{namespace_of(trainer)}.loggers.logger")
    trainer.loggers = [loggers.DummyLogger()] if trainer.loggers else []
    for number, callback in enumerate(trainer.checkpoint_callbacks):
        if hasattr(callback, "dirpath"):
            callback.dirpath = f"{run.output}/checkpoints-{number}"
    # early stopping would leave schedules unfinished
    trainer.callbacks = [one for one in trainer.callbacks if type(one).__name__ != "EarlyStopping"]


def _conclude(trainer: Any, model: Any, data: dict[str, Any]) -> None:
    session = next(one.session for one in trainer.callbacks if getattr(one, "session", None) is not None)
    loaders = {"dataloaders": data["val_dataloaders"], "datamodule": data["datamodule"]}

    def metrics() -> dict[str, Any]:
        if not trainer.enable_validation:
            return {}
        trainer.validate(model, **loaders, verbose=False)
        return dict(trainer.callback_metrics)

    short_run_of(session).conclude(
        session, metrics, lambda place: trainer.save_checkpoint(f"{place}/model.ckpt", weights_only=True)
    )
