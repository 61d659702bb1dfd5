"""FP8 training: swap layers, update the recipe once per step, discard steps with NaN, restore stock layers."""

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
    matrices_of,
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


def _parameters(module: Any) -> list[Any]:
    """Return the parameters that hold a layer's weights, or the matrix of an expert."""
    return [module.module.get_parameter(module.stack)] if isinstance(module, ExpertMatrix) else matrices_of(module)


class Fp8(Technique):
    """Train with linear layers whose forward and backward products multiply FP8 values.

    Weights, optimizer state and checkpoints keep their precision, and nothing is baked at the end. A step
    with NaN or infinity in a layer, on any rank, is discarded: weights, optimizer state and histories do not change.

    Args:
        config: The options, already checked.
    """

    reaches_frozen: ClassVar[bool] = True
    config: Fp8Config

    def __init__(self, config: Fp8Config) -> None:
        super().__init__(config)
        self.layers: dict[str, Any] = {}
        self.sixteen_bit: set[str] = set()
        self.left_out: dict[str, str] = {}
        self.states: dict[str, LayerFp8] = {}  # empty with torchao
        self.discarded = 0
        self._in_a_row = 0
        self._emulated_because: str | None = None
        self._watch = NonFiniteWatch()
        self._loss_dtype = LossDtype()
        self._bank: Bank | None = None
        self._pending: Tensor | None = None
        self._undo: Undo = []

    def attach(self, context: Context) -> Touched:
        """Swap the classes of the layers to multiply in FP8. Nothing is recorded yet."""
        model = context.model
        context.undo.callback(self._detach)
        found = select_layers(model, self.config)
        self.left_out = found.left_out
        self.sixteen_bit = set(found.sixteen_bit)
        self._convert(model, found.narrow | found.sixteen_bit)
        return self._touched()

    def leave_unheld(self, context: Context) -> Touched:
        """Restore the layers whose weight no optimizer holds."""
        out = {name: UNHELD for name, module in self.layers.items() if context.unheld.keys() >= {*_parameters(module)}}
        if len(out) == len(self.layers):
            raise MatchError("fp8", "no optimizer holds the weight of any FP8 layer")
        if out:
            self._detach()
            self.left_out |= {self._stacks().get(name, name): reason for name, reason in out.items()}
            self._convert(context.model, {name: module for name, module in self.layers.items() if name not in out})
        return self._touched()

    def _convert(self, model: nn.Module, layers: dict[str, Any]) -> None:
        """Swap the classes of these layers and assign their rows in the bank."""
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
        """Restore the stock classes of the layers."""
        for module in self.layers.values():
            restore(module)
            if isinstance(module, nn.Module):
                restore_from_torchao(module)
        fast_paths_on(self._undo)

    def plan(self, context: Context) -> Plan:
        """Return a plan that guards the layers and the modules that stack experts."""
        linear = {name: one for name, one in self.layers.items() if not isinstance(one, ExpertMatrix)}
        stacks = {stack.rpartition(".")[0]: self.layers[name].module for name, stack in self._stacks().items()}
        return Plan(guards=linear | stacks, acts_on_gradients=False)

    def _touched(self) -> Touched:
        """Return the layers that multiply in FP8."""
        sizes: dict[str, int] = {}
        stacks = self._stacks()
        for name, one in self.layers.items():
            if isinstance(one, ExpertMatrix):
                sizes[stacks[name]] = sizes.get(stacks[name], 0) + one.weight.numel()
            else:
                sizes[name] = sum(value.numel() for value in one.parameters(recurse=False))
        return Touched(sizes, dict(self.left_out), "layers")

    def _matrices(self) -> list[Tensor]:
        """Return the weights, without gradients; of sharded ones the local part."""
        return [local_part(weight.detach()) for module in self.layers.values() for weight in matrices_of(module)]

    def _stacks(self) -> dict[str, str]:
        """Return matrix of an expert → name of the parameter that stacks it."""
        experts = (name for name, one in self.layers.items() if isinstance(one, ExpertMatrix))
        return {name: name.rpartition("[")[0] for name in experts}

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Start recording, and warn if FP8 is emulated."""
        if state is not None:
            self._restore(state)
        for name, one in self.layers.items():
            if isinstance(one, ExpertMatrix) and is_sharded(one.module.get_parameter(one.stack)):
                raise CompatibilityError(
                    "fp8",
                    f"{name} is a sharded stack of experts, which is not supported: its matrices are read one by one",
                    "skip it, or use DDP",
                )
        device = weight_of(next(iter(self.layers.values()))).device
        if not self.states:
            for module in self.layers.values():
                follow_device(module, self.config)
        self._watch.move_(device)
        if self._bank is not None:
            self._bank.move_(device)
        for name, layer in self.states.items():
            matrices = matrices_of(self.layers[name])
            if len(matrices) == 1:  # of several, each product would replace the codes of the one before
                layer.keep_codes_of(matrices[0])
        self._observe(True)
        if self.config.recipe == "hfp8":
            round_weights_(self._matrices())
        self._emulated_because = self._why_emulated(device)
        if self._emulated_because is not None:
            context.services.say(
                f"efftrain: fp8: EMULATED, as {self._emulated_because}: products are computed in float32 on "
                f"{self.config.forward_format} values, so results are the same, but every step is "
                "slower, not faster"
            )

    def loss(self, task_loss: Tensor, context: Context) -> Tensor:
        """Return the loss unchanged. The first one shows in which type it was computed."""
        self._loss_dtype.warn(task_loss, context, self.loss)
        return task_loss

    def before_step(self, context: Context) -> None:
        """Take the window of this step, and discard the step if any rank had NaN or infinity."""
        # A window still pending belongs to a skipped step and is dropped.
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
                    f"operands or gradients had NaN or infinity in {self.config.max_skips} steps in a row (max_skips)",
                    "lower the learning rate, or check the data",
                )

    def _met_non_finite(self) -> bool:
        if not self.states:  # torchao's operands are not visible, but non-finite values appear in gradients
            for module in self.layers.values():
                if (gradient := weight_of(module).grad) is not None:
                    self._watch.see(local_part(gradient))
        if self._bank is None or self._pending is None:
            return self._watch.take()
        # a bank's window has seen every operand and is already joined over ranks; int16 counts NaN last
        bad = torch.isinf(self._pending) if isinstance(self._bank, AmaxBank) else self._pending[:, -1] > 0
        return bool(bad.any())

    def after_step(self, context: Context, applied: bool) -> None:
        """Update the histories with the pending window. `hfp8` rounds the weights to its 16-bit grid."""
        if not applied:
            self._pending = None
            return
        self._in_a_row = 0
        self._watch.casts += 1  # weights may have changed unnoticed, or their scales have
        if self._bank is not None and self._pending is not None:
            self._bank.commit(self._pending)
            self._pending = None
        if self.config.recipe == "hfp8":
            # the run's generator is on the CPU, as part of the saved state, and seeds that of the device
            seed = int(torch.randint(2**62, (), generator=context.generator))
            generator = torch.Generator(weight_of(next(iter(self.layers.values()))).device).manual_seed(seed)
            round_update_(self._matrices(), generator)

    @contextlib.contextmanager
    def swapped(self, context: Context, purpose: Purpose) -> Iterator[None]:
        """Record nothing during validation, even if it puts layers into training mode."""
        if purpose != "evaluate":
            yield
            return
        self._observe(False)
        try:
            yield
        finally:
            self._observe(True)

    def _forget_codes(self) -> None:
        """Release cached codes, so that weights are cast again."""
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
        # hfp8's 16-bit layers are emulated like its others
        return next(iter(self.states.values())).arithmetic.why_emulated(device)

    def weights_replaced(self, context: Context) -> None:
        """Forget the histories of the old weights. The next scales come from current magnitudes."""
        self._forget_codes()
        if self._bank is not None:
            self._bank.forget()

    def finish(self, context: Context) -> None:
        """Restore stock layers. Their weights are plain and need no baking."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return the histories with the current window, the NaN flag of the current step, and counts."""
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
        """Restore a saved state, with histories by layer name."""
        self._forget_codes()
        self.discarded, self._in_a_row = int(state["discarded"]), int(state["in_a_row"])
        self._watch.flag.copy_(state["flag"])
        self._loss_dtype.load_state_dict(state["loss"])
        for name, saved in state.get("products", {}).items():
            if name in self.states:  # keep the counts of products since an earlier checkpoint
                self.states[name].scaled |= Counter(saved[0])
                self.states[name].emulated |= Counter(saved[1])
        if self._bank is None or "bank" not in state:  # the recipe changed, which the session reports
            return
        names = list(state["layers"])
        if set(names) != set(self.layers):
            odd = ", ".join(sorted(set(names) ^ set(self.layers))[:5])
            raise CheckpointError(
                "fp8",
                f"saved histories and the current FP8 layers differ in {odd}",
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
        """Return the numbers of FP8 layers and of steps discarded for NaN or infinity."""
        return {"fp8/layers": float(len(self.layers)), "fp8/discarded_steps": float(self.discarded)}

    def report(self) -> dict[str, Any]:
        """Return the FP8 layers, how often and by what they multiplied, and the layers left out with reasons."""
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
        text = f"{counted(layers, 'layer')} multiplied in {report['forward_format']}"
        reason = report.get("emulated_because")
        how = f", {native:,} of them natively" if 0 < native < layers else ""
        if reason:
            how = f", emulated in float32 because {reason}"
        discarded = report["discarded_steps"]
        return [
            f"{text}{how}.",
            *(["Emulation is slower than float32 alone."] if reason else []),
            *([f"{counted(discarded, 'step')} overflowed and were discarded."] if discarded else []),
            *([f"Left out: {listed(report['left_out'], 3)}."] if report["left_out"] else []),
        ]

    def _layer_report(self, index: int, name: str, module: nn.Module) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": name, "weights": sum(weight.numel() for weight in matrices_of(module))}
        if self.config.recipe == "hfp8":
            entry["sixteen_bit"] = name in self.sixteen_bit
        state = self.states.get(name)
        if state is None:  # torchao does not count; its backend is set at the start
            on_gpu = weight_of(module).device.type == "cuda"
            return entry | {"by": "torchao", "native": on_gpu and self._emulated_because is None}
        entry |= {
            # native means run on FP8 hardware: counted calls, not just requested
            "native": bool(state.scaled) and not state.emulated and weight_of(module).device.type == "cuda",
            "scaled_mm": {product: state.scaled[product] for product in PRODUCTS},
            "emulated": {product: state.emulated[product] for product in PRODUCTS},
        }
        if isinstance(self._bank, AmaxBank):
            entry["amax"] = {role: self._bank.past(index, role, torch.device("cpu")).item() for role in ROLES}
        return entry
