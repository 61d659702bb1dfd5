"""`attach`: techniques for any constructed Trainer, without a subclass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_eff._adapters.adapter import Adapter
from hf_eff._trainer_hooks import SessionCallback
from hf_eff.training_args import EffFlags
from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session
from shared_core.errors import ConfigError, TrainingError
from shared_core.front_ends.flags import as_recipe


def attach(trainer: Trainer, recipe: Recipe | Mapping[str, Any] | str | Path | None = None) -> Session:
    """Return the session that will run `recipe` when ``trainer.train()`` is called.

    Call it after the trainer is constructed and before it trains. Techniques that are attached already stay; what the
    trainer's `EffTrainingArguments` switch on joins them. An empty recipe touches nothing.

    Args:
        trainer: A ``Trainer``, any subclass of it, or another library's trainer that is known to train with one.
        recipe: A recipe, a dict of one, or a path to a YAML or JSON file of one.

    Raises:
        ConfigError: If an option is wrong or a technique is given twice.
        CompatibilityError: If the techniques cannot run in this trainer.
        MatchError: If a technique matches no module.
        TrainingError: If the trainer trains or has trained.

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
            f"attach must come before train, got a trainer that {when}",
            "construct another one and attach to that",
        )
    # Flags count once: the first driver of a trainer takes them, later ones find them taken.
    args: Any = trainer.args
    flags = args.recipe if isinstance(args, EffFlags) else None
    if flags is not None and not (session_callback and session_callback.args_recipe is not None):
        # `attach(trainer, args.recipe)` means the same techniques, not the same ones twice
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
    """Return what drives a session through this trainer, None if nothing is attached."""
    callbacks = trainer.callback_handler.callbacks
    return next((callback for callback in callbacks if isinstance(callback, SessionCallback)), None)
