"""Adapters of single techniques: a scaler, drawn batches, checkpoints that can be averaged."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any, cast

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_eff._adapters import Adapter
from hf_eff._checkpoints import checkpoint_folder, weights_of
from hf_eff._run_environment import inner_optimizer, is_peft
from shared_core.distributed.collectives import from_main
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.front_ends.session import Session


class LossScaling(Adapter):
    """Gives accelerate the technique's scaler, and restores its own afterwards."""

    key = "loss_scale"

    def around(self) -> dict[str, Callable[..., Any]]:
        """Swap around each attempt to train: the scaler must exist before accelerate's `prepare`."""
        return {"_inner_training_loop": self._train}

    def _train(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer, accelerator = self._trainer, cast(Any, self._trainer.accelerator)
        own = accelerator.scaler, accelerator.native_amp
        accelerator.scaler = self.technique.make_scaler(accelerator.device.type)
        if trainer.optimizer is not None:
            # an optimizer from an earlier `train` holds that run's scaler
            trainer.optimizer = inner_optimizer(trainer.optimizer)
        if accelerator.mixed_precision == "fp16" and not accelerator.native_amp:
            accelerator.native_amp = True
            self.session.note(
                f"fp16 on {accelerator.device.type} runs under autocast because loss_scale is on; without it the "
                "trainer would train in fp32 here"
            )
        try:
            return method(*args, **kwargs)
        finally:
            accelerator.scaler, accelerator.native_amp = own


class DifferentialPrivacy(Adapter):
    """Draws the Trainer's batches, and tells the technique how the Trainer averages the loss."""

    key = "dp"
    _num_items: Tensor | int | None = None

    def check(self) -> None:
        """Raise an error for settings that hide the gradients of single examples."""
        self.technique.sees_loss_in_forward = False  # each row counts by its own labels here
        for name in ("gradient_checkpointing", "torch_compile"):
            if getattr(self._trainer.args, name):
                raise CompatibilityError(
                    "dp",
                    f"{name} must be off, got True",
                    "per-layer hooks keep the gradient of each example, and do not work with it",
                )

    def around(self) -> dict[str, Callable[..., Any]]:
        """Draw batches, and record the label counts in them."""
        return {"get_train_dataloader": self._loader, "get_batch_samples": self._batches}

    def _loader(self, method: Callable[[], Any]) -> Any:
        """Return the trainer's loader with drawn batches."""
        stock, args = method(), self._trainer.args
        more = {"device": stock.device} if isinstance(stock, DataLoaderShard) else {}
        made = self.technique.loader(stock, args.gradient_accumulation_steps, args.train_batch_size, **more)
        if not more:
            raise CompatibilityError(
                "dp",
                f"every process must read its own batches, got {type(stock).__name__}",
                "leave dispatch_batches out",
            )
        self._trainer.accelerator._dataloaders[-1] = made
        return made

    def begin(self, loader: Any) -> None:
        """Make the next iteration start at the epoch's first step: the trainer skips what it has trained."""
        if not self._trainer.args.ignore_data_skip:
            loader.batch_sampler.begin_epoch_again()

    def _batches(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        window, self._num_items = method(*args, **kwargs)
        return window, self._num_items

    def loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Set the factor that makes each row's share of the loss the mean over its own labels."""
        self.technique.weights = self._weights(inputs)
        return method(model, inputs, *args, **kwargs)

    def _weights(self, inputs: Any) -> Tensor | None:
        trainer, labeled = self._trainer, self._window.labeled(inputs)
        if labeled is None or labeled.dim() == 0:
            return None
        counts = labeled.reshape(len(labeled), -1).sum(1)
        total: Tensor | int = counts.sum()
        if not self._window.divides and self._num_items is not None:
            replicas = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
            total = torch.as_tensor(self._num_items, device=counts.device) / replicas
        return (total / counts.clamp(min=1)).where(counts > 0, 0).float()


class Soup(Adapter):
    """Fails at the start, or after the first checkpoint, if there would be nothing to average."""

    key = "soup"

    def join(self, session: Session) -> None:
        """Report checkpoints with the metric that the soup uses."""
        super().join(session)
        self._options = session.recipe["soup"].to_dict() if "soup" in session.recipe else {}
        self._services.metric = self._options.get("metric")

    def check(self) -> None:
        """Raise an error if the trainer saves or evaluates too little."""
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
                "set it to the value of save_strategy",
            )

    def around(self) -> dict[str, Callable[..., Any]]:
        """Check the result of `evaluate`: one that a greedy soup cannot use fails at the first validation."""
        return {"evaluate": self._validate}

    def _validate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        metrics = method(*args, **kwargs)
        return self._services.checked_metrics(metrics) if self._options["kind"] == "greedy" else metrics

    def saved(self, trial: Any) -> None:
        """Raise an error for unreadable checkpoints after the first one, not at the end of training."""
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
    """Return True if a data set, or one in a dict of them, is known to be empty; unknown for a stream."""
    parts = data.values() if isinstance(data, dict) else [data]
    return any(isinstance(part, Sized) and len(part) == 0 for part in parts)
