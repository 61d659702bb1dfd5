"""The entry point for callbacks of installed packages: returns ours only if ``EFF_RECIPE`` names a recipe."""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "EFF_RECIPE"


def for_pytorch_lightning() -> list[Any]:
    """Return the callbacks for every Trainer: none, or one with the recipe in the file ``EFF_RECIPE``."""
    source = os.environ.get(VARIABLE)
    if not source:
        # Runs in every Trainer of the environment, so import nothing early.
        return []
    from lightning_eff._trainer_hooks import EffCallback
    from shared_core.engine.recipe import Recipe
    from shared_core.errors import ConfigError

    try:
        return [EffCallback(Recipe.from_yaml(source))]
    except ConfigError as error:
        raise ConfigError(VARIABLE, error) from error


for_lightning = for_pytorch_lightning
