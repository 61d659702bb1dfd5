"""Quantization-aware training: swaps layers, moves ranges once a step, bakes at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from eff_kernels import quantization as kernels
from torch import Tensor, nn

from shared_core.errors import CheckpointError, ConfigError, TrainingError
from shared_core.fast_paths import Undo, fast_paths_off, fast_paths_on
from shared_core.module_match import plain_name
from shared_core.positions import parse_position
from shared_core.quantization.config import QatConfig
from shared_core.quantization.modules import STOCK, layer_range, restore, swap
from shared_core.quantization.observers import LayerQuantizer, RangeBank
from shared_core.quantization.selection import select_layers
from shared_core.quantization.weights import bake_, weight_report
from shared_core.technique import Context, Technique


class QuantizationAwareTraining(Technique):
    """Trains with fake-quantised weights and activations, and leaves weights that survive their quantisation.

    Args:
        config: The options, already checked.
    """

    key: ClassVar[str] = "qat"
    config: QatConfig

    def __init__(self, config: QatConfig) -> None:
        super().__init__(config)
        self.layers: dict[str, nn.Module] = {}
        self.left_out: dict[str, str] = {}
        self._weight_keys: set[str] = set()
        self._undo: Undo = []
        self._pending: Tensor | None = None
        self._window_restored = False
        self._begin = self._freeze = 0
        self._began_at: int | None = None
        self._final: list[dict[str, Any]] | None = None
        self._bank = RangeBank(0)

    def attach(self, model: nn.Module, context: Context) -> None:
        """Swap the classes of the layers to quantise; observe nothing yet."""
        config = self.config
        self.layers, self.left_out = select_layers(model, config.include, config.skip)
        self._bank = RangeBank(
            len(self.layers),
            weight_bits=config.weight_bits,
            activation_bits=config.activation_bits,
            rounded_gate=config.gate == "rounded",
        )
        for index, module in enumerate(self.layers.values()):
            vars(module).pop("quantized_range", None)  # of an earlier run
            swap(module, LayerQuantizer(self._bank, index))
        self._undo = fast_paths_off(model, tuple(STOCK))
        ids = {id(module) for module in self.layers.values()}
        # a module that the model holds under two names has two keys in the state dict
        names = model.named_modules(remove_duplicate=False)
        self._weight_keys = {f"{plain_name(name)}.weight".lstrip(".") for name, module in names if id(module) in ids}

    def detach(self, model: nn.Module) -> None:
        """Give the layers back their stock classes."""
        if self._keeps_modules:
            return
        for module in self.layers.values():
            restore(module)
        fast_paths_on(self._undo)
        self._undo = []

    @property
    def _keeps_modules(self) -> bool:
        return self._final is not None and self.config.keep

    def begin(self, context: Context) -> None:
        """Resolve positions and start to observe."""
        self._begin, self._freeze = (
            self._resolve("begin", context),
            self._resolve("freeze_observers", context),
        )
        if context.total_steps is not None and self._begin > context.total_steps:
            raise ConfigError(
                f"qat: begin must lie within the {context.total_steps} steps of this run, got {self.config.begin!r}"
            )
        if self._freeze < 1:
            raise ConfigError(
                f"qat: freeze_observers must be step 1 or later, got {self.config.freeze_observers!r}; "
                "the first step "
                "finds the first ranges"
            )
        self._bank.move_(next(iter(self.layers.values())).weight.device)  # type: ignore[arg-type]
        if not self._window_restored:
            self._bank.window.fill_(float("inf"))
        self._set_switches(context.step)

    def _resolve(self, name: str, context: Context) -> int:
        value = getattr(self.config, name)
        position = parse_position(value)
        if context.total_steps is None and position.unit == "fraction" and position.value in (0.0, 1.0):
            return 0 if position.value == 0 else sys.maxsize  # start and end need no known length
        return context.resolve(value, f"qat.{name}")

    def _set_switches(self, step: int) -> None:
        bank = self._bank
        bank.observing = step < self._freeze
        if step >= self._begin and not bank.quantize_weights:
            bank.quantize_weights = bank.quantize_activations = True
            if self._began_at is None:
                self._began_at = step

    def before_optimizer_step(self, context: Context) -> None:
        """Take the window of this step; a window already pending belongs to a skipped step and is dropped."""
        self._pending = self._bank.take_window() if self._bank.observing else None

    def after_optimizer_step(self, context: Context) -> None:
        """Move the ranges by the pending window and turn switches whose step has come."""
        if self._pending is not None:
            self._bank.commit(self._pending, self.config.ema_constant)
            self._pending = None
            self._read_known()
        self._set_switches(context.step)

    def _read_known(self) -> None:
        quantizers = self._quantizers()
        # read from the device only until every layer has a range
        if not all(quantizer.has_range for quantizer in quantizers):
            for quantizer, known in zip(quantizers, self._bank.known.tolist(), strict=True):
                quantizer.has_range = known

    def _quantizers(self) -> list[LayerQuantizer]:
        return [module.quantizer for module in self.layers.values()]  # type: ignore[misc]

    def before_eval(self, context: Context) -> None:
        """Stop observing, also in a validation that puts layers into training mode."""
        self._bank.observing = False

    def after_eval(self, context: Context) -> None:
        """Go on observing."""
        self._bank.observing = context.step < self._freeze

    def weights_replaced(self, context: Context) -> None:
        """Estimate the ranges anew from training batches: those of other weights do not fit."""
        bank, quantizers = self._bank, self._quantizers()
        if not any(quantizer.has_range for quantizer in quantizers):
            return
        before = bank.ranges.clone(), bank.known.clone(), bank.window.clone(), bank.observing
        for quantizer in quantizers:
            quantizer.has_range = False
        bank.known.zero_()
        bank.window.fill_(float("inf"))
        bank.observing = True
        try:
            context.services.calibrate(self.config.calibration_batches)
            window = bank.take_window()
            if not bool(torch.isfinite(window[before[1]]).all()):
                raise TrainingError(
                    "qat: calibration batches must reach every quantised layer with finite inputs; "
                    "raise qat.calibration_batches, or look for NaN"
                )
            bank.commit(window, self.config.ema_constant)
        except BaseException:
            bank.set_ranges(before[0], before[1])
            raise
        finally:
            bank.window.copy_(before[2])
            bank.observing = before[3]
            self._read_known()

    def finish(self, model: nn.Module, context: Context) -> None:
        """Bake the quantised weights in place and leave stock layers that carry their range.

        A run that ended before `begin` is quantised now: a model was asked for that holds codes.
        """
        bank = self._bank
        if self._began_at is None:
            self._began_at = context.step
        bank.quantize_weights = bank.quantize_activations = True
        bank.observing = False
        self._final = self._layer_reports()
        if self.config.keep:
            return
        for module in self.layers.values():
            bake_(module, bank.weight_qmax)
            entry = layer_range(module)
            if entry is not None:
                module.quantized_range = entry  # type: ignore[assignment]
        self.detach(model)

    def bake(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy whose quantised layers hold the values of their codes, if quantisation has begun."""
        if not self._bank.quantize_weights or (self._final is not None and not self.config.keep):
            return state_dict
        with torch.no_grad():
            return {
                name: kernels.fake_quantize_symmetric(value.detach(), 0, self._bank.weight_qmax)
                if plain_name(name) in self._weight_keys
                else value
                for name, value in state_dict.items()
            }

    def ranges(self) -> dict[str, dict[str, Any]]:
        """Return every layer's range and widths as plain values, for `apply_ranges` and `convert`."""
        found = {name: layer_range(module) for name, module in self.layers.items()}
        return {name: entry for name, entry in found.items() if entry is not None}

    def deployment(self) -> dict[str, Any]:
        """Return the activation ranges: with them and the baked weights a model computes what was trained."""
        return {"ranges": self.ranges()}

    def state_dict(self) -> dict[str, Any]:
        """Return ranges, the open window, counts and switches."""
        bank = self._bank
        return {
            "layers": list(self.layers),
            "ranges": bank.ranges.clone(),
            "known": bank.known.clone(),
            "window": bank.window.clone(),
            "non_finite": bank.non_finite.clone(),
            "num_updates": bank.num_updates,
            "began_at": self._began_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the saved ranges, each for the layer of its name.

        Raises:
            CheckpointError: If the state is of other layers, or damaged.
        """
        bank = self._bank
        try:
            names = list(state["layers"])
            if set(names) != set(self.layers):
                odd = ", ".join(sorted(set(names) ^ set(self.layers))[:5])
                raise CheckpointError(
                    f"qat: saved ranges must be of the layers that are quantised now, but differ in {odd}; "
                    "resume with the include and skip of the saved run"
                )
            rows = torch.tensor([names.index(name) for name in self.layers])
            saved = {key: state[key].cpu()[rows].to(bank.device) for key in ("ranges", "known", "window", "non_finite")}
            bank.set_ranges(saved["ranges"], saved["known"])
            bank.window.copy_(saved["window"])
            bank.non_finite.copy_(saved["non_finite"])
            bank.num_updates = int(state["num_updates"])
            self._began_at = state["began_at"]
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"qat: state must be one that qat saved, got {error!r}") from error
        self._window_restored = True
        for quantizer, known in zip(self._quantizers(), bank.known.tolist(), strict=True):
            quantizer.has_range = known

    def metrics(self) -> dict[str, float]:
        """Return whether quantisation is on, and how many layers and range updates there are."""
        return {
            "qat/active": float(self._bank.quantize_weights),
            "qat/layers": float(len(self.layers)),
            "qat/range_updates": float(self._bank.num_updates),
        }

    def report(self) -> dict[str, Any]:
        """Return what is quantised how, what was left out and why, and how much the weights lose."""
        layers = self._final if self._final is not None else self._layer_reports()
        return {
            "layers": len(layers),
            "weight_bits": self.config.weight_bits,
            "activation_bits": self.config.activation_bits,
            "began_at_step": self._began_at,
            "range_updates": self._bank.num_updates,
            "non_finite_windows": int(self._bank.non_finite.sum()),
            "without_range": [entry["name"] for entry in layers if entry["scale"] is None],
            "smallest_sqnr_db": min((entry["sqnr_db"] for entry in layers), default=None),
            "left_out": dict(self.left_out),
            "per_layer": layers,
        }

    def _layer_reports(self) -> list[dict[str, Any]]:
        bank = self._bank
        rows = zip(
            self.layers.items(),
            bank.known.tolist(),
            bank.ranges.tolist(),
            bank.scale.tolist(),
            bank.zero_point.tolist(),
            strict=True,
        )
        return [
            {
                "name": name,
                "min": minimum if known else None,
                "max": maximum if known else None,
                "scale": scale if known else None,
                "zero_point": zero_point if known else None,
                **weight_report(module, bank.weight_qmax),
            }
            for (name, module), known, (minimum, maximum), scale, zero_point in rows
        ]
