"""Linear layers on the grids of torchao, by plain rounding or as its GPTQ, AWQ and SmoothQuant calibrate them."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from eff_kernels.exact_sums import sums_exactly
from torch import Tensor, nn

from shared_core.config import TechniqueConfig, option
from shared_core.errors import CompatibilityError, MatchError, MissingExtraError

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
            f"{WHERE}: method must run on {device.type} in {dtype}, got {config.method} with {config.scheme}, of which "
            f"torchao {importlib.import_module('torchao').__version__} says: {_told(error)}; "
            f"what runs here: {runs or 'none of them'}"
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
    try:
        torchao = importlib.import_module("torchao")
    except ImportError as error:
        raise MissingExtraError(WHERE, "torchao", "torchao") from error
    try:
        return getattr(importlib.import_module(f"torchao.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise CompatibilityError(
            f"{WHERE}: torchao must have {module}.{name}, which {torchao.__version__} has not; install another version "
            "of the extra: pip install 'efftrain[torchao]'"
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
        raise MatchError(f"{WHERE}: model must have weights of torchao's, found none; quantise it first")
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
