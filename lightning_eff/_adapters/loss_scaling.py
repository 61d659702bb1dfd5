"""Our precision plugin in the place of Lightning's own while a Trainer fits."""

from __future__ import annotations

from typing import Any

from lightning_eff._adapters.adapter import Adapter
from lightning_eff._run_environment import namespace_of
from lightning_eff.precision import precision_class
from shared_core.errors import CompatibilityError
from shared_core.front_ends.wrapped_method import Wrapped


class LossScaling(Adapter):
    """Puts the technique's scaler into the plugin, and the plugin into the Trainer."""

    key = "loss_scale"
    _stock: Any = None

    def set_up(self) -> list[Wrapped]:
        """Put our plugin in the place of Lightning's own, unless the Trainer has it already."""
        trainer, plugin = self._trainer, self._trainer.precision_plugin
        if any(kind.__qualname__ == "LossScalingPrecision" for kind in type(plugin).__mro__):
            return []
        if type(plugin).__name__ not in ("Precision", "MixedPrecision", "Fp8Precision", "HalfPrecision"):
            raise CompatibilityError(
                "loss_scale",
                "precision plugin must be Lightning's 32-true, 16-mixed, bf16-mixed or 16-true, got "
                f"{type(plugin).__name__}",
                "pass plugins=LossScalingPrecision(...) instead of precision=",
            )
        options = self.session.recipe["loss_scale"].to_dict()
        trainer.strategy.precision_plugin = precision_class(namespace_of(trainer))(
            precision=plugin.precision, **options
        )
        self._stock = plugin
        return []

    def start_fit(self) -> None:
        """Give the plugin its scaler before its state is restored."""
        device = self._trainer.strategy.root_device.type
        self._trainer.precision_plugin.scaler = self.technique.make_scaler(device)

    def undo(self) -> None:
        """Put Lightning's own plugin back."""
        if self._stock is not None:
            self._trainer.strategy.precision_plugin = self._stock
