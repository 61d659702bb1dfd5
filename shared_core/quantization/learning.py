"""All that the layers of one model learn beside their weights: when it starts, its decay, its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shared_core.quantization.config import QatConfig
from shared_core.quantization.estimator_bank import EstimatorBank
from shared_core.quantization.layer_quantizer import LayerQuantizer
from shared_core.quantization.layers import weights_of
from shared_core.quantization.learned_ranges import InputRange, WeightScale
from shared_core.quantization.observers import RangeBank
from shared_core.quantization.plain_state import LEARNED
from shared_core.quantization.weight_decay import NoDecay

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
        if config.range not in ("lsq", "lsq_plus", "pact"):
            self._decay = NoDecay([])
            return
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
        # PACT's clip is meant to decay (Choi et al. 2018, section 3.1)
        names = [name for name in LEARNED if name != "input_clip"]
        self._decay = NoDecay(
            p for layer in layers.values() for name in names if (p := layer._parameters.get(name)) is not None
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

    def close(self) -> None:
        """Let go of the layers, which are about to become stock ones."""
        self._closed, self.layers = self.state_dict(), {}

    def before_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Gradients are complete: keep weight decay away."""
        self._decay.before_step(optimizers)

    def after_step(self) -> None:
        """The step was applied."""
        self._decay.after_step()

    def state_dict(self) -> dict[str, Any]:
        """Return what is learned, by layer; empty if nothing is. Readable after `close` too."""
        if self._closed is not None:
            return self._closed
        state: dict[str, Any] = {}
        for name, layer in self.layers.items():
            values = {
                key: value.detach().clone() for key in LEARNED if (value := layer._parameters.get(key)) is not None
            }
            quantizer: Any = layer.quantizer
            learned = quantizer.learned_input
            state[name] = {"parameters": values, "input": None if learned is None else learned.state_dict()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a saved state."""
        for name, layer in self.layers.items():
            for key, value in state[name]["parameters"].items():
                layer._parameters[key].copy_(value)  # type: ignore[union-attr]
            quantizer: Any = layer.quantizer
            if quantizer.learned_input is not None:
                quantizer.learned_input.load_state_dict(state[name]["input"])


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
