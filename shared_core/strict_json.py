"""Reports as JSON that every parser reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(values: Any) -> str:
    """Return `values` as indented JSON, with null where a number is NaN or infinite: JSON has no word for these.

    Python writes ``NaN`` and ``Infinity``, at which jq, JavaScript and most other parsers stop.

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
