"""FP8 training as a callback, and as a precision plugin where a Trainer's precision is chosen."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from lightning_eff._namespaces import PYTORCH_LIGHTNING, installed, plugins
from lightning_eff._session_callback import EffCallback
from lightning_eff._typed_options import typed_options
from shared_core.errors import ConfigError
from shared_core.fp8 import Fp8Config
from shared_core.recipe import Recipe

_PUBLIC_MODULE = {PYTORCH_LIGHTNING: "lightning_eff.pytorch"}


@typed_options("fp8")
class Fp8(EffCallback):
    """Trains with linear layers that multiply FP8 values, forward and backward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Recipe.from_dict({"fp8": options}))


@functools.cache
def fp8_precision_class(namespace: str) -> Any:
    """Return `Fp8Precision` for Trainers imported from this namespace.

    Args:
        namespace: ``"pytorch_lightning"`` or ``"lightning.pytorch"``.
    """
    base: Any = plugins(namespace).MixedPrecision

    @typed_options("fp8", recipe="tensorwise")
    class Fp8Precision(base):
        """Trains with linear layers that multiply FP8 values; what is left of the model runs in `precision`.

        Pass it as ``Trainer(plugins=Fp8Precision(recipe="delayed"))``, without ``precision=``. Callbacks of other
        techniques join it.

        Args:
            precision: bf16-mixed runs forward under bf16 autocast; 32-true leaves all but the FP8 layers in fp32.
            device: Device type of autocast; by default that of the Trainer.
        """

        def __init__(
            self, precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed", device: str | None = None, **options: Any
        ) -> None:
            if precision not in ("bf16-mixed", "32-true"):
                raise ConfigError(f"fp8: precision must be one of bf16-mixed, 32-true, got {precision!r}")
            self.eff_recipe = {"fp8": Fp8Config.from_dict({"recipe": "tensorwise", **options})}
            super().__init__("bf16-mixed", device or "cpu")
            self.precision = precision
            self.given = {"precision": precision, "device": device}

        def convert_module(self, module: Any) -> Any:
            """Make a callback of ours drive the Trainer if there is none; layers are swapped by its session."""
            if self.given["device"] is None:
                self.device = module.trainer.strategy.root_device.type
            EffCallback.join_late(module.trainer, module)
            return super().convert_module(module)

        @contextlib.contextmanager
        def forward_context(self) -> Iterator[None]:
            """Enable bf16 autocast, unless the model runs in fp32."""
            with self.autocast_context_manager() if self.precision == "bf16-mixed" else contextlib.nullcontext():
                yield

    Fp8Precision.__qualname__ = "Fp8Precision"
    Fp8Precision.__module__ = _PUBLIC_MODULE.get(namespace, "lightning_eff.lightning")
    return Fp8Precision


if TYPE_CHECKING:
    from lightning_eff._namespaces import MixedPrecision

    class Fp8Precision(MixedPrecision):  # noqa: D101
        def __init__(self, precision: Literal["bf16-mixed", "32-true"] = ..., **options: Any) -> None: ...


def __getattr__(name: str) -> Any:
    if name != "Fp8Precision":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fp8_precision_class(installed()[0])
