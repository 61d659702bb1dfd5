"""Choose bits per layer: the plan and its file, the cheapest plan under a budget, and selective quantization.

Selective quantization quantizes as many layers as the accepted loss of quality allows.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.errors import ConfigError, MatchError, TrainingError, nearest
from shared_core.files.atomic import atomic_write
from shared_core.files.json_yaml import parse_yaml
from shared_core.modules.matching import is_transformers_conv1d
from shared_core.modules.weight_views import RECURRENT, is_depthwise
from shared_core.quantization.layer_graph import LAYERS, Node, trace
from shared_core.quantization.post_training.sensitivity import round_weight, weighted_layers

_FORMAT = "efftrain bit plan 1"
_LARGEST_CODE = 8  # bits; wider layers stay in float


@dataclass(frozen=True)
class BitPlan:
    """Bits of each layer's weight.

    Attributes:
        bits: Layer → bits of a code, 2 to 8, or 16, 32 or 64 for float. In the order of execution.
        sizes: Layer → number of weights.
        cost: Sum of the sensitivities by which the plan was chosen, or None.

    Example:
        >>> plan = BitPlan({"0": 8, "2": 32}, {"0": 100, "2": 100})
        >>> plan.average_bits, plan.conversions, plan.qat_options()
        (20.0, 2, {'scheme': 'int8', 'overrides': {'0': {'weight_bits': 8}}, 'skip': ['2']})
    """

    bits: dict[str, int]
    sizes: dict[str, int]
    cost: float | None = None

    def __post_init__(self) -> None:
        if not self.bits or self.bits.keys() != self.sizes.keys():
            raise ConfigError("bit_plan", "bits and sizes must name the same layers, at least one layer")
        for name, width in self.bits.items():
            if isinstance(width, bool) or not isinstance(width, int) or not (2 <= width <= 8 or width in (16, 32, 64)):
                raise ConfigError(
                    "bit_plan", f"bits of {name!r} must be 2 to 8, or 16, 32 or 64 for float, got {width!r}"
                )
            checked(self.sizes[name], int, "bit_plan", f"size of {name!r}", low=1)

    @property
    def average_bits(self) -> float:
        """Mean bits per weight over all layers of the plan."""
        return sum(self.bits[name] * size for name, size in self.sizes.items()) / sum(self.sizes.values())

    @property
    def quantized(self) -> tuple[str, ...]:
        """Layers whose weights are codes."""
        return tuple(name for name, width in self.bits.items() if width <= _LARGEST_CODE)

    @property
    def conversions(self) -> int:
        """Number of format changes from the float input through the layers in order to the float output."""
        # Input and output of the chain are float (0), so a change of format at either end counts too.
        formats = [0, *(width if width <= _LARGEST_CODE else 0 for width in self.bits.values()), 0]
        return sum(first != second for first, second in itertools.pairwise(formats))

    def qat_options(self, scheme: str = "int8") -> dict[str, Any]:
        """Return options of `QatConfig` that train to this plan: one override per layer, float layers skipped.

        Args:
            scheme: ``"int8"``, or another scheme with ``weight_bits``.
        """
        return {
            "scheme": scheme,
            "overrides": {name: {"weight_bits": self.bits[name]} for name in self.quantized},
            "skip": [name for name, width in self.bits.items() if width > _LARGEST_CODE],
        }

    def to_yaml(self, path: str | Path | None = None, *, scheme: str = "int8") -> str:
        """Return the plan as YAML, and write it to `path` if given.

        Its ``qat`` section has the form of a recipe, so you can copy it into one.

        Raises:
            CheckpointError: If `path` cannot be written.
        """
        content = {
            "format": _FORMAT,
            "average_bits": self.average_bits,
            "conversions": self.conversions,
            "cost": self.cost,
            "layers": {name: {"bits": width, "weights": self.sizes[name]} for name, width in self.bits.items()},
            "qat": self.qat_options(scheme),
        }
        text: str = yaml.safe_dump(content, sort_keys=False)
        if path is not None:
            with atomic_write(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_yaml(cls, source: str | Path) -> BitPlan:
        """Return the plan in a YAML file, or in YAML text (recognized by a line end).

        Raises:
            ConfigError: If there is no such file, or it holds no plan.

        Example:
            >>> plan = BitPlan({"a": 4}, {"a": 10}, cost=0.5)
            >>> BitPlan.from_yaml(plan.to_yaml()) == plan
            True
        """
        where, content = _read(source)
        layers = content.get("layers")
        if not isinstance(layers, dict) or not all(
            isinstance(name, str) and isinstance(entry, dict) and {"bits", "weights"} <= entry.keys()
            for name, entry in layers.items()
        ):
            raise ConfigError(where, f"layers must map names to bits and weights, got {layers!r:.80}")
        cost = content.get("cost")
        return cls(
            {name: entry["bits"] for name, entry in layers.items()},
            {name: entry["weights"] for name, entry in layers.items()},
            None if cost is None else float(cost),
        )

    @classmethod
    def options_from_yaml(cls, source: str | Path) -> dict[str, Any]:
        """Return `qat_options` of the plan in a YAML file or text, for the scheme with which it was saved.

        Raises:
            ConfigError: If there is no such file, or it holds no plan.

        Example:
            >>> plan = BitPlan({"a": 4}, {"a": 10})
            >>> BitPlan.options_from_yaml(plan.to_yaml(scheme="int8_weight"))["scheme"]
            'int8_weight'
        """
        qat = _read(source)[1].get("qat")
        return cls.from_yaml(source).qat_options(**({"scheme": qat["scheme"]} if qat and "scheme" in qat else {}))


def _read(source: str | Path) -> tuple[str, dict[str, Any]]:
    where = "bit_plan" if "\n" in str(source) else f"bit_plan: {source}"
    try:
        text = str(source) if "\n" in str(source) else Path(source).read_text(encoding="utf-8")
        content = parse_yaml(text)
    except (OSError, ValueError) as error:
        raise ConfigError(where, f"must be a YAML file with a plan, got {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigError(where, f"format must be {_FORMAT!r}", "write the file with BitPlan.to_yaml")
    return where, content


def plan_bits(
    sensitivities: Mapping[str, Mapping[int, float]],
    sizes: Mapping[str, int],
    budget: float,
    candidates: Sequence[int] | None = None,
    *,
    floor: int = 3,
    fixed: Mapping[str, int] | None = None,
) -> BitPlan:
    """Return the plan of least total sensitivity with at most `budget` bits per weight on average.

    Exact: ``min Σ Ω_l(b_l)`` with ``Σ n_l·b_l <= budget·Σ n_l``, by dynamic programming over the Pareto front of size
    and cost, pruned by a Lagrangian bound.

    Args:
        sensitivities: Layer → bits → cost, as `layer_sensitivity` returns it; in the order of execution.
        sizes: Layer → number of weights.
        budget: Largest mean bits per weight, over all layers of the plan.
        candidates: Bits to choose from; None: those for which every layer has a cost.
        floor: Fewest bits of a layer. Costs are estimates for small changes, and 2 bits is no small change. Lower it
            only if quantization-aware training follows.
        fixed: Layer → fixed bits, such as a first layer kept at 8. They count in the budget.

    Raises:
        ConfigError: If an option is invalid, or no plan is within the budget.
        MatchError: If a layer has no size or no cost.

    Source: Dong et al. 2020 (HAWQ-V2), arXiv:1911.03852, section 3.3.

    Example:
        >>> costs = {"a": {4: 9.0, 8: 1.0}, "b": {4: 2.0, 8: 1.0}}
        >>> plan = plan_bits(costs, {"a": 10, "b": 10}, 6)
        >>> plan.bits, plan.cost, plan.average_bits
        ({'a': 8, 'b': 4}, 3.0, 6.0)
    """
    where, fixed = "plan_bits", dict(fixed or {})
    names = [*sensitivities, *(name for name in fixed if name not in sensitivities)]
    for name in names:
        if name not in sizes:
            raise MatchError(where, f"sizes has no entry for {name!r}{nearest(name, sizes)}")
        checked(sizes[name], int, where, f"size of {name!r}", low=1)
    widths = _widths(sensitivities, candidates, floor, where)
    options: list[list[tuple[int, int, float]]] = []  # of each layer: (width, size in bits, cost)
    for name in names:
        chosen = [fixed[name]] if name in fixed else widths
        costs = sensitivities.get(name, {})
        for width in chosen if name not in fixed else ():
            _check_cost(costs, name, width, where, MatchError)
        options.append([(width, width * sizes[name], costs.get(width, 0.0)) for width in chosen])
    total = sum(sizes[name] for name in names)
    checked(budget, float, where, "budget", above=0)
    # 1e-12: budget * total may be rounded below the intended integer.
    capacity = math.floor(budget * total * (1 + 1e-12))
    least = sum(min(size for _, size, _ in choices) for choices in options)
    if least > capacity:
        raise ConfigError(
            where,
            f"budget must be at least {least / total:.4g} bits per weight, got {budget}",
            f"raise it, or lower floor = {floor}, or add smaller candidates than {widths}",
        )
    chosen_widths, cost = _cheapest(options, capacity)
    return BitPlan(dict(zip(names, chosen_widths, strict=True)), {name: sizes[name] for name in names}, cost)


def _widths(
    sensitivities: Mapping[str, Mapping[int, float]], candidates: Sequence[int] | None, floor: int, where: str
) -> list[int]:
    if candidates is None:
        shared = [set(costs) for costs in sensitivities.values()]
        candidates = sorted(set.intersection(*shared)) if shared else []
    widths = sorted(width for width in set(candidates) if width >= floor)
    if not widths and sensitivities:
        raise ConfigError(where, f"candidates must include bits of at least floor = {floor}, got {list(candidates)}")
    return widths


def _cheapest(options: list[list[tuple[int, int, float]]], capacity: int) -> tuple[list[int], float]:
    price, best = _lagrangian(options, capacity)
    # Exact branch and bound over partial plans (a multiple-choice knapsack). rest[i] is a lower bound of the cost of
    # layers i.. at the Lagrangian price, to drop plans early that cannot beat the feasible one.
    rest = [0.0]  # lower bound of the cost of the following layers, at this price per bit
    for choices in reversed(options):
        rest.append(rest[-1] + min(cost + price * size for _, size, cost in choices))
    rest.reverse()
    slack = 1e-9 * (abs(best) + price * capacity)
    states: list[tuple[int, float, Any]] = [(0, 0.0, None)]  # size, cost, widths as a linked list
    for index, choices in enumerate(options):
        grown = [
            (used + size, cost + more, (width, chosen))
            for used, cost, chosen in states
            for width, size, more in choices
        ]
        # Pareto front, by size, then cost: a plan is kept only if it costs less than every smaller one.
        grown.sort(key=lambda state: state[:2])
        smallest_rest = sum(min(size for _, size, _ in later) for later in options[index + 1 :])
        states, cheapest = [], math.inf
        for used, cost, chosen in grown:
            # Lower bound of this plan's cost: its own cost, the bound of the rest, and unused capacity at the price.
            bound = cost + rest[index + 1] - price * (capacity - used)
            if cost < cheapest and used + smallest_rest <= capacity and bound <= best + slack:
                states.append((used, cost, chosen))
                cheapest = cost
    _, cost, chosen = min(states, key=lambda state: (state[1], state[0]))
    widths: list[int] = []
    while chosen is not None:
        width, chosen = chosen
        widths.append(width)
    return widths[::-1], cost


def _lagrangian(options: list[list[tuple[int, int, float]]], capacity: int) -> tuple[float, float]:
    """Return (price per bit, cost of the cheapest plan at this price that fits)."""

    def at(price: float) -> tuple[int, float]:
        picked = [min(choices, key=lambda choice: (choice[2] + price * choice[1], choice[1])) for choices in options]
        return sum(size for _, size, _ in picked), sum(cost for _, _, cost in picked)

    # Find the lowest price at which the greedy plan fits, by doubling, then bisection.
    low, high = 0.0, 1e-30
    if at(low)[0] <= capacity:
        return 0.0, at(low)[1]
    while at(high)[0] > capacity:
        low, high = high, high * 16
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle)[0] <= capacity else (middle, high)
    return high, at(high)[1]


def _check_cost(
    costs: Mapping[int, float], name: str, bits: int, where: str, error: type[ConfigError | MatchError]
) -> None:
    if not math.isfinite(costs.get(bits, math.nan)):
        raise error(where, f"{name!r} must have a finite cost at {bits} bits, got {dict(costs)}")


Apply = Callable[[nn.Module, Mapping[str, int]], nn.Module]
"""A float model and layer → bits → a new model with these layers quantized."""

_SENSITIVE_OUTPUTS = frozenset("Softmax LogSoftmax Tanh Sigmoid GELU softmax tanh sigmoid gelu".split())  # noqa: SIM905
_PASSING = frozenset("Dropout Identity Flatten dropout flatten contiguous".split())  # noqa: SIM905


@dataclass(frozen=True)
class CurvePoint:
    """A measured model: its number of quantized layers, quality and mean bits per weight."""

    quantized: int
    quality: float
    average_bits: float


@dataclass(frozen=True)
class SelectivePlan:
    """The result of `plan_by_quality`.

    Attributes:
        plan: Layers and bits.
        float_quality: Quality of the float model.
        quality: Quality of the plan.
        conversions: Number of format changes from input to output.
        curves: ``"quantized"`` and ``"float"`` → points measured from that start, in order.
    """

    plan: BitPlan
    float_quality: float
    quality: float
    conversions: int
    curves: dict[str, tuple[CurvePoint, ...]]


@torch.no_grad()
def round_layers(model: nn.Module, bits: Mapping[str, int]) -> nn.Module:
    """Return a copy of `model` with rounded weights in the named layers. Activations stay in float."""
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
        model: Not changed.
        example_inputs: As for `trace`; None: torch.fx traces the model.

    Raises:
        CompatibilityError: If the model cannot be traced.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> keep_high(net)
        {'0': 'the first layer', '2': "it reads the output of GELU '1'", '4': 'the last layer'}
    """
    flow = trace(model, example_inputs, where="keep_high")
    layers = [node for node in flow.nodes if node.module is not None and _is_weighted(node.module)]
    kept: dict[str, str] = {}
    for node in layers:
        source = _source(node)
        if node is layers[0]:
            kept[node.label] = "the first layer"
        elif node is layers[-1]:
            kept[node.label] = "the last layer"
        elif isinstance(node.module, LAYERS) and is_depthwise(node.module):
            kept[node.label] = "a depthwise convolution"
        elif source is not None and (source.kind in _SENSITIVE_OUTPUTS or "GELU" in source.kind):
            kept[node.label] = f"it reads the output of {source}"
    return kept


def _is_weighted(module: nn.Module) -> bool:
    return isinstance(module, (*LAYERS, *RECURRENT, nn.Embedding)) or is_transformers_conv1d(module)


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
    """Return which layers to quantize so that quality falls by at most `largest_loss`.

    Starting from all quantized, the most sensitive layer goes back to float until the loss is accepted. Starting from
    all float, the least sensitive layer is quantized while the loss is accepted. Both are measured, no model twice.

    Args:
        model: In float; not changed.
        evaluate: Model → its quality, higher is better, on data not used for the final test.
        sensitivities: Layer → bits → cost, as `layer_sensitivity` returns it; in the order of execution.
        largest_loss: E, in units of `evaluate`; at least 0.
        bits: Bits of a quantized layer.
        start: The start that gives the plan. ``"quantized"`` may keep more layers quantized if quality is not
            monotonic.
        keep: Layers that stay in float, such as those from `keep_high`.
        apply: Quantizes a copy of the model; by default only weights are rounded.

    Raises:
        ConfigError: If an option is invalid, or nothing is left to quantize.
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
    largest_loss = checked(largest_loss, float, where, "largest_loss", low=0)
    checked(start, Literal["quantized", "float"], where, "start")
    modules = weighted_layers(model, [*sensitivities, *keep], where)
    able = [name for name in sensitivities if name not in keep]
    for name in able:
        _check_cost(sensitivities[name], name, bits, where, ConfigError)
    if not able:
        raise ConfigError(where, f"keep leaves no layer of sensitivities to quantize: {list(sensitivities)}")
    # Least sensitive first. Each curve quantizes a prefix of this order.
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
                raise TrainingError(where, f"evaluate must return a number, got NaN with {count} layers quantized")
            measured[count] = CurvePoint(count, quality, plan(count).average_bits)
        return measured[count]

    float_quality = measure(0).quality
    curves: dict[str, list[CurvePoint]] = {"quantized": [], "float": []}
    accepted = {"quantized": 0, "float": 0}
    # From all quantized downwards until quality is accepted. No bisection, because quality may not be monotonic.
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
