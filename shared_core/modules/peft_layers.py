"""Layers of PEFT that a user put into his model: adapters, and what they stand beside."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from shared_core.errors import CompatibilityError


def refuse_adapters(where: str, model: nn.Module, chosen: Mapping[str, nn.Module], done: str, instead: str) -> None:
    """Refuse to change weights that merging joins with others, which undoes what was done to them.

    Args:
        where: The technique.
        model: The user's.
        chosen: What the technique would change, by name.
        done: What merging does to it, in words.
        instead: What the user may do.

    Raises:
        CompatibilityError: If a chosen layer is an adapter of PEFT's, or stands beneath one.
    """
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")  # without it there is no such layer
    if tuners is None:
        return
    inside = {
        id(part)
        for layer in model.modules()
        if isinstance(layer, tuners.BaseTunerLayer) and isinstance(layer, nn.Module)
        for part in layer.modules()
    }
    name = next((name for name, module in chosen.items() if id(module) in inside), None)
    if name is not None:
        raise CompatibilityError(
            f"{where}: weights must not be those of PEFT's adapters or of layers beneath them, got {name}: {done}; "
            f"{instead}, or leave these layers out by skip"
        )
