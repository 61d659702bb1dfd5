"""Values that a tensor has whatever the input is: NaN where they are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def unless_unknown(value: Tensor | None) -> Tensor | None:
    """Return the constants, None if not one of them is known."""
    return None if value is None or not value.is_floating_point() or bool(value.isnan().all()) else value


def product(first: Tensor, second: Tensor) -> Tensor:
    """Return the product of two tensors of constants; zero times the unknown is zero.

    Example:
        >>> product(torch.tensor([0.0, 2.0]), torch.tensor([float("nan"), 3.0]))
        tensor([0., 6.])
    """
    result = first * second
    return torch.where((first == 0) | (second == 0), torch.zeros_like(result), result)


def contraction(first: Tensor, second: Tensor, contract: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a sum of products of constants, known where no term is unknown times what is not zero.

    Args:
        first: Constants, NaN where unknown.
        second: The same.
        contract: Bilinear: a matrix product, a convolution without bias.

    Example:
        >>> nan = float("nan")
        >>> contraction(torch.tensor([[nan, 1.0]]), torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.mm)
        tensor([[2., nan]])
    """
    value = contract(first.nan_to_num(0.0), second.nan_to_num(0.0))
    precise = torch.promote_types(value.dtype, torch.float32)
    nonzero = [(item != 0).to(precise) for item in (first, second)]  # NaN != 0
    known = [((item != 0) & ~item.isnan()).to(precise) for item in (first, second)]
    unknown_terms = contract(*nonzero) - contract(*known)
    return value.masked_fill(unknown_terms > 0.5, float("nan"))


def pointwise(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return what an elementwise operator makes of constants.

    Args:
        name: Of the operator, without a trailing underscore.
        func: The operator.
        args: Its arguments, tensors replaced by their constants.
        kwargs: The same.
    """
    if name == "mul" and isinstance(args[1], Tensor):
        return product(args[0], args[1])
    if name == "div" and isinstance(args[1], Tensor) and not kwargs:
        result = args[0] / args[1]
        return torch.where(args[0] == 0, torch.zeros_like(result), result)
    if name == "where":
        first, second = (item if isinstance(item, Tensor) else torch.tensor(item) for item in args[1:3])
        return torch.where(first == second, first, torch.full_like(first, float("nan")))
    if name == "masked_fill":
        value, fill = args[0], args[2]
        return torch.where(value == fill, value, torch.full_like(value, float("nan")))
    result = func(*args, **kwargs)
    return result if isinstance(result, Tensor) else None


def agreed(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the constants that do not differ over `dims`, which are dropped; NaN where they do.

    Example:
        >>> agreed(torch.tensor([[1.0, 2.0], [1.0, 3.0]]), (0,))
        tensor([1., nan])
    """
    if not dims:
        return value
    low, high = value.amin(dims), value.amax(dims)  # both are NaN where one is
    return torch.where(low == high, low, torch.full_like(low, float("nan")))
