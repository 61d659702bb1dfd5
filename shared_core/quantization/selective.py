"""Selective quantisation: as many layers as a largest accepted loss of quality allows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shared_core.errors import ConfigError, TrainingError
from shared_core.quantization.bit_plan import BitPlan
from shared_core.quantization.channels import is_depthwise
from shared_core.quantization.graph import LAYERS, Node, trace
from shared_core.quantization.sensitivity import round_weight, weighted_layers

Apply = Callable[[nn.Module, Mapping[str, int]], nn.Module]
"""A float model and layer → bits → a new model with these layers quantised."""

_SENSITIVE_OUTPUTS = frozenset("Softmax LogSoftmax Tanh Sigmoid GELU softmax tanh sigmoid gelu".split())  # noqa: SIM905
_PASSING = frozenset("Dropout Identity Flatten dropout flatten contiguous".split())  # noqa: SIM905


@dataclass(frozen=True)
class CurvePoint:
    """A measured model: how many layers are quantised, its quality, its bits a weight."""

    quantized: int
    quality: float
    average_bits: float


@dataclass(frozen=True)
class SelectivePlan:
    """What `plan_by_quality` found.

    Attributes:
        plan: Layers and bits.
        float_quality: Of the float model.
        quality: Of the plan.
        conversions: Changes of format from input to output.
        curves: ``"quantized"`` and ``"float"`` → points in the order in which they were measured from that start.
    """

    plan: BitPlan
    float_quality: float
    quality: float
    conversions: int
    curves: dict[str, tuple[CurvePoint, ...]]


@torch.no_grad()
def round_layers(model: nn.Module, bits: Mapping[str, int]) -> nn.Module:
    """Return a copy of `model` whose named layers have rounded weights; activations stay in float.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> _ = net.weight.data.copy_(torch.tensor([[3.0, 1.4]]))
        >>> round_layers(net, {"": 3}).weight.tolist(), net.weight[0, 1].item() < 1.5
        ([[3.0, 1.0]], True)
    """
    rounded = copy.deepcopy(model)
    for name, width in bits.items():
        module = rounded.get_submodule(name)
        weight: Tensor = module.weight  # type: ignore[assignment]
        weight.copy_(round_weight(module, weight, width))
    return rounded


def keep_high(model: nn.Module, example_inputs: Any = None) -> dict[str, str]:
    """Return layer → why it should stay in high precision, by rules of thumb.

    These are the first and the last layer, depthwise convolutions, and layers that read the output of softmax, tanh,
    sigmoid or GELU.

    Args:
        model: Searched through, not changed.
        example_inputs: As `trace` takes them; without, torch.fx traces the model.

    Raises:
        CompatibilityError: If the model cannot be traced.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> keep_high(net)
        {'0': 'the first layer', '2': "it reads the output of GELU '1'", '4': 'the last layer'}
    """
    flow = trace(model, example_inputs, where="keep_high")
    layers = [node for node in flow.nodes if isinstance(node.module, (*LAYERS, nn.Embedding))]
    kept: dict[str, str] = {}
    for node in layers:
        source = _source(node)
        if node is layers[0]:
            kept[node.label] = "the first layer"
        elif node is layers[-1]:
            kept[node.label] = "the last layer"
        elif isinstance(node.module, LAYERS) and is_depthwise(node.module):
            kept[node.label] = "a depthwise convolution"
        elif source is not None and source.kind in _SENSITIVE_OUTPUTS:
            kept[node.label] = f"it reads the output of {source}"
    return kept


def _source(node: Node) -> Node | None:
    source = node.inputs[0] if node.inputs else None
    while source is not None and source.kind in _PASSING:
        source = source.inputs[0] if source.inputs else None
    return source


def plan_by_quality(
    model: nn.Module,
    evaluate: Callable[[nn.Module], float],
    sensitivities: Mapping[str, Mapping[int, float]],
    *,
    largest_loss: float,
    bits: int = 8,
    start: Literal["quantized", "float"] = "quantized",
    keep: Mapping[str, str] | tuple[str, ...] = (),
    apply: Apply = round_layers,
) -> SelectivePlan:
    """Return which layers to quantise so that quality falls by at most `largest_loss`.

    From all quantised, the most sensitive layer goes back to float until the loss is accepted; from all float, the
    least sensitive is quantised while it is. Both are measured, each until it meets the bound, and no model twice.

    Args:
        model: In float; not changed.
        evaluate: A model → its quality, greater is better; on data that the final test does not use.
        sensitivities: Layer → bits → cost, as `layer_sensitivity` returns it; in the order of execution.
        largest_loss: E, in units of `evaluate`; at least 0.
        bits: Of a quantised layer.
        start: Which of the two gives the plan. ``"quantized"`` may keep a plan that passes through a worse one
            on the way.
        keep: Layers that stay in float, such as `keep_high` returns.
        apply: Quantises a copy of the model; by default weights alone are rounded.

    Raises:
        ConfigError: If an option breaks its rule, or nothing is left to quantise.
        MatchError: If a name is no layer of the model.
        TrainingError: If a quality is NaN.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> costs = {"0": {8: 0.1}, "1": {8: 0.2}}
        >>> found = plan_by_quality(net, lambda model: 1.0, costs, largest_loss=0.0)
        >>> found.plan.bits, found.conversions
        ({'0': 8, '1': 8}, 2)
    """
    where = "plan_by_quality"
    if not (isinstance(largest_loss, (int, float)) and 0 <= largest_loss < math.inf):
        raise ConfigError(f"{where}: largest_loss must be at least 0 and finite, got {largest_loss!r}")
    if start not in ("quantized", "float"):
        raise ConfigError(f"{where}: start must be 'quantized' or 'float', got {start!r}")
    modules = weighted_layers(model, [*sensitivities, *keep], where)
    able = [name for name in sensitivities if name not in keep]
    for name in able:
        if not math.isfinite(sensitivities[name].get(bits, math.nan)):
            raise ConfigError(f"{where}: bits must be a width at which {name!r} has a finite cost, got {bits}")
    if not able:
        raise ConfigError(f"{where}: sensitivities must name a layer that keep does not, got {list(sensitivities)}")
    order = sorted(able, key=lambda name: sensitivities[name][bits])  # a stable sort: ties in order of execution
    sizes = {name: module.weight.numel() for name, module in modules.items()}  # type: ignore[operator, union-attr]
    widths = {name: module.weight.element_size() * 8 for name, module in modules.items()}  # type: ignore[operator, union-attr]
    measured: dict[int, CurvePoint] = {}

    def plan(count: int) -> BitPlan:
        chosen = set(order[:count])
        return BitPlan({name: bits if name in chosen else widths[name] for name in modules}, sizes)

    def measure(count: int) -> CurvePoint:
        if count not in measured:
            candidate = apply(model, dict.fromkeys(order[:count], bits)) if count else model
            quality = float(evaluate(candidate))
            if math.isnan(quality):
                raise TrainingError(f"{where}: evaluate must return a number, got NaN with {count} layers quantised")
            measured[count] = CurvePoint(count, quality, plan(count).average_bits)
        return measured[count]

    float_quality = measure(0).quality
    curves: dict[str, list[CurvePoint]] = {"quantized": [], "float": []}
    accepted = {"quantized": 0, "float": 0}
    for count in range(len(order), -1, -1):
        curves["quantized"].append(measure(count))
        if float_quality - measure(count).quality <= largest_loss:
            accepted["quantized"] = count
            break
    for count in range(len(order) + 1):
        curves["float"].append(measure(count))
        if not float_quality - measure(count).quality <= largest_loss:
            break
        accepted["float"] = count
    chosen = plan(accepted[start])
    return SelectivePlan(
        chosen,
        float_quality,
        measured[accepted[start]].quality,
        chosen.conversions,
        {name: tuple(points) for name, points in curves.items()},
    )
