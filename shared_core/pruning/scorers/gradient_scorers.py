"""Criteria from gradients: first-order Taylor, movement, and the diagonal Fisher of optimal brain damage.

Taylor and movement use the gradients of complete optimizer steps, for weights or whole units. Fisher sums squared
per-example gradients, computed from a layer's inputs and the gradients of its outputs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.distributed.collectives import local_part
from shared_core.distributed.sharded_tensors import is_sharded, part_of, whole_of
from shared_core.modules.matching import is_transformers_conv1d, weight_of
from shared_core.modules.weight_views import channel_axis, over_outputs
from shared_core.pruning.scorers.capture import BackwardScorer, Call
from shared_core.pruning.scorers.scorer import Scorer, saved_tensors, wide

# Chunk size in numbers: each per-example gradient is as large as the weight.
_BUDGET = 1 << 24


@torch.no_grad()
def squared_gradient_sum(
    module: nn.Module, calls: Sequence[tuple[Tensor, Tensor]], *, max_elements: int = _BUDGET
) -> Tensor:
    """Return ``Σ_i (∂ℓ/∂W of example i)²``, where an example is one index of the first axis.

    An example's gradient is summed exactly over its positions (tokens, places) and over the calls of the layer before
    it is squared. Examples are processed in chunks of at least one. The gradients and unfolded inputs of a chunk hold
    at most about `max_elements` numbers.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to 3d, transformers' Conv1D, with any stride, dilation, groups
            and padding mode.
        calls: (input, gradient of the output) for each call, with equally many examples. One example if there is no
            batch axis.
        max_elements: Chunk size, in numbers.

    Returns:
        float32, float64 for a float64 weight, of the weight's shape.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    # (examples, ..., features) each; a missing batch axis is one example.
    calls = [(_batched(module, x), _batched(module, gradient)) for x, gradient in calls]
    examples = calls[0][0].shape[0]
    total: Tensor | None = None
    device = calls[0][0].device
    # Autocast would round the products to 16 bits.
    with torch.autocast(device.type, enabled=False):
        per_example = max(_elements(module, x, gradient) for x, gradient in calls) if examples else 1
        size = max(1, max_elements // max(per_example, 1))
        for start in range(0, examples, size):
            where = slice(start, start + size)
            pairs = [_factors(module, x[where].to(dtype), gradient[where].to(dtype)) for x, gradient in calls]
            squared = _squared(pairs).reshape(weight.shape).contiguous()
            total = squared if total is None else total.add_(squared)
    return torch.zeros(weight.shape, dtype=dtype, device=device) if total is None else total


def num_examples(module: nn.Module, x: Tensor) -> int:
    """Return the number of examples in a layer's input or output: its first axis, or 1 without a batch axis."""
    return _batched(module, x).shape[0]


def _squared(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum over examples of ``(Σ over calls of A Bᵀ)²``. A and B are (examples, groups, rows, places)."""
    first, second = pairs[0]
    if len(pairs) == 1 and first.shape[-1] == 1:
        # With one place, the square of a product is the product of squares, and the sum is one matrix product.
        return torch.einsum("nga,ngb->gab", first[..., 0].square(), second[..., 0].square())
    # (examples, groups, outputs, inputs): the sum over places is squared, so it must exist for each example.
    gradients = first @ second.transpose(-1, -2)
    for a, b in pairs[1:]:
        gradients += a @ b.transpose(-1, -2)
    return gradients.square_().sum(0)


def _batched(module: nn.Module, x: Tensor) -> Tensor:
    """Return a layer's input or gradient with an axis of examples."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return x.unsqueeze(0) if x.dim() == len(module.kernel_size) + 1 else x
    return x.unsqueeze(0) if x.dim() == 1 else x


def _elements(module: nn.Module, x: Tensor, gradient: Tensor) -> int:
    """Return how many numbers one example needs: gradient, unfolded input, and copies in the sum's dtype."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    own = (x.numel() + gradient.numel()) // max(x.shape[0], 1)
    places = own
    if isinstance(module, nn.modules.conv._ConvNd):
        folded = gradient if module.transposed else x
        spots = x if module.transposed else gradient
        window = math.prod(module.kernel_size)
        places = folded.shape[1] * window * math.prod(spots.shape[2:])
    elif x.dim() == 2:
        return own  # never formed
    return weight.numel() + places + own


def _factors(module: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B, (examples, groups, rows, places). An example's weight gradient is ``A Bᵀ``, rows as stored."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        # (examples, 1, features, places): all tokens of an example are places of its gradient.
        inputs = x.reshape(x.shape[0], 1, -1, x.shape[-1]).transpose(-1, -2)
        outputs = gradient.reshape(gradient.shape[0], 1, -1, gradient.shape[-1]).transpose(-1, -2)
        return (inputs, outputs) if is_transformers_conv1d(module) else (outputs, inputs)
    padding = list(module._reversed_padding_repeated_twice)
    if module.transposed:
        # The adjoint of a convolution: input and output are swapped.
        columns, rows = _unfolded(module, F.pad(gradient, padding), x.shape[2:]), x
    else:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        columns, rows = _unfolded(module, F.pad(x, padding, mode=mode), gradient.shape[2:]), gradient
    examples, groups = x.shape[0], module.groups
    places = math.prod(rows.shape[2:])
    rows = rows.reshape(examples, groups, rows.shape[1] // groups, places)
    return rows, columns.reshape(examples, groups, columns.shape[1] // groups, places)


def _unfolded(module: nn.modules.conv._ConvNd, x: Tensor, places: Sequence[int]) -> Tensor:
    """Return the inputs at each kernel position: (examples, channels · kernel size, places)."""
    dims = len(module.kernel_size)
    for axis, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2
    ):
        # Unfold with the dilated window, then take every `dilation`-th element: the inputs at one kernel position.
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        # Rows at the end have no place, because of output_padding or a stride that does not divide.
        x = x.narrow(axis, 0, places[axis - 2])
    # (examples, channels, kernel dims, place dims): channels and kernel as in the weight, places last.
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    x = x.permute(order)
    return x.reshape(x.shape[0], x.shape[1] * math.prod(module.kernel_size), -1)


class Fisher(BackwardScorer):
    """``½·w²·F`` with F the mean over examples of their squared gradients (LeCun et al. 1989; arXiv:1801.05787).

    The square of a batch's gradient is not the mean of squares, so hooks compute each example's gradient during the
    user's own backward. An example is one index of a layer's first axis.

    Scaling: an example's gradient is N times its contribution to the unscaled gradient that this rank accumulates, with
    N the examples of this rank's step. So the 1/N of a mean over the batch, the division by accumulation steps and the
    loss scale cancel, and 1 × 8 examples score the same as 4 × 2. If the loss is a sum, scores are N² times as large,
    in the same order. Every step sums over ranks, with one reduction of the size of the weights.
    """

    criterion: ClassVar[str] = "fisher"
    needs: ClassVar[frozenset[str]] = frozenset({"per_example_gradients"})

    def __init__(self, modules: Mapping[str, nn.Module], *, max_elements: int = 1 << 24, **common: Any) -> None:
        super().__init__(modules, **common)
        self.max_elements = max_elements

    def fisher(self, name: str, weight: Tensor) -> Tensor:
        """Return F of one weight as a new tensor: the mean of squared per-example gradients, 0 without examples."""
        total = self._total(name, weight)
        return torch.zeros_like(wide(weight)) if total is None else total / self._counts[name]

    def _keep(self, x: Tensor, output: Tensor) -> Tensor:
        return x

    def _take(self, name: str, calls: list[Call]) -> None:
        module = self.modules[name]
        sums = squared_gradient_sum(module, calls, max_elements=self.max_elements)
        self._gather(name, sums, num_examples(module, calls[0][0]))

    def _rescale_(self, window: Tensor, count: int, loss_scale: float) -> None:
        # A mean loss over `count` examples scales each gradient by 1/count, and the scaler multiplies by loss_scale.
        window.mul_((count / loss_scale) ** 2)

    def _like(self, name: str) -> Tensor:
        weight: Tensor = self.modules[name].weight  # type: ignore[assignment]
        return torch.zeros_like(wide(weight.detach()), memory_format=torch.contiguous_format)

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        return self.fisher(name, weight).mul_(wide(weight).square()).mul_(0.5)

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        part = wide(weight.reshape(-1)[where])
        total = self._total(name, weight)
        if total is None:
            return torch.zeros_like(part)
        return (total.view(-1)[where] / self._counts[name]).mul_(part.square()).mul_(0.5)


class _StepSums(Scorer):
    """Keeps one sum over steps for each weight, in the scores' dtype, on the weight's device.

    Gradients of complete steps are equal on every rank, so no reduction is needed. For a weight sharded by FSDP2 each
    rank keeps the sum of its own part, and weights are scored one at a time.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})
    _gathered: dict[str, Tensor]
    _saw_nothing: ClassVar[str] = "but no weight had a gradient; check for frozen layers or a detached loss"

    @property
    def ready(self) -> bool:
        """True if any weight had a gradient in a step."""
        return bool(self._sums)

    def _observe(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], loss_scale: float) -> None:
        for name in self.modules:
            gradient = gradients.get(name)
            if gradient is None:
                continue
            # Sums hold this process's part. They are gathered only for ranking and saving.
            gradient = local_part(gradient.to_dense() if gradient.is_sparse else gradient)
            if is_sharded(weights[name]) and name not in self._placed:
                self._placed[name] = weights[name]
                # A saved sum is whole. How the weight is sharded is known at the first step after resuming.
                if name in self._sums:  # resumed
                    self._sums[name] = part_of(self._sums[name].to(gradient.device), weights[name])
            weight = local_part(weights[name].detach())
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(wide(weight), memory_format=torch.contiguous_format)
                self._ever.add(name)
            self._add_(self._sum(name, weight), wide(weight), wide(gradient))

    @abstractmethod
    def _add_(self, total: Tensor, weight: Tensor, gradient: Tensor) -> None: ...

    def _sum(self, name: str, weight: Tensor) -> Tensor:
        total = self._sums[name]
        if total.device != weight.device:
            total = self._sums[name] = total.to(weight.device)
        return total

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        # A weight without a gradient did not affect the loss.
        return self._mean(self._whole(name).to(weight.device)) if name in self._sums else torch.zeros_like(wide(weight))

    def _whole(self, name: str) -> Tensor:
        return whole_of(self._sums[name], self._placed.get(name))

    def gather(self) -> None:
        """Gather the sums of all ranks on the CPU."""
        self._gathered = {name: self._whole(name).cpu() for name in self._placed}

    def release(self) -> None:
        """Keep only this rank's sums."""
        self._gathered.clear()

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        if name not in self._sums:
            return torch.zeros_like(wide(weight).reshape(-1)[where])
        return self._mean(self._sum(name, weight).view(-1)[where])

    def _mean(self, total: Tensor) -> Tensor:
        return total / self.num_observed

    def _forget(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._placed: dict[str, Tensor] = {}
        self._gathered = {}

    def state_dict(self) -> dict[str, Any]:
        """Also return the whole sums. Every rank must call it unless they are gathered."""
        whole = {name: self._gathered[name] if name in self._gathered else self._whole(name) for name in self._sums}
        return {**super().state_dict(), "sums": {name: total.clone() for name, total in whole.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the sums. They move to the weights' devices at the next step."""
        super().load_state_dict(state)
        shapes = {name: weight_of(name, module).shape for name, module in self.modules.items()}
        self._placed = {}
        self._sums = saved_tensors(state, "sums", shapes, f"prune {self.criterion}")


class Taylor(_StepSums):
    """``mean over steps of |w·g|``: the change of the loss without the weight, to first order (Molchanov et al. 2017).

    g is the gradient of a complete optimizer step. |·| is taken per step, so that steps do not cancel. The mean
    restarts with every `reset` (arXiv:1611.06440, arXiv:1906.10771).
    """

    criterion: ClassVar[str] = "taylor"

    def _add_(self, total: Tensor, weight: Tensor, gradient: Tensor) -> None:
        total.add_((weight * gradient).abs_())


class Movement(_StepSums):
    """``−Σ over all steps of w·g``, signed: weights that grow are kept (Sanh et al. 2020, arXiv:2005.07683).

    The sum continues across every `reset`, as in the paper.
    """

    criterion: ClassVar[str] = "movement"
    zero_is_lowest: ClassVar[bool] = False
    keeps_going: ClassVar[bool] = True

    def _add_(self, total: Tensor, weight: Tensor, gradient: Tensor) -> None:
        # The score's gradient step (equation 3) without the learning rate, which does not change the ranking.
        total.addcmul_(weight, gradient, value=-1)

    def _mean(self, total: Tensor) -> Tensor:
        return total.clone()


class NeuronTaylor(BackwardScorer):
    """``mean over examples of |mean over positions of a·∂L/∂a|`` of a layer's output units (arXiv:1611.06440, eq. 8).

    a is the output of the layer before the nonlinearity. If that is piecewise linear through 0 (ReLU), a·∂L/∂a is the
    same after it. Scaling is as in `Fisher`, but to the first power, with the same N. Outputs are copied and kept until
    backward, because a nonlinearity may overwrite them.
    """

    criterion: ClassVar[str] = "neuron_taylor"
    needs: ClassVar[frozenset[str]] = frozenset({"activations", "per_example_gradients"})
    zero_is_lowest: ClassVar[bool] = False

    @torch.no_grad()
    def unit_scores(self, name: str, weight: Tensor) -> Tensor:
        """Return one score per output unit, (units,), in the scores' dtype."""
        self._require_ready()
        units = self._unit_means(name, weight.detach())
        return units if self.costs is None else units / self.costs[name]

    def _keep(self, x: Tensor, output: Tensor) -> Tensor:
        return output.clone()

    def _take(self, name: str, calls: list[Call]) -> None:
        module = self.modules[name]
        products: Tensor | None = None
        places = examples = 0
        for output, gradient in calls:
            axis = channel_axis(module, output)
            # a ∂L/∂a, channels last.
            product = (wide(output) * wide(gradient)).movedim(axis, -1)
            if axis == 0:
                product = product.unsqueeze(0)  # without a batch axis: one example
            examples = product.shape[0]
            if not product.numel():
                return
            product = product.reshape(examples, -1, product.shape[-1])
            places += product.shape[1]
            # Summed with sign before |.|: equation 8 takes the absolute value of an example's mean.
            products = product.sum(1) if products is None else products + product.sum(1)
        if products is not None:
            # float64: long runs exceed the resolution of float32 sums.
            self._gather(name, products.abs_().sum(0).double() / max(places, 1), examples)

    def _rescale_(self, window: Tensor, count: int, loss_scale: float) -> None:
        window.mul_(count / loss_scale)

    def _like(self, name: str) -> Tensor:
        weight: Tensor = self.modules[name].weight  # type: ignore[assignment]
        return torch.zeros(self._num_units(name, weight), dtype=torch.float64, device=weight.device)

    def _num_units(self, name: str, weight: Tensor) -> int:
        module = self.modules[name]
        units = getattr(module, "out_features", None) or getattr(module, "out_channels", None)
        return int(units or weight.shape[-1])

    def _unit_means(self, name: str, weight: Tensor) -> Tensor:
        dtype = wide(weight[:0]).dtype
        total = self._total(name, weight)
        if total is None:
            return torch.zeros(self._num_units(name, weight), dtype=dtype, device=weight.device)
        return (total / self._counts[name]).to(dtype)

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        return over_outputs(self.modules[name], self._unit_means(name, weight), weight.shape)
