"""What quantisation costs the outputs, of the whole model and of each layer: signal to noise on batches of inputs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import ConfigError
from shared_core.modules.calls import call_model
from shared_core.quantization.layer_graph import evaluating, output_tensor


class SignalToNoise:
    """Sums of squares of what is exact and of what quantisation adds to it, over many batches.

    Example:
        >>> sums = SignalToNoise()
        >>> sums.add(torch.tensor([10.0, 0.0]), torch.tensor([9.0, 0.0]))
        >>> sums.decibels
        20.0
    """

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def add(self, exact: Tensor, rounded: Tensor) -> None:
        """Count a batch; where `exact` is infinite or NaN, as masked logits are, nothing is counted."""
        finite = torch.isfinite(exact)
        exact, rounded = exact[finite].double(), rounded[finite].double()
        self._signal += exact.square().sum().item()
        self._noise += (rounded - exact).square().sum().item()

    @property
    def decibels(self) -> float:
        """``10·log10(Σy² / Σ(ŷ - y)²)``, infinite without noise."""
        if self._noise == 0:
            return math.inf
        return 10 * math.log10(self._signal / self._noise) if self._signal else -math.inf


@torch.no_grad()
def output_noise(
    reference: nn.Module,
    quantized: nn.Module,
    layers: Iterable[str],
    batches: list[Any],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, dict[str, float]]:
    """Return the SQNR in dB of the quantised model's output, and that of each layer's alone.

    A layer is given the inputs that it has in the float model, so that its figure holds no other layer's error.

    Args:
        reference: The model in float.
        quantized: The model of the same structure that quantises weights and inputs.
        layers: Names of the quantised layers; those that no batch reaches are left out of the result.
        batches: Inputs.
        progress: Called with (batches run, batches) after each.

    Raises:
        ConfigError: If a batch is not what the model takes, or two outputs differ in shape.

    Example:
        >>> exact, rounded = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        >>> _ = exact.weight.data.fill_(1.0), rounded.weight.data.fill_(0.9)
        >>> whole, layers = output_noise(exact, rounded, [""], [torch.ones(4, 1)])
        >>> round(whole, 4), round(layers[""], 4)
        (20.0, 20.0)
    """
    whole, found = SignalToNoise(), dict[str, SignalToNoise]()

    def compared(name: str) -> Callable[..., None]:
        other = quantized.get_submodule(name)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            found.setdefault(name, SignalToNoise()).add(output_tensor(output), output_tensor(other(*args, **kwargs)))

        return hook

    where = "quantize: calibration"
    with evaluating(reference), evaluating(quantized):
        for done, batch in enumerate(batches, 1):
            with contextlib.ExitStack() as stack:
                for name in layers:
                    handle = reference.get_submodule(name).register_forward_hook(compared(name), with_kwargs=True)
                    stack.callback(handle.remove)
                exact = output_tensor(call_model(reference, batch, where))
            rounded = output_tensor(call_model(quantized, batch, where))
            if exact.shape != rounded.shape:
                raise ConfigError(
                    f"{where}: outputs must have one shape in float and quantised, got {tuple(exact.shape)} and "
                    f"{tuple(rounded.shape)}; give inputs whose outputs do not depend on small changes"
                )
            whole.add(exact, rounded)
            if progress is not None:
                progress(done, len(batches))
    return whole.decibels, {name: sums.decibels for name, sums in found.items()}
