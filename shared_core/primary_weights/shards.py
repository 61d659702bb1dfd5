"""What float32 copies need where FSDP2 shards the parameters: gathered to be saved, rounded as one process would."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from shared_core.errors import CheckpointError
from shared_core.numerics import stochastic_round_
from shared_core.primary_weights.optimizer_swap import dtype_name, moments
from shared_core.ranks import local_part
from shared_core.sharded import cut, fill_, is_sharded, place_of, whole

_CHUNK = 1 << 22


class CopiesOfShards:
    """The copies and moments of sharded parameters as a checkpoint takes them: whole, on the CPU, by name.

    The moments too: the state dict that torch (2.13) loads an optimizer of sharded parameters from has their format.
    """

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self.moments: dict[str, dict[str, Tensor]] = {}

    def gather(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Iterable[Tensor],
        copies: Mapping[Tensor, Tensor],
        names: Mapping[Tensor, str],
    ) -> None:
        """Gather them, one by one; every process must call it."""
        for parameter in filter(is_sharded, parameters):
            if parameter in copies:
                self.copies[names[parameter]] = whole(copies[parameter].detach()).cpu()
            for optimizer in optimizers:
                if found := moments(optimizer, parameter):
                    self.moments[names[parameter]] = {key: whole(value).cpu() for key, value in found.items()}

    @staticmethod
    def restore_moments_(
        optimizers: Sequence[torch.optim.Optimizer],
        names: Mapping[Tensor, str],
        saved: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        """Put saved moments in the place of those that torch has loaded in the parameters' format."""
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in saved.get(names.get(parameter, ""), {}).items():
                    state[key] = cut(value.to(parameter.device), parameter)


@torch.no_grad()
def restore_(primary: Tensor, saved: Tensor, name: str) -> None:
    """Put a saved copy, which is whole, back.

    Raises:
        CheckpointError: If it is of another parameter.
    """
    if saved.shape != primary.shape or saved.dtype != torch.float32:
        raise CheckpointError(
            f"primary_weights: the saved copy of {name} must be float32 of shape {tuple(primary.shape)}, got "
            f"{dtype_name(saved.dtype)} of {tuple(saved.shape)}; resume with the model that wrote the checkpoint"
        )
    fill_(primary, saved)


@torch.no_grad()
def round_part_(parameter: Tensor, primary: Tensor, generator: torch.Generator) -> None:
    """Write float32 values, stochastically rounded, into a parameter, or into the part that this process holds.

    The numbers drawn for what other processes hold are drawn too, so that each part is what one process would make of
    it on a CPU, and no two parts are rounded by the same numbers.
    """
    part = local_part(parameter)
    rows = place_of(parameter)[:1] if is_sharded(parameter) else ()
    row = math.prod(parameter.shape[1:])
    before = rows[0].start * row if rows else 0
    after = (parameter.shape[0] - rows[0].stop) * row if rows else 0
    _pass_over(before, part, generator)
    stochastic_round_(part, local_part(primary), generator=generator)
    _pass_over(after, part, generator)


def _pass_over(count: int, like: Tensor, generator: torch.Generator) -> None:
    for start in range(0, count, _CHUNK):
        values = torch.zeros(min(_CHUNK, count - start), device=like.device)
        stochastic_round_(torch.empty_like(values, dtype=like.dtype), values, generator=generator)
