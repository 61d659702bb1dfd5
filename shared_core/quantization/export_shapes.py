"""Which axes of a model's inputs an exported file leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import (
    KeyPath,
    MappingKey,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_map_with_path,
)

from shared_core.errors import ConfigError

_SHORTEST = 3  # torch.export takes a length of 1 for a constant, and the file is run with one less, too


def check_length(inputs: Any) -> None:
    """Refuse inputs without a length to leave open.

    Raises:
        ConfigError: If the second axis of the first tensor is missing or shorter than 3.
    """
    shape = tuple(next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)).shape)
    if len(shape) < 2 or shape[1] < _SHORTEST:
        raise ConfigError(
            "export_onnx: dynamic_length must come with example_inputs of shape (batch, length, ...) and a length of "
            f"{_SHORTEST} at least, got {shape}; give longer ones or leave it out"
        )


def two_examples(inputs: Any) -> Any:
    """Return inputs whose batch is not 1, which torch.export would take for a constant."""
    if _batch(inputs) != 1:
        return inputs
    return tree_map_only(Tensor, lambda x: torch.cat([x, x]) if x.dim() and len(x) == 1 else x, inputs)


def dynamic_shapes(inputs: Any, *, batch: bool, length: bool) -> Any:
    """Return for `torch.export` which axes of the inputs stay open, None for none.

    Args:
        inputs: A tensor, a tuple of arguments or a dictionary of keyword arguments.
        batch: Leave the first axis of all open that are as many as the first.
        length: Leave the second axis of all open that are as long as the first. Inputs whose names begin with
            ``decoder_`` have a length of their own.
    """
    if not (batch or length):
        return None
    examples, lengths = _batch(inputs) if batch else None, _lengths(inputs) if length else {}
    open_axes = {name: torch.export.Dim(name) for name in ("batch", *lengths)}

    def axes(path: KeyPath, value: Any) -> dict[int, Any] | None:
        is_batch = isinstance(value, Tensor) and value.dim() > 0 and len(value) == examples
        found = {0: open_axes["batch"]} if is_batch else {}
        return found | ({1: open_axes[_axis(path)]} if _has_length(path, value, lengths) else {}) or None

    return tree_map_with_path(axes, inputs if isinstance(inputs, dict | tuple | list) else (inputs,))


def one_shorter(inputs: Any) -> Any:
    """Return inputs that are shorter by one along the axes that `dynamic_shapes` leaves open as lengths."""
    lengths = _lengths(inputs)
    return tree_map_with_path(lambda path, x: x[:, :-1] if _has_length(path, x, lengths) else x, inputs)


def _batch(inputs: Any) -> int | None:
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return len(first) if first.dim() else None


def _lengths(inputs: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, value in tree_flatten_with_path(inputs)[0]:
        if isinstance(value, Tensor) and value.dim() > 1:
            found.setdefault(_axis(path), value.shape[1])
    return found


def _axis(path: KeyPath) -> str:
    name = next((str(key.key) for key in reversed(path) if isinstance(key, MappingKey)), "")
    return "decoder_length" if name.startswith("decoder_") else "length"


def _has_length(path: KeyPath, value: Any, lengths: Mapping[str, int]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == lengths.get(_axis(path))
