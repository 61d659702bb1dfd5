"""Find our callbacks in a Trainer, and merge their recipes with those of its plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_eff._adapters import Adapter
from lightning_eff._run_environment import callback_kinds
from shared_core.engine.recipe import Recipe
from shared_core.engine.services import Services
from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.front_ends.session import Session


def joined_recipe(trainer: Any, recipes: list[Recipe]) -> Recipe:
    """Return the callbacks' recipes merged with what the Trainer's precision plugin and strategy switch on."""
    recipe = Recipe({})
    for one in recipes:
        recipe = recipe.merged(one)
    for plugin in (trainer.precision_plugin, trainer.strategy):
        for key, config in getattr(plugin, "eff_recipe", {}).items():
            # Giving it twice with the same options is fine.
            if recipe.get(key, config) != config:
                raise ConfigError(
                    "recipe",
                    f"{key} must be given once, got it in a callback and in {type(plugin).__name__}",
                    "keep one",
                )
            recipe = Recipe({**recipe, key: config}, allow_partial=recipe.allow_partial)
    for adapter in Adapter.registered():
        if adapter.applies(recipe) and (why := adapter.left_out(trainer)):
            Services().say(f"efftrain: {adapter.key} is left out: {why}")
            left = {key: config for key, config in recipe.items() if key != adapter.key}
            recipe = Recipe(left, allow_partial=recipe.allow_partial)
    return recipe


def replaced(trainer: Any, recipe: Recipe) -> Any:
    """Return the callback that led this Trainer's last run with the same techniques, None if there is none.

    Lightning gets new callbacks from `configure_callbacks` in every `fit`.
    """
    earlier = vars(trainer).pop("_eff_leader", None)
    session = getattr(earlier, "session", None)
    return earlier if session is not None and session.recipe.keys() == recipe.keys() else None


def refuse_other_module(trainer: Any, session: Session | None, module: Any) -> None:
    """Raise an error for another module than this Trainer has trained: masks and clusters would not fit."""
    session = session or getattr(vars(trainer).get("_eff_leader"), "session", None)
    before = session and session.context and session.context.model
    if before is not None and before is not module and trainer.global_step > 0:
        raise TrainingError(
            "lightning",
            "fit must continue with the module that this Trainer has trained, got another one after "
            f"{trainer.global_step} steps, which Lightning counts on from",
            "make a new Trainer for it; the callbacks can be the same",
        )


def tries_first(trainer: Any, recipe: Recipe) -> bool:
    """Return True if Lightning's tuner runs trials before training, without any callbacks.

    In a trial, techniques are on the model but inactive. Its weights are restored afterwards.
    """
    found = _tuning(trainer)
    for adapter in Adapter.registered() if found else ():
        if adapter.applies(recipe):
            adapter.check_trials(found[0])
    return bool(found)


def refuse_trials_on_resume(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Raise an error if trials would break a resume: Lightning (2.6) then trains from step 0 with loaded weights."""
    found = _tuning(trainer)
    if found and checkpoint["global_step"]:  # a trial's own checkpoint is at step 0
        raise CompatibilityError(
            "resume",
            f"callbacks must not include {found[0]} on resume: after its trials Lightning starts again at step 0",
            "leave it out; what it found is in the checkpoint",
        )


def _tuning(trainer: Any) -> list[str]:
    return sorted(callback_kinds(trainer) & {"BatchSizeFinder", "LearningRateFinder"})


def last_on_exception(callbacks: Sequence[Any], ours: Any) -> Any:
    """Return the last callback after ours that acts on an exception, for instance saves; None if there is none.

    Lightning calls OnExceptionCheckpoint and ModelCheckpoint after all others.
    """
    later = callbacks[callbacks.index(ours) + 1 :]
    return next(
        (one for one in reversed(later) if not type(one).on_exception.__qualname__.startswith("Callback.")), None
    )


def removed_in_training(joined: Sequence[Any], callbacks: Sequence[Any], step: int) -> TrainingError | None:
    """Return the error for a callback that was removed from the Trainer during a run, None if all are there."""
    gone = [callback for callback in joined if callback not in callbacks]
    if not gone:
        return None
    return TrainingError(
        "lightning",
        f"{type(gone[0]).__name__} must stay until training ends, but was removed by step {step}",
        "remove it before or after fit, and run a tuner before training",
    )


def came_late(callback: Any) -> TrainingError:
    """Return the error for a callback that was added during training."""
    return TrainingError(
        "lightning",
        f"{type(callback).__name__} must be among the Trainer's callbacks before fit, but was added in training, when "
        "the optimizer exists",
        "pass it in Trainer(callbacks=[...])",
    )


def not_of_hugging_face(callback: Any) -> ConfigError:
    """Return the error for a callback given to the Hugging Face Trainer."""
    kinds = (kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] == "lightning_eff")
    rule = f"{type(callback).__name__} must be a callback of a Lightning Trainer, got Hugging Face's"
    name = next(kind.__name__ for kind in kinds)
    return ConfigError("lightning", rule, f"write `from efftrain.hf import {name}`")


def not_of_fabric(callback: Any) -> CompatibilityError:
    """Return the error for a callback given to Fabric."""
    return CompatibilityError(
        "lightning",
        f"{type(callback).__name__} must be a callback of a Trainer, got Fabric, whose loop does not report its steps",
        "call efftrain.lightning.setup(fabric, model, optimizer, recipe=..., total_steps=...) instead of fabric.setup",
    )
