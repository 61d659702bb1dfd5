"""Measure the effect of quantization: bytes per layer, noise of outputs, forward time, and loss of quality."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shared_core.config.options import checked
from shared_core.errors import ConfigError, EffError
from shared_core.hardware import milliseconds
from shared_core.modules.calls import call_model, evaluating
from shared_core.modules.weight_views import as_rows, weights_of
from shared_core.numerics.rounding import SignalToNoise
from shared_core.quantization.batch_norm import run
from shared_core.quantization.fake_quant_layers import layer_entry
from shared_core.quantization.integer.convert import convert
from shared_core.quantization.layer_graph import output_tensor
from shared_core.quantization.ranges.saved_ranges import saved_scheme
from shared_core.quantization.schemes import LayerScheme

RULES: dict[str, tuple[float, float]] = {"default": (0.005, 0.01), "recommender": (0.0001, 0.0001)}
"""Name → (largest acceptable loss, largest borderline loss), as shares of the float quality."""

_ROUNDING = 1e-9  # 1 − 0.995 is a hair above 0.005


@dataclass(frozen=True)
class Verdict:
    """The verdict on a loss of quality.

    Attributes:
        loss: Lost share of the float quality, negative if quality rose.
        judgement: ``"acceptable"``, ``"borderline"`` or ``"unacceptable"``; ``"unknown"`` if no loss can be computed.
        rule: The rule, in words.
    """

    loss: float
    judgement: Literal["acceptable", "borderline", "unacceptable", "unknown"]
    rule: str


def thresholds(accept: str | float) -> tuple[float, float]:
    """Return (largest acceptable loss, largest borderline loss) of a rule's name, or a number for both."""
    if accept in RULES:
        return RULES[str(accept)]
    try:
        bound = float(accept)
    except ValueError:
        bound = math.nan
    if not 0 <= bound <= 1:
        raise ConfigError("verdict", f"accept must be {', '.join(RULES)} or a share from 0 to 1, got {accept!r}")
    return bound, bound


def judge_loss(
    before: float, after: float, accept: str | float = "default", mode: Literal["max", "min"] = "max"
) -> Verdict:
    """Return the verdict on a loss of quality: ``(before − after)/|before|`` against the rule's bounds.

    By default a loss up to 0.5 % is acceptable, and above 1 % unacceptable. For recommenders it is unacceptable above
    0.01 %. Between the bounds it is borderline.

    Args:
        before: Quality in float.
        after: Quality of the quantized model, in the same unit.
        accept: As in `thresholds`.
        mode: Whether a larger or a smaller quality is better.

    Example:
        >>> judge_loss(0.98, 0.978).judgement, judge_loss(0.98, 0.978, "recommender").judgement
        ('acceptable', 'unacceptable')
    """
    checked(mode, Literal["max", "min"], "verdict", "mode")
    good, bad = thresholds(accept)
    rule = f"acceptable up to {good:.4%}, unacceptable above {bad:.4%} of the float quality"
    change = before - after if mode == "max" else after - before
    # A quality of 0 has no relative loss.
    if not (math.isfinite(change) and before):
        return Verdict(math.nan, "unknown", rule)
    loss = change / abs(before)
    if loss <= good + _ROUNDING:
        return Verdict(loss, "acceptable", rule)
    return Verdict(loss, "unacceptable" if loss > bad + _ROUNDING else "borderline", rule)


def code_bytes(channels: int, width: int, scheme: LayerScheme) -> int:
    """Return the bytes of one weight's codes and scales, codes packed without gaps.

    Channels and groups have float32 scales, and affine groups a zero point of one byte. MX and NVFP4 have one byte per
    block, and NVFP4 four more per tensor.
    """
    codes = -(-channels * width * scheme.weight_bits // 8)  # packed across rows
    if scheme.is_half:
        return codes
    if scheme.weight == "group":
        # int4 groups: a float32 scale each, and a zero point of one byte if affine.
        return codes + channels * (width // scheme.group_of(width)) * (5 if scheme.affine else 4)
    if scheme.weight == "fp8_block":
        return codes + 4 * -(-channels // 128) * (width // scheme.group_of(width))
    if scheme.block:
        return codes + channels * -(-width // scheme.block) + (4 if scheme.weight == "nvfp4" else 0)
    return codes + (4 if scheme.weight == "fp8_tensor" else 4 * channels)


def _coded(model: nn.Module, where: str) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (layer, weight, bytes of the weight's codes and scales) for quantized layers."""
    for name, module in model.named_modules():
        if (entry := layer_entry(module)) is not None:
            scheme = saved_scheme(entry, where)
            for weight in weights_of(module).values():
                channels, width = as_rows(module, weight.detach()).shape
                yield name, weight, code_bytes(channels, width, scheme)


def quantized_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's state dict if weights of quantized layers are stored as codes."""
    # By address: tied weights count once.
    tensors = {value.data_ptr(): value.numel() * value.element_size() for value in model.state_dict().values()}
    tensors |= {weight.data_ptr(): codes for _, weight, codes in _coded(model, "quantized_bytes")}
    return sum(tensors.values())


def layer_bytes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return quantized layer → (bytes of its weights in float, bytes of their codes and scales).

    A weight that two layers share counts in both.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, weight, codes in _coded(model, "layer_bytes"):
        before = found.get(name, (0, 0))
        found[name] = before[0] + weight.numel() * weight.element_size(), before[1] + codes
    return found


def _add(sums: SignalToNoise, exact: Tensor, rounded: Tensor) -> None:
    finite = torch.isfinite(exact)  # masked logits are infinite
    sums.add(exact[finite], rounded[finite])


@torch.no_grad()
def output_noise(
    reference: nn.Module,
    quantized: nn.Module,
    layers: Iterable[str],
    batches: list[Any],
) -> tuple[float, dict[str, float]]:
    """Return the SQNR in dB of the quantized model's output and of each layer's own output.

    Layers receive their inputs from the float model, so that their figures contain no error of other layers.

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
            # Run the quantized layer on the exact inputs to measure only its own noise.
            _add(sums, output_tensor(output), output_tensor(other(*args, **kwargs)))

        return hook

    where = "quantize: calibration"
    with evaluating(reference), evaluating(quantized):
        for batch in batches:
            with contextlib.ExitStack() as stack:
                for name in layers:
                    handle = reference.get_submodule(name).register_forward_hook(compared(name), with_kwargs=True)
                    stack.callback(handle.remove)
                exact = output_tensor(call_model(reference, batch, where))
            rounded = output_tensor(call_model(quantized, batch, where))
            if exact.shape != rounded.shape:
                raise ConfigError(
                    where,
                    f"float and quantized outputs must have the same shape, got {tuple(exact.shape)} and "
                    f"{tuple(rounded.shape)}",
                    "pass inputs for which the output's shape does not depend on small changes",
                )
            _add(whole, exact, rounded)
    return whole.decibels, {name: sums.decibels for name, sums in found.items()}


def latencies(model: nn.Module, quantized: nn.Module, example_inputs: Any, *, repeats: int = 15) -> dict[str, float]:
    """Return milliseconds per forward of the float model, in bf16, and of the quantized model's variants.

    Measured as by `hardware.milliseconds`: on a CPU in CPU time of one thread. ``int8 reference`` is `convert`'s exact
    model, which is not fast. ``torchao`` uses its kernels, if installed. A variant that cannot run is left out.
    """
    run(model, example_inputs, "latencies: example_inputs")  # raise here: below, a variant that cannot run is left out
    narrow = tree_map(_to_bf16, example_inputs)
    makers: dict[str, tuple[Callable[[], nn.Module], Any]] = {
        "float32": (lambda: model, example_inputs),
        "bfloat16": (lambda: copy.deepcopy(model).to(torch.bfloat16), narrow),
        "int8 reference": (lambda: convert(quantized), example_inputs),
    }
    if importlib.util.find_spec("torchao") is not None:
        makers["torchao"] = (lambda: convert(quantized, backend="torchao"), example_inputs)
    forms = {name: form for name, (make, inputs) in makers.items() if (form := _form(make, inputs)) is not None}
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    times = milliseconds([*forms.values()], device, repeats)
    return {name: statistics.median(found) for name, found in zip(forms, times, strict=True)}


def _form(make: Callable[[], nn.Module], inputs: Any) -> Callable[[], Any] | None:
    @torch.no_grad()
    def forward() -> Any:
        return call_model(made, inputs)

    try:
        made = make().eval()
        forward()
    except (EffError, RuntimeError, NotImplementedError, TypeError):  # this variant has no kernel here
        return None
    return forward


def _to_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value
