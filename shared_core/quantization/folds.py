"""Which batch norms quantised layers compute themselves, so that what is quantised is the weight that inference has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, MatchError
from shared_core.module_match import plain_name
from shared_core.quantization.batch_norm_folding import Fold
from shared_core.quantization.channels import scaled_outputs
from shared_core.quantization.fusion import find_batch_norms
from shared_core.quantization.graph import evaluating


def find_folds(model: nn.Module, where: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return (layer → the batch norm behind it, batch norm → why it is not folded).

    A model whose forward cannot be traced is searched part by part: a LightningModule has none, and those of large
    models look at values, but a block of convolution and batch norm does not.

    Args:
        model: Searched through, not changed.
        where: Who asks.

    Example:
        >>> find_folds(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), "qat")
        ({'0': '1'}, {})
    """
    norms = {name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    if not norms:
        return {}, {}
    try:
        with evaluating(model):
            pairs, refused = find_batch_norms(model, where=where)
        return {pair.layer: pair.batch_norm for pair in pairs}, refused
    except CompatibilityError as error:
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
    """Return ``γ/σ`` of each output channel, with the running statistics."""
    norm = fold.batch_norm
    deviation = torch.sqrt(norm.running_var.to(dtype) + norm.eps)
    return 1 / deviation if norm.weight is None else norm.weight.to(dtype) / deviation


def folded_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a folded layer's weight as inference has it, that of any other layer as it is."""
    fold: Any = getattr(module, "fold", None)
    if fold is None:
        return weight
    factor = channel_factor(fold, fold.batch_norm.running_var.dtype)
    return scaled_outputs(weight, module, factor.to(weight.device)).to(weight.dtype)


def unfolded_weight(module: nn.Module, folded: Tensor, weight: Tensor) -> Tensor:
    """Return the weight whose fold is `folded`; where γ = 0 no weight matters, and `weight` stays."""
    fold: Any = module.fold
    factor = channel_factor(fold, torch.float64).to(weight.device)
    inverse = torch.where(factor == 0, torch.ones_like(factor), 1 / factor)
    unfolded = scaled_outputs(folded.double(), module, inverse).to(weight.dtype)
    dead = scaled_outputs(torch.ones_like(weight, dtype=torch.float64), module, (factor == 0).double())
    return torch.where(dead.bool(), weight, unfolded)


def relative(layer: str, batch_norm: str) -> str:
    """Return a batch norm's name seen from the layer, ``..`` being the module above: prefixes may come and go.

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
    """Return the batch norm that `relative` named.

    Raises:
        MatchError: If the model has none there.
    """
    above = (len(name) - len(name.lstrip("."))) // 2
    parts = layer.split(".")
    full = ".".join([*parts[: max(len(parts) - above, 0)], name.lstrip(".")])
    found = {plain_name(own): module for own, module in model.named_modules()}.get(full)
    if not isinstance(found, nn.modules.batchnorm._BatchNorm):
        raise MatchError(f"{where}: batch_norm of {layer} must be a batch norm of the model, got {full!r}")
    return found
