"""Parse untrusted YAML and JSON: any text gives values or a `ValueError`, in bounded time.

Also write reports as JSON that every parser reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_MOST_VALUES = 1_000_000


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Return the value of a JSON text.

    Example:
        >>> parse_json('{"a": 1, "a": 2}', unique=True)
        Traceback (most recent call last):
        ValueError: 'a' is given twice
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without base-60 numbers: ``2:4`` is text, and parsing long ones does not take quadratic time."""


for _kind in ("int", "float"):

    def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode, kind: str = _kind) -> Any:
        return node.value if ":" in node.value else getattr(loader, f"construct_yaml_{kind}")(node)

    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _number)


def parse_yaml(text: str) -> Any:
    """Return the plain value of a YAML text. Tags create no objects, and duplicate names are errors.

    Example:
        >>> parse_yaml("prune: {sparsity: 0.5}")
        {'prune': {'sparsity': 0.5}}
        >>> parse_yaml("n_m: 2:4")
        {'n_m': '2:4'}
    """
    loader = None
    try:
        loader = _Loader(text)
        # Build the node tree first, to check size and names before any value is created.
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values")
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except (RecursionError, TypeError, KeyError, IndexError, AttributeError) as error:  # as PyYAML 6 raises them
        raise ValueError(f"it is nested too deeply or malformed ({type(error).__name__})") from None
    finally:
        if loader is not None:
            loader.dispose()


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        found[name] = value
    return found


def _size(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Return the number of values of a node with its aliases expanded. Each alias may double the number."""
    if id(node) in known:
        size = known[id(node)]
        if size is None:
            raise ValueError("it contains itself")
        return size
    # None while it is being counted, so that an alias to it is a cycle.
    known[id(node)], size = None, 1
    if isinstance(node, yaml.MappingNode):
        _unique((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        size += sum(_size(key, known) + _size(value, known) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(item, known) for item in node.value)
    known[id(node)] = size
    return size


def json_text(values: Any) -> str:
    """Return `values` as indented JSON, with null for NaN and infinity.

    Python would write ``NaN`` and ``Infinity``, which jq, JavaScript and most other parsers reject.

    Example:
        >>> print(json_text({"sqnr_db": math.inf, "size": 1.5}))
        {
          "sqnr_db": null,
          "size": 1.5
        }
    """
    return json.dumps(_finite(values), indent=2, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
