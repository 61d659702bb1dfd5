"""The numbers of a configuration: reading, changing and listing those that may be widths."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

Path = tuple[str | int, ...]
"""Attributes and indices that lead to a number of a configuration."""
_WIDTHS_BY_DEFAULT = ("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size", "d_inner")
"""Names that may hold None for a multiple of the hidden size."""


def is_configured(model: nn.Module) -> bool:
    """Return whether a model is built from a configuration object alone, as those of transformers are."""
    config = getattr(model, "config", None)
    return hasattr(config, "to_dict") and hasattr(model, "save_pretrained") and hasattr(type(model), "from_pretrained")


def read(config: Any, path: Path) -> Any:
    """Return the value at a path of attributes and indices, None where there is none."""
    for part in path:
        config = config[part] if isinstance(part, int) else getattr(config, part, None)
    return config


def changed_config(config: Any, values: Mapping[Path, Any]) -> Any:
    """Return a copy of a configuration with these values."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        *parents, last = path
        owner = read(config, tuple(parents))
        if isinstance(last, int):
            owner[last] = value
        else:
            setattr(owner, last, value)
    return config


def numbers(config: Any, prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of every whole number above 1, of lists' too, and of widths that are left to default."""
    for name, value in vars(config).items():
        if name.startswith("_") or name.endswith(("_id", "_ids", "_index")):
            continue
        path = (*prefix, name)
        if isinstance(value, bool):
            continue
        if (isinstance(value, int) and value > 1) or (value is None and name in _WIDTHS_BY_DEFAULT):
            yield path, value
        elif isinstance(value, list | tuple) and all(type(item) is int for item in value):
            if isinstance(value, list):
                yield from (((*path, index), item) for index, item in enumerate(value) if item > 1)
        elif hasattr(value, "to_dict") and hasattr(value, "__dict__"):
            yield from numbers(value, path)


def ratios(config: Any, prefix: Path = ()) -> Iterator[tuple[Path, float]]:
    """Yield the path and value of every ratio of widths."""
    for name, value in vars(config).items():
        path = (*prefix, name)
        if name.endswith("ratio") and isinstance(value, int | float) and value > 0 and not isinstance(value, bool):
            yield path, value
        elif name.endswith("ratios") and isinstance(value, list):
            yield from (((*path, index), item) for index, item in enumerate(value) if item > 0)
        elif hasattr(value, "to_dict") and hasattr(value, "__dict__") and not name.startswith("_"):
            yield from ratios(value, path)


def explicit_head_sizes(config: Any, prefix: Path = ()) -> Iterator[tuple[Path, int]]:
    """Yield a head size for every configuration that would otherwise divide the width by the number of heads."""
    if hasattr(config, "head_dim") and config.head_dim is None:
        width, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
        if isinstance(width, int) and isinstance(heads, int) and heads:
            yield (*prefix, "head_dim"), width // heads
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "__dict__") and not name.startswith("_"):
            yield from explicit_head_sizes(value, (*prefix, name))
