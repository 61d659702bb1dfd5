"""Private training in the Trainer: which batches it gets, and what of the loss is one example's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.data_loader import DataLoaderShard
from torch import Tensor

from hf_eff._loss_normalisation import Window
from shared_core.engine.session import Session
from shared_core.errors import CompatibilityError
from shared_core.privacy.sampling import check_loader, loader_options

if TYPE_CHECKING:
    from transformers import Trainer

    from shared_core.privacy import DifferentialPrivacy


def check_trainer(trainer: Trainer) -> None:
    """Refuse what hides the gradients of single examples.

    Raises:
        CompatibilityError: Naming the argument.
    """
    for name in ("gradient_checkpointing", "torch_compile"):
        if getattr(trainer.args, name):
            raise CompatibilityError(
                f"dp: {name} must be off, got True; hooks on single layers keep the gradient of each example, and "
                "do not run as they should there"
            )


class PoissonData:
    """What the trainer must be told for `DifferentialPrivacy`, around its own methods; without it nothing.

    Args:
        trainer: The trainer.
        window: Knows whether the trainer divides the loss by the number of micro-batches.
    """

    session: Session
    """The trainer's."""

    def __init__(self, trainer: Trainer, window: Window) -> None:
        self._trainer, self._window = trainer, window
        self._num_items: Tensor | int | None = None

    @property
    def _technique(self) -> DifferentialPrivacy | None:
        return cast("DifferentialPrivacy | None", self.session.techniques.get("dp"))

    def loader(self, method: Callable[[], Any]) -> Any:
        """Return the trainer's loader with batches drawn for it."""
        stock = method()
        if self._technique is None:
            return stock
        check_loader(stock)
        if not isinstance(stock, DataLoaderShard):
            raise CompatibilityError(
                f"dp: every process must read its own batches, got {type(stock).__name__}; leave dispatch_batches out"
            )
        args = self._trainer.args
        batches = self._technique.sample(stock, args.train_batch_size, args.gradient_accumulation_steps)
        made = DataLoaderShard(stock.dataset, device=stock.device, batch_sampler=batches, **loader_options(stock))
        self._trainer.accelerator._dataloaders[-1] = made
        return made

    def resume(self, trained: int, loader: Any) -> None:
        """Have the next iteration begin at the epoch's first step: the trainer skips what it trained of it."""
        if self._technique is not None and not self._trainer.args.ignore_data_skip:
            batches = loader.batch_sampler
            batches.replayed = trained % batches.steps_per_epoch

    def batches(self, around: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return a window's micro-batches as `around` does, and keep how many labels the trainer counts."""
        window, self._num_items = around(*args, **kwargs)
        return window, self._num_items

    def weigh(self, inputs: Any) -> None:
        """Tell by how much each row's share of the loss must be multiplied to be the mean over its own labels."""
        if self._technique is not None:
            self._technique.weights = self._weights(inputs)

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
