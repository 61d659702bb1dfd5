"""Measure the noise of quantisation in outputs, of the whole model and of each layer: signal to noise on batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import ConfigError
from shared_core.modules.calls import call_model, evaluating
from shared_core.numerics.noise import SignalToNoise
from shared_core.quantization.layer_graph import output_tensor


def _add(sums: SignalToNoise, exact: Tensor, rounded: Tensor) -> None:
    finite = torch.isfinite(exact)  # masked logits are infinite
    sums.add(exact[finite], rounded[finite])


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
            sums = found.setdefault(name, SignalToNoise())
            # The quantised layer on the exact inputs: its own noise, without that of the layers before.
            _add(sums, output_tensor(output), output_tensor(other(*args, **kwargs)))

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
                    where,
                    f"outputs must have one shape in float and quantised, got {tuple(exact.shape)} and "
                    f"{tuple(rounded.shape)}",
                    "give inputs whose outputs do not depend on small changes",
                )
            _add(whole, exact, rounded)
            if progress is not None:
                progress(done, len(batches))
    return whole.decibels, {name: sums.decibels for name, sums in found.items()}
