"""Fold batch norms into the layers before them, in training and after it.

Training quantizes the folded weight, because inference uses that one. Learned scales of layers stay out of state dicts
(`PlainState`).
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from eff_kernels.quantization.affine import compute_dtype
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared_core.errors import CompatibilityError, MatchError, TrainingError
from shared_core.modules.calls import call_model, evaluated, evaluating
from shared_core.modules.like_stock import NORMS, steps_after_norm, stock_kind
from shared_core.modules.made_classes import derived, importable
from shared_core.modules.matching import change_class, plain_name, replaced
from shared_core.modules.weight_views import compute, num_outputs, scaled_outputs
from shared_core.quantization.layer_graph import LAYERS, Flow, Node, output_tensor, sole_user, trace

LEARNED = ("weight_magnitude", "input_magnitude", "input_offset", "input_clip")
"""Names of the parameters that quantization adds to a layer."""


class PlainState(nn.Module):
    """A layer whose learned scales train like any parameter but stay out of state dicts."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in LEARNED:
            destination.pop(prefix + name, None)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        missing: list[str] = args[2]
        super()._load_from_state_dict(state_dict, prefix, *args)
        # In place, because torch keeps using this list object.
        missing[:] = [name for name in missing if name.removeprefix(prefix) not in LEARNED]


@contextlib.contextmanager
def own_parameters(model: nn.Module) -> Iterator[None]:
    """Hide learned scales from `named_parameters`, so that plain weights can be loaded by parameter name."""
    layers = [module for module in model.modules() if isinstance(module, PlainState)]
    learned = [  # in their order, because torch finds optimizer state by order
        {name: layer._parameters.pop(name) for name in [*layer._parameters] if name in LEARNED} for layer in layers
    ]
    for layer, beside in zip(layers, learned, strict=True):
        vars(layer).update(beside)  # FSDP2 (torch 2.13) looks each up as an attribute after a load
    try:
        yield
    finally:
        for layer, beside in zip(layers, learned, strict=True):
            for name, value in beside.items():
                del vars(layer)[name]
                layer._parameters[name] = value


class FoldQuantizer(Protocol):
    """The fake quantization of a folded layer."""

    def input(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the layer's input, fake-quantized."""
        ...

    def weight(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Return the folded weight, fake-quantized."""
        ...

    def output(self, module: nn.Module, y: Tensor) -> Tensor:
        """Return the normalized output, observed."""
        ...


def fold_batch_norm(
    layer: nn.Module,
    mean: Tensor,
    deviation: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a layer that computes `layer` followed by batch norm.

    ``w' = w·γ/σ`` per output channel, ``b' = β + (b − μ)·γ/σ``. Gradients reach every tensor.

    Args:
        layer: A Linear, Conv or transposed Conv layer; its weight and bias are read.
        mean: μ, of shape (channels,).
        deviation: ``σ = √(variance + ε)``, of shape (channels,).
        gamma: Of shape (channels,); None: one.
        beta: Of shape (channels,); None: zero.

    Returns:
        Both in the widest type of the arguments; (shape of the weight) and (channels,).

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3.2.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> _ = layer.weight.data.fill_(3.0), layer.bias.data.fill_(1.0)
        >>> one = torch.ones(1)
        >>> [value.item() for value in fold_batch_norm(layer, 5 * one, 2 * one, 4 * one, one)]
        [6.0, -7.0]
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    # γ / σ scales the weight, (b - μ) γ / σ + β is the bias.
    factor = 1 / deviation if gamma is None else gamma / deviation
    shift = (-mean if bias is None else bias - mean) * factor
    return scaled_outputs(weight, layer, factor), shift if beta is None else shift + beta


class Fold:
    """The batch norm of a folded layer.

    Attributes:
        batch_norm: The module whose parameters, buffers and mode are used. It stays in the model, so that both
            modules keep their keys, and is not registered here.
        quantizer: Fake-quantizes input and folded weight; None: nothing is quantized.
        frozen: Use running statistics, and don't update them, in training too.
    """

    def __init__(self, batch_norm: nn.Module, quantizer: FoldQuantizer | None) -> None:
        self.batch_norm: Any = batch_norm
        self.quantizer = quantizer
        self.frozen = False
        self._is_mean = self.batch_norm.momentum is None

    @property
    def uses_running_statistics(self) -> bool:
        """True if statistics are frozen and are not being re-estimated, as a soup does."""
        # A soup re-estimates statistics as a mean over batches by setting the momentum to None.
        return self.frozen and (self._is_mean or self.batch_norm.momentum is not None)


class FoldedLayer(PlainState):
    """A layer that computes itself and the following batch norm with one folded weight.

    While statistics of the batch (``μ_B, σ_B``) are used, with ``σ`` of the running variance,

    ``y = (x ∗ Q(w·γ/σ)) · σ/σ_B + β + (b − μ_B)·γ/σ_B``:

    the weight is quantized as in inference, so that its codes do not jitter from batch to batch, and the
    output is normalized by the batch, as training needs it. Once frozen, and in evaluation,
    ``y = x ∗ Q(w·γ/σ) + β + (b − μ)·γ/σ``. Until then a training step computes the layer twice, once without
    weight quantization for its statistics.

    The batch norm's mode, momentum, ε and buffers apply, and its buffers are updated as usual.
    As in torch, recomputing a forward for activation checkpointing updates them again.

    Source: Krishnamoorthi 2018, arXiv:1806.08342, section 3.2.2 (correction and freezing).
    """

    fold: Fold
    weight: Tensor
    training: bool

    def forward(self, input: Tensor, *args: Any) -> Tensor:
        """Return the normalized output. Takes the arguments of the layer."""
        quantizer = self.fold.quantizer
        y = self._normalized(input, *args)
        return y if quantizer is None else quantizer.output(self, y)

    def _normalized(self, input: Tensor, *args: Any) -> Tensor:
        layer: Any = self
        norm, quantizer = self.fold.batch_norm, self.fold.quantizer
        x = input if quantizer is None else quantizer.input(layer, input)
        wide = compute_dtype(norm.running_var.dtype)
        batch = None
        # In training the layer runs once in float for the batch statistics, and once with the folded weight.
        if norm.training and not self.fold.uses_running_statistics:
            batch = _batch_statistics(layer, compute(layer, x, self.weight, None, *args), wide)
            _update_running(norm, *batch)
        deviation = torch.sqrt(norm.running_var.to(wide) + norm.eps)
        # Fold with the running σ, which changes slowly. The batch's σ would move the grid in every step.
        weight, shift = fold_batch_norm(layer, norm.running_mean.to(wide), deviation, norm.weight, norm.bias)
        weight = weight.to(self.weight.dtype)
        if quantizer is not None:
            weight = quantizer.weight(layer, weight)
        if batch is None:
            return compute(layer, x, weight, shift.to(self.weight.dtype), *args)
        # The output goes from running to batch statistics: y σ_r / σ_b + shift (Krishnamoorthi 2018,
        # arXiv:1806.08342).
        mean, variance, _ = batch
        batch_deviation = torch.sqrt(variance + norm.eps)
        _, shift = fold_batch_norm(layer, mean, batch_deviation, norm.weight, norm.bias)
        y = compute(layer, x, weight, None, *args)
        shape = [1, -1, *[1] * (y.dim() - 2)]
        return (y * (deviation / batch_deviation).reshape(shape) + shift.reshape(shape)).to(y.dtype)


def _batch_statistics(layer: Any, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance per channel of ``y + b``, and the number of values per channel."""
    spatial = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    if y.dim() != 2 + spatial:
        raise TrainingError(
            "batch_norm_folding",
            f"output of {type(layer).__name__} must have {2 + spatial} dimensions, a batch of channels, got "
            f"{tuple(y.shape)}",
            "leave this pair unfolded",
        )
    count = y.numel() // max(y.shape[1], 1)
    if count < 2:
        raise TrainingError(
            "batch_norm_folding",
            f"batch must have more than 1 value per channel in training, got {tuple(y.shape)}",
            "increase the batch size, or drop the smaller last batch",
        )
    axes = [0, *range(2, y.dim())]
    # As in torch, the biased variance normalizes and the unbiased one updates the running estimate.
    variance, mean = torch.var_mean(y.to(dtype), axes, correction=0)
    # b cancels in the output and its gradient is zero, as in batch norm, but DDP needs it in the graph.
    return mean if layer.bias is None else mean + layer.bias, variance, count


@torch.no_grad()
def _update_running(norm: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked.to(mean.dtype)
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance * (count / (count - 1)))):
        running.copy_((1 - momentum) * running + momentum * new.detach())


class _PassedOn:
    """A batch norm that returns its input: the layer before it uses its parameters and statistics.

    What the forward of a user's class calls after the norm still runs.
    """

    steps_after: tuple[str, ...] = ()

    def forward(self: Any, input: Tensor) -> Tensor:
        for name in self.steps_after:
            input = self._modules[name](input)
        return input


FOLDED: dict[type[nn.Module], type[nn.Module]] = {
    kind: importable(f"Folded{kind.__name__}", (base, kind), __name__)
    for base, kinds in ((FoldedLayer, LAYERS), (_PassedOn, NORMS))
    for kind in kinds
}
STOCK: dict[type[nn.Module], type[nn.Module]] = {folded: stock for stock, folded in FOLDED.items()}


def folded_kind(kind: type[nn.Module], mixin: type) -> type[nn.Module]:
    """Return the folded class of a layer or batch norm. One for a user's class is made once."""
    if kind not in FOLDED:
        FOLDED[kind] = derived("Folded", mixin, kind, folded_kind)
        STOCK[FOLDED[kind]] = kind
    return FOLDED[kind]


def fold_pair_(layer: nn.Module, batch_norm: nn.Module, quantizer: FoldQuantizer | None = None) -> Fold:
    """Make `layer` compute the following batch norm, by changing both classes. Keys and parameters stay.

    Args:
        layer: A stock Linear, Conv or transposed Conv layer.
        batch_norm: The stock batch norm that is the only reader of the layer's output.
        quantizer: Fake-quantizes input and folded weight; None: the pair computes the same as before.

    Returns:
        The handle of the pair. Set ``frozen`` on it at the step where statistics freeze.

    Raises:
        CompatibilityError: If a class cannot be folded, widths differ, or there are no running statistics.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
        >>> fold_pair_(net[0], net[1]).frozen
        False
        >>> list(net.state_dict())[:3]
        ['0.weight', '1.weight', '1.bias']
    """
    check_pair(layer, batch_norm, "fold_pair_")
    fold = Fold(batch_norm, quantizer)
    layer.fold = fold  # type: ignore[assignment]
    if steps := steps_after_norm(batch_norm):
        vars(batch_norm)["steps_after"] = steps
    for module, mixin in ((layer, FoldedLayer), (batch_norm, _PassedOn)):
        change_class(module, type(module), folded_kind(type(module), mixin))
    return fold


def unfold_pair_(layer: nn.Module) -> None:
    """Restore the stock classes of a folded layer and its batch norm. Other layers stay as they are.

    Args:
        layer: The layer passed to `fold_pair_`, or any other.
    """
    if type(layer) in STOCK:
        norm: Any = layer.fold.batch_norm  # type: ignore[union-attr]
        for module in (layer, norm):
            change_class(module, type(module), STOCK[type(module)])
        vars(norm).pop("steps_after", None)
        del layer.fold


def check_pair(layer: nn.Module, batch_norm: nn.Module, where: str) -> None:
    """Raise `CompatibilityError` unless a batch norm after this layer can be folded into it."""
    if why := _why_no_pair(layer, batch_norm):
        raise CompatibilityError(where, why)


def _why_no_pair(layer: nn.Module, batch_norm: nn.Module) -> str | None:
    if stock_kind(type(layer)) not in LAYERS:
        return f"layer must compute a Linear, Conv or transposed Conv, got {type(layer).__name__}"
    if steps_after_norm(batch_norm) is None:
        return (
            "batch_norm must compute a BatchNorm1d, 2d or 3d and then only its own submodules, got "
            f"{type(batch_norm).__name__}"
        )
    if batch_norm.running_mean is None or batch_norm.running_var is None:
        return "batch_norm must have running statistics to fold, got track_running_stats=False"
    if batch_norm.num_features != num_outputs(layer):
        return f"batch_norm must have the layer's {num_outputs(layer)} channels, got {batch_norm.num_features}"
    return None


_RELU = frozenset({"ReLU", "ReLU6", "relu", "relu_", "relu6"})


@dataclass(frozen=True)
class BatchNormPair:
    """A layer whose output only a batch norm reads; names are those of `named_modules`.

    Attributes:
        layer: The Linear, Conv or transposed Conv.
        batch_norm: The batch norm that follows it.
        activation: The module or function name of the ReLU or ReLU6 that is the only reader of the batch norm, or
            None. A quantizer need not round before it.
    """

    layer: str
    batch_norm: str
    activation: str | None


@dataclass(frozen=True)
class FusionReport:
    """The result of `fuse_batch_norm`.

    Attributes:
        fused: The pairs, in the order of execution.
        refused: Batch norm → why it stays.
        vanished_keys: Removed keys of the state dict.
        new_keys: Added keys: biases of layers that had none.
    """

    fused: tuple[BatchNormPair, ...]
    refused: dict[str, str]
    vanished_keys: tuple[str, ...]
    new_keys: tuple[str, ...]


def find_batch_norms(
    model: nn.Module, example_inputs: Any = None, *, where: str = "fuse_batch_norm"
) -> tuple[list[BatchNormPair], dict[str, str]]:
    """Return (pairs that can be folded, batch norm → why it cannot).

    Args:
        model: Not changed.
        example_inputs: As for `trace`; None: torch.fx traces the model.
        where: The caller, for errors.

    Raises:
        CompatibilityError: If the model has batch norms and cannot be traced.

    Example:
        >>> find_batch_norms(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU()))[0]
        [BatchNormPair(layer='0', batch_norm='1', activation='2')]
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    if not norms:
        return [], {}
    flow = trace(model, example_inputs, where=where)
    pairs: list[BatchNormPair] = []
    refused = {name: "the forward never calls it" for name in norms if name not in flow.calls}
    for name in (name for name in flow.calls if name in norms):
        node = flow.calls[name][0]
        reason = _why_not(flow, node)
        if reason is not None:
            refused[name] = reason
            continue
        reader = sole_user(node)[0]
        follows = reader.label if reader is not None and reader.kind in _RELU else None
        pairs.append(BatchNormPair(node.inputs[0].label, name, follows))
    return pairs, refused


def _why_not(flow: Flow, node: Node) -> str | None:
    reason = flow.why_not(node)
    if reason is not None:
        return reason
    layer = node.inputs[0] if node.inputs else None
    if layer is None or stock_kind(type(layer.module)) not in LAYERS:
        return f"it follows {layer}, which is not a Linear or Conv layer"
    reason = flow.why_not(layer) or (sole_user(layer)[1] or None)
    if reason is not None:
        return f"layer {layer.label!r}: {reason}"
    if isinstance(layer.module, nn.Linear) and layer.shape is not None and len(layer.shape) != 2:
        return f"it normalizes axis 1 of {tuple(layer.shape)}, which does not hold the channels of the Linear layer"
    return _why_no_pair(layer.module, node.module)  # type: ignore[arg-type]


def fuse_batch_norm(model: nn.Module, example_inputs: Any = None) -> FusionReport:
    """Fold every batch norm into the layer before it, in place, and return what was fused.

    ``w' = w·γ/√(σ² + ε)``, ``b' = β + (b − μ)·γ/√(σ² + ε)``, computed in float64 and rounded once; outputs in
    evaluation stay equal up to float rounding. Layers keep their classes and get a bias if they have none; a
    batch norm becomes `torch.nn.Identity`, or the submodules that its class calls after it. A model without batch
    norms is left as it is.

    Args:
        model: In evaluation mode.
        example_inputs: A tensor, a tuple of arguments or a mapping of keyword arguments. One forward shows the
            order of layers, and outputs before and after are compared. None: torch.fx traces the model. Pass it
            if torch.fx cannot trace the model, or if a Linear layer reads sequences.

    Returns:
        The pairs, the batch norms that stay and why, and the removed and added keys.

    Raises:
        CompatibilityError: If the model is in training mode or cannot be traced, or if outputs would change. The
            model is then unchanged.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3.2.

    Example:
        >>> net = nn.Sequential(nn.Conv1d(2, 4, 3, bias=False), nn.BatchNorm1d(4), nn.ReLU()).eval()
        >>> report = fuse_batch_norm(net)
        >>> report.fused[0].activation, report.new_keys, report.vanished_keys[0]
        ('2', ('0.bias',), '1.weight')
        >>> net[1]
        Identity()
    """
    where = "fuse_batch_norm"
    norms = model.named_modules()
    training = [name for name, module in norms if isinstance(module, _BatchNorm) and module.training]
    if training:
        raise CompatibilityError(
            where, f"model must be in evaluation mode, but {training[0]!r} is in training", "call model.eval() first"
        )
    pairs, refused = find_batch_norms(model, example_inputs, where=where)
    if example_inputs is not None and pairs:
        trial = copy.deepcopy(model)  # if outputs change, the model stays as it is
        _fuse(trial, pairs)
        check_same_function(run(model, example_inputs), run(trial, example_inputs), where)
    keys = list(model.state_dict())
    _fuse(model, pairs)
    after = list(model.state_dict())
    return FusionReport(tuple(pairs), refused, _missing(keys, after), _missing(after, keys))


def _fuse(model: nn.Module, pairs: list[BatchNormPair]) -> None:
    modules = dict(model.named_modules())
    for pair in pairs:
        fuse_pair_(model, modules[pair.layer], modules[pair.batch_norm])


def _missing(keys: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    known = set(others)
    return tuple(key for key in keys if key not in known)


@torch.no_grad()
def fuse_pair_(model: nn.Module, layer: nn.Module, batch_norm: nn.Module) -> None:
    """Fold one batch norm into `layer`, and replace it everywhere in `model` by an Identity or the steps after it."""
    check_pair(layer, batch_norm, "fuse_pair_")
    norm: Any = batch_norm
    weight: Tensor = layer.weight  # type: ignore[assignment]
    # float64: the fused weight is rounded once.
    deviation = torch.sqrt(norm.running_var.double() + norm.eps)
    folded, bias = fold_batch_norm(layer, norm.running_mean.double(), deviation, norm.weight, norm.bias)
    weight.copy_(folded)
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        layer.bias.copy_(bias)  # type: ignore[operator]
    left: nn.Module = nn.Identity()
    if steps := steps_after_norm(batch_norm):
        left = nn.Sequential(OrderedDict((name, cast("nn.Module", batch_norm._modules[name])) for name in steps))
    left.training = batch_norm.training
    replaced(model, {batch_norm: left})


def run(model: nn.Module, inputs: Any, where: str = "model: inputs") -> Tensor:
    """Return the output tensor of `model` in evaluation mode, without gradients; `where` as in `call_model`."""
    with evaluated(model):
        return output_tensor(call_model(model, inputs, where)).clone()


def check_same_function(before: Tensor, after: Tensor, where: str) -> None:
    """Raise `CompatibilityError` if outputs differ by more than float rounding.

    The bound is ``√ε·max|y|`` with ε of the type. Rounding in a deep network stays far below it, an error does not.
    """
    wide = compute_dtype(before.dtype)
    error = (after.to(wide) - before.to(wide)).abs()
    # √eps relative to the largest output allows for float rounding in a whole network, not just one layer.
    bound = torch.finfo(before.dtype).eps ** 0.5 * before.to(wide).abs().max() if before.numel() else 0.0
    if before.numel() and not bool((error <= bound).all()):
        raise CompatibilityError(
            where,
            f"outputs on example_inputs would change by {error.max().item():.3g}, where the "
            f"largest output is {before.abs().max().item():.3g}",
            "the model uses a layer in a way that tracing does not show. It was not changed",
        )


def find_folds(model: nn.Module, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (layer → the batch norm that follows it, batch norm → why it is not folded).

    If the whole model cannot be traced, its children are searched one by one. A LightningModule may have no forward,
    and large models branch on values, but a block of convolution and batch norm usually traces.
    """
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    if not norms:
        return {}, {}
    try:
        with evaluating(model):
            pairs, refused = find_batch_norms(model, where=where)
        return {pair.layer: pair.batch_norm for pair in pairs}, refused
    except CompatibilityError as error:
        # Its children may still be traceable.
        folds: dict[str, str] = {}
        left = {name: str(error).removeprefix(f"{where}: ") for name in norms}
        for name, child in model.named_children():
            if name in norms:
                continue
            found, refused = find_folds(child, where)
            folds |= {f"{name}.{layer}": f"{name}.{norm}" for layer, norm in found.items()}
            left |= {f"{name}.{norm}": reason for norm, reason in refused.items()}
        return folds, {name: reason for name, reason in left.items() if name not in folds.values()}


def channel_factor(fold: Fold, dtype: torch.dtype) -> Tensor:
    """Return ``γ/σ`` per output channel, from the running statistics."""
    norm = fold.batch_norm
    deviation = torch.sqrt(norm.running_var.to(dtype) + norm.eps)
    return 1 / deviation if norm.weight is None else norm.weight.to(dtype) / deviation


def folded_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight that inference uses: folded for a folded layer, else unchanged."""
    fold: Any = getattr(module, "fold", None)
    if fold is None:
        return weight
    factor = channel_factor(fold, fold.batch_norm.running_var.dtype)
    return scaled_outputs(weight, module, factor.to(weight.device)).to(weight.dtype)


def unfolded_weight(module: nn.Module, folded: Tensor, weight: Tensor) -> Tensor:
    """Return the weight that folds to `folded`. Where γ = 0 the weight does not matter, and `weight` is kept."""
    fold: Any = module.fold
    factor = channel_factor(fold, torch.float64).to(weight.device)
    inverse = torch.where(factor == 0, torch.ones_like(factor), 1 / factor)
    unfolded = scaled_outputs(folded.double(), module, inverse).to(weight.dtype)
    # γ = 0: the output does not depend on the weight. Avoid 1 / 0.
    dead = scaled_outputs(torch.ones_like(weight, dtype=torch.float64), module, (factor == 0).double())
    return torch.where(dead.bool(), weight, unfolded)


def relative(layer: str, batch_norm: str) -> str:
    """Return a batch norm's name relative to the layer, ``..`` for the parent, since wrappers change prefixes.

    Example:
        >>> relative("net.conv", "net.norm"), relative("0", "1")
        ('..norm', '..1')
    """
    ours, theirs = layer.split("."), batch_norm.split(".")
    shared = 0
    while shared < min(len(ours), len(theirs)) - 1 and ours[shared] == theirs[shared]:
        shared += 1
    return ".." * (len(ours) - shared) + ".".join(theirs[shared:])


def batch_norm_of(model: nn.Module, layer: str, name: str, where: str) -> nn.Module:
    """Return the batch norm with the name that `relative` returned."""
    above = (len(name) - len(name.lstrip("."))) // 2
    parts = layer.split(".")
    full = ".".join([*parts[: max(len(parts) - above, 0)], name.lstrip(".")])
    found = {plain_name(own): module for own, module in model.named_modules()}.get(full)
    if not isinstance(found, nn.modules.batchnorm._BatchNorm):
        raise MatchError(where, f"batch_norm of {layer} is {full!r}, which is not a batch norm of the model")
    return found
