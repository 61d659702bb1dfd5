"""Bias correction: the shift that quantised weights give a layer's mean output is taken out of its bias."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError, nearest
from shared_core.model_calls import call_model
from shared_core.quantization.channels import channel_sums
from shared_core.quantization.graph import LAYERS, evaluating


@dataclass(frozen=True)
class BiasCorrectionReport:
    """What `correct_bias` did.

    Attributes:
        corrected: Layer → root mean square of the correction over its channels, in the order of execution.
        without_bias: Layers that have no bias and got none.
        new_keys: Keys of the state dict that appeared, where biases were added.
    """

    corrected: dict[str, float]
    without_bias: tuple[str, ...]
    new_keys: tuple[str, ...]


def correct_bias(
    quantized: nn.Module,
    reference: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    add_missing: bool = False,
) -> BiasCorrectionReport:
    """Add ``E[y_float − y_quantised]`` of each output channel to the biases of `quantized`, in place.

    Layers are corrected in the order of execution, and each is measured with those before it corrected already, so
    that no shift is taken out twice: one pass over the batches for the float model and one for each layer.

    Args:
        quantized: The model with quantised weights, activations in float or quantised.
        reference: The float model, with the same module names.
        batches: Calibration batches, at least one; a tensor, a tuple of arguments or a mapping of keyword arguments
            each. Read several times, so a list or a loader without shuffling, not an iterator.
        layers: Names to correct; None: every Linear, Conv and transposed Conv layer of `reference` that
            `quantized` has too, whatever its class there.
        add_missing: Give a layer without bias one; it appears in the state dict. Otherwise it is left alone.

    Returns:
        What was corrected and by how much.

    Raises:
        ConfigError: If `batches` can be read only once, or is empty.
        MatchError: If there is no layer to correct.
        CompatibilityError: If a layer is called more than once in a forward: its calls have means of their own.
        TrainingError: If a mean is not finite.

    Source: Nagel et al. 2019, arXiv:1906.04721, section 4.2 and appendix D; Banner et al. 2019, arXiv:1810.05723.

    Example:
        >>> reference, quantized = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> _ = quantized.load_state_dict(reference.state_dict()), quantized.weight.data.add_(0.5)
        >>> report = correct_bias(quantized, reference, [torch.tensor([[2.0], [4.0]])])
        >>> round((quantized.bias - reference.bias).item(), 4)
        -1.5
    """
    where = "correct_bias"
    if isinstance(batches, Iterator):
        raise ConfigError(f"{where}: batches must be readable several times, got an iterator; pass a list")
    reference_layers, quantized_layers = _pair(reference, quantized, layers)
    means = _means(reference, reference_layers, batches)
    without = [name for name in means if getattr(quantized_layers[name], "bias", None) is None]
    keys = set(quantized.state_dict())
    corrected: dict[str, float] = {}
    for name, mean in means.items():
        module = quantized_layers[name]
        if name in without and not add_missing:
            continue
        found = _means(quantized, {name: module}, batches, like=reference_layers)
        if name not in found:
            raise MatchError(f"{where}: {name!r} must be reached in the quantised model too; correct the other layers")
        correction = mean - found[name].to(mean)
        _add(module, correction)
        corrected[name] = correction.square().mean().sqrt().item()
    return BiasCorrectionReport(
        corrected,
        () if add_missing else tuple(without),
        tuple(key for key in quantized.state_dict() if key not in keys),
    )


def _pair(
    reference: nn.Module, quantized: nn.Module, layers: Sequence[str] | None
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    there = dict(quantized.named_modules())
    able = {name: module for name, module in reference.named_modules() if isinstance(module, LAYERS) and name in there}
    for name in layers or ():
        if name not in able:
            raise MatchError(
                f"correct_bias: {name!r} must be a Linear or Conv layer of both models{nearest(name, able)}"
            )
    chosen = able if layers is None else {name: able[name] for name in layers}
    if not chosen:
        raise MatchError("correct_bias: must match at least one Linear or Conv layer that both models have, got none")
    return chosen, {name: there[name] for name in chosen}


def _means(
    model: nn.Module, layers: dict[str, nn.Module], batches: Iterable[Any], like: dict[str, nn.Module] | None = None
) -> dict[str, Tensor]:
    """Return the mean of each output channel of the layers, in the order of execution."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    calls: dict[str, int] = {}
    shapes = layers if like is None else like
    num_batches = 0
    with _watch(layers) as outputs, evaluating(model), torch.no_grad():
        for batch in batches:
            call_model(model, batch)
            num_batches += 1
            for name, output in outputs:
                total, count = channel_sums(output, shapes[name])
                sums[name] = sums[name] + total if name in sums else total
                counts[name] = counts.get(name, 0) + count
                calls[name] = calls.get(name, 0) + 1
            outputs.clear()
    if not num_batches:
        raise ConfigError("correct_bias: batches must hold at least one batch, got none")
    for name, total in sums.items():
        if calls[name] > num_batches:
            raise CompatibilityError(f"correct_bias: {name!r} must be called once in a forward; leave it out of layers")
        if not bool(torch.isfinite(total).all()):
            raise TrainingError(f"correct_bias: outputs of {name!r} must be finite, got NaN or infinity in a batch")
    return {name: total / max(counts[name], 1) for name, total in sums.items()}


@contextmanager
def _watch(layers: dict[str, nn.Module]) -> Iterator[list[tuple[str, Tensor]]]:
    seen: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: seen.append((name, output)))
        for name, module in layers.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _add(module: nn.Module, correction: Tensor) -> None:
    bias: Any = getattr(module, "bias", None)
    if bias is not None:
        bias.copy_(bias.double() + correction)
        return
    weight = next((value for value in module.parameters(recurse=False) if value.is_floating_point()), None)
    dtype = torch.float32 if weight is None else weight.dtype
    module.bias = nn.Parameter(correction.to(dtype), requires_grad=weight is not None and weight.requires_grad)
