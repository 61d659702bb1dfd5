"""FP8 training: swaps layers, does what a recipe does once a step, discards steps with NaN, leaves stock layers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.engine.checks.loss_dtype import LossDtype
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Purpose, Technique
from shared_core.errors import CheckpointError, CompatibilityError, MatchError, TrainingError
from shared_core.fp8 import native as probe
from shared_core.fp8.config import Fp8Config
from shared_core.fp8.expert_layers import ExpertMatrix
from shared_core.fp8.layers import (
    PRODUCTS,
    Bank,
    LayerFp8,
    convert_layer,
    follow_device,
    restore,
    restore_from_torchao,
    select_layers,
    weight_of,
)
from shared_core.fp8.recipes import SharedExponentBank, round_update_, round_weights_
from shared_core.fp8.scaling import ROLES, AmaxBank, NonFiniteWatch
from shared_core.modules.matching import UNHELD
from shared_core.modules.own_forward import Undo, fast_paths_off, fast_paths_on
from shared_core.printing import counted, listed


def _parameter(module: Any) -> Any:
    """Return the parameter that holds a layer's weight, or the matrix of an expert."""
    return module.module.get_parameter(module.stack) if isinstance(module, ExpertMatrix) else weight_of(module)


class Fp8(Technique):
    """Trains with linear layers whose forward and backward products multiply FP8 values.

    Weights, optimizer state and checkpoints stay in the precision that they have; nothing is baked at the end. A step
    that met NaN or infinity in a layer, on any rank, is discarded: no weight, optimizer state or history moves.

    Args:
        config: The options, already checked.
    """

    key: ClassVar[str] = "fp8"
    reaches_frozen: ClassVar[bool] = True
    config: Fp8Config

    def __init__(self, config: Fp8Config) -> None:
        super().__init__(config)
        self.layers: dict[str, Any] = {}
        self.sixteen_bit: set[str] = set()
        self.left_out: dict[str, str] = {}
        self.states: dict[str, LayerFp8] = {}  # empty where torchao multiplies
        self.discarded = 0
        self._in_a_row = 0
        self._emulated_because: str | None = None
        self._watch = NonFiniteWatch()
        self._loss_dtype = LossDtype()
        self._bank: Bank | None = None
        self._pending: Tensor | None = None
        self._undo: Undo = []

    def attach(self, context: Context) -> Touched:
        """Swap the classes of the layers to multiply in FP8; remember nothing yet."""
        model = context.model
        context.undo.callback(self._detach)
        found = select_layers(model, self.config)
        self.left_out = found.left_out
        self.sixteen_bit = set(found.sixteen_bit)
        self._convert(model, found.narrow | found.sixteen_bit)
        return self._touched()

    def leave_unheld(self, context: Context) -> Touched:
        """Leave in their precision the layers whose weight no optimizer holds."""
        out = {name: UNHELD for name, module in self.layers.items() if _parameter(module) in context.unheld}
        if len(out) == len(self.layers):
            raise MatchError("fp8", "must find at least one layer whose weight an optimizer holds, got none")
        if out:
            self._detach()
            self.left_out |= {self._stacks().get(name, name): reason for name, reason in out.items()}
            self._convert(context.model, {name: module for name, module in self.layers.items() if name not in out})
        return self._touched()

    def _convert(self, model: nn.Module, layers: dict[str, Any]) -> None:
        """Swap the classes of these layers, each with its place in what is remembered."""
        self.layers, self.states = layers, {}
        if self.config.recipe == "delayed":
            self._bank = AmaxBank(len(self.layers), self.config.amax_history)
        elif self.config.recipe == "int16":
            self._bank = SharedExponentBank(len(self.layers))
        for index, (name, module) in enumerate(self.layers.items()):
            layer = convert_layer(
                module,
                self.config,
                index=index,
                bank=self._bank,
                watch=self._watch,
                sixteen_bit=name in self.sixteen_bit,
            )
            if layer is not None:
                self.states[name] = layer
        self._undo = fast_paths_off(
            model, tuple({type(one) for one in self.layers.values() if isinstance(one, nn.Module)})
        )

    def _detach(self) -> None:
        """Give the layers back their stock class."""
        for module in self.layers.values():
            restore(module)
            if isinstance(module, nn.Module):
                restore_from_torchao(module)
        fast_paths_on(self._undo)
        self._undo = []

    def plan(self, context: Context) -> Plan:
        """Return that the layers must stay, and the modules that stack experts."""
        linear = {name: one for name, one in self.layers.items() if not isinstance(one, ExpertMatrix)}
        stacks = {stack.rpartition(".")[0]: self.layers[name].module for name, stack in self._stacks().items()}
        return Plan(guards=linear | stacks)

    def _touched(self) -> Touched:
        """Return the layers that multiply in FP8."""
        sizes: dict[str, int] = {}
        stacks = self._stacks()
        for name, one in self.layers.items():
            if isinstance(one, ExpertMatrix):
                sizes[stacks[name]] = sizes.get(stacks[name], 0) + one.weight.numel()
            else:
                sizes[name] = sum(value.numel() for value in one.parameters())
        return Touched(sizes, dict(self.left_out), "layers")

    def _stacks(self) -> dict[str, str]:
        """Return by matrix of an expert the name of the parameter that stacks it."""
        experts = (name for name, one in self.layers.items() if isinstance(one, ExpertMatrix))
        return {name: name.rpartition("[")[0] for name in experts}

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Start to remember, and say aloud if FP8 is emulated."""
        if state is not None:
            self._restore(state)
        for name, one in self.layers.items():
            if isinstance(one, ExpertMatrix) and is_sharded(one.module.get_parameter(one.stack)):
                raise CompatibilityError(
                    "fp8",
                    f"{name} must not be sharded, got a stack of experts that is: its matrices are read one by one",
                    "skip it, or train in DDP",
                )
        device = weight_of(next(iter(self.layers.values()))).device
        if not self.states:
            for module in self.layers.values():
                follow_device(module, self.config)
        self._watch.move_(device)
        if self._bank is not None:
            self._bank.move_(device)
        for name, layer in self.states.items():
            layer.keep_codes_of(weight_of(self.layers[name]))
        self._observe(True)
        if self.config.recipe == "hfp8":
            round_weights_([local_part(weight_of(module).detach()) for module in self.layers.values()])
        self._emulated_because = self._why_emulated(device)
        if self._emulated_because is not None:
            context.services.say(
                f"efftrain: fp8: EMULATED, as {self._emulated_because}: products are computed in float32 on "
                f"{self.config.forward_format} values, so the numbers are those of such training but every step is "
                "slower, not faster"
            )

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the loss as it is; the first one tells what it was computed in."""
        self._loss_dtype.tell(task_loss, context, self.loss)
        return task_loss

    def before_step(self, context: Context) -> None:
        """Take the window of this step, and have the step discarded if it met NaN or infinity on any rank."""
        # A window already pending belongs to a skipped step and is dropped.
        self._watch.casts += 1
        if self._bank is not None:
            self._pending = self._bank.take_window()
        if self._met_non_finite():
            context.discard_step = True
            self.discarded += 1
            self._in_a_row += 1
            if self._in_a_row >= self.config.max_skips:
                raise TrainingError(
                    "fp8",
                    f"operands and gradients must be finite at least once in {self.config.max_skips} steps "
                    "(max_skips), got NaN or infinity in each of them",
                    "lower the learning rate, or look at the data",
                )

    def _met_non_finite(self) -> bool:
        if not self.states:  # torchao's operands are out of sight, but what is not finite in them shows in gradients
            for module in self.layers.values():
                if (gradient := weight_of(module).grad) is not None:
                    self._watch.see(local_part(gradient))
        if self._bank is None or self._pending is None:
            return self._watch.take()
        # a bank's window has seen every operand, and its collective was joined already; int16 counts NaN last
        bad = torch.isinf(self._pending) if isinstance(self._bank, AmaxBank) else self._pending[:, -1] > 0
        return bool(bad.any())

    def after_step(self, context: Context, applied: bool) -> None:
        """Move the histories by the pending window; `hfp8` rounds the weights to its 16-bit grid."""
        if not applied:
            self._pending = None
            return
        self._in_a_row = 0
        self._watch.casts += 1  # weights may have changed in ways that leave no trace, or their scales have
        if self._bank is not None and self._pending is not None:
            self._bank.commit(self._pending)
            self._pending = None
        if self.config.recipe == "hfp8":
            # the run's generator is on the CPU, as part of the saved state; what it draws seeds the device's own
            seed = int(torch.randint(2**62, (), generator=context.generator))
            generator = torch.Generator(weight_of(next(iter(self.layers.values()))).device).manual_seed(seed)
            round_update_([local_part(weight_of(module).detach()) for module in self.layers.values()], generator)

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Remember nothing of a validation, also of one that puts layers into training mode."""
        if purpose != "evaluate":
            yield
            return
        self._observe(False)
        try:
            yield
        finally:
            self._observe(True)

    def _forget_codes(self) -> None:
        """Have weights cast anew, and release what is kept of them."""
        for state in self.states.values():
            state.forget_codes()

    def _observe(self, observing: bool) -> None:
        self._forget_codes()
        self._watch.observing = observing
        if self._bank is not None:
            self._bank.observing = observing

    def _why_emulated(self, device: torch.device) -> str | None:
        if not self.states:
            return probe.why_not_native(self.config.recipe, self.config.gradient_dtype, device)
        # hfp8's layers in 16 bit are emulated as its others are
        return next(iter(self.states.values())).arithmetic.why_emulated(device)

    def weights_replaced(self, context: Context) -> None:
        """Forget the histories: those of other weights do not fit; the next scales are of current magnitudes."""
        self._forget_codes()
        if self._bank is not None:
            self._bank.forget()

    def finish(self, context: Context) -> None:
        """Leave stock layers; their weights are plain and need no baking."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the histories with the open window, whether the open step met NaN, and counts."""
        return {
            "layers": list(self.layers),
            "discarded": self.discarded,
            "in_a_row": self._in_a_row,
            "flag": self._watch.flag.clone(),
            "loss": self._loss_dtype.state_dict(),
            "products": {name: [dict(state.scaled), dict(state.emulated)] for name, state in self.states.items()},
            **({} if self._bank is None else {"bank": self._bank.state_dict()}),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, histories each for the layer of its name."""
        self._forget_codes()
        self.discarded, self._in_a_row = int(state["discarded"]), int(state["in_a_row"])
        self._watch.flag.copy_(state["flag"])
        self._loss_dtype.load_state_dict(state["loss"])
        for name, saved in state.get("products", {}).items():
            if name in self.states:  # products since an earlier checkpoint stay counted
                self.states[name].scaled |= Counter(saved[0])
                self.states[name].emulated |= Counter(saved[1])
        if self._bank is None or "bank" not in state:  # the recipe changed in between, which the session notes
            return
        names = list(state["layers"])
        if set(names) != set(self.layers):
            odd = ", ".join(sorted(set(names) ^ set(self.layers))[:5])
            raise CheckpointError(
                "fp8",
                f"saved histories must be of the layers that are in FP8 now, but differ in {odd}",
                "resume with the include and skip of the saved run",
            )
        count = len(ROLES)
        rows = torch.tensor([names.index(name) * count + role for name in self.layers for role in range(count)])
        self._bank.load_state_dict(
            {
                key: value.cpu()[rows] if isinstance(value, Tensor) and value.dim() else value
                for key, value in state["bank"].items()
            }
        )

    def figures(self) -> dict[str, float]:
        """Return how many layers multiply in FP8, and how many steps were discarded for NaN or infinity."""
        return {"fp8/layers": float(len(self.layers)), "fp8/discarded_steps": float(self.discarded)}

    def report(self) -> dict[str, Any]:
        """Return which layers multiplied in FP8, how often and by what, and what was left out and why."""
        layers = [self._layer_report(index, name, module) for index, (name, module) in enumerate(self.layers.items())]
        return {
            "recipe": self.config.recipe,
            "backend": "torchao" if self.config.backend == "torchao" else "efftrain",
            "forward_format": self.config.forward_format,
            "gradient_format": self.config.gradient_format,
            "layers": len(layers),
            "native_layers": sum(entry["native"] for entry in layers),
            **({} if self._emulated_because is None else {"emulated_because": self._emulated_because}),
            "discarded_steps": self.discarded,
            **self._loss_dtype.report(),
            "left_out": dict(self.left_out),
            "per_layer": layers,
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        layers, native = report["layers"], report["native_layers"]
        told = f"{counted(layers, 'layer')} multiplied in {report['forward_format']}"
        reason = report.get("emulated_because")
        how = f", {native:,} of them natively" if 0 < native < layers else ""
        if reason:
            how = f", emulated in float32 because {reason}"
        discarded = report["discarded_steps"]
        return [
            f"{told}{how}.",
            *(["Emulation is slower than float32 alone."] if reason else []),
            *([f"{counted(discarded, 'step')} overflowed and were discarded."] if discarded else []),
            *([f"Left out: {listed(report['left_out'], 3)}."] if report["left_out"] else []),
        ]

    def _layer_report(self, index: int, name: str, module: nn.Module) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": name, "weights": weight_of(module).numel()}
        if self.config.recipe == "hfp8":
            entry["sixteen_bit"] = name in self.sixteen_bit
        state = self.states.get(name)
        if state is None:  # torchao does not count; it multiplies as it was told at the start
            on_gpu = weight_of(module).device.type == "cuda"
            return entry | {"by": "torchao", "native": on_gpu and self._emulated_because is None}
        entry |= {
            # native means on hardware that multiplies FP8, and seen to be called, not only asked for
            "native": bool(state.scaled) and not state.emulated and weight_of(module).device.type == "cuda",
            "scaled_mm": {product: state.scaled[product] for product in PRODUCTS},
            "emulated": {product: state.emulated[product] for product in PRODUCTS},
        }
        if isinstance(self._bank, AmaxBank):
            entry["amax"] = {role: self._bank.past(index, role, torch.device("cpu")).item() for role in ROLES}
        return entry
