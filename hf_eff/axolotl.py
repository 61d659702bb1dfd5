"""An Axolotl plugin: put ``plugins: [hf_eff.axolotl.EffPlugin]`` and a recipe under ``eff:`` in its YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from hf_eff.callbacks import attach
from shared_core.engine.recipe import Recipe
from shared_core.errors import ConfigError
from shared_core.front_ends.flags import as_recipe


class EffArguments(BaseModel):
    """The key that `EffPlugin` adds to Axolotl's YAML."""

    eff: dict[str, Any] | str | None = None
    """A recipe, or the path to a YAML or JSON file."""


class EffPlugin(BasePlugin):
    """Attaches the recipe under ``eff`` to the trainer that Axolotl builds."""

    def get_input_args(self) -> str:
        """Return the import path of `EffArguments` for Axolotl."""
        return f"{EffArguments.__module__}.{EffArguments.__qualname__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the recipe before anything is loaded. Axolotl calls this with the YAML as read."""
        _recipe(cfg)

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: Any) -> None:
        """Attach the recipe."""
        attach(trainer, _recipe(cfg))


def _recipe(cfg: Mapping[str, Any]) -> Recipe:
    given = cfg.get("eff")
    if not given:
        raise ConfigError("axolotl", f"eff must be a recipe or a recipe file, got {given!r}", "leave out the plugin")
    return as_recipe(given)
