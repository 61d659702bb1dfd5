"""FSDP that fills a sharded model from its state dict, beside techniques whose state is not all there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_eff._adapters.adapter import Adapter
from shared_core.errors import CompatibilityError


class EfficientLoading(Adapter):
    """Refuses `cpu_ram_efficient_loading` for adapters and learned ranges."""

    def check(self) -> None:
        """Refuse it.

        Raises:
            CompatibilityError: Names the technique.
        """
        recipe: Mapping[str, Any] = self.session.recipe
        plugin = getattr(self._trainer.accelerator.state, "fsdp_plugin", None)
        beside = {"lora": "merged weights and no adapters"} if "lora" in recipe else {}
        if "qat" in recipe and recipe["qat"].learns_ranges:
            beside["qat with learned ranges"] = "weights and no ranges"
        for key, held in beside.items() if getattr(plugin, "cpu_ram_efficient_loading", False) else ():
            raise CompatibilityError(
                "hf",
                f"{key} needs cpu_ram_efficient_loading false in fsdp_config: accelerate would fill the sharded model "
                f"from its state dict, which holds {held}",
            )
