"""Techniques as callbacks of a stock Trainer: ``Trainer(callbacks=[Pruning(sparsity=0.8)])``, no subclass."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_eff._attach import as_recipe, attach, session_callback_of
from shared_core.errors import TrainingError
from shared_core.recipe import Recipe

if TYPE_CHECKING:
    from shared_core.session import Session


class EffCallback(TrainerCallback):
    """Switches on the techniques of a recipe. Several such callbacks join one session, whatever their order.

    Args:
        recipe: A recipe, a dict of one, or a path to a YAML or JSON file of one.

    Example:
        ``Trainer(..., callbacks=[EffCallback({"prune": {"sparsity": 0.8}})])``
    """

    def __init__(self, recipe: Recipe | Mapping[str, Any] | str | Path) -> None:
        self.recipe = as_recipe(recipe)
        self.session: Session | None = None
        """The session of the trainer that this callback was given to."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.recipe!r})"

    def join(self, trainer: Trainer) -> None:
        """Attach to a trainer that has not trained yet."""
        self.session = attach(trainer, self.recipe)
        if (driver := session_callback_of(trainer)) is not None:
            driver.given.callbacks.append(self)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Find the trainer that is being constructed, and attach all of its techniques at once."""
        trainer = _trainer_under_construction(self)
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
        """Refuse a callback that came after construction: the optimizer exists, so it is too late to attach.

        It is asked at each event that follows too: another callback may have added this one in any of them.

        Raises:
            TrainingError: If nothing is attached.
        """
        if self.session is None and self.recipe:
            raise TrainingError(
                f"hf: {type(self).__name__} must be known when the trainer is constructed, got add_callback after it; "
                "pass it in Trainer(callbacks=[...]), or call hf_eff.attach(trainer, recipe) before it trains"
            )

    on_epoch_begin = on_step_begin = on_step_end = on_train_end = on_train_begin


class TechniqueCallback(EffCallback):
    """One technique, with its options as keyword arguments."""

    key: ClassVar[str] = ""

    def __init__(self, **options: Any) -> None:
        super().__init__({self.key: options})

    def __repr__(self) -> str:
        return self.recipe[self.key].call_text(type(self).__name__)


def _trainer_under_construction(callback: EffCallback) -> Trainer:
    # The event has no trainer in its arguments, but it runs inside Trainer.__init__: its frame holds it.
    frame = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer) and callback in trainer.callback_handler.callbacks:
            return trainer
        frame = frame.f_back  # type: ignore[assignment]
    raise TrainingError(
        f"hf: {type(callback).__name__} must be called by a Trainer, and none was found; call hf_eff.attach instead"
    )
