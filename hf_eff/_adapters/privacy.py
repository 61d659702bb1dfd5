"""Private training in the Trainer: which batches it gets, and what of the loss is one example's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor

from hf_eff._adapters.adapter import Adapter
from shared_core.errors import CompatibilityError


class DifferentialPrivacy(Adapter):
    """Draws the Trainer's batches, and tells the technique how it averages the loss."""

    key = "dp"
    _num_items: Tensor | int | None = None

    def check(self) -> None:
        """Refuse what hides the gradients of single examples."""
        self.technique.sees_loss_in_forward = False  # each row counts by its own labels here
        for name in ("gradient_checkpointing", "torch_compile"):
            if getattr(self._trainer.args, name):
                raise CompatibilityError(
                    "dp",
                    f"{name} must be off, got True",
                    "hooks on single layers keep the gradient of each example, and do not run as they should there",
                )

    def around(self) -> dict[str, Callable[..., Any]]:
        """Draw batches, and keep what is counted in them."""
        return {"get_train_dataloader": self._loader, "get_batch_samples": self._batches}

    def _loader(self, method: Callable[[], Any]) -> Any:
        """Return the trainer's loader with batches drawn for it."""
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
        """Have the next iteration begin at the epoch's first step: the trainer skips what it trained of it."""
        if not self._trainer.args.ignore_data_skip:
            loader.batch_sampler.begin_epoch_again()

    def _batches(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        window, self._num_items = method(*args, **kwargs)
        return window, self._num_items

    def loss(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Tell by how much each row's share of the loss must be multiplied to be the mean over its own labels."""
        self.technique.weights = self._weights(inputs)
        return method(model, inputs, *args, **kwargs)

    def _weights(self, inputs: Any) -> Tensor | None:
        trainer, labelled = self._trainer, self._window.labelled(inputs)
        if labelled is None or labelled.dim() == 0:
            return None
        counts = labelled.reshape(len(labelled), -1).sum(1)
        total: Tensor | int = counts.sum()
        if not self._window.divides and self._num_items is not None:
            replicas = trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1
            total = torch.as_tensor(self._num_items, device=counts.device) / replicas
        return (total / counts.clamp(min=1)).where(counts > 0, 0).float()
