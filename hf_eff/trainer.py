"""Trainers that read their techniques from the arguments, and a mixin for any Trainer subclass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_eff.callbacks import attach, session_callback_of
from shared_core.engine.recipe import Recipe
from shared_core.engine.session import Session


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
