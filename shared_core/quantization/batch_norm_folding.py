"""Batch norm inside the quantised weight: in training the folded weight is what is quantised."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from eff_kernels.quantization import compute_dtype
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, TrainingError
from shared_core.quantization.channels import num_outputs, scaled_outputs
from shared_core.quantization.layers import compute
from shared_core.quantization.plain_state import PlainState


class FoldQuantizer(Protocol):
    """What fake-quantises a folded layer."""

    def input(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return the layer's input, fake-quantised."""
        ...

    def weight(self, module: nn.Module, weight: Tensor) -> Tensor:
        """Return the folded weight, fake-quantised."""
        ...


def fold_batch_norm(
    layer: nn.Module,
    mean: Tensor,
    deviation: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of the one layer that computes `layer` followed by batch norm.

    ``w' = w·γ/σ`` for each output channel, ``b' = β + (b − μ)·γ/σ``. Gradients reach every tensor.

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
    factor = 1 / deviation if gamma is None else gamma / deviation
    shift = (-mean if bias is None else bias - mean) * factor
    return scaled_outputs(weight, layer, factor), shift if beta is None else shift + beta


class Fold:
    """What a folded layer knows of its batch norm.

    Attributes:
        batch_norm: The module whose parameters, buffers and mode are used. It stays where it is in the model, so
            that both modules keep their keys; here it is held aside, not registered a second time.
        quantizer: Fake-quantises input and folded weight; None: nothing is quantised.
        frozen: Use running statistics, and leave them, in training too.
    """

    def __init__(self, batch_norm: nn.Module, quantizer: FoldQuantizer | None) -> None:
        self.batch_norm: Any = batch_norm
        self.quantizer = quantizer
        self.frozen = False
        self._is_mean = self.batch_norm.momentum is None

    @property
    def uses_running_statistics(self) -> bool:
        """Whether statistics rest: frozen, unless somebody re-estimates them as a mean over batches, as a soup does."""
        return self.frozen and (self._is_mean or self.batch_norm.momentum is not None)


class FoldedLayer(PlainState):
    """A layer that computes itself and the batch norm behind it with one folded weight.

    While statistics of the batch (``μ_B, σ_B``) are used, with ``σ`` of the running variance,

    ``y = (x ∗ Q(w·γ/σ)) · σ/σ_B + β + (b − μ_B)·γ/σ_B``:

    the weight is quantised as inference will see it, so that its codes do not jitter from batch to batch, and the
    output is normalised by the batch, as training needs it. Once frozen, and in evaluation,
    ``y = x ∗ Q(w·γ/σ) + β + (b − μ)·γ/σ``. Until then a training step computes the layer twice, once without
    weight quantisation for its statistics; afterwards once.

    Statistics follow the batch norm module: its mode, momentum, ε and buffers, which are updated as it would.
    As there, a forward that is computed again under activation checkpointing updates them again.

    Source: Krishnamoorthi 2018, arXiv:1806.08342, section 3.2.2 (correction and freezing).
    """

    fold: Fold
    weight: Tensor
    training: bool

    def forward(self, input: Tensor, *args: Any) -> Tensor:
        """Return the normalised output; arguments are those of the layer."""
        layer: Any = self
        norm, quantizer = self.fold.batch_norm, self.fold.quantizer
        x = input if quantizer is None else quantizer.input(layer, input)
        wide = compute_dtype(norm.running_var.dtype)
        batch = None
        if norm.training and not self.fold.uses_running_statistics:
            batch = _batch_statistics(layer, compute(layer, x, self.weight, None, *args), wide)
            _update_running(norm, *batch)
        deviation = torch.sqrt(norm.running_var.to(wide) + norm.eps)
        weight, shift = fold_batch_norm(layer, norm.running_mean.to(wide), deviation, norm.weight, norm.bias)
        weight = weight.to(self.weight.dtype)
        if quantizer is not None:
            weight = quantizer.weight(layer, weight)
        if batch is None:
            return compute(layer, x, weight, shift.to(self.weight.dtype), *args)
        mean, variance, _ = batch
        batch_deviation = torch.sqrt(variance + norm.eps)
        _, shift = fold_batch_norm(layer, mean, batch_deviation, norm.weight, norm.bias)
        y = compute(layer, x, weight, None, *args)
        shape = [1, -1, *[1] * (y.dim() - 2)]
        return (y * (deviation / batch_deviation).reshape(shape) + shift.reshape(shape)).to(y.dtype)


def _batch_statistics(layer: Any, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """Return mean and biased variance of each channel of ``y + b``, and the number of values a channel."""
    spatial = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    if y.dim() != 2 + spatial:
        raise TrainingError(
            f"batch_norm_folding: output of {type(layer).__name__} must have {2 + spatial} dimensions, a batch of "
            f"channels, got {tuple(y.shape)}; leave this pair unfolded"
        )
    count = y.numel() // max(y.shape[1], 1)
    if count < 2:
        raise TrainingError(
            f"batch_norm_folding: batch must have more than 1 value per channel in training, got {tuple(y.shape)}; "
            "raise the batch size or drop the last, smaller batch"
        )
    axes = [0, *range(2, y.dim())]
    variance, mean = torch.var_mean(y.to(dtype), axes, correction=0)
    # b cancels in the output and has a gradient of zero, as in batch norm; it must still be part of the graph for DDP
    return mean if layer.bias is None else mean + layer.bias, variance, count


@torch.no_grad()
def _update_running(norm: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    norm.num_batches_tracked.add_(1)
    momentum = norm.momentum if norm.momentum is not None else 1 / norm.num_batches_tracked.to(mean.dtype)
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance * (count / (count - 1)))):
        running.copy_((1 - momentum) * running + momentum * new.detach())


class FoldedLinear(FoldedLayer, nn.Linear):
    """`torch.nn.Linear` with the batch norm behind it."""


class FoldedConv1d(FoldedLayer, nn.Conv1d):
    """`torch.nn.Conv1d` with the batch norm behind it."""


class FoldedConv2d(FoldedLayer, nn.Conv2d):
    """`torch.nn.Conv2d` with the batch norm behind it."""


class FoldedConv3d(FoldedLayer, nn.Conv3d):
    """`torch.nn.Conv3d` with the batch norm behind it."""


class FoldedConvTranspose1d(FoldedLayer, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` with the batch norm behind it."""


class FoldedConvTranspose2d(FoldedLayer, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` with the batch norm behind it."""


class FoldedConvTranspose3d(FoldedLayer, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` with the batch norm behind it."""


class _PassedOn:
    def forward(self, input: Tensor) -> Tensor:
        return input


class FoldedBatchNorm1d(_PassedOn, nn.BatchNorm1d):
    """Holds the parameters and statistics of a batch norm that the layer before it computes."""


class FoldedBatchNorm2d(_PassedOn, nn.BatchNorm2d):
    """Holds the parameters and statistics of a batch norm that the layer before it computes."""


class FoldedBatchNorm3d(_PassedOn, nn.BatchNorm3d):
    """Holds the parameters and statistics of a batch norm that the layer before it computes."""


FOLDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FoldedLinear,
    nn.Conv1d: FoldedConv1d,
    nn.Conv2d: FoldedConv2d,
    nn.Conv3d: FoldedConv3d,
    nn.ConvTranspose1d: FoldedConvTranspose1d,
    nn.ConvTranspose2d: FoldedConvTranspose2d,
    nn.ConvTranspose3d: FoldedConvTranspose3d,
    nn.BatchNorm1d: FoldedBatchNorm1d,
    nn.BatchNorm2d: FoldedBatchNorm2d,
    nn.BatchNorm3d: FoldedBatchNorm3d,
}
STOCK: dict[type[nn.Module], type[nn.Module]] = {folded: stock for stock, folded in FOLDED.items()}


def fold_pair_(layer: nn.Module, batch_norm: nn.Module, quantizer: FoldQuantizer | None = None) -> Fold:
    """Let `layer` compute the batch norm behind it, by a change of both classes; keys and parameters stay.

    Args:
        layer: A stock Linear, Conv or transposed Conv layer.
        batch_norm: The stock batch norm that alone reads the layer's output.
        quantizer: Fake-quantises input and folded weight; None: the pair computes what it did before.

    Returns:
        The handle of the pair; set ``frozen`` on it at the step where statistics freeze.

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
    layer.__class__, batch_norm.__class__ = FOLDED[type(layer)], FOLDED[type(batch_norm)]
    return fold


def unfold_pair_(layer: nn.Module) -> None:
    """Give a folded layer and its batch norm their stock classes back; a layer that is stock stays so.

    Args:
        layer: Of a pair that `fold_pair_` has folded, or any other.
    """
    if type(layer) in STOCK:
        norm: Any = layer.fold.batch_norm  # type: ignore[union-attr]
        layer.__class__, norm.__class__ = STOCK[type(layer)], STOCK[type(norm)]
        del layer.fold


def check_pair(layer: nn.Module, batch_norm: nn.Module, where: str) -> None:
    """Raise `CompatibilityError` unless the batch norm can be folded into the layer, if it follows it."""
    if type(layer) not in FOLDED or isinstance(layer, nn.modules.batchnorm._BatchNorm):
        raise CompatibilityError(
            f"{where}: layer must be a stock Linear, Conv or transposed Conv, got {type(layer).__name__}"
        )
    if type(batch_norm) not in FOLDED or not isinstance(batch_norm, nn.modules.batchnorm._BatchNorm):
        raise CompatibilityError(
            f"{where}: batch_norm must be a stock BatchNorm1d, 2d or 3d, got {type(batch_norm).__name__}"
        )
    if batch_norm.running_mean is None or batch_norm.running_var is None:
        raise CompatibilityError(
            f"{where}: batch_norm must have running statistics, got track_running_stats=False; they are what is folded"
        )
    if batch_norm.num_features != num_outputs(layer):
        raise CompatibilityError(
            f"{where}: batch_norm must have the layer's {num_outputs(layer)} channels, got {batch_norm.num_features}"
        )
