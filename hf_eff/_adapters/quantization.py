"""Quantization-aware training in the Trainer."""

from __future__ import annotations

from hf_eff._adapters.adapter import Adapter
from hf_eff._environment import check_efficient_loading


class QuantizationAwareTraining(Adapter):
    """Refuses a sharded model that would be filled without its learned ranges."""

    key = "qat"

    def check(self) -> None:
        """Refuse `cpu_ram_efficient_loading` where ranges are parameters."""
        if self.session.recipe["qat"].to_dict()["range"] in ("lsq", "lsq_plus", "pact"):
            check_efficient_loading(self._trainer, "qat with learned ranges", "weights and no ranges")
