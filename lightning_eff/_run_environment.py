"""Lightning's two package names: which are installed, and which classes ours must derive from.

Also facts about a run of a Lightning Trainer: its environment and its length.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lightning_eff._averages import averaging
from shared_core.config.training_time import StepsPerEpoch, steps_until
from shared_core.engine.checks.model_guards import kinds_of, wrapped_by_user
from shared_core.errors import MissingExtraError

if TYPE_CHECKING:
    import lightning.pytorch as unified
    import pytorch_lightning as pl

    # For type checkers, our classes derive from both names. At run time they have the one base that they need.
    class Callback(pl.Callback, unified.Callback): ...  # type: ignore[misc]

    class MixedPrecision(pl.plugins.MixedPrecision, unified.plugins.MixedPrecision): ...  # type: ignore[misc]

    class DDPStrategy(pl.strategies.DDPStrategy, unified.strategies.DDPStrategy): ...  # type: ignore[misc]

    class ModelParallelStrategy(  # type: ignore[misc]
        pl.strategies.ModelParallelStrategy, unified.strategies.ModelParallelStrategy
    ): ...


PYTORCH_LIGHTNING, LIGHTNING = "pytorch_lightning", "lightning.pytorch"


@functools.cache
def installed() -> tuple[str, ...]:
    """Return the import names under which Lightning is installed."""
    names = tuple(
        name for name in (PYTORCH_LIGHTNING, LIGHTNING) if importlib.util.find_spec(name.partition(".")[0]) is not None
    )
    if not names:
        raise MissingExtraError("lightning_eff", "pytorch-lightning", "lightning")
    return names


def namespace_of(trainer_or_module: object) -> str:
    """Return the package name of this object's Lightning class: Lightning rejects plugins of the other name."""
    # By the module that defines the class: many environments have both names installed.
    for kind in type(trainer_or_module).__mro__:
        for name in installed():
            if kind.__module__.startswith(f"{name}."):
                return name
    return installed()[0]


def callback_kinds(trainer: Any) -> set[str]:
    """Return the class names of a Trainer's callbacks, under either package name."""
    return {kind.__name__ for callback in trainer.callbacks for kind in type(callback).__mro__}


def classes_of_either_name(
    module: str, makers: Mapping[str, Callable[[str], Any]], moment: str, trainer_of: Callable[..., object]
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module whose classes, by name, are made for Trainers of either name."""

    @functools.cache
    def made(make: Callable[[str], Any]) -> Any:
        return _of_either_name(make, moment, trainer_of)

    def find(name: str) -> Any:
        if name not in makers:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return made(makers[name])

    return find


def _of_either_name(make: Callable[[str], Any], moment: str, trainer_of: Callable[..., object]) -> Any:
    """Return a class whose instances fit a Trainer of either name, and then become its name's class.

    With both names installed, the right one is only known when a Trainer sets up an instance.
    """
    kinds = tuple(make(name) for name in installed())
    # With one name installed there is nothing to decide.
    if len(kinds) == 1:
        return kinds[0]

    def settle(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The class changes once, when the instance first meets a Trainer. Until then it belongs to both.
        if type(self) is made:
            self.__class__ = make(namespace_of(trainer_of(self, *args, **kwargs)))
            return getattr(self, moment)(*args, **kwargs)
        return getattr(super(made, self), moment)(*args, **kwargs)  # a class that a user derived

    names = {"__doc__": kinds[0].__doc__, "__module__": "lightning_eff", moment: settle}
    made = type(kinds[0].__name__, kinds, names)
    return made


def public(made: Any, namespace: str) -> Any:
    """Return a class under the name that pickle looks up, for spawned processes."""
    made.__qualname__ = made.__name__
    made.__module__ = "lightning_eff.pytorch" if namespace == PYTORCH_LIGHTNING else "lightning_eff.lightning"
    return made


def _callback_base() -> type[Callback]:
    # The other name's Trainer accepts a callback of one name, but its command line does not.
    bases = tuple(importlib.import_module(name).Callback for name in installed())
    return type("LightningCallback", bases, {"__module__": __name__, "__doc__": "A callback of every installed name."})


if not TYPE_CHECKING:
    Callback = _callback_base()


def strategies(namespace: str) -> Any:
    """Return the strategies module of one package name."""
    return importlib.import_module(f"{namespace}.strategies")


def plugins(namespace: str) -> Any:
    """Return the plugins module of one package name."""
    return importlib.import_module(f"{namespace}.plugins")


_STRATEGIES = {
    "DeepSpeedStrategy": "deepspeed",
    "FSDPStrategy": "fsdp1",
    "ModelParallelStrategy": "fsdp2",
    "XLAStrategy": "tpu",
    "SingleDeviceXLAStrategy": "tpu",
    "XLAFSDPStrategy": "tpu",
}


def run_environment(trainer: Any, model: Any) -> set[str]:
    """Return the keys of `shared_core.config.environments.RUN_ENVIRONMENTS` that hold; optimizers once they exist."""
    kinds = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    found = {key for name, key in _STRATEGIES.items() if name in kinds}
    if "fsdp2" in found and trainer.strategy.device_mesh["tensor_parallel"].size() > 1:
        found.add("tensor_parallel")
    if "deepspeed" in found:
        found |= {"lightning_deepspeed", *(("zero3",) if trainer.strategy.zero_stage_3 else ())}
    if "fsdp2" not in found:
        found |= wrapped_by_user(model)
    precision = str(trainer.precision_plugin.precision)
    found |= {kind for kind, start in (("bf16", "bf16"), ("fp16", "16")) if precision.startswith(start)}
    if averaging(trainer):
        found.add("averaging_callback")
    if "ModelPruning" in callback_kinds(trainer):
        found.add("pruning_callback")
    peft = sys.modules.get("peft")  # if it is not imported, there is no such model
    if peft is not None and any(isinstance(module, peft.PeftModel) for module in model.modules()):
        found.add("peft")
    if not model.automatic_optimization:
        found.add("manual_optimization")
    optimizers = trainer.optimizers
    if len(optimizers) > 1:
        found.add("several_optimizers")
    return found | kinds_of(optimizers)


def total_steps(trainer: Any, model: Any) -> int | None:
    """Return the number of optimizer steps of the run, None if unknown.

    With manual optimization, every optimizer is assumed to step once per batch, unless ``max_steps`` ends the run
    first.
    """
    limit = trainer.max_steps if trainer.max_steps >= 0 else None
    steps = steps_per_epoch(trainer, model)
    if steps is None or trainer.max_epochs in (None, -1):
        return limit
    by_epochs = int(steps_until(max(trainer.max_epochs, 1), steps))
    # Epochs or steps, whichever end first.
    return by_epochs if limit is None else min(by_epochs, limit)


def steps_per_epoch(trainer: Any, model: Any) -> StepsPerEpoch | None:
    """Return the number of optimizer steps per epoch, for each epoch if accumulation changes; None if unknown."""
    batches = float(trainer.num_training_batches)
    if not math.isfinite(batches):
        return None
    if not model.automatic_optimization:
        return batches * max(len(trainer.optimizers), 1)
    for callback in trainer.callbacks:
        if hasattr(callback, "get_accumulate_grad_batches"):
            # One epoch more than planned: schedules look one ahead.
            epochs = range(max(trainer.max_epochs or 1, *callback.scheduling, 1) + 1)
            return tuple(math.ceil(batches / callback.get_accumulate_grad_batches(epoch)) for epoch in epochs)
    return float(math.ceil(batches / trainer.accumulate_grad_batches))


def share_done(trainer: Any, model: Any, batch_index: int) -> float | None:
    """Return the share of the run's epochs done after a batch, weighted by planned steps; None without an end."""
    steps = steps_per_epoch(trainer, model)
    if steps is None or trainer.max_epochs in (None, -1) or not trainer.num_training_batches:
        return None
    epochs = trainer.current_epoch + (batch_index + 1) / trainer.num_training_batches
    return steps_until(epochs, steps) / steps_until(max(trainer.max_epochs, 1), steps)


def clips_by_norm(trainer: Any, model: Any) -> bool:
    """Return True if gradients may be clipped by norm. False only if Lightning would clip and does not."""
    # A user's own clipping may do anything.
    own = type(model).configure_gradient_clipping is not _stock(model).configure_gradient_clipping
    if own or not model.automatic_optimization:
        return True
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"


def _stock(model: Any) -> Any:
    return next(kind for kind in type(model).__mro__ if kind.__name__ == "LightningModule")


@contextlib.contextmanager
def no_logging(model: Any) -> Iterator[None]:
    """Drop what a module logs inside this block."""
    names = ("log", "log_dict")
    before = {name: vars(model)[name] for name in names if name in vars(model)}
    for name in names:
        setattr(model, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)
        vars(model).update(before)
