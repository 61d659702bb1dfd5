"""Keeps weight decay away from learned scales, whatever group of the optimizer they are in.

All that the layers of one model learn beside their weights: when it starts, its decay, its state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import fill_, is_sharded, whole
from shared_core.errors import CompatibilityError
from shared_core.modules.weight_views import weights_of
from shared_core.quantization.config import QatConfig
from shared_core.quantization.layers.layer_quantizer import LayerQuantizer
from shared_core.quantization.layers.plain_state import LEARNED
from shared_core.quantization.ranges.learned_scales import SMALLEST_MAGNITUDE, InputRange, WeightScale, learned_value
from shared_core.quantization.ranges.observers import EstimatorBank, RangeBank

# they subtract lr·decay·p from the parameter; all others add decay·p to its gradient
_DECOUPLED = ("AdamW", "Lion", "Adafactor", "Muon")


def _is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> bool:
    flag = group.get("decoupled_weight_decay")
    return bool(flag) if flag is not None else any(name in type(optimizer).__name__ for name in _DECOUPLED)


class NoDecay:
    """Takes back, step by step, what weight decay does to some parameters.

    A group of their own would need no such thing, but learning-rate schedulers and saved optimizer states count the
    groups that the user's code made.

    Args:
        parameters: Those that take no decay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._before: list[tuple[nn.Parameter, Tensor, float]] = []

    @torch.no_grad()
    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Subtract a coupled decay from the gradient; remember the values that a decoupled one will shrink."""
        self._before = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                decay = float(group.get("weight_decay") or 0.0)
                if not decay:
                    continue
                for parameter in group["params"]:
                    if id(parameter) not in self._ids or parameter.grad is None:
                        continue
                    if _is_decoupled(optimizer, group):
                        self._before.append((parameter, parameter.detach().clone(), float(group["lr"]) * decay))
                    else:
                        parameter.grad.add_(parameter, alpha=-decay)

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore what a decoupled decay took."""
        for parameter, before, share in self._before:
            parameter.add_(before, alpha=share)
        self._before = []


_STOCK_WEIGHTS = (nn.Embedding, nn.RNNBase)


class Learned:
    """Registers what the config's range learns on swapped layers, and drives it; nothing with an observed range.

    Embeddings and recurrent layers keep the scales that their weights give: of the one a step sees few rows, of the
    other a library sees all weights at once. So do layers that share a weight: it is baked once, for all of them.

    Args:
        config: The options.
        layers: Name → fake-quantising layer.
    """

    def __init__(self, config: QatConfig, layers: Mapping[str, nn.Module]) -> None:
        self.layers: dict[str, nn.Module] = {}
        self._closed: dict[str, Any] | None = None
        self._decay = NoDecay([])
        self._positive: list[nn.Parameter] = []
        if config.range not in ("lsq", "lsq_plus", "pact"):
            return
        if any(map(is_sharded, (weight for layer in layers.values() for weight in weights_of(layer).values()))):
            raise CompatibilityError(
                f"qat: range must be an observed one, such as ema, for a model that is sharded already, got "
                f"{config.range}: FSDP2 takes in no parameters afterwards, and learned scales are such; observe "
                "ranges, or use strategy eff_fsdp or the Hugging Face Trainer, which shard later, or DDP"
            )
        rounded = config.gate == "rounded"
        owners = Counter(id(weight) for layer in layers.values() for weight in weights_of(layer).values())
        for name, layer in layers.items():
            quantizer: Any = layer.quantizer
            scheme = quantizer.scheme
            if quantizer.index is not None:
                quantizer.learned_input = InputRange(layer, config.range, scheme, rounded)
            alone = all(owners[id(weight)] == 1 for weight in weights_of(layer).values())
            learnable = scheme.weight == "channel" and alone and not isinstance(layer, _STOCK_WEIGHTS)
            if config.range != "pact" and learnable:
                quantizer.learned_weight = WeightScale(layer, scheme, config.range == "lsq_plus", rounded)
            self.layers[name] = layer

    def begin(self) -> None:
        """The optimizer exists, and FSDP2 has put its own parameters in the place of those that were registered."""
        self._refuse_other_dtypes()
        # PACT's clip is meant to decay (Choi et al. 2018, section 3.1)
        self._decay = NoDecay(
            value for layer in self.layers.values() for name, value in _parameters(layer) if name != "input_clip"
        )
        self._positive = [
            value for layer in self.layers.values() for name, value in _parameters(layer) if name != "input_offset"
        ]

    def _refuse_other_dtypes(self) -> None:
        for name, layer in self.layers.items():
            learned = {value.dtype for _, value in _parameters(layer) if is_sharded(value)}
            other = {weight.dtype for weight in weights_of(layer).values() if weight.requires_grad} - learned
            if learned and other:
                raise CompatibilityError(
                    f"qat: range must be an observed one, such as ema, for 16-bit weights under FSDP2, got {name} in "
                    f"{other.pop()} with learned scales in {learned.pop()}: FSDP2 takes parameters of one dtype "
                    "together; observe ranges, or load the model in float32 and let FSDP2 compute in 16 bits"
                )

    def _quantizers(self) -> Iterable[tuple[nn.Module, LayerQuantizer]]:
        return ((layer, layer.quantizer) for layer in self.layers.values())  # type: ignore[misc]

    def start_weights(self) -> None:
        """Set the scales of weights from the weights that there are: fake quantisation starts."""
        for layer, quantizer in self._quantizers():
            if quantizer.learned_weight is not None:
                quantizer.learned_weight.start(layer)

    def start_inputs(self, bank: RangeBank) -> None:
        """Set what layers learn of their inputs, where quantisation is on and a range has been seen."""
        if not bank.quantizing:
            return
        for layer, quantizer in self._quantizers():
            learned = quantizer.learned_input
            if learned is not None and not learned.started and quantizer.has_range and quantizer.index is not None:
                minimum, maximum = bank.ranges[quantizer.index].tolist()
                learned.start(layer, minimum, maximum, bank.mean[quantizer.index].item())

    def restart(self, bank: RangeBank) -> None:
        """Start anew: the weights came from elsewhere."""
        for _, quantizer in self._quantizers():
            if quantizer.learned_input is not None:
                quantizer.learned_input.started = False
        if bank.quantizing:
            self.start_weights()
        self.start_inputs(bank)

    def gather(self) -> None:
        """Hold all that is sharded whole until `release`; every process must call it."""
        for layer in self.layers.values():
            layer.gathered = {key: whole(value.detach()) for key, value in _parameters(layer) if is_sharded(value)}  # type: ignore[assignment]

    def release(self) -> None:
        """Undo `gather`."""
        for layer in self.layers.values():
            vars(layer).pop("gathered", None)

    def close(self) -> None:
        """Release the layers, which are about to become stock ones."""
        kept = [
            (key in vars(layer).get("gathered", {})) or not is_sharded(value)
            for layer in self.layers.values()
            for key, value in _parameters(layer)
        ]
        self._closed = self.state_dict() if all(kept) else {}  # cut short: the other processes may be gone
        self.release()
        self.layers = {}

    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Gradients are complete: keep weight decay away."""
        if self.layers:
            self._decay.before_step(optimizers)

    @torch.no_grad()
    def after_step(self) -> None:
        """The step was applied: keep positive what must be."""
        if self.layers:
            self._decay.after_step()
            torch._foreach_clamp_min_([local_part(value) for value in self._positive], SMALLEST_MAGNITUDE)

    def state_dict(self) -> dict[str, Any]:
        """Return what is learned, by layer; empty if nothing is. Readable after `close` too."""
        if self._closed is not None:
            return self._closed
        state: dict[str, Any] = {}
        for name, layer in self.layers.items():
            values = {key: learned_value(layer, key).detach().clone() for key, _ in _parameters(layer)}
            quantizer: Any = layer.quantizer
            learned = quantizer.learned_input
            state[name] = {"parameters": values, "input": None if learned is None else learned.state_dict()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        for name, layer in self.layers.items():
            for key, value in state[name]["parameters"].items():
                fill_(cast("Tensor", layer._parameters[key]), value)
            quantizer: Any = layer.quantizer
            if quantizer.learned_input is not None:
                quantizer.learned_input.load_state_dict(state[name]["input"])


def _parameters(layer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, value) for name in LEARNED if (value := layer._parameters.get(name)) is not None]


def make_bank(config: QatConfig, codes: Sequence[tuple[int, int]]) -> RangeBank:
    """Return the bank of ranges that a config asks for, for layers with these codes."""
    rounded = config.gate == "rounded"
    bank: RangeBank
    if config.range in ("percentile", "kl", "mse"):
        bank = EstimatorBank(config.range, codes, percentile=config.percentile, rounded_gate=rounded)
    else:
        constant = None if config.range == "minmax" else config.ema_constant
        means = config.range in ("lsq", "lsq_plus", "pact")
        bank = RangeBank(codes, ema_constant=constant, rounded_gate=rounded, means=means)
    return bank
