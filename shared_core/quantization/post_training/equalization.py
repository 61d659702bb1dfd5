"""Bias correction and cross-layer equalization.

Bias correction removes the shift of a layer's mean output that quantized weights cause. Equalization rescales
neighboring layers so that their ranges match. The function stays the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.modules.calls import call_model, evaluated
from shared_core.modules.weight_views import (
    by_channel,
    channel_sums,
    is_depthwise,
    largest_by_input,
    largest_by_output,
    num_inputs,
    num_outputs,
    scale_inputs_,
    scale_outputs_,
)
from shared_core.quantization.batch_norm import check_same_function, run
from shared_core.quantization.layer_graph import LAYERS, Flow, Node, chosen_layers, sole_user, trace


@dataclass(frozen=True)
class BiasCorrectionReport:
    """The result of `correct_bias`.

    Attributes:
        corrected: Layer → root mean square of the correction over its channels, in the order of execution.
        without_bias: Layers that have no bias and were skipped.
        new_keys: Keys of the state dict for added biases.
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
    """Add ``E[y_float − y_quantized]`` per output channel to the biases of `quantized`, in place.

    Layers are corrected in the order of execution, each measured after the layers before it are corrected, so
    that no shift is removed twice. This takes one pass over the batches for the float model and one per layer.

    Args:
        quantized: The model with quantized weights, activations in float or quantized.
        reference: The float model, with the same module names.
        batches: Calibration batches, at least one; each a tensor, a tuple of arguments or a mapping of keyword
            arguments. They are read several times: pass a list or a loader without shuffling, not an iterator.
        layers: Names to correct; None: every Linear, Conv and transposed Conv layer of `reference` that
            `quantized` has too, in any class.
        add_missing: Add a bias, and its key in the state dict, to layers without one. Otherwise they are skipped.

    Returns:
        What was corrected and by how much.

    Raises:
        ConfigError: If `batches` can be read only once, or is empty.
        MatchError: If there is no layer to correct.
        CompatibilityError: If a layer is called more than once in a forward: its calls have different means.
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
        raise ConfigError(where, "batches must be readable several times, got an iterator", "pass a list")
    there = dict(quantized.named_modules())
    able = {name: module for name, module in reference.named_modules() if isinstance(module, LAYERS) and name in there}
    reference_layers = chosen_layers(able, layers, "Linear or Conv layer of both models", where)
    # Means of the float model first, then layer by layer in order of execution, because a correction changes the
    # inputs of later layers.
    means = _means(reference, reference_layers, batches)
    without = [name for name in means if getattr(there[name], "bias", None) is None]
    keys = set(quantized.state_dict())
    corrected: dict[str, float] = {}
    for name, mean in means.items():
        module = there[name]
        if name in without and not add_missing:
            continue
        # Use the shapes of the float layers: the quantized class may not have channels.
        found = _means(quantized, {name: module}, batches, like=reference_layers)
        if name not in found:
            raise MatchError(where, f"the quantized model never calls {name!r}", "leave it out of layers")
        # E[y_float - y_q] in float64: mean over all batches and positions per output channel.
        correction = mean - found[name].to(mean)
        _add(module, correction)
        corrected[name] = correction.square().mean().sqrt().item()
    return BiasCorrectionReport(
        corrected,
        () if add_missing else tuple(without),
        tuple(key for key in quantized.state_dict() if key not in keys),
    )


def _means(
    model: nn.Module, layers: dict[str, nn.Module], batches: Iterable[Any], like: dict[str, nn.Module] | None = None
) -> dict[str, Tensor]:
    """Return the mean per output channel of the layers, in the order of execution."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    calls: dict[str, int] = {}
    shapes = layers if like is None else like
    num_batches = 0
    with _watch(layers) as outputs, evaluated(model):
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
        raise ConfigError("correct_bias", "batches must hold at least one batch, got none")
    for name, total in sums.items():
        # Several calls in one forward: one bias cannot correct inputs of different means.
        if calls[name] > num_batches:
            raise CompatibilityError(
                "correct_bias", f"{name!r} must be called once in a forward", "leave it out of layers"
            )
        if not bool(torch.isfinite(total).all()):
            raise TrainingError("correct_bias", f"outputs of {name!r} must be finite, got NaN or infinity in a batch")
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


# f(sx) = s·f(x) for s > 0, value by value
_HOMOGENEOUS = frozenset(
    """
    Identity ReLU LeakyReLU PReLU Dropout Dropout1d Dropout2d Dropout3d relu relu_ leaky_relu leaky_relu_ prelu dropout
    dropout_
    """.split()  # noqa: SIM905
)
# the same within one channel of a convolution; after a Linear layer they would mix channels
_POOLING = frozenset(
    f"{name}{dims}d"
    for dims in "123"
    for kind in ("Max", "Avg")
    for name in (f"{kind}Pool", f"Adaptive{kind}Pool", f"{kind.lower()}_pool", f"adaptive_{kind.lower()}_pool")
)


@dataclass(frozen=True)
class Link:
    """Two layers with only functions between them for which ``f(sx) = s·f(x)``.

    Attributes:
        first: The layer whose outputs are scaled down.
        second: The layer whose inputs are scaled up.
        channels: Channels of the flattened map that a Linear `second` reads; None: its features are the channels.
    """

    first: str
    second: str
    channels: int | None = None


@dataclass(frozen=True)
class EqualizationReport:
    """The result of `equalize`.

    Attributes:
        chains: Names of layers equalized together: two, or three around a depthwise convolution.
        refused: Layer → why it was not equalized with the next.
        iterations: Sweeps over all chains.
        converged: True if the last sweep changed every scale by less than the tolerance.
        spread: Layer → (before, after): largest / smallest range of its output channels, without zeros.
    """

    chains: tuple[tuple[str, ...], ...]
    refused: dict[str, str]
    iterations: int
    converged: bool
    spread: dict[str, tuple[float, float]]


def find_links(model: nn.Module, example_inputs: Any = None) -> tuple[dict[str, Link], dict[str, str]]:
    """Return (first layer → link, layer → why there is none).

    Example:
        >>> links, refused = find_links(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.GELU()))
        >>> links["0"].second, refused["2"]
        ('2', "GELU '3' follows it and does not satisfy f(sx) = s·f(x)")
    """
    flow = trace(model, example_inputs, where="equalize")
    links: dict[str, Link] = {}
    refused: dict[str, str] = {}
    for name, calls in flow.calls.items():
        if type(calls[0].module) not in LAYERS:
            continue
        found = flow.why_not(calls[0]) or _follow(flow, calls[0])
        if isinstance(found, Link):
            links[name] = found
        elif found is not None:
            refused[name] = found
    return links, refused


def _follow(flow: Flow, start: Node) -> Link | str | None:
    node, flat, pooled = start, False, isinstance(start.module, nn.Linear)
    while True:
        following, reason = sole_user(node)
        if following is None:
            return reason
        node = following
        if node.label == "output" and node.module is None:
            return None
        if type(node.module) in LAYERS:
            why = flow.why_not(node)
            return f"{node} follows it: {why}" if why else _join(start, node, flat)
        # After a flatten each channel is a block of features, for which its scale is repeated.
        if _is_flatten(node):
            flat = True
        elif node.kind in _POOLING and not pooled and not flat:
            continue
        elif "BatchNorm" in node.kind or node.kind == "batch_norm":
            return f"{node} follows it; fuse batch norm first"
        elif node.kind not in _HOMOGENEOUS:
            return f"{node} follows it and does not satisfy f(sx) = s·f(x)"


def _join(start: Node, end: Node, flat: bool) -> Link | str:
    first, second = start.module, end.module
    if first is None or second is None:
        return "it is a function"
    channels, inputs = num_outputs(first), num_inputs(second)
    link = Link(start.label, end.label)
    if isinstance(first, nn.Linear) or not isinstance(second, nn.Linear):
        same_kind = isinstance(first, nn.Linear) == isinstance(second, nn.Linear)
        if same_kind and channels == inputs and (not flat or isinstance(first, nn.Linear)):
            return link
    elif flat and inputs % channels == 0:
        return Link(start.label, end.label, channels)
    return f"its {channels} channels are not those that {end} reads"


def _is_flatten(node: Node) -> bool:
    if isinstance(node.module, nn.Flatten):
        return node.module.start_dim == 1 and node.module.end_dim == -1
    settings = dict(zip(("start_dim", "end_dim"), node.args, strict=False)) | node.kwargs
    return node.kind == "flatten" and settings.get("start_dim") == 1 and settings.get("end_dim", -1) == -1


def _chains(links: dict[str, Link], modules: dict[str, nn.Module]) -> list[tuple[Link, ...]]:
    chains: list[tuple[Link, ...]] = []
    joined: set[str] = set()
    for name, link in links.items():
        if name in joined:
            continue
        # A depthwise layer has equal input and output channels, so the three layers are equalized together.
        behind = links.get(link.second)
        if behind is not None and is_depthwise(modules[link.second]):
            joined.add(link.second)
            chains.append((link, behind))
        else:
            chains.append((link,))
    return chains


class _Weights:
    """Float64 copies of the layers' weights and biases, so that all sweeps together are rounded once."""

    def __init__(self, modules: dict[str, nn.Module], links: list[Link]) -> None:
        channels = {link.second: link.channels for link in links}
        names = {name: None for link in links for name in (link.first, link.second)}
        self.modules = {name: modules[name] for name in names}
        self.weights: dict[str, Tensor] = {
            name: module.weight.detach().to(torch.float64, copy=True)  # type: ignore[operator, union-attr]
            for name, module in self.modules.items()
        }
        self.views = {
            name: by_channel(self.weights[name], module, channels.get(name)) for name, module in self.modules.items()
        }
        # The first layer's outputs are divided by the product of all sweeps' scales, and so is its bias.
        self.divisors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            if not bool(torch.isfinite(weight).all()):
                raise CompatibilityError("equalize", f"weights of {name!r} must be finite, got NaN or infinity")

    def divide(self, link: Link, scale: Tensor) -> None:
        """Divide outputs of the first layer, multiply inputs of the second."""
        scale_outputs_(self.views[link.first], 1 / scale)
        scale_inputs_(self.views[link.second], scale)
        self.divisors[link.first] = self.divisors.get(link.first, torch.ones_like(scale)) * scale

    def spread(self, name: str) -> float:
        ranges = largest_by_output(self.views[name])
        ranges = ranges[ranges > 0]
        return (ranges.max() / ranges.min()).item() if ranges.numel() else 1.0

    @torch.no_grad()
    def write(self) -> list[tuple[Tensor, Tensor]]:
        """Round into the model. Return the tensors and their old values."""
        new: list[tuple[Tensor, Tensor]] = []
        for name, module in self.modules.items():
            new.append((module.weight, self.weights[name]))  # type: ignore[arg-type]
            if module.bias is not None and name in self.divisors:
                new.append((module.bias, module.bias.double() / self.divisors[name]))  # type: ignore[arg-type, operator]
        # Nothing is written unless every value is finite in the model's dtype.
        for old, value in new:
            if not bool(torch.isfinite(value.to(old.dtype)).all()):
                raise CompatibilityError(
                    "equalize", f"equalized values do not fit into {old.dtype}", "equalize in float32"
                )
        before = [(old, old.clone()) for old, _ in new]
        for old, value in new:
            old.copy_(value)
        return before


def equalize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    max_iterations: int = 100,
    tolerance: float = 1e-4,
) -> EqualizationReport:
    """Equalize the ranges of neighboring layers in place. Outputs stay equal up to float rounding.

    For each channel i between two layers, ``s_i = √(r1_i·r2_i)/r2_i`` with r = max|w| of the channel, 1 where a
    range is 0: ``w1/s``, ``b1/s``, ``w2·s``. Around a depthwise convolution ``p = ∛(r1·r2·r3)``, ``s1 = r1/p``,
    ``s2 = p/r3``. Repeated over all chains until the scales converge.

    Between two layers there may be ReLU, LeakyReLU, PReLU, identity, dropout (in evaluation), pooling between
    convolutions, and ``flatten(1)`` from a convolution to a Linear layer. Layers at ReLU6, hardtanh, hardswish, GELU or
    residual branches, and shared or tied layers, are skipped and listed in the report.

    Args:
        model: A model without batch norms: fuse them first.
        example_inputs: As for `trace`. One forward shows the order of layers, and outputs before and after are
            compared. None: torch.fx traces the model.
        pairs: Names of neighbors to equalize, (first, second); None: all that can be.
        max_iterations: Most sweeps, at least 1.
        tolerance: Converged when every ``|ln s|`` of a sweep is below this; above 0.

    Returns:
        Which layers were equalized, which were not and why.

    Raises:
        ConfigError: If an option is invalid.
        MatchError: If there is nothing to equalize.
        CompatibilityError: If a named pair cannot be equalized, weights are not finite, or outputs would change.

    Source: Nagel et al. 2019, arXiv:1906.04721, sections 4.1 and appendix A.

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
        >>> _ = net[0].weight.data.fill_(8.0), net[2].weight.data.fill_(2.0)
        >>> equalize(net).chains
        (('0', '2'),)
        >>> net[0].weight.item(), net[2].weight.item()
        (4.0, 4.0)
    """
    max_iterations = checked(max_iterations, int, "equalize", "max_iterations", low=1)
    tolerance = checked(tolerance, float, "equalize", "tolerance", above=0)
    links, refused = find_links(model, example_inputs)
    if pairs is not None:
        links = {first: _asked_for(first, second, links, refused) for first, second in pairs}
    if not links:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(refused.items())[:3])
        raise MatchError("equalize", "must match at least two consecutive layers", reasons or "none found")
    modules = dict(model.named_modules())
    weights = _Weights(modules, list(links.values()))
    chains = _chains(links, modules)
    before = {name: weights.spread(name) for name in links}
    iterations, moved = 0, math.inf
    while iterations < max_iterations and moved >= tolerance:
        moved = max(_sweep(weights, chain) for chain in chains)
        iterations += 1
    expected = None if example_inputs is None else run(model, example_inputs)
    # Compare outputs on the example, and undo if they changed.
    held = weights.write()
    if expected is not None:
        try:
            check_same_function(expected, run(model, example_inputs), "equalize")
        except CompatibilityError:
            with torch.no_grad():
                for parameter, value in held:
                    parameter.copy_(value)
            raise
    return EqualizationReport(
        tuple((chain[0].first, *(link.second for link in chain)) for chain in chains),
        refused,
        iterations,
        moved < tolerance,
        {name: (before[name], weights.spread(name)) for name in links},
    )


def _asked_for(first: str, second: str, links: dict[str, Link], refused: dict[str, str]) -> Link:
    link = links.get(first)
    if link is None or link.second != second:
        reason = refused.get(first) or (
            f"{link.second!r} follows it" if link is not None else "the forward calls no such layer"
        )
        raise CompatibilityError(
            "equalize", f"pairs must be neighbors that can be equalized, got {first!r}, {second!r}: {reason}"
        )
    return link


def _sweep(weights: _Weights, chain: tuple[Link, ...]) -> float:
    """Equalize one chain; return the largest ``|ln s|``."""
    first = largest_by_output(weights.views[chain[0].first])
    last = largest_by_input(weights.views[chain[-1].second])
    if len(chain) == 1:
        # r1 / s = r2 s gives s = √(r1 / r2): both ranges become √(r1 r2) (Nagel et al. 2019, arXiv:1906.04721).
        scales = [torch.sqrt(first / last)]  # √(r1·r2)/r2 without the product, which may overflow
        live = (first > 0) & (last > 0)
    else:
        middle = largest_by_output(weights.views[chain[0].second])
        # Three ranges become their geometric mean; cube roots first, for a product of three may overflow.
        mean = first.pow(1 / 3) * middle.pow(1 / 3) * last.pow(1 / 3)
        scales = [first / mean, mean / last]
        live = (first > 0) & (middle > 0) & (last > 0)
    largest = 0.0
    for link, scale in zip(chain, scales, strict=True):
        # A channel of zeros cannot be equalized and keeps scale 1.
        scale = torch.where(live, scale, 1.0)
        weights.divide(link, scale)
        largest = max(largest, scale.log().abs().max().item())
    return largest
