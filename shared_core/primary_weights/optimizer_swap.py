"""Other tensors in the place of an optimizer's parameters: in its groups and in its state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def replace_parameters_(optimizer: torch.optim.Optimizer, replacement: Mapping[Tensor, Tensor]) -> None:
    """Put other tensors into an optimizer's groups, in place, with the state of those that they replace.

    Torch's optimizers read their groups when they step, so what is there steps. What `replacement` does not name
    stays; the inverse mapping undoes it, also after groups were added in between.

    Args:
        optimizer: Changed in place; the order of its parameters, and so its state dict, stays.
        replacement: New tensor by the one whose place it takes.

    Example:
        >>> weight, other = torch.zeros(2, dtype=torch.float16), torch.zeros(2)
        >>> optimizer = torch.optim.SGD([weight], lr=1.0)
        >>> replace_parameters_(optimizer, {weight: other})
        >>> other.grad = torch.ones(2)
        >>> optimizer.step()
        >>> weight.tolist(), other.tolist()
        ([0.0, 0.0], [-1.0, -1.0])
    """
    for group in optimizer.param_groups:
        group["params"][:] = [replacement.get(parameter, parameter) for parameter in group["params"]]
    if not any(key in replacement for key in optimizer.state):
        return
    moved = {replacement.get(key, key): value for key, value in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(moved)


def trained_in_16_bit(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield every trainable fp16 or bf16 parameter of the optimizers once, in their order."""
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype in HALF and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the floating-point state of a parameter's shape by name: what torch casts when it is loaded."""
    return {
        name: value
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
    }
