"""FP8 training: swaps layers, moves the histories of delayed scaling once a step, leaves stock layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.errors import CheckpointError
from shared_core.fast_paths import Undo, fast_paths_off, fast_paths_on
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.convert import select_layers
from shared_core.fp8.linear import PRODUCTS, Fp8Linear, LayerFp8, restore, swap
from shared_core.fp8.scaling import ROLES, AmaxBank
from shared_core.technique import Context, Technique


class Fp8Training(Technique):
    """Trains with linear layers whose forward and backward products multiply FP8 values.

    Weights, optimizer state and checkpoints stay in the precision that they have; nothing is baked at the end.

    Args:
        config: The options, already checked.
    """

    key: ClassVar[str] = "fp8"
    config: Fp8Config

    def __init__(self, config: Fp8Config) -> None:
        super().__init__(config)
        self.layers: dict[str, nn.Linear] = {}
        self.left_out: dict[str, str] = {}
        self.states: dict[str, LayerFp8] = {}
        self._bank: AmaxBank | None = None
        self._pending: Tensor | None = None
        self._undo: Undo = []

    def attach(self, model: nn.Module, context: Context) -> None:
        """Swap the classes of the layers to multiply in FP8; remember nothing yet."""
        config = self.config
        self.layers, self.left_out = select_layers(model, config)
        if config.recipe == "delayed":
            self._bank = AmaxBank(len(self.layers), config.amax_history)
        for index, (name, module) in enumerate(self.layers.items()):
            self.states[name] = LayerFp8(config, self._bank, index)
            swap(module, self.states[name])
        self._undo = fast_paths_off(model, (Fp8Linear,))

    def detach(self, model: nn.Module) -> None:
        """Give the layers back their stock class."""
        for module in self.layers.values():
            restore(module)
        fast_paths_on(self._undo)
        self._undo = []

    def begin(self, context: Context) -> None:
        """Start to remember, and say aloud if FP8 is emulated."""
        name, module = next(iter(self.layers.items()))
        device = module.weight.device
        if self._bank is not None:
            self._bank.move_(device)
            self._bank.observing = True
        if not self.states[name].uses_scaled_mm(device):
            reason = "as backend=emulated asks"
            if self.config.backend == "auto":
                able = self.config.recipe not in ("blockwise", "mx")
                reason = (
                    f"as {device.type} does not multiply FP8" if able else "as this recipe has no scaled matmul here"
                )
            context.services.say(
                f"efftrain: fp8: EMULATED, {reason}: products are computed in float32 on FP8 values, so the numbers "
                "are those of FP8 training but every step is slower, not faster"
            )

    def before_optimizer_step(self, context: Context) -> None:
        """Take the window of this step; a window already pending belongs to a skipped step and is dropped."""
        if self._bank is not None:
            self._pending = self._bank.take_window()

    def after_optimizer_step(self, context: Context) -> None:
        """Move the histories by the pending window."""
        if self._bank is not None and self._pending is not None:
            self._bank.commit(self._pending)
            self._pending = None

    def before_eval(self, context: Context) -> None:
        """Stop remembering, also in a validation that puts layers into training mode."""
        if self._bank is not None:
            self._bank.observing = False

    def after_eval(self, context: Context) -> None:
        """Go on remembering."""
        if self._bank is not None:
            self._bank.observing = True

    def weights_replaced(self, context: Context) -> None:
        """Forget the histories: those of other weights do not fit; the next scales are of current magnitudes."""
        if self._bank is not None:
            self._bank.forget()

    def finish(self, model: nn.Module, context: Context) -> None:
        """Leave stock layers; their weights are plain and need no baking."""
        self.detach(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the histories, the open window and counts; empty without delayed scaling."""
        bank = self._bank
        if bank is None:
            return {}
        return {
            "layers": list(self.layers),
            "history": bank.history.clone(),
            "window": bank.window.clone(),
            "non_finite": bank.non_finite.clone(),
            "num_updates": bank.num_updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the saved histories, each for the layer of its name; a run without delayed scaling has none.

        Raises:
            CheckpointError: If the state is of other layers, of another length, or damaged.
        """
        bank = self._bank
        if bank is None or not state:  # the recipe changed in between, which the session notes
            return
        try:
            names = list(state["layers"])
            if set(names) != set(self.layers):
                odd = ", ".join(sorted(set(names) ^ set(self.layers))[:5])
                raise CheckpointError(
                    f"fp8: saved histories must be of the layers that are in FP8 now, but differ in {odd}; "
                    "resume with the include and skip of the saved run"
                )
            if state["history"].shape[1] != bank.history.shape[1]:
                raise CheckpointError(
                    f"fp8: amax_history must be the saved {state['history'].shape[1]} steps, "
                    f"got {bank.history.shape[1]}; resume with the saved value"
                )
            count = len(ROLES)
            rows = torch.tensor([names.index(name) * count + role for name in self.layers for role in range(count)])
            saved = {key: state[key].cpu()[rows] for key in ("history", "window", "non_finite")}
            bank.history.copy_(saved["history"])
            bank.largest.copy_(bank.history.amax(1))
            bank.window.copy_(saved["window"])
            bank.non_finite.copy_(saved["non_finite"])
            bank.num_updates = int(state["num_updates"])
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"fp8: state must be one that fp8 saved, got {error!r}") from error

    def metrics(self) -> dict[str, float]:
        """Return how many layers multiply in FP8."""
        return {"fp8/layers": float(len(self.layers))}

    def report(self) -> dict[str, Any]:
        """Return which layers multiplied in FP8, how often and by what, and what was left out and why."""
        layers = [self._layer_report(name, module) for name, module in self.layers.items()]
        return {
            "recipe": self.config.recipe,
            "forward_format": "e4m3",
            "gradient_format": "e5m2" if self.config.gradient_dtype == torch.float8_e5m2 else "e4m3",
            "layers": len(layers),
            "native_layers": sum(entry["native"] for entry in layers),
            **({} if self._bank is None else {"non_finite_windows": int(self._bank.non_finite.sum())}),
            "left_out": dict(self.left_out),
            "per_layer": layers,
        }

    def _layer_report(self, name: str, module: nn.Linear) -> dict[str, Any]:
        state = self.states[name]
        entry: dict[str, Any] = {
            "name": name,
            "weights": module.weight.numel(),
            # native means on hardware that multiplies FP8, and seen to be called, not only asked for
            "native": bool(state.scaled) and not state.emulated and module.weight.device.type == "cuda",
            "scaled_mm": {product: state.scaled[product] for product in PRODUCTS},
            "emulated": {product: state.emulated[product] for product in PRODUCTS},
        }
        if self._bank is not None:
            entry["amax"] = {role: self._bank.past(state.index, role, torch.device("cpu")).item() for role in ROLES}
        return entry
