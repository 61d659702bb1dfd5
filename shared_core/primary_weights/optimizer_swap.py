"""Other tensors in the place of an optimizer's parameters: in its groups and in its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shared_core.errors import MatchError

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
    exchange_parameters_(optimizer, replacement.items())


def exchange_parameters_(optimizer: torch.optim.Optimizer, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Do what `replace_parameters_` does, of pairs of an old tensor and the new one."""
    # by identity: this runs twice a step, and a tensor's hash is a call of Python's
    new = {id(old): new for old, new in pairs}
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(id(old), old) for old in group["params"]]
    if optimizer.state:
        moved = [(new.get(id(key), key), value) for key, value in optimizer.state.items()]
        optimizer.state.clear()
        optimizer.state.update(moved)


def trained_in_16_bit(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return every trainable fp16 or bf16 parameter of the optimizers once, in their order."""
    groups = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    return [*{id(p): p for parameters in groups for p in parameters if p.dtype in HALF and p.requires_grad}.values()]


def moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the floating-point state of a parameter's shape by name: what torch casts when it is loaded."""
    return {
        name: value
        for name, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == parameter.shape
    }


def check_match(parameters: Iterable[Tensor]) -> None:
    """Refuse parameters of which none is trained in 16 bit.

    Raises:
        MatchError: If so.
    """
    dtypes = {parameter.dtype for parameter in parameters if parameter.requires_grad}
    if dtypes.isdisjoint(HALF):
        raise MatchError(
            "primary_weights: the model must be loaded in 16 bit, with trainable float16 or bfloat16 parameters, got "
            f"{', '.join(sorted(map(dtype_name, dtypes))) or 'none that are trainable'}; load it so or drop "
            "primary_weights: autocast leaves parameters in float32, which need no copy"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float16`` of ``torch.float16``."""
    return str(dtype).removeprefix("torch.")
