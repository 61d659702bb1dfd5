"""Per-example gradients of one layer's weight from its inputs and the gradients of its outputs, squared and summed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.module_match import is_transformers_conv1d

_BUDGET = 1 << 24


@torch.no_grad()
def squared_gradient_sum(
    module: nn.Module, calls: Sequence[tuple[Tensor, Tensor]], *, max_elements: int = _BUDGET
) -> Tensor:
    """Return ``Σ_i (∂ℓ/∂W of example i)²``, an example being one index of the first axis.

    An example's gradient is summed exactly over its positions (tokens, places) and over the calls of the layer before
    it is squared. Examples are taken in chunks, so that one chunk's gradients and unfolded inputs together hold at
    most about `max_elements` numbers, but never less than one example's.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to 3d, transformers' Conv1D; strides, dilation, groups and
            every padding mode.
        calls: For each call (input, gradient of the output), all with as many examples; without a batch axis one.
        max_elements: Size of a chunk, in numbers.

    Returns:
        float32, float64 for a float64 weight, of the weight's shape.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> x, gradient = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [1.0]])
        >>> squared_gradient_sum(layer, [(x, gradient)])  # 3² + 2²
        tensor([[13.]])
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    calls = [(_batched(module, x), _batched(module, gradient)) for x, gradient in calls]
    examples = calls[0][0].shape[0]
    total: Tensor | None = None
    device = calls[0][0].device
    # autocast would round the products to 16 bits
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
    """Return how many examples a layer's input or output holds: its first axis, 1 without a batch axis.

    Example:
        >>> num_examples(nn.Linear(4, 2), torch.zeros(4)), num_examples(nn.Linear(4, 2), torch.zeros(3, 5, 4))
        (1, 3)
    """
    return _batched(module, x).shape[0]


def _squared(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the sum over examples of ``(Σ over calls of A Bᵀ)²``; A and B are (examples, groups, rows, places)."""
    first, second = pairs[0]
    if len(pairs) == 1 and first.shape[-1] == 1:
        # one place: the square of a product is the product of squares, and the sum a single matrix product
        return torch.einsum("nga,ngb->gab", first[..., 0].square(), second[..., 0].square())
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
    """Return how many numbers one example needs: its gradient, unfolded input and both in the type of the sum."""
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
    """Return A and B, (examples, groups, rows, places): an example's weight gradient is ``A Bᵀ``, rows as stored."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        inputs = x.reshape(x.shape[0], 1, -1, x.shape[-1]).transpose(-1, -2)
        outputs = gradient.reshape(gradient.shape[0], 1, -1, gradient.shape[-1]).transpose(-1, -2)
        return (inputs, outputs) if is_transformers_conv1d(module) else (outputs, inputs)
    padding = list(module._reversed_padding_repeated_twice)
    if module.transposed:
        # the adjoint of a convolution: input and output change places
        columns, rows = _unfolded(module, F.pad(gradient, padding), x.shape[2:]), x
    else:
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        columns, rows = _unfolded(module, F.pad(x, padding, mode=mode), gradient.shape[2:]), gradient
    examples, groups = x.shape[0], module.groups
    places = math.prod(rows.shape[2:])
    rows = rows.reshape(examples, groups, rows.shape[1] // groups, places)
    return rows, columns.reshape(examples, groups, columns.shape[1] // groups, places)


def _unfolded(module: nn.modules.conv._ConvNd, x: Tensor, places: Sequence[int]) -> Tensor:
    """Return what each place of the kernel meets: (examples, channels · kernel size, places)."""
    dims = len(module.kernel_size)
    for axis, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True), start=2
    ):
        x = x.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        # rows at the end meet no place: output_padding, or a stride that does not divide
        x = x.narrow(axis, 0, places[axis - 2])
    order = [0, 1, *range(2 + dims, 2 + 2 * dims), *range(2, 2 + dims)]
    x = x.permute(order)
    return x.reshape(x.shape[0], x.shape[1] * math.prod(module.kernel_size), -1)
