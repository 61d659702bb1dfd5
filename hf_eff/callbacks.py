"""Techniques for any Trainer: by `attach`, ``Trainer(callbacks=[Pruning(sparsity=0.8)])``, a mixin or a subclass."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_eff._adapters import Adapter
from hf_eff._trainer_hooks import SessionCallback
from hf_eff.training_args import EffFlags
from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError, TrainingError
from shared_core.front_ends.flags import as_recipe
from shared_core.front_ends.session import Session
from shared_core.front_ends.typed_options import OneTechnique


def attach(trainer: Trainer, recipe: Recipe | Mapping[str, Any] | str | Path | None = None) -> Session:
    """Switch on the techniques of `recipe` for ``trainer.train()``, and return their session.

    Call it after the trainer is constructed and before it trains. It adds to techniques already attached and to those
    of the trainer's `EffTrainingArguments`. An empty recipe changes nothing.

    Args:
        trainer: A ``Trainer``, a subclass of it, or a supported trainer of another library that uses one.
        recipe: A recipe, a dict, or a path to a YAML or JSON file.

    Raises:
        ConfigError: If an option is wrong or a technique is given twice.
        CompatibilityError: If the techniques cannot run in this trainer.
        MatchError: If a technique matches no module.
        TrainingError: If the trainer is training or has trained.

    Example:
        ``attach(trainer, {"prune": {"sparsity": 0.8}}); trainer.train()``
    """
    for adapter in Adapter.registered():
        trainer = adapter.trainer_in(trainer)
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            "hf", f"trainer must be a transformers Trainer, got {type(trainer).__name__}", "construct one"
        )
    session_callback = session_callback_of(trainer)
    wanted = as_recipe({} if recipe is None else recipe)
    if wanted and (trainer.is_in_train or trainer.state.max_steps > 0):
        when = "trains" if trainer.is_in_train else "has trained"
        raise TrainingError(
            "hf",
            f"techniques must be attached before train, got a trainer that {when}",
            "attach to a new trainer",
        )
    # Flags count once: a trainer's first driver takes them, later ones skip them.
    args: Any = trainer.args
    flags = args.recipe if isinstance(args, EffFlags) else None
    if flags is not None and not (session_callback and session_callback.args_recipe is not None):
        # `attach(trainer, args.recipe)` means the same techniques, not each one twice
        wanted = wanted if wanted == flags else wanted.merged(flags)
        args.mark_taken()
    if session_callback is None:
        if not wanted:
            return Session(wanted, front_end="hf")
        session_callback = SessionCallback(trainer, wanted)
    elif wanted or wanted.allow_partial:
        session_callback.join(wanted)
    session_callback.args_recipe = session_callback.args_recipe or flags
    return session_callback.session


def session_callback_of(trainer: Trainer) -> SessionCallback | None:
    """Return the callback that drives a session through this trainer, None if nothing is attached."""
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if isinstance(callback, SessionCallback)), None)


class EffCallback(TrainerCallback):
    """Switches on the techniques of a recipe. Several such callbacks share one session, in any order.

    Args:
        recipe: A recipe, a dict, or a path to a YAML or JSON file.

    Example:
        ``Trainer(..., callbacks=[EffCallback({"prune": {"sparsity": 0.8}})])``
    """

    state_key: ClassVar[str] = "hf_eff"  # Lightning reads it first to name a callback
    in_lightning: ClassVar[str] = ""
    """Its name in `lightning_eff`, if different."""

    def __init__(self, recipe: Recipe | Mapping[str, Any] | str | Path) -> None:
        self.recipe = as_recipe(recipe)
        self.session: Session | None = None
        """The session of the trainer that has this callback."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe!r})"

    def join(self, trainer: Trainer) -> None:
        """Attach to a trainer that has not trained yet."""
        self.session = attach(trainer, self.recipe)
        if (driver := session_callback_of(trainer)) is not None:
            driver.given.callbacks.append(self)

    def setup(self, *_: Any, **__: Any) -> None:
        """Raise an error for Lightning's Trainer and Fabric, which call this first."""
        kinds = (kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] == "hf_eff")
        name = self.in_lightning or next(kind.__name__ for kind in kinds)
        rule = f"{type(self).__name__} must be a callback of a Hugging Face Trainer, got Lightning"
        raise ConfigError("hf", rule, f"write `from efftrain.lightning import {name}`")

    on_after_setup = on_after_optimizer_step = setup

    def on_exception(self, *_: Any) -> None:
        """Let Lightning show the error of `setup`."""

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Find the trainer under construction, and attach all of its techniques at once."""
        trainer = _trainer_under_construction(self)
        # The first of our callbacks attaches for all: techniques must be attached together, in their order.
        ours = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, EffCallback)]
        if self is not ours[0]:
            return
        recipe = Recipe({})
        for callback in ours:
            recipe = recipe.merged(callback.recipe)
        session = attach(trainer, recipe)
        for callback in ours:
            callback.session = session
        if (driver := session_callback_of(trainer)) is not None:
            driver.given.callbacks += ours

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise an error for a callback that bypassed `add_callback`: with an optimizer it is too late to attach."""
        # Also checked at later events: another callback may have added this one there.
        if self.session is None and self.recipe:
            raise TrainingError(
                "hf",
                f"{type(self).__name__} must be known to the trainer before it trains, but was added to its handler",
                "pass it in Trainer(callbacks=[...]), or call trainer.add_callback before train",
            )

    on_epoch_begin = on_step_begin = on_step_end = on_train_end = on_train_begin


def _attach_what_is_added() -> None:
    """Make ``Trainer.add_callback`` attach our callbacks, since no event reports an added callback."""
    stock = Trainer.add_callback

    @functools.wraps(stock)
    def add_callback(trainer: Trainer, callback: Any) -> None:
        stock(trainer, callback)
        if isinstance(callback, EffCallback):
            try:
                callback.join(trainer)
            except BaseException:
                trainer.remove_callback(callback)
                raise

    Trainer.add_callback = add_callback  # type: ignore[method-assign, assignment]


_attach_what_is_added()


def _trainer_under_construction(callback: EffCallback) -> Trainer:
    # The event does not pass the trainer, but runs inside Trainer.__init__, whose frame holds it.
    frame = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer) and callback in trainer.callback_handler.callbacks:
            return trainer
        frame = frame.f_back  # type: ignore[assignment]
    raise TrainingError(
        "hf",
        f"{type(callback).__name__} must be called by a Trainer, and none was found",
        "call efftrain.hf.attach instead",
    )


class TechniqueCallback(OneTechnique, EffCallback):
    """One technique, with its options as keyword arguments."""


class ActivationCheckpointing(TechniqueCallback):
    """Recomputes activations in backward instead of keeping them. Gradients stay bit-equal."""


class Distillation(TechniqueCallback):
    """Trains the student on a teacher's outputs. The teacher is a folder, a Hub name or a model."""


class Fp8(TechniqueCallback):
    """Trains with linear layers that multiply FP8 values, forward and backward."""


class GradientCompression(TechniqueCallback):
    """Compresses the gradients that DDP processes exchange: 16 bits, or products of low rank."""


class Lora(TechniqueCallback):
    """Trains low-rank adapters on frozen linear layers, and saves them in PEFT's format."""


class LossScaling(TechniqueCallback):
    """Scales the loss instead of the trainer's own scaler."""

    in_lightning = "LossScalingPrecision"


class LowRank(TechniqueCallback):
    """Trains layers as products of two smaller ones, which are kept or multiplied out at the end."""


class MatmulPrecision(TechniqueCallback):
    """Multiplies float32 matrices in TF32 or bf16 if the hardware supports it, and reports if not."""


class PrimaryWeights(TechniqueCallback):
    """Updates 16-bit weights in float32."""


class DifferentialPrivacy(TechniqueCallback):
    """Trains with DP-SGD: sampled batches, clipped examples, noise, and epsilon in log and receipt."""


class Pruning(TechniqueCallback):
    """Prunes weights on a schedule, and keeps them zero."""


class QuantizationAwareTraining(TechniqueCallback):
    """Trains with fake-quantized weights and activations."""


class ActivationCompression(TechniqueCallback):
    """Stores activations for the backward pass compressed, or on the host."""


class ModelSoup(TechniqueCallback):
    """Averages this run's checkpoints when training ends."""


class LotteryTicket(TechniqueCallback):
    """Trains dense or with a ticket, and saves the next ticket. `LotterySearch` of shared_core runs a whole search."""


class WeightAverage(TechniqueCallback):
    """Averages the weights during training. Validation, the best model and the final model use the average."""


class WeightClustering(TechniqueCallback):
    """Clusters the weights of each layer and trains the shared values."""


class EffTrainerMixin:
    """Adds techniques to the trainer class after it in the bases.

    Args:
        args: The trainer's positional arguments.
        recipe: Techniques to add to those of `EffTrainingArguments` and callbacks.
        kwargs: The trainer's keyword arguments.

    Example:
        ``class MyTrainer(EffTrainerMixin, Seq2SeqTrainer): ...``
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise an error if the order of bases would skip the mixin.

        Raises:
            TypeError: If a Trainer comes first.
        """
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(EffTrainerMixin):
            raise TypeError(
                f"hf: EffTrainerMixin must come before the trainer class in the bases of {cls.__name__}; write "
                f"class {cls.__name__}(EffTrainerMixin, ...)"
            )

    def __init__(
        self, *args: Any, recipe: Recipe | Mapping[str, Any] | str | Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._attached = attach(self._as_trainer(), recipe)

    @property
    def session(self) -> Session:
        """The session that drives the techniques."""
        driver = session_callback_of(self._as_trainer())
        return self._attached if driver is None else driver.session

    def _as_trainer(self) -> Any:
        return self


class EffTrainer(EffTrainerMixin, Trainer):
    """The stock Trainer with the techniques of its `EffTrainingArguments`, of `recipe` and of its callbacks."""
