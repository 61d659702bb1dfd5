"""Private training in a Lightning Trainer: which batches it gets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_eff._adapters.adapter import Adapter
from lightning_eff._run_environment import no_logging
from shared_core.distributed.collectives import any_rank, world_size
from shared_core.engine.state_file import rng_state, set_rng_state
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.front_ends.wrapped_method import Wrapped
from shared_core.privacy import PoissonBatches

_STATE_DIMS = 3


class DifferentialPrivacy(Adapter):
    """Trains on batches drawn for the technique, and shows it whether the loss is a mean over examples."""

    key = "dp"

    @classmethod
    def check_trials(cls, tuner: str) -> None:
        """Refuse them.

        Raises:
            CompatibilityError: Always.
        """
        raise CompatibilityError(
            "dp",
            f"learning rate and batch size must be given, got {tuner}, whose trials see the data without noise",
            "tune on public data",
        )

    def set_up(self) -> list[Wrapped]:
        """Surround what makes the Trainer's loader.

        Raises:
            CompatibilityError: If accumulation changes while training, or batches are repeated.
        """
        trainer = self._trainer
        if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in trainer.callbacks):
            raise CompatibilityError(
                "dp",
                "accumulate_grad_batches must stay the same, got a GradientAccumulationScheduler",
                "each step is one draw",
            )
        if trainer.overfit_batches:
            raise CompatibilityError(
                "dp", f"overfit_batches must be 0, got {trainer.overfit_batches}", "it takes the order of the data over"
            )
        trainer.fit_loop._combined_loader = None  # a Trainer that trains on would keep the last run's batches
        return [
            Wrapped(trainer.fit_loop._data_source, "dataloader", self._loader),
            Wrapped(trainer._data_connector, "_requires_distributed_sampler", self._shards),
        ]

    def _loader(self, original: Callable[[], Any]) -> Any:
        trainer = self._trainer
        if world_size() > 1 and not trainer._accelerator_connector.use_distributed_sampler:
            raise CompatibilityError(
                "dp",
                "use_distributed_sampler must be True with several processes, got False",
                "each must hold all data, of which one draw gives it its part",
            )
        accumulate, limit = trainer.accumulate_grad_batches, trainer.limit_train_batches
        made = self.technique.loader(original(), accumulate)
        batches = min(limit, len(made)) if isinstance(limit, int) else int(limit * len(made))
        if batches % accumulate:
            raise ConfigError(
                "dp",
                f"limit_train_batches must leave a multiple of accumulate_grad_batches {accumulate}, got {batches} "
                "batches",
                "each step is one draw",
            )
        return made

    def _shards(self, original: Callable[[Any], bool], loader: Any) -> bool:
        return not isinstance(loader.batch_sampler, PoissonBatches) and original(loader)

    def arguments(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Have the technique compare the loss of the run's first batch of two rows or more with those of its halves.

        Raises:
            CompatibilityError: If the loss is no mean over examples.
        """
        batch, *rest = args
        technique, module = self.technique, self._module
        rows = technique.rows
        cuts = [(slice(0, rows // 2), rows // 2), (slice(rows // 2, rows), rows - rows // 2)]
        # all processes or none: a sharded module gathers its weights in every forward
        if not technique.checks_loss or any_rank(rows < 2 or _is_unclear(batch, rows), module.device):
            return args
        modes, random = {part: part.training for part in module.modules()}, rng_state()
        module.eval()  # dropout would differ, and hooks would keep what they see
        try:
            with no_logging(module), torch.no_grad():
                parts = [batch, *(_cut(batch, cut, rows) for cut, _ in cuts)]
                outputs = [step(part, *rest, **kwargs) for part in parts]
        finally:
            set_rng_state(random)
            for part, mode in modes.items():
                part.training = mode
        found: list[Any] = [output.get("loss") if isinstance(output, Mapping) else output for output in outputs]
        if all(isinstance(loss, Tensor) for loss in found):
            whole, *halves = map(float, found)
            technique.check_loss(whole, [(count, loss) for (_, count), loss in zip(cuts, halves, strict=True)])
        return args

    def replay(self, loaders: list[Any], batches: int) -> None:
        """Have the next iteration begin at the epoch's first step: Lightning's epoch starts over and skips batches."""
        for loader in loaders:
            drawn = getattr(loader, "batch_sampler", None)
            if isinstance(drawn, PoissonBatches):
                drawn.replayed = batches // drawn.accumulate


def _cut(batch: Any, rows: slice, count: int) -> Any:
    """Return those rows of everything in a batch that has one entry an example."""
    if isinstance(batch, Tensor):
        if batch.dim() and len(batch) == count:
            return batch[rows]
        return batch[:, rows] if _is_state(batch, count) else batch
    if isinstance(batch, PackedSequence):
        padded, lengths = pad_packed_sequence(batch, batch_first=True)
        return pack_padded_sequence(padded[rows], lengths[rows], batch_first=True, enforce_sorted=False)
    if isinstance(batch, list | tuple):
        if len(batch) == count and not any(isinstance(value, Tensor) and value.dim() for value in batch):
            return batch[rows]
        values = [_cut(value, rows, count) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    parts = {name: _cut(value, rows, count) for name, value in _fields(batch).items()}
    if not isinstance(batch, MutableMapping) and not dataclasses.is_dataclass(batch):
        return parts or batch
    other: Any = copy.copy(batch)  # not its class, which may take other arguments, as defaultdict does
    (vars(other) if dataclasses.is_dataclass(batch) else other).update(parts)
    return other


def _fields(batch: Any) -> Mapping[Any, Any]:
    """Return the values of a mapping or a dataclass by name, of anything else nothing."""
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch if isinstance(batch, Mapping) else {}


def _is_state(value: Tensor, count: int) -> bool:
    """Return whether a tensor has the examples in its second dimension, as (layers, batch, width) of torch.nn.LSTM."""
    return value.dim() == _STATE_DIMS and value.shape[1] == count


def _is_unclear(batch: Any, count: int) -> bool:
    """Return whether both dimensions of a tensor could be the examples'; Poisson sampling soon draws another number."""
    if isinstance(batch, Tensor):
        return _is_state(batch, count) and len(batch) == count
    values = batch if isinstance(batch, list | tuple) else _fields(batch).values()
    return any(_is_unclear(value, count) for value in values)
