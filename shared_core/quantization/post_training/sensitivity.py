"""Rank layers by the cost of their quantization: curvature, change of the output distribution, or error."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared_core.config.options import checked
from shared_core.errors import ConfigError, MatchError, TrainingError
from shared_core.modules.calls import call_model, evaluating
from shared_core.modules.matching import is_transformers_conv1d
from shared_core.quantization.layer_graph import LAYERS, chosen_layers, output_tensor
from shared_core.quantization.rounding import quantize_weight
from shared_core.quantization.schemes import LayerScheme

Loss = Callable[[nn.Module, Any], Tensor]
"""The mean loss of a model on a batch, a scalar."""
Quantize = Callable[[nn.Module, Tensor, int], Tensor]
"""Layer, its weight and bits → the quantized weight."""
Metric = Literal["hessian", "kl", "rmse"]


@dataclass(frozen=True)
class TraceEstimate:
    """Hutchinson's estimate of the trace of one layer's block of the Hessian.

    Attributes:
        trace: Mean of ``vᵀHv`` over the probes.
        standard_error: Standard error of that mean: deviation of the probes / √probes.
        probes: Number of probes.
        weights: n, elements of the weight.
    """

    trace: float
    standard_error: float
    probes: int
    weights: int

    @property
    def average(self) -> float:
        """``tr(H)/n``."""
        return self.trace / self.weights


def round_weight(module: nn.Module, weight: Tensor, bits: int) -> Tensor:
    """Return a weight rounded to symmetric `bits`-bit codes, one scale per output channel (row of an embedding)."""
    return quantize_weight(module, weight, LayerScheme(weight_bits=bits))


def hessian_trace(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    probes: int = 50,
    seed: int = 0,
) -> dict[str, TraceEstimate]:
    """Return the trace of each layer's block of the Hessian of the mean loss, with its standard error.

    ``tr(H) = E[vᵀHv]`` with ``v`` of ±1 (Rademacher); one probe has signs for all layers together, so that it costs
    one Hessian-vector product per batch for any number of layers. The cross terms between layers average to zero and
    are part of the standard error. Attention uses its plain formula, because fused kernels cannot be
    differentiated twice. The model runs in evaluation mode, and its gradients and modes are restored. Processes
    do not communicate: pass all of them the same batches.

    Args:
        model: In float; every layer's own operations must be twice differentiable.
        loss: Called as ``loss(model, batch)``; returns the mean loss, a scalar.
        batches: At least one, of equal weight; held in memory.
        layers: Names of Linear, Conv or Embedding layers; None: all that have a weight of their own.
        probes: At least 2.
        seed: Seed of the signs, which are drawn on the CPU and so equal on every device and rank.

    Raises:
        ConfigError: If an option is invalid, or `batches` is empty.
        MatchError: If no layer matches, or a name is unknown.
        TrainingError: If an estimate is not finite.

    Source: Hutchinson 1990; Dong et al. 2020 (HAWQ-V2), arXiv:1911.03852, section 3.2.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> estimate = hessian_trace(net, lambda model, x: model(x).square().mean(), [torch.eye(2)])[""]
        >>> estimate.trace, estimate.standard_error, estimate.average
        (2.0, 0.0, 1.0)
    """
    where = "hessian_trace"
    probes = checked(probes, int, where, "probes", low=2)  # for a standard error
    held = _held(batches, where)
    modules = weighted_layers(model, layers, where)
    weights: list[Tensor] = [module.weight for module in modules.values()]  # type: ignore[misc]
    generator = torch.Generator().manual_seed(seed)
    # tr(H) = E[vᵀHv] for random signs v; each probe is one sample (Dong et al. 2020, HAWQ-V2,
    # arXiv:1911.03852).
    samples = torch.zeros(probes, len(weights), dtype=torch.float64)
    with _twice_differentiable(model, weights):
        for probe in range(probes):
            signs = [_signs(weight, generator) for weight in weights]
            for batch in held:
                samples[probe] += _curvatures(loss(model, batch), weights, signs, where) / len(held)
    if not bool(torch.isfinite(samples).all()):
        worst = next(name for name, column in zip(modules, samples.T, strict=True) if not torch.isfinite(column).all())
        raise TrainingError(where, f"the curvature of {worst!r} is NaN or infinity", "use float32 weights")
    error = samples.std(0) / math.sqrt(probes)
    return {
        name: TraceEstimate(samples[:, index].mean().item(), error[index].item(), probes, weights[index].numel())
        for index, name in enumerate(modules)
    }


def _curvatures(value: Tensor, weights: list[Tensor], signs: list[Tensor], where: str) -> Tensor:
    """Return ``vᵀHv`` per layer, zero if the loss does not depend on it or only linearly."""
    if value.numel() != 1 or not value.requires_grad:
        raise ConfigError(where, f"loss must return a scalar that depends on the weights, got {tuple(value.shape)}")
    zeros = torch.zeros(len(weights), dtype=torch.float64)
    # Hv as the gradient of gᵀv, without forming H: one double backward for all layers at once.
    gradients = torch.autograd.grad(value.reshape(()), weights, create_graph=True, allow_unused=True)
    pairs = [(gradient, sign) for gradient, sign in zip(gradients, signs, strict=True) if gradient is not None]
    pairs = [(gradient, sign) for gradient, sign in pairs if gradient.requires_grad]
    if not pairs:
        return zeros
    products = torch.autograd.grad(
        [gradient for gradient, _ in pairs], weights, [sign for _, sign in pairs], allow_unused=True
    )
    for index, (product, sign) in enumerate(zip(products, signs, strict=True)):
        # This layer's part of vᵀHv for all layers' v. Cross terms between layers average to 0.
        if product is not None:
            zeros[index] = (product.double() * sign.double()).sum().item()
    return zeros


def _signs(weight: Tensor, generator: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8)
    return (bits * 2 - 1).to(weight)


@contextlib.contextmanager
def _twice_differentiable(model: nn.Module, weights: list[Tensor]) -> Iterator[None]:
    frozen = [weight for weight in weights if not weight.requires_grad]
    # cuDNN's recurrent layers have no second derivative
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    cudnn = torch.backends.cudnn.flags(enabled=False) if recurrent else contextlib.nullcontext()
    try:
        for weight in frozen:
            weight.requires_grad_()
        with evaluating(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), cudnn:
            yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)


def layer_sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    metric: Metric = "hessian",
    bits: Sequence[int] = (3, 4, 8),
    loss: Loss | None = None,
    layers: Sequence[str] | None = None,
    traces: Mapping[str, TraceEstimate] | None = None,
    quantize: Quantize = round_weight,
    probes: int = 50,
    seed: int = 0,
) -> dict[str, dict[int, float]]:
    """Return layer → bits → cost of quantizing only this layer's weight to these bits.

    - ``"hessian"``: ``tr(H)/n · ‖Q(w) − w‖²``; a negative estimate of the trace counts as 0;
    - ``"kl"``: mean over the examples of ``KL(softmax y ‖ softmax ŷ)`` in nats, classes along the last axis;
    - ``"rmse"``: ``√mean (ŷ − y)²`` over all outputs.

    The model runs in evaluation mode and is unchanged afterwards.

    Args:
        model: In float.
        batches: Each a tensor, a tuple of arguments or a mapping of keyword arguments; for ``"hessian"`` anything
            that `loss` takes. At least one; held in memory.
        metric: The cost.
        bits: Bits to try, 2 to 8.
        loss: As in `hessian_trace`; for ``"hessian"`` only, unless `traces` is given.
        layers: As in `hessian_trace`.
        traces: The result of `hessian_trace`, to avoid computing it again.
        quantize: Rounds a weight; by default symmetric, per output channel.
        probes: As in `hessian_trace`.
        seed: As in `hessian_trace`.

    Raises:
        ConfigError: If an option breaks its rule.
        MatchError: If there is no layer, or not one of that name.
        TrainingError: If a cost is not finite.

    Source: Dong et al. 2020 (HAWQ-V2), arXiv:1911.03852, equation 7.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> _ = net.weight.data.copy_(torch.tensor([[3.0, 1.5]]))
        >>> layer_sensitivity(net, [torch.tensor([[0.0, 2.0]])], metric="rmse", bits=[3])
        {'': {3: 1.0}}
    """
    where = "layer_sensitivity"
    checked(metric, Literal["hessian", "kl", "rmse"], where, "metric")
    for width in bits or (0,):
        checked(width, int, where, "bits", low=2, high=8)
    held = _held(batches, where)
    modules = weighted_layers(model, layers, where)
    if metric == "hessian":
        if traces is None:
            if loss is None:
                raise ConfigError(where, "metric='hessian' needs a loss", "pass loss or traces")
            traces = hessian_trace(model, loss, held, layers=list(modules), probes=probes, seed=seed)
        missing = [name for name in modules if name not in traces]
        if missing:
            raise MatchError(where, f"traces has no entry for {missing[0]!r}", "pass layers too")
        costs = {
            # ½ tr(H)/n · ‖ŵ - w‖² without the ½, which changes no ranking. A negative estimate is noise around 0.
            name: {width: max(traces[name].average, 0.0) * _noise(module, quantize, width) for width in bits}
            for name, module in modules.items()
        }
    else:
        costs = _output_costs(model, modules, held, metric, bits, quantize)
    for name, entry in costs.items():
        if not all(math.isfinite(cost) for cost in entry.values()):
            raise TrainingError(
                where, f"costs of {name!r} must be finite, got {entry}", "look for NaN in weights or data"
            )
    return costs


@torch.no_grad()
def _noise(module: nn.Module, quantize: Quantize, bits: int) -> float:
    weight: Tensor = module.weight  # type: ignore[assignment]
    return (quantize(module, weight, bits).double() - weight.double()).square().sum().item()


@torch.no_grad()
def _output_costs(
    model: nn.Module,
    modules: dict[str, nn.Module],
    batches: Sequence[Any],
    metric: Metric,
    bits: Sequence[int],
    quantize: Quantize,
) -> dict[str, dict[int, float]]:
    costs = {name: dict.fromkeys(bits, 0.0) for name in modules}
    count = 0  # of outputs, or of distributions
    with evaluating(model):
        for batch in batches:
            exact = output_tensor(call_model(model, batch)).double()
            count += exact.numel() if metric == "rmse" else exact.numel() // max(exact.shape[-1], 1)
            for name, module in modules.items():
                for width in bits:
                    with _replaced(module, quantize, width):
                        rounded = output_tensor(call_model(model, batch)).double()
                    costs[name][width] += _distance(exact, rounded, metric)
    # rounding can make a divergence of zero slightly negative; NaN passes through both branches
    mean = (lambda cost: max(cost / count, 0.0)) if metric == "kl" else (lambda cost: math.sqrt(cost / count))
    return {name: {width: mean(cost) for width, cost in entry.items()} for name, entry in costs.items()}


def _distance(exact: Tensor, rounded: Tensor, metric: Metric) -> float:
    if metric == "rmse":
        return (rounded - exact).square().sum().item()
    # KL(p || p̂) of the distributions along the last axis.
    target = F.log_softmax(exact, -1)
    return F.kl_div(F.log_softmax(rounded, -1), target, reduction="sum", log_target=True).item()


@contextlib.contextmanager
def _replaced(module: nn.Module, quantize: Quantize, bits: int) -> Iterator[None]:
    weight: Tensor = module.weight  # type: ignore[assignment]
    held = weight.detach().clone()
    try:
        weight.copy_(quantize(module, weight, bits))
        yield
    finally:
        weight.copy_(held)


def weighted_layers(model: nn.Module, layers: Sequence[str] | None, where: str) -> dict[str, nn.Module]:
    """Return the named Linear, Conv and Embedding layers; None: all that have their own float weight."""
    able: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        known = isinstance(module, (*LAYERS, nn.Embedding)) or is_transformers_conv1d(module)
        if known and weight is not None and weight.is_floating_point() and weight.numel():
            able[name] = module
    return chosen_layers(able, layers, "Linear, Conv or Embedding layer", where)


def _held(batches: Iterable[Any], where: str) -> list[Any]:
    """Return the batches as a list, because a loader may shuffle on each pass."""
    held = list(batches)
    if not held:
        raise ConfigError(where, "batches must hold at least one batch, got none")
    return held
