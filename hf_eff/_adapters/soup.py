"""Soups of the Trainer's checkpoints: what it must save and evaluate."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_eff._adapters.adapter import Adapter
from hf_eff._checkpoints import checkpoint_folder, weights_of
from hf_eff._run_environment import is_peft
from shared_core.distributed.collectives import from_main
from shared_core.engine.session import Session
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError


class Soup(Adapter):
    """Refuses at the start, or after the first checkpoint, what would leave nothing to average."""

    key = "soup"

    def join(self, session: Session) -> None:
        """Have checkpoints reported with the metric that the soup goes by."""
        super().join(session)
        self._options = session.recipe["soup"].to_dict() if "soup" in session.recipe else {}
        self._services.metric = self._options.get("metric")

    def check(self) -> None:
        """Refuse a trainer that saves or evaluates too little."""
        args, evaluated = self._trainer.args, self._trainer.eval_dataset
        if args.save_strategy == SaveStrategy.NO:
            raise ConfigError(
                "soup",
                "save_strategy must save checkpoints while training, got 'no'",
                "set save_strategy to steps or epoch",
            )
        if args.save_total_limit == 1 and not args.load_best_model_at_end:  # which keeps the best one beside the last
            raise ConfigError(
                "soup",
                "save_total_limit must keep at least two checkpoints, got 1, which leaves nothing to average",
                "raise it or leave it out",
            )
        if self._options["kind"] == "greedy" and (evaluated is None or _is_empty(evaluated)):
            got = "None" if evaluated is None else "one without examples"
            raise ConfigError(
                "soup", f"eval_dataset must hold examples for a greedy soup, got {got}", "pass one to the trainer"
            )
        if self._options["order"] == "logged" and args.eval_strategy == IntervalStrategy.NO:
            raise ConfigError(
                "soup",
                "eval_strategy must evaluate while training for order logged, got 'no'",
                "give it the value of save_strategy",
            )

    def around(self) -> dict[str, Callable[..., Any]]:
        """Look at what `evaluate` returns: one that a greedy soup could not use fails at the first validation."""
        return {"evaluate": self._validate}

    def _validate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        metrics = method(*args, **kwargs)
        return self._services.checked_metrics(metrics) if self._options["kind"] == "greedy" else metrics

    def saved(self, trial: Any) -> None:
        """Refuse after the first checkpoint, not after all training, what no soup could read."""
        trainer, session = self._trainer, self.session
        sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if self._services.saved_steps[1:] or sharded or is_peft(trainer.model):
            return
        found = ""
        if trainer.args.should_save and session.context is not None:
            try:
                weights_of(checkpoint_folder(trainer._get_output_dir(trial), session.step), session.context.model)
            except CheckpointError as error:
                found = str(error)
        if found := from_main(found):
            raise CompatibilityError("soup", f"checkpoints must hold the model's weights under its names, but {found}")


def _is_empty(data: Any) -> bool:
    """Return whether a data set, or one of a dict of them, is known to have no example; a stream does not tell."""
    parts = data.values() if isinstance(data, dict) else [data]
    return any(isinstance(part, Sized) and len(part) == 0 for part in parts)
