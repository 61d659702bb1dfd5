"""Adapters of our own in the Trainer."""

from __future__ import annotations

from hf_eff._adapters.adapter import Adapter
from hf_eff._environment import check_efficient_loading


class Lora(Adapter):
    """Refuses a sharded model that would be filled without its adapters."""

    key = "lora"

    def check(self) -> None:
        """Refuse `cpu_ram_efficient_loading`."""
        check_efficient_loading(self._trainer, "lora", "merged weights and no adapters")
