"""FP8 training as a precision plugin, for Trainers whose precision is chosen by plugin.

Also the precision plugin of loss scaling: Lightning's mixed precision with a scaler that reports skipped steps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightning_eff._run_environment import classes_of_either_name, plugins, public
from shared_core.errors import ConfigError
from shared_core.fp8 import Fp8Config
from shared_core.front_ends.typed_options import typed_options
from shared_core.loss_scaling import LossScaleConfig, LossScaler


@functools.cache
def fp8_precision_class(namespace: str) -> Any:
    """Return `Fp8Precision` for Trainers imported from this namespace."""
    base: Any = plugins(namespace).MixedPrecision

    @typed_options("fp8", recipe="tensorwise")
    class Fp8Precision(base):
        """Trains with linear layers that multiply FP8 values. The rest of the model runs in `precision`.

        Pass it as ``Trainer(plugins=Fp8Precision(recipe="delayed"))``, without ``precision=``. You can add callbacks of
        other techniques.

        Args:
            precision: bf16-mixed runs forward under bf16 autocast; 32-true keeps all but the FP8 layers in fp32.
            device: Device type of autocast; by default that of the Trainer.
        """

        def __init__(
            self, precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed", device: str | None = None, **options: Any
        ) -> None:
            if precision not in ("bf16-mixed", "32-true"):
                raise ConfigError("fp8", f"precision must be one of bf16-mixed, 32-true, got {precision!r}")
            self.eff_recipe = {"fp8": Fp8Config.from_dict({"recipe": "tensorwise", **options})}
            # The base class knows "bf16-mixed". The real precision is set later, and read at each forward.
            super().__init__("bf16-mixed", device or "cpu")
            self.precision = precision
            self.given = {"precision": precision, "device": device}

        def convert_module(self, module: Any) -> Any:
            """Add a callback of ours to the Trainer if there is none. Its session replaces the layers."""
            # The Trainer's device is unknown when a plugin is made.
            if self.given["device"] is None:
                self.device = module.trainer.strategy.root_device.type
            from lightning_eff._trainer_hooks import EffCallback

            EffCallback.join_late(module.trainer, module)
            return super().convert_module(module)

        @contextlib.contextmanager
        def forward_context(self) -> Iterator[None]:
            """Enable bf16 autocast, unless the model runs in fp32."""
            with self.autocast_context_manager() if self.precision == "bf16-mixed" else contextlib.nullcontext():
                yield

    return public(Fp8Precision, namespace)


if TYPE_CHECKING:
    from lightning_eff._run_environment import MixedPrecision

    class Fp8Precision(MixedPrecision):  # noqa: D101
        def __init__(self, precision: Literal["bf16-mixed", "32-true"] = ..., **options: Any) -> None: ...


_PRECISIONS = ("16-mixed", "32-true", "bf16-mixed", "16-true")


@functools.cache
def precision_class(namespace: str) -> Any:
    """Return `LossScalingPrecision` for Trainers imported from this namespace."""
    base: Any = plugins(namespace).MixedPrecision

    @typed_options("loss_scale", kind="dynamic")
    class LossScalingPrecision(base):
        """Scales the loss so that small gradients survive fp16, and skips steps that overflow.

        Pass it as ``Trainer(plugins=LossScalingPrecision())``, without ``precision=``. It runs fp16 on a CPU
        too, where ``precision="16-mixed"`` silently becomes bf16. Skipped steps do not advance schedules.

        Args:
            precision: 16-mixed runs forward under fp16 autocast; 32-true scales the loss of an fp32 model; bf16-mixed
                runs under bf16 autocast, which is useful only for fp8 with gradients in e5m2; 16-true casts the model
                to fp16, for use with primary_weights.
            device: Device type of autocast; by default that of the Trainer.
        """

        def __init__(
            self,
            precision: Literal["16-mixed", "32-true", "bf16-mixed", "16-true"] = "16-mixed",
            device: str | None = None,
            **options: Any,
        ) -> None:
            if precision not in _PRECISIONS:
                raise ConfigError("loss_scale", f"precision must be one of {', '.join(_PRECISIONS)}, got {precision!r}")
            self.config = LossScaleConfig.from_dict({"kind": "dynamic", **options})
            self.eff_recipe = {"loss_scale": self.config}
            # Lightning rejects any scaler with bf16-mixed; `precision` is read each time to choose the autocast
            super().__init__("16-mixed", device or "cpu", scaler=LossScaler(**self.config.scaler_options()))
            self.precision = precision
            self.given = {"precision": precision, "device": device}
            self._casts = plugins(namespace).HalfPrecision("16-true") if precision == "16-true" else None
            """The plugin that casts model and input if autocast does not."""

        def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
            """Take the Trainer's device, and add a session that counts steps if no callback of ours does."""
            module = model if hasattr(model, "automatic_optimization") else model.module
            if self.given["device"] is None:
                self.device = module.trainer.strategy.root_device.type
            from lightning_eff._trainer_hooks import EffCallback

            EffCallback.join_late(module.trainer, module)
            return super().connect(model, optimizers, lr_schedulers)

        @contextlib.contextmanager
        def forward_context(self) -> Iterator[None]:
            """Enable fp16 or bf16 autocast, unless the model runs in fp32 or is fp16 itself."""
            if self._casts is not None:
                context = self._casts.forward_context()
            else:
                context = self.autocast_context_manager() if self.precision != "32-true" else contextlib.nullcontext()
            with context:
                yield

        def _cast(self, name: str, *args: Any) -> Any:
            """Call the 16-true plugin's method that casts model, batches and new tensors, otherwise our own."""
            return getattr(super() if self._casts is None else self._casts, name)(*args)

        convert_module = functools.partialmethod(_cast, "convert_module")
        convert_input = functools.partialmethod(_cast, "convert_input")
        tensor_init_context = functools.partialmethod(_cast, "tensor_init_context")
        module_init_context = functools.partialmethod(_cast, "module_init_context")

        def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
            """Run the closure, unscale, clip, and step unless gradients overflowed. Also for fused optimizers."""
            result = closure()
            # no backward: `training_step` returned no loss, or Lightning's SWA updates batch norms only
            no_loss = model.automatic_optimization and (result is None or model.trainer.fit_loop._skip_backward)
            if not no_loss:
                # Before `_after_closure`: callbacks and clipping must see unscaled gradients.
                self.scaler.unscale_(optimizer)
            self._after_closure(model, optimizer)
            if no_loss:
                return result
            output = self.scaler.step(optimizer, **kwargs)
            self.scaler.update()
            return output

        def clip_gradients(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            """Clip unscaled gradients. Fused optimizers are supported, unlike in Lightning."""
            # Bypass MixedPrecision's method, which rejects fused optimizers: ours unscales before.
            super(base, self).clip_gradients(optimizer, *args, **kwargs)

    return public(LossScalingPrecision, namespace)  # its name is the key of the scaler's state in checkpoints


if TYPE_CHECKING:
    from lightning_eff._run_environment import MixedPrecision

    class LossScalingPrecision(MixedPrecision):  # noqa: D101
        def __init__(
            self, precision: Literal["16-mixed", "32-true", "bf16-mixed", "16-true"] = ..., **options: Any
        ) -> None: ...


_MAKERS = {"Fp8Precision": fp8_precision_class, "LossScalingPrecision": precision_class}
__getattr__ = classes_of_either_name(__name__, _MAKERS, "convert_module", lambda plugin, module: module.trainer)
