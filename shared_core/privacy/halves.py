"""Compute the loss of a batch and of its two halves, which show if the loss is a mean over examples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shared_core.distributed.collectives import any_rank
from shared_core.engine.state_file import rng_state, set_rng_state
from shared_core.modules.calls import modes_restored

_STATE_DIMS = 3


def losses_of_halves(
    model: nn.Module, run: Callable[[Any], Any], batch: Any, rows: int
) -> tuple[float, list[tuple[int, float]]] | tuple[()] | None:
    """Return the loss of a batch and, by their rows, those of its halves; nothing where the outputs hold no loss.

    None for a batch that has a single row, on any process, or whose rows cannot be told.
    """
    cuts = [(slice(0, rows // 2), rows // 2), (slice(rows // 2, rows), rows - rows // 2)]
    # all processes or none: a sharded module gathers its weights in every forward
    if any_rank(rows < 2 or _is_unclear(batch, rows), next(model.parameters()).device):
        return None
    random = rng_state()
    try:
        with modes_restored(model), torch.no_grad():
            for part in model.modules():  # dropout would differ, and hooks keep what they see; `eval` is more to a loop
                part.training = False
            outputs = [run(part) for part in (batch, *(_cut(batch, cut, rows) for cut, _ in cuts))]
    finally:
        set_rng_state(random)
    found: list[Any] = [
        output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output) for output in outputs
    ]
    if not all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in found):
        return ()
    whole, *halves = map(float, found)
    return whole, [(count, loss) for (_, count), loss in zip(cuts, halves, strict=True)]


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
