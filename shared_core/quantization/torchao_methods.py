"""GPTQ, AWQ and SmoothQuant of torchao: calibrated there, measured here beside plain rounding to the same grid."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.model_calls import call_model
from shared_core.module_match import match_modules
from shared_core.quantization.graph import output_tensor
from shared_core.quantization.lora_base import sqnr
from shared_core.quantization.torchao_layers import (
    WHERE,
    ObservedLayer,
    TorchaoMethodConfig,
    base_config,
    check_runs,
    group_size_of,
    plainly_rounded,
    put_weight,
    to_dense,
    to_plain_weights,
)

Progress = Callable[[int, int], None]
_KERNELS = {
    ("int8_weight", "cpu"): "torchao int8 weight-only: a product in float",
    ("int8_dynamic", "cpu"): "torchao int8 dynamic: int8 x int8 -> int32 (torch._int_mm)",
    ("int4_weight", "cpu"): "torchao int4 weight-only: aten::_weight_int4pack_mm_for_cpu",
    ("int4_weight", "cuda"): "torchao int4 weight-only: mslk",
}


@dataclass(frozen=True)
class TorchaoReport:
    """What a method of torchao's did to a model.

    Attributes:
        method: ``"gptq"``, ``"awq"`` or ``"smoothquant"``.
        scheme: What the weights and inputs became.
        layers: One entry a layer: name, codes, kernel, bytes, and signal-to-noise ratios in dB: of its weight
            (``sqnr_db``) and of its output on the calibration batches (``output_sqnr_db``), each beside that of plain
            rounding to the same kind of grid (``plain_sqnr_db``, ``plain_output_sqnr_db``). Methods that weigh errors
            by the inputs may lose on the weight and gain on the output.
        left_out: Layer → why it stays in float.
        batches: Calibration batches that were run.
        output_error: ``‖ŷ - y‖/‖y‖`` of the model's output over those batches: ``"plain"`` and ``"quantized"``.
        torchao: Its version.
    """

    method: str
    scheme: str
    layers: list[dict[str, Any]]
    left_out: dict[str, str]
    batches: int
    output_error: dict[str, float]
    torchao: str


@torch.no_grad()
def quantize_with_torchao(
    model: nn.Module,
    method: str,
    calibration: Iterable[Any],
    *,
    num_batches: int = 100,
    plain_weights: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[nn.Module, TorchaoReport]:
    """Return (copy whose linear layers hold torchao's quantised weights, report); `model` stays as it is.

    | method | scheme | runs on |
    |---|---|---|
    | ``gptq`` (Frantar et al. 2023, arXiv:2210.17323) | ``int8_weight`` by row; ``int4_weight`` in groups | CUDA |
    | ``awq`` (Lin et al. 2024, arXiv:2306.00978) | ``int4_weight`` in groups; ``int8_weight`` | CPU, CUDA |
    | ``smoothquant`` (Xiao et al. 2023, arXiv:2211.10438) | ``int8_dynamic``: int8 inputs by token | CPU, CUDA |

    On CUDA ``int4_weight`` needs the library mslk. What runs is found out by trying it on a small layer first. All
    layers are observed with float inputs, in one pass over the batches; a second pass measures. AWQ holds the inputs of
    all layers in the CPU's memory.

    Args:
        model: Trained, in float. Layers of class `nn.Linear` are quantised.
        method: As above.
        calibration: Batches of inputs, without labels: each a tensor, a tuple of arguments or a mapping of keyword
            arguments.
        num_batches: How many of them are run, at most.
        plain_weights: Bake as `to_plain_weights` does: ordinary parameters, for checkpoints that load in your model.
        progress: Called with (batches run, batches) after each batch of both passes, to show a bar.
        **options: Of `TorchaoMethodConfig`: scheme, group_size, alpha, search_steps, damping, include, skip.

    Raises:
        MissingExtraError: If torchao is not installed.
        ConfigError: If an option breaks its rule, or calibration is not what the model takes.
        CompatibilityError: If the method does not run on the model's device, this version of torchao has no such
            method, or a weight is not finite.
        MatchError: If no layer can be quantised.
        TrainingError: If a layer saw no input, or NaN or infinity.

    Example:
        >>> net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16))
        >>> quantized, report = quantize_with_torchao(net, "smoothquant", [torch.ones(4, 32)])
        >>> [entry["name"] for entry in report.layers]
        ['0', '2']
    """
    config = TorchaoMethodConfig.from_dict({"method": method, **options})
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 1:
        raise ConfigError(f"{WHERE}: num_batches must be a whole number of at least 1, got {num_batches!r}")
    quantized = copy.deepcopy(model).eval()
    layers, left_out = _select(quantized, config)
    for device, dtype in dict.fromkeys((layer.weight.device, layer.weight.dtype) for layer in layers.values()):
        check_runs(config, device, dtype)
    batches = list(itertools.islice(calibration, num_batches))
    if not batches:
        raise ConfigError(f"{WHERE}: calibration must hold batches, got none")
    tell = progress or (lambda done, total: None)
    observed = {name: ObservedLayer(layer, config) for name, layer in layers.items()}
    _observe(quantized, observed, batches, tell)
    forms: dict[str, dict[str, Tensor]] = {"plain": {}, "quantized": {}}
    for name, layer in layers.items():
        forms["plain"][name] = plainly_rounded(layer, base_config(config, layer))
        forms["quantized"][name] = _converted(name, observed.pop(name))
    ratios, errors = _measure(quantized, layers, forms, batches, tell)
    entries = []
    for name, layer in layers.items():
        exact, plain, made = layer.weight.detach(), forms["plain"][name], forms["quantized"][name]
        dense = to_dense(made)
        entries.append({
            **_entry(name, layer, config, made),
            "sqnr_db": sqnr(exact, dense),
            "plain_sqnr_db": sqnr(exact, to_dense(plain)),
            "output_sqnr_db": ratios[name]["quantized"],
            "plain_output_sqnr_db": ratios[name]["plain"],
            "largest_relative_error": ((dense - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item(),
        })  # fmt: skip
        put_weight(layer, made)
    if plain_weights:
        to_plain_weights(quantized)
    version = importlib.import_module("torchao").__version__
    return quantized, TorchaoReport(config.method, str(config.scheme), entries, left_out, len(batches), errors, version)


def _select(model: nn.Module, config: TorchaoMethodConfig) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return (name → layer to quantise, name → why a matched layer stays in float)."""
    owners = Counter(id(value) for module in model.modules() for value in module._parameters.values())
    layers, left_out = dict[str, nn.Linear](), dict[str, str]()
    for found in match_modules(model, (nn.Linear,), where=WHERE, include=config.include, skip=config.skip):
        why = _why_left(found.name, found.module, config, owners)
        if why:
            left_out[found.name] = why
        elif isinstance(found.module, nn.Linear):
            layers[found.name] = found.module
    if not layers:
        told = "; ".join(f"{name}: {reason}" for name, reason in list(left_out.items())[:3])
        raise MatchError(f"{WHERE}: must match at least one layer that can be quantised; {told}")
    for name, layer in layers.items():
        if not bool(torch.isfinite(layer.weight).all()):
            raise CompatibilityError(
                f"{WHERE}: weights of {name} must be finite, got NaN or infinity; look for the diverged step"
            )
    return layers, left_out


def _why_left(name: str, layer: nn.Module, config: TorchaoMethodConfig, owners: Counter[int]) -> str:
    if type(layer) is not nn.Linear:
        return f"{type(layer).__name__} is a class of its own, whose forward is not known"
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is computed by other code (a parametrisation, torch.nn.utils.prune)"
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        return f"its weight is {type(weight).__name__} of {weight.dtype}, not a plain one in float"
    if owners[id(weight)] > 1:
        return "its weight is tied to another module, which would not be quantised"
    if any(part.startswith("lora_") for part in name.split(".")):
        return "a LoRA adapter; merge it first"
    if config.scheme == "int4_weight":
        group = group_size_of(config, weight)
        if group is None or weight.shape[1] % group:
            return f"{weight.shape[1]} inputs do not divide into groups of {config.group_size or 32}"
        if weight.device.type == "cpu" and weight.shape[0] % 16:
            return f"the int4 kernel takes outputs in sixteens, got {weight.shape[0]}"
    return ""


def _converted(name: str, observed: ObservedLayer) -> Tensor:
    try:
        return observed.convert()
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise TrainingError(
            f"{WHERE}: Hessian of {name} must be positive definite, got one that is not; raise damping"
        ) from error


def _rows(layer: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    inputs: Tensor = args[0] if args else kwargs["input"]
    return inputs.detach().reshape(-1, layer.in_features)


@contextlib.contextmanager
def _hooked(layers: dict[str, nn.Linear], make: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    handles = [layer.register_forward_hook(make(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call(model: nn.Module, batch: Any) -> Tensor:
    return output_tensor(call_model(model, batch, f"{WHERE}: calibration"))


def _observe(model: nn.Module, observed: dict[str, ObservedLayer], batches: list[Any], tell: Progress) -> None:
    layers = {name: one.layer for name, one in observed.items()}

    def hook(name: str) -> Callable[..., None]:
        return lambda layer, args, kwargs, output: observed[name].see(_rows(layer, args, kwargs))

    with _hooked(layers, hook):
        for done, batch in enumerate(batches, 1):
            _call(model, batch)
            tell(done, 2 * len(batches))
    for wrong, what in (
        ([name for name, one in observed.items() if not one.seen], "saw none; skip them"),
        ([name for name, one in observed.items() if not one.finite], "saw NaN or infinity; look for the batch"),
    ):
        if wrong:
            raise TrainingError(
                f"{WHERE}: calibration must reach every layer with finite inputs, but {', '.join(wrong[:5])} {what}"
            )


def _measure(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    forms: dict[str, dict[str, Tensor]],
    batches: list[Any],
    tell: Progress,
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return (layer → SQNR of its output in each form, form → relative error of the model's output)."""
    original = {name: layer.weight for name, layer in layers.items()}
    # signal, then noise in each form
    sums = {name: dict.fromkeys(("signal", *forms), 0.0) for name in layers}
    whole = dict.fromkeys(("signal", *forms), 0.0)

    def hook(name: str) -> Callable[..., None]:
        def measure(layer: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            rows = _rows(layer, args, kwargs)
            if len(rows):
                exact = output.detach().reshape(-1, layer.out_features)
                _add(sums[name], exact, {form: F.linear(rows, forms[form][name], layer.bias) for form in forms})

        return measure

    for done, batch in enumerate(batches, 1):
        with _hooked(layers, hook):
            exact = _call(model, batch)
        outputs = {}
        for form, weights in forms.items():
            for name, layer in layers.items():
                put_weight(layer, weights[name])
            outputs[form] = _call(model, batch)
        for name, layer in layers.items():
            layer.weight = original[name]
        _add(whole, exact, outputs)
        tell(len(batches) + done, 2 * len(batches))
    ratios = {name: {form: _decibels(found["signal"], found[form]) for form in forms} for name, found in sums.items()}
    errors = {form: math.sqrt(whole[form] / whole["signal"]) if whole["signal"] else math.inf for form in forms}
    return ratios, errors


def _add(sums: dict[str, float], exact: Tensor, forms: dict[str, Tensor]) -> None:
    exact = exact.double()
    sums["signal"] += exact.square().sum().item()
    for form, output in forms.items():
        sums[form] += (output.double() - exact).square().sum().item()


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _entry(name: str, layer: nn.Linear, config: TorchaoMethodConfig, weight: Tensor) -> dict[str, Any]:
    parts: list[str] = weight.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    tensors = [getattr(weight, part) for part in parts]
    kind, device = str(config.scheme), layer.weight.device.type
    return {
        "name": name,
        "type": "Linear",
        "weights": layer.weight.numel(),
        "weight_bits": 4 if kind == "int4_weight" else 8,
        "group_size": group_size_of(config, layer.weight) if kind == "int4_weight" else None,
        "input": "token" if kind == "int8_dynamic" else "none",
        "kernel": _KERNELS.get((kind, device), _KERNELS[kind, "cpu"]),
        "float_bytes": layer.weight.numel() * layer.weight.element_size(),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
    }
