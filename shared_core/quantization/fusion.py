"""Batch norm folded into the layer before it, for quantisation after training."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from eff_kernels.quantization import compute_dtype
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared_core.errors import CompatibilityError
from shared_core.model_calls import call_model
from shared_core.quantization.batch_norm_folding import check_pair, fold_batch_norm
from shared_core.quantization.graph import LAYERS, Flow, Node, evaluating, output_tensor, sole_user, trace

_RELU = frozenset({"ReLU", "ReLU6", "relu", "relu_", "relu6"})


@dataclass(frozen=True)
class BatchNormPair:
    """A layer whose output only a batch norm reads; names are those of `named_modules`.

    Attributes:
        layer: The Linear, Conv or transposed Conv.
        batch_norm: The batch norm behind it.
        activation: The ReLU or ReLU6 that alone reads the batch norm (a module's name or a function's), or None.
            A quantiser need not round in front of it.
    """

    layer: str
    batch_norm: str
    activation: str | None


@dataclass(frozen=True)
class FusionReport:
    """What `fuse_batch_norm` did.

    Attributes:
        fused: The pairs, in the order of execution.
        refused: Batch norm → why it stays.
        vanished_keys: Keys of the state dict that no longer exist.
        new_keys: Keys that did not exist: biases of layers that had none.
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
        model: Searched through, not changed.
        example_inputs: As `trace` takes them; without, torch.fx traces the model.
        where: Who asks, for errors.

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
    refused = {name: "no forward reached it" for name in norms if name not in flow.calls}
    for name in (name for name in flow.calls if name in norms):
        node = flow.calls[name][0]
        reason = _why_not(flow, node, where)
        if reason is not None:
            refused[name] = reason
            continue
        reader = sole_user(node)[0]
        follows = reader.label if reader is not None and reader.kind in _RELU else None
        pairs.append(BatchNormPair(node.inputs[0].label, name, follows))
    return pairs, refused


def _why_not(flow: Flow, node: Node, where: str) -> str | None:
    reason = flow.why_not(node)
    if reason is not None:
        return reason
    layer = node.inputs[0] if node.inputs else None
    if layer is None or type(layer.module) not in LAYERS:
        return f"it follows {layer}, no Linear or Conv layer"
    reason = flow.why_not(layer) or (sole_user(layer)[1] or None)
    if reason is not None:
        return f"layer {layer.label!r}: {reason}"
    if isinstance(layer.module, nn.Linear) and layer.shape is not None and len(layer.shape) != 2:
        return f"it normalises axis 1 of {tuple(layer.shape)}, which are not the channels of the Linear layer"
    try:
        check_pair(layer.module, node.module, where)  # type: ignore[arg-type]
    except CompatibilityError as error:
        return str(error).removeprefix(f"{where}: ")
    return None


def fuse_batch_norm(model: nn.Module, example_inputs: Any = None) -> FusionReport:
    """Fold every batch norm into the layer before it, in place, and return what was fused.

    ``w' = w·γ/√(σ² + ε)``, ``b' = β + (b − μ)·γ/√(σ² + ε)``, computed in float64 and rounded once; outputs in
    evaluation stay equal up to float rounding. Layers keep their classes and get a bias if they have none; a
    batch norm becomes `torch.nn.Identity`. A model without batch norms is left as it is.

    Args:
        model: In evaluation mode.
        example_inputs: A tensor, a tuple of arguments or a mapping of keyword arguments: the flow is read from one
            forward, and outputs before and after are compared. None: torch.fx traces the model. Pass it
            for a model that torch.fx cannot trace, and where a Linear layer reads sequences.

    Returns:
        The pairs, the batch norms that stay and why, and the keys that vanished and appeared.

    Raises:
        CompatibilityError: If the model is in training mode or cannot be traced, or if outputs would change; the
            model is as it was.

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
            f"{where}: model must be in evaluation mode, got {training[0]!r} in training; call model.eval() first"
        )
    pairs, refused = find_batch_norms(model, example_inputs, where=where)
    if example_inputs is not None and pairs:
        trial = copy.deepcopy(model)  # so that a model that would change is left as it is
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
    """Fold one batch norm into `layer` and put an Identity in its place, wherever `model` holds it.

    Args:
        model: Holds both.
        layer: A stock Linear, Conv or transposed Conv layer whose output only `batch_norm` reads.
        batch_norm: A stock batch norm with running statistics.
    """
    check_pair(layer, batch_norm, "fuse_pair_")
    norm: Any = batch_norm
    weight: Tensor = layer.weight  # type: ignore[assignment]
    deviation = torch.sqrt(norm.running_var.double() + norm.eps)
    folded, bias = fold_batch_norm(layer, norm.running_mean.double(), deviation, norm.weight, norm.bias)
    weight.copy_(folded)
    if layer.bias is None:
        layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        layer.bias.copy_(bias)  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is batch_norm:
                parent._modules[name] = nn.Identity().train(batch_norm.training)


def run(model: nn.Module, inputs: Any, where: str = "model: inputs") -> Tensor:
    """Return the output tensor of `model` in evaluation, without a graph; `where` as in `call_model`."""
    with evaluating(model), torch.no_grad():
        return output_tensor(call_model(model, inputs, where)).clone()


def check_same_function(before: Tensor, after: Tensor, where: str) -> None:
    """Raise `CompatibilityError` if outputs differ by more than float rounding.

    The bound is ``√ε·max|y|`` for the ε of the type: rounding of a deep net stays far below, an error does not.
    """
    wide = compute_dtype(before.dtype)
    error = (after.to(wide) - before.to(wide)).abs()
    bound = torch.finfo(before.dtype).eps ** 0.5 * before.to(wide).abs().max() if before.numel() else 0.0
    if before.numel() and not bool((error <= bound).all()):
        raise CompatibilityError(
            f"{where}: outputs must stay equal on example_inputs, got a difference of {error.max().item():.3g} where "
            f"the largest output is {before.abs().max().item():.3g}; the model uses a layer in a way that its "
            "flow does not show, and was left as it was"
        )
