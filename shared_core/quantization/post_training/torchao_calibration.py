"""Linear layers on the grids of torchao, by plain rounding or as its GPTQ, AWQ and SmoothQuant calibrate them.

GPTQ, AWQ and SmoothQuant of torchao: calibrated there, measured here beside plain rounding to the same grid.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from eff_kernels.quantization.exact_sums import sums_exactly
from torch import Tensor, nn

from shared_core.config.options import TechniqueConfig, option
from shared_core.engine import coverage
from shared_core.engine.plan import Touched
from shared_core.errors import CompatibilityError, ConfigError, MatchError, MissingExtraError, TrainingError
from shared_core.libraries import optional
from shared_core.modules.calls import call_model, evaluated
from shared_core.modules.matching import match_modules
from shared_core.numerics.noise import decibels, sqnr
from shared_core.quantization.layer_graph import output_tensor

WHERE = "quantize: torchao"
SCHEMES: dict[str, tuple[str, ...]] = {
    "gptq": ("int8_weight", "int4_weight"),
    "awq": ("int4_weight", "int8_weight"),
    "smoothquant": ("int8_dynamic",),
}
"""Method → its schemes, the default first."""

_GROUPS = (128, 64, 32)
_OWN = {"alpha": "smoothquant", "search_steps": "awq", "damping": "gptq"}
_PROBE = 64  # a multiple of what every kernel asks for


@dataclass(frozen=True, kw_only=True)
class TorchaoMethodConfig(TechniqueConfig):
    """Options of a method of torchao's."""

    key = "torchao"

    method: Literal["gptq", "awq", "smoothquant"] = option(help="Which method.")
    scheme: Literal["int8_weight", "int4_weight", "int8_dynamic"] | None = option(
        None, help="int8_weight, int4_weight or int8_dynamic; the method's own by default."
    )
    group_size: int | None = option(
        None, help="int4_weight: weights that share a scale; by default the largest of 128, 64, 32 that divides a row."
    )
    alpha: float | None = option(None, low=0, high=1, help="smoothquant: how much moves from inputs to weights; 0.5.")
    search_steps: int | None = option(None, low=1, help="awq: exponents that are tried; 20.")
    damping: float | None = option(None, above=0, help="gptq: share of the Hessian's mean diagonal; 0.01.")
    include: tuple[str, ...] = option((), help="Name patterns, type names, first, last; empty: all.")
    skip: tuple[str, ...] = option((), help="The same; wins over include.")

    def validate(self) -> None:
        """Fill in the scheme, and refuse options of other methods."""
        known = SCHEMES[self.method]
        if self.scheme is None:
            object.__setattr__(self, "scheme", known[0])
        elif self.scheme not in known:
            raise self._error("scheme", f"must be {' or '.join(known)} with {self.method}")
        for name, method in _OWN.items():
            if getattr(self, name) is not None and method != self.method:
                raise self._error(name, f"must be left out with {self.method}: it is an option of {method}")
        if self.group_size is not None and (self.scheme != "int4_weight" or self.group_size not in _GROUPS):
            raise self._error("group_size", "must be 32, 64 or 128, and come with int4_weight")


def methods_here(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, dict[str, str]]:
    """Return method → scheme → why it does not run on a device, ``""`` where it does; found by trying.

    Args:
        device: Where a small layer is converted and run.
        dtype: Of its weights and inputs: float32, bfloat16 or float16.

    Raises:
        MissingExtraError: If torchao is not installed.

    Example:
        >>> methods_here("cpu")["smoothquant"]
        {'int8_dynamic': ''}
    """
    return {
        method: {scheme: why_not(method, scheme, torch.device(device), dtype) for scheme in schemes}
        for method, schemes in SCHEMES.items()
    }


def why_not(method: str, scheme: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a method does not run, in torchao's words; empty where a small layer goes all the way."""
    try:
        _try_out(method, scheme, device, dtype)
    except MissingExtraError:
        raise
    except Exception as error:  # whatever a prototype raises: assertions, missing libraries, missing kernels
        return _told(error)
    return ""


def check_runs(config: TorchaoMethodConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse a method that does not run on a device, and name those that do.

    Raises:
        MissingExtraError: If torchao is not installed.
        CompatibilityError: If it does not run, or this version of torchao has no such method.
    """
    try:
        _try_out(config.method, str(config.scheme), device, dtype)
    except (MissingExtraError, CompatibilityError):
        raise
    except Exception as error:
        able = {
            method: [scheme for scheme, why in found.items() if not why]
            for method, found in methods_here(device, dtype).items()
        }
        runs = ", ".join(f"{method} ({', '.join(schemes)})" for method, schemes in able.items() if schemes)
        raise CompatibilityError(
            WHERE,
            f"method must run on {device.type} in {dtype}, got {config.method} with {config.scheme}, of which torchao "
            f"{importlib.import_module('torchao').__version__} says: {_told(error)}",
            f"what runs here: {runs or 'none of them'}",
        ) from error


def _told(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _try_out(method: str, scheme: str, device: torch.device, dtype: torch.dtype) -> None:
    # no generator is drawn from: a run's numbers must not depend on a trial
    ramp = torch.arange(_PROBE * _PROBE, device=device).view(_PROBE, _PROBE)
    layer = nn.Linear(_PROBE, _PROBE, bias=False, device="meta")
    layer.weight = nn.Parameter((ramp % 37 - 18).to(dtype) / 64)
    rows = (ramp % 23 - 11).to(dtype) / 8
    with torch.no_grad():
        observed = ObservedLayer(layer, TorchaoMethodConfig.from_dict({"method": method, "scheme": scheme}))
        observed.see(rows)
        put_weight(layer, observed.convert())
        layer(rows)


def base_config(config: TorchaoMethodConfig, layer: nn.Linear) -> Any:
    """Return torchao's config of the grid, which leaves inductor's global settings alone."""
    device = layer.weight.device
    if config.scheme == "int8_weight":
        return _torchao("quantization", "Int8WeightOnlyConfig")(set_inductor_config=False)
    if config.scheme == "int8_dynamic":
        # inductor puts oneDNN's product in the place of torch._int_mm
        narrow = device.type == "cpu" and not (sums_exactly("matmul") and sums_exactly("linear"))
        make = _torchao("quantization", "Int8DynamicActivationInt8WeightConfig")
        return make(set_inductor_config=False, reduce_range=narrow)
    if config.method == "awq" and device.type == "cpu":
        make = _torchao("prototype.quantization.int4", "PrototypeInt4WeightOnlyConfig")
    else:
        make = _torchao("quantization", "Int4WeightOnlyConfig")
    return make(group_size=group_size_of(config, layer.weight), set_inductor_config=False)


def _step(config: TorchaoMethodConfig, layer: nn.Linear, convert: bool) -> Any:
    base = base_config(config, layer)
    if config.method == "gptq":
        make, step = _torchao("prototype.gptq", "GPTQConfig"), "convert" if convert else "observe"
        return make(step=step, base_config=base, percdamp=config.damping or 0.01)
    step = "convert" if convert else "prepare"
    if config.method == "awq":
        make = _torchao("prototype.awq", "AWQConfig")
        return make(base, step=step, scale_search_space_size=config.search_steps or 20)
    make = _torchao("prototype.smoothquant", "SmoothQuantConfig")
    alpha = 0.5 if config.alpha is None else config.alpha
    # the running maximum gives the same factors as torchao's default, which keeps all inputs
    return make(base, step=step, alpha=alpha, use_running_absmax=True)


def _torchao(module: str, name: str) -> Any:
    """Return a name of torchao's, or say which version lacks it: prototypes move between versions."""
    torchao = optional("torchao", "torchao", WHERE)
    try:
        return getattr(importlib.import_module(f"torchao.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise CompatibilityError(
            WHERE,
            f"torchao must have {module}.{name}, which {torchao.__version__} has not",
            "install another version of the extra: pip install 'efftrain[torchao]'",
        ) from error


def _apply(holder: nn.ModuleList, config: Any) -> None:
    quantize = _torchao("quantization", "quantize_")
    device: torch.device = holder[0].weight.device  # type: ignore[assignment]
    # torchao draws numbers for weights that it then replaces, and prints a line a layer, between those of --json
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        quantize(holder, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))


def _twin(layer: nn.Linear) -> nn.ModuleList:
    """Return a stock layer with a weight of its own, in a container that torchao can replace it in."""
    twin = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    twin.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)  # GPTQ overwrites it
    return nn.ModuleList([twin])


def plainly_rounded(layer: nn.Linear, base: Any) -> Tensor:
    """Return the weight plainly rounded to a grid of torchao's."""
    holder = _twin(layer)
    _apply(holder, base)
    weight: Any = holder[0].weight
    return weight  # type: ignore[no-any-return]


class ObservedLayer:
    """A twin that torchao observes beside a layer, whose module, hooks and names so stay as they are.

    The twin sees rows: torchao concatenates inputs as they come, which fails when batches differ in size or length.
    """

    def __init__(self, layer: nn.Linear, config: TorchaoMethodConfig) -> None:
        self.layer, self.holder, self.seen, self.finite = layer, _twin(layer), False, True
        self._convert = _step(config, layer, True)
        _apply(self.holder, _step(config, layer, False))

    def see(self, rows: Tensor) -> None:
        """Show inputs (rows, in_features) to the twin."""
        if len(rows):
            self.seen = True
            # Kept on the device of the rows: read once, when all batches are through.
            self.finite = self.finite and bool(torch.isfinite(rows).all())
            self.holder[0](rows.clone())  # AWQ keeps what it sees, and the model may write into it

    def convert(self) -> Tensor:
        """Return the weight that the method makes of what was seen."""
        _apply(self.holder, self._convert)
        weight: Any = self.holder[0].weight
        return weight.detach()  # type: ignore[no-any-return]


def to_plain_weights(model: nn.Module) -> nn.Module:
    """Return `model` with torchao's quantised weights replaced by the values that they stand for, in place.

    The weights are ordinary parameters again, which checkpoints hold and the float model loads. A scale that a method
    applies to a layer's input is multiplied into its columns. The result computes with float inputs.

    Args:
        model: As `quantize_with_torchao` returns it; changed in place.

    Raises:
        MatchError: If no layer has a weight of torchao's.
    """
    found = [module for module in model.modules() if isinstance(module, nn.Linear) and _is_torchao(module.weight)]
    if not found:
        raise MatchError(WHERE, "model must have weights of torchao's, found none", "quantise it first")
    for module in found:
        module.weight = nn.Parameter(to_dense(module.weight).to(module.weight.dtype))
    return model


@torch.no_grad()
def to_dense(weight: Tensor) -> Tensor:
    """Return the values (outputs, inputs) that a quantised weight of torchao's multiplies a layer's input by."""
    scale: Tensor | None = getattr(weight, "act_pre_scale", None)
    if "dequantize" in vars(type(weight)):
        dense: Tensor = weight.dequantize(torch.float32)  # type: ignore[call-arg]
        return dense if scale is None else dense * scale.float()
    # torchao's int4 tensors have no `dequantize`, but their kernel's products with rows of the identity are exact
    width = weight.shape[1]
    rows = []
    for start in range(0, width, 1024):
        chosen = torch.arange(start, min(start + 1024, width), device=weight.device)
        rows.append(F.linear(F.one_hot(chosen, width).to(weight.dtype), weight))
    return torch.cat(rows).t().float().contiguous()


def _is_torchao(weight: Tensor) -> bool:
    loaded = sys.modules.get("torchao.utils")
    return loaded is not None and isinstance(weight, loaded.TorchAOBaseTensor)


def group_size_of(config: TorchaoMethodConfig, weight: Tensor) -> int | None:
    """Return how many weights of a row share a scale in int4 schemes; None where no size divides a row."""
    return config.group_size or next((size for size in _GROUPS if weight.shape[1] % size == 0), None)


def put_weight(layer: nn.Linear, weight: Tensor) -> None:
    """Give a layer a quantised weight."""
    layer.weight = nn.Parameter(weight, requires_grad=False)


Progress = Callable[[int, int], None]
# What multiplies with each kind of weight on each device, for the report.
_KERNELS = {
    ("int8_weight", "cpu"): "torchao int8 weight-only: a product in float",
    ("int8_dynamic", "cpu"): "torchao int8 dynamic: int8 x int8 -> int32 (torch._int_mm)",
    ("int4_weight", "cpu"): "torchao int4 weight-only: aten::_weight_int4pack_mm_for_cpu",
    ("int4_weight", "cuda"): "torchao int4 weight-only: mslk",
}


@dataclass(frozen=True)
class TorchaoReport:
    """The result of one of torchao's methods on a model.

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
    allow_partial: bool = False,
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
        allow_partial: Whether layers with less than half of the weights that multiply activations will do.
        progress: Called with (batches run, batches) after each batch of both passes, to show a bar.
        **options: Of `TorchaoMethodConfig`: scheme, group_size, alpha, search_steps, damping, include, skip.

    Raises:
        MissingExtraError: If torchao is not installed.
        ConfigError: If an option breaks its rule, or calibration is not what the model takes.
        CompatibilityError: If the method does not run on the model's device, this version of torchao has no such
            method, or a weight is not finite.
        MatchError: If no layer can be quantised, or too few (`allow_partial`).
        TrainingError: If a layer saw no input, or NaN or infinity.

    Example:
        >>> net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16))
        >>> quantized, report = quantize_with_torchao(net, "smoothquant", [torch.ones(4, 32)])
        >>> [entry["name"] for entry in report.layers]
        ['0', '2']
    """
    config = TorchaoMethodConfig.from_dict({"method": method, **options})
    if isinstance(num_batches, bool) or not isinstance(num_batches, int) or num_batches < 1:
        raise ConfigError(WHERE, f"num_batches must be a whole number of at least 1, got {num_batches!r}")
    quantized = copy.deepcopy(model).eval()
    layers, left_out = _select(quantized, config)
    coverage.after_training(
        coverage.count(quantized), Touched.modules(layers, left_out), config, quantized, where=WHERE,
        allow_partial=allow_partial,
    )  # fmt: skip
    for device, dtype in dict.fromkeys((layer.weight.device, layer.weight.dtype) for layer in layers.values()):
        check_runs(config, device, dtype)
    batches = list(itertools.islice(calibration, num_batches))
    if not batches:
        raise ConfigError(WHERE, "calibration must hold batches, got none")
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
        raise MatchError(WHERE, "must match at least one layer that can be quantised", told)
    for name, layer in layers.items():
        if not bool(torch.isfinite(layer.weight).all()):
            raise CompatibilityError(
                WHERE, f"weights of {name} must be finite, got NaN or infinity", "look for the diverged step"
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
            WHERE, f"Hessian of {name} must be positive definite, got one that is not", "raise damping"
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
    with evaluated(model):
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
                WHERE, f"calibration must reach every layer with finite inputs, but {', '.join(wrong[:5])} {what}"
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
            # Each form on the same inputs: noise of the weight alone, not of the layers before.
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
            # The whole model with all layers in one form.
            outputs[form] = _call(model, batch)
        for name, layer in layers.items():
            layer.weight = original[name]
        _add(whole, exact, outputs)
        tell(len(batches) + done, 2 * len(batches))
    ratios = {name: {form: decibels(found["signal"], found[form]) for form in forms} for name, found in sums.items()}
    errors = {form: math.sqrt(whole[form] / whole["signal"]) if whole["signal"] else math.inf for form in forms}
    return ratios, errors


def _add(sums: dict[str, float], exact: Tensor, forms: dict[str, Tensor]) -> None:
    exact = exact.double()
    sums["signal"] += exact.square().sum().item()
    for form, output in forms.items():
        sums[form] += (output.double() - exact).square().sum().item()


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
