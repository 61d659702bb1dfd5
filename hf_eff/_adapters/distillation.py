"""Distillation in the Trainer: logits, unlabelled examples and the column that tells them, losses of other models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_eff._adapters.adapter import Adapter
from hf_eff._adapters.trainers import fuses_head, loss_of_trl
from hf_eff._run_environment import is_peft
from shared_core.engine.session import Session
from shared_core.errors import CompatibilityError, ConfigError

_NO_LABELS = torch.empty(0, dtype=torch.int64)
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "CPT")
_TOKEN_TASKS = ("CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS")


class Distillation(Adapter):
    """Tells the window which positions the soft term counts, and the Trainer nothing that it would refuse."""

    key = "distill"

    def join(self, session: Session) -> None:
        """Tell the window whether a term is added to the task loss."""
        super().join(session)
        options = session.recipe["distill"].to_dict() if "distill" in session.recipe else {}
        self._window.adds_term, self._window.lacks_logits = bool(options), bool(options.get("chunked"))
        self._window.causal, self._window.term_positions = False, None

    def around(self) -> dict[str, Callable[..., Any]]:
        """Keep the column that tells unlabelled examples away from the model, and clip peers by their own norms."""
        return {
            "get_batch_samples": self._batches,
            "_set_signature_columns_if_needed": self._keep_column,
            "_prepare_inputs": self._prepare,
            "_clip_grad_norm": self._clip,
        }

    @property
    def field(self) -> str | None:
        """The column that tells unlabelled examples, if there is one."""
        field: str | None = self.technique.config.unlabelled_field
        return field

    def check_data(self) -> None:
        """Raise `ConfigError` where the training data lack the column, as far as they tell without being read."""
        data: Any = self._trainer.train_dataset
        if self.field is None:
            return
        columns = getattr(data, "column_names", None)
        if columns is None and isinstance(data, list | tuple) and data and isinstance(data[0], Mapping):
            columns = list(data[0])
        if isinstance(columns, list) and self.field not in columns:
            raise ConfigError(
                "distill",
                f"unlabelled_field must be a column of the training data, got {self.field!r}",
                f"they have {', '.join(columns)}",
            )
        if self._trainer.label_names and "labels" not in self._trainer.label_names:
            raise ConfigError(
                "distill",
                f"unlabelled_field must be none where labels are called {', '.join(self._trainer.label_names)}, not "
                f"labels, got {self.field!r}",
            )

    def _keep_column(self, method: Callable[..., None]) -> None:
        """Fill the trainer's list of columns that it does not drop."""
        method()
        columns = self._trainer._signature_columns
        if self.field is not None and columns is not None and self.field not in columns:
            columns.append(self.field)

    def _prepare(self, method: Callable[..., Any], inputs: Any) -> Any:
        """Return inputs as the model takes them; in training, labels of unlabelled examples are taken out."""
        inputs = method(inputs)
        if self.field is None or self._trainer.model is None:
            return inputs
        if self._trainer.model.training and self.session.is_attached:
            return self.technique.prepare_batch(inputs)
        return {name: value for name, value in inputs.items() if name != self.field}

    def _batches(
        self, method: Callable[..., Any], batches: Iterator[Any], *args: Any, **kwargs: Any
    ) -> tuple[list[Any], Any]:
        """Return a window's micro-batches and how many labels the trainer counts; note what the soft term counts."""
        window, num_items = method(map(self._countable, batches), *args, **kwargs)
        window = [
            {name: value for name, value in batch.items() if value is not _NO_LABELS}
            if isinstance(batch, Mapping) and batch.get("labels") is _NO_LABELS
            else batch
            for batch in window
        ]
        if isinstance(num_items, Tensor):
            num_items = num_items.clamp(min=1)  # a window without one label: its sum of 0 would be divided by 0
        self._window.causal, self._window.term_positions = self.technique.is_causal, self._positions(window)
        return window, num_items

    def _countable(self, batch: Any) -> Any:
        """Return a batch whose labels are those that the loss will see; the trainer counts them before it."""
        if not isinstance(batch, Mapping):
            return batch
        if self.lacks_labels(batch):
            # transformers (5.23) looks at the first batch alone to decide whether labels can be counted
            return {**batch, "labels": _NO_LABELS}
        if self.field is None:
            return batch
        prepared = self.technique.prepare_batch(batch)
        if prepared["labels"].is_floating_point() and self._trainer.compute_loss_func is None:
            raise ConfigError(
                "distill",
                f"unlabelled_field {self.field!r} must come with class indices as labels, or with a compute_loss_func "
                f"that leaves NaN labels out, got {prepared['labels'].dtype}",
            )
        return {**prepared, self.field: batch[self.field]}

    def lacks_labels(self, batch: Mapping[str, Any]) -> bool:
        """Return whether a batch has no labels, where the model would take them."""
        return "labels" in self._trainer.label_names and batch.get("labels") is None

    def _positions(self, window: list[Any]) -> Tensor | None:
        trainer, distillation = self._trainer, self.technique
        if "labels" not in trainer.label_names and any(batch.get("labels") is None for batch in window):
            return None  # labels of another name, or none at all
        count = torch.zeros((), dtype=torch.int64, device=trainer.args.device)
        for batch in window:
            count += distillation.positions_ahead(batch).to(count.device)
        return count

    def loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loss; 0 for a batch without labels whose model returns none."""
        distillation, whole = self.technique, dict(inputs)
        self._services.compute_loss = lambda other: method(other, dict(whole), *args, **kwargs)
        distillation.labels = inputs.get("labels")  # label smoothing and compute_loss_func take them out
        if not self.lacks_labels(inputs):
            return method(model, inputs, *args, **kwargs)
        distillation.prepare_batch(inputs)
        output = model(**inputs)
        own = output.get("loss") if isinstance(output, Mapping) else None
        if own is None:
            return distillation.unlabelled_task(output)
        return own if self._window.divides else own / self._trainer.current_gradient_accumulation_steps

    def _clip(self, method: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        norm = method(model, *args, **kwargs)
        for peer in self.technique.peers:
            method(peer, *args, **kwargs)  # each by its own norm: how far the student goes is not the peers' business
        return norm

    def check(self) -> None:
        """Refuse a trainer or a model that computes other logits than those of the batch, or none."""
        trainer, chunked = self._trainer, self._window.lacks_logits
        self._check_trl()
        prompts = getattr(trainer.model, "active_peft_config", None) if is_peft(trainer.model) else None
        if prompts is not None and prompts.peft_type in _PROMPTS and prompts.task_type in _TOKEN_TASKS:
            raise CompatibilityError(
                "distill",
                f"logits must be those of the batch's tokens, but PEFT's {prompts.peft_type.value} puts "
                f"{prompts.num_virtual_tokens} of its own before them, which no teacher sees",
                "take prefix tuning or LoRA",
            )
        if chunked and trainer.label_smoother is not None:
            raise CompatibilityError(
                "distill",
                f"label_smoothing_factor must be 0 with chunked, got {trainer.args.label_smoothing_factor}: the "
                "trainer smooths the log-probabilities of all classes, which do not exist",
                "drop one of the two",
            )
        if (chunked or self.technique.fuses_head) and trainer.args.torch_compile:
            raise CompatibilityError(
                "distill",
                "torch_compile must be False with chunked and TRL's SFTTrainer, got True: a compiled head computes "
                "logits",
                "drop one of the two",
            )

    def _check_trl(self) -> None:
        """Refuse a trainer of TRL whose loss no soft term can join, and find out whether it fuses its head."""
        trainer, owner = self._trainer, loss_of_trl(self._trainer)
        if owner not in (None, "SFTTrainer", "RewardTrainer"):
            own = hasattr(trainer, "teacher_model")
            raise CompatibilityError(
                "distill",
                f"trainer must train on labels, as TRL's SFTTrainer does, got {owner}, "
                + ("which has a teacher of its own" if own else "whose loss scores whole completions"),
                "leave distill out" + ("" if own else ", or distil with SFTTrainer first"),
            )
        config = self.technique.config
        if owner == "RewardTrainer" and config.divergence != "logit_mse":
            raise ConfigError(
                "distill",
                f"divergence must be logit_mse with TRL's RewardTrainer, of one score, got {config.divergence}",
            )
        self.technique.fuses_head = fuses = fuses_head(trainer)
        if not fuses:
            return
        if config.mutual or config.student is not None:
            raise CompatibilityError(
                "distill",
                "teacher must not be mutual, and student be left out, with TRL's SFTTrainer, whose loss is of one "
                f"whole model, got {'mutual' if config.mutual else config.student}",
                "train with transformers' own Trainer",
            )
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise CompatibilityError(
                "distill",
                "TRL's SFTTrainer must keep the head's weight whole, which the soft term reads, got "
                f"{'FSDP' if trainer.is_fsdp_enabled else 'DeepSpeed'}",
                "use DDP",
            )
