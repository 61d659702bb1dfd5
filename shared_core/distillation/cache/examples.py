"""Batches of a data set as a teacher takes them: padded, without a collator of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from shared_core.distillation.cache.keys import mask_of
from shared_core.distillation.unlabelled import IGNORED
from shared_core.errors import ConfigError

_IDS = ("input_ids", "decoder_input_ids")


def batches_of(data: Any, batch_size: int) -> Iterable[Any]:
    """Return batches of what a user's function gave: in order, always the same.

    Args:
        data: An iterable of batches, which is returned as it is; a data set (``torch.utils.data`` or ``datasets``),
            whose examples are padded by `pad_examples`; or a pair of a data set and its own collator.
        batch_size: Examples a batch of a data set.

    Raises:
        ConfigError: If it is none of these.
    """
    collate: Callable[[list[Any]], Any] = pad_examples
    if isinstance(data, tuple) and len(data) == 2 and _is_data_set(data[0]) and callable(data[1]):
        data, collate = data
    if _is_data_set(data):
        return DataLoader(data, batch_size=batch_size, collate_fn=collate)
    if not isinstance(data, Iterable) or isinstance(data, Tensor | Mapping | str):
        raise ConfigError(
            f"cached teacher: data must be batches, a data set, or a pair of one and its collator, got "
            f"{type(data).__name__}"
        )
    return data


def pad_examples(examples: Sequence[Any]) -> Any:
    """Return a batch: sequences padded on the right with 0, labels with -100, a mask added where there is none.

    Of a pair (input, label) the input is taken, of a mapping what is numbers. What the padding is does not matter to
    a cache, as keys and targets leave it out.

    Args:
        examples: Tensors, pairs, or mappings of tensors, numbers and lists of numbers.

    Raises:
        ConfigError: If a mapping holds no numbers.

    Example:
        >>> batch = pad_examples([{"input_ids": [5, 6], "text": "a"}, {"input_ids": [7], "text": "b"}])
        >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
        ([[5, 6], [7, 0]], [[1, 1], [1, 0]])
    """
    first = examples[0]
    if isinstance(first, tuple | list) and len(first) == 2:
        return default_collate([example[0] for example in examples])
    if not isinstance(first, Mapping):
        return default_collate(list(examples))
    columns = {name: [_tensor(example[name]) for example in examples] for name in first}
    named = {name: [value for value in column if value is not None] for name, column in columns.items()}
    named = {name: column for name, column in named.items() if len(column) == len(examples)}
    if not named:
        raise ConfigError(f"cached teacher: examples must hold numbers, got {', '.join(map(str, first))} without")
    batch = {name: _padded(column, IGNORED if name == "labels" else 0) for name, column in named.items()}
    for name in _IDS:
        if name in batch and batch[name].ndim == 2 and mask_of(name) not in batch:
            batch[mask_of(name)] = _padded([torch.ones_like(value) for value in named[name]], 0)
    return batch


def _is_data_set(data: Any) -> bool:
    # those of `datasets` are no subclass of torch's
    return isinstance(data, Dataset) or (hasattr(data, "column_names") and hasattr(data, "__getitem__"))


def _tensor(value: Any) -> Tensor | None:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _padded(values: list[Tensor], filler: int) -> Tensor:
    if values[0].ndim != 1 or len({value.shape for value in values}) == 1:
        return torch.stack(values)
    return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=filler)
