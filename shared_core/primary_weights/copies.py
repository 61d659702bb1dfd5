"""float32 copies of 16-bit parameters, and their float32 gradients.

Copies follow what others write into the parameters. Under FSDP2 they are gathered to be saved, and rounded as a single
process would round them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import has_group, local_part
from shared_core.distributed.sharded_tensors import cut, fill_, is_sharded, whole
from shared_core.errors import CheckpointError
from shared_core.primary_weights.optimizer_swap import dtype_name, moments
from shared_core.primary_weights.rounding import compensated

_SMALL, _TOGETHER = 1 << 14, 1 << 18


class _Bundle(NamedTuple):
    parameters: list[Tensor]
    dtype: torch.dtype
    values: Tensor
    """float32, those of all parameters one after the other; of one parameter its copy itself."""


class Copies:
    """float32 copies of parameters, which follow what others write into these.

    Copies of small parameters of one format and row shape lie one after the other, up to a megabyte: what is asked of
    every copy in every step is asked of a few tensors.

    Args:
        parameters: fp16 or bf16, each once.
        known: Copies of some of the parameters, whose values are to be kept.

    Example:
        >>> parameter = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
        >>> copies = Copies([parameter])
        >>> copies.values[0].data[0] = 1.001
        >>> parameter[1] = 3.0
        >>> copies.follow_()
        True
        >>> copies.values[0].data
        tensor([1.0010, 3.0000])
    """

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Tensor] = (), known: Mapping[Tensor, Tensor] | None = None) -> None:
        self.parameters = [*parameters]
        self.is_sharded = any(map(is_sharded, self.parameters))
        self._bundles: list[_Bundle] = []
        # By id: a tensor's == is elementwise, and its hash a call of Python's.
        values: dict[int, Tensor] = {}
        for together in _bundled(self.parameters):
            bundle, copies = _copied(together, known or {})
            self._bundles.append(bundle)
            values.update(zip(map(id, together), copies, strict=True))
        # In the order of `parameters`: bundles have sorted them otherwise.
        self.values = [values[id(parameter)] for parameter in self.parameters]

    @property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The copy of each parameter."""
        return dict(zip(self.parameters, self.values, strict=True))

    @torch.no_grad()
    def follow_(self) -> bool:
        """Take over what was written into parameters: where a copy's rounding is not its parameter, to the bit."""
        for parameters, dtype, copies in self._bundles:
            now, values = _joined(parameters), local_part(copies)
            # Casting the model (to another 16-bit dtype, to float32) replaces what parameters hold: the copies must
            # be made anew.
            if now.dtype != dtype:
                return False
            # bits, so that a NaN equals itself
            bits, rounded = now.view(torch.int16), values.to(dtype).view(torch.int16)
            # on a CPU asking first is ten times faster than `where` (torch 2.13)
            if not (now.is_cpu and torch.equal(rounded, bits)):
                # Where the bits agree, the copy keeps what lies beyond 16 bit. Where not, someone else wrote the
                # parameter (a mask, a loaded checkpoint): that value counts.
                values.copy_(torch.where(rounded == bits, values, now))
        return True

    @torch.no_grad()
    def write_(self) -> None:
        """Write the copies, rounded, into the parameters."""
        parameters, values = self.parameters, self.values
        # foreach works on plain tensors of this process: on DTensors it would dispatch one by one.
        if self.is_sharded:
            parameters, values = [*map(local_part, parameters)], [*map(local_part, values)]
        if parameters:
            torch._foreach_copy_(parameters, values)


def _bundled(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    bundles: list[list[Tensor]] = []
    unfilled: dict[object, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        size = parameter.numel()
        # A small model has hundreds of norms and biases: one kernel for each would take longer than the arithmetic.
        # Large tensors gain nothing, and cat would copy them.
        if size > _SMALL or is_sharded(parameter) or not parameter.is_contiguous():
            bundles.append([parameter])
            continue
        # What cat along the first dimension asks for. Contiguous, so that rows of the joined tensor are the
        # parameter's memory order.
        key = parameter.dtype, parameter.device, parameter.dim(), parameter.shape[1:]
        bundle, filled = unfilled.get(key, ([], 0))
        if not bundle or filled + size > _TOGETHER:
            bundle, filled = [], 0
            bundles.append(bundle)
        bundle.append(parameter)
        unfilled[key] = bundle, filled + size
    return bundles


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0]
    if len(parameters) == 1:
        return local_part(first)
    return torch.cat([*parameters]) if first.dim() else torch.stack([*parameters])


def _copied(parameters: list[Tensor], known: Mapping[Tensor, Tensor]) -> tuple[_Bundle, list[Tensor]]:
    first, *more = parameters
    if not more:
        # A known copy is taken as it is, so that the optimizer's state, which belongs to the tensor object, still
        # matches.
        copy = known[first] if first in known else nn.Parameter(first.detach().to(torch.float32, copy=True))
        return _Bundle(parameters, first.dtype, copy), [copy]
    values = _joined([known.get(parameter, parameter) for parameter in parameters]).float()
    # Views of the bundle: `follow_` and `write_` work on the whole, the optimizer on each.
    rows = torch.split(values, [*map(len, parameters)]) if first.dim() else values.unbind()
    return _Bundle(parameters, first.dtype, values), [*map(nn.Parameter, rows)]


class WideGradients:
    """Widens gradients to float32: as they are accumulated, or with a process group once they are complete.

    `torch.nn.parallel.DistributedDataParallel` reduces in buckets of the parameter's format and refuses gradients of
    another one (torch 2.13: ``Expected Half, got Float``), so between steps its parameters keep their own.
    """

    def __init__(self) -> None:
        self.reduced_in_16_bit = False
        """Whether gradients are accumulated and reduced in 16 bit, and widened for the step alone."""
        self._reduced: dict[Tensor, Tensor] = {}
        self._widened: Sequence[Tensor] = ()
        """Parameters whose gradients are float32 from now on: torch refuses others."""

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Decide by the process group, and let the next backward accumulate in float32 where that works."""
        self.reduced_in_16_bit = has_group()
        if not self.reduced_in_16_bit:
            for parameter in parameters:
                self.widen(parameter)

    def widen_all(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what `widen` does for each."""
        # The same list as last time, widened by then, and torch keeps to grad_dtype: no need to look at each.
        if not self.reduced_in_16_bit and self._widened is parameters:
            return [parameter.grad for parameter in parameters]
        self._widened = parameters
        return [self.widen(parameter) for parameter in parameters]

    def widen(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient made float32, and make those to come so where no process group reduces them."""
        gradient = parameter.grad
        if gradient is None:
            # No gradient yet: backward will accumulate in float32 straight away.
            if not self.reduced_in_16_bit:
                parameter.grad_dtype = torch.float32
        elif gradient.dtype == parameter.dtype:
            # In this order: torch checks grad against grad_dtype at both assignments, so grad has to be gone while
            # dtypes change.
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameter.grad = wide = gradient.float()
            # With DDP the gradient is a view of its bucket, which the next backward writes into: keep it, and put it
            # back.
            if self.reduced_in_16_bit:
                self._reduced[parameter] = gradient
            return wide
        return gradient

    def restore(self) -> None:
        """Put the reduced tensors back after the step, with the values of the wide ones.

        The very tensors: with ``gradient_as_bucket_view`` they are windows into DDP's buckets.
        """
        for parameter, gradient in self._reduced.items():
            wide, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            # With the wide one's values: clipping or unscaling has changed them, and whoever reads .grad after the
            # step sees that.
            parameter.grad = None if wide is None else gradient.copy_(wide)
        self._reduced = {}

    def end(self, parameters: Iterable[Tensor]) -> None:
        """Leave parameters whose gradients have their own format."""
        self.restore()
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


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
        # One by one: gathered whole on the device, moved to the CPU, dropped. The peak is one parameter.
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
def restore_(kept: Tensor, parameter: Tensor, saved: Tensor, name: str) -> None:
    """Put back what was saved of a parameter, whole: its float32 copy, or in bf16 what rounding lost of it.

    Either is made from the other where a run goes on with another kind.
    """
    if saved.shape != kept.shape or saved.dtype not in (torch.float32, torch.bfloat16):
        raise CheckpointError(
            "primary_weights",
            f"the saved copy of {name} must be float32 or bfloat16 of shape {tuple(kept.shape)}, got "
            f"{dtype_name(saved.dtype)} of {tuple(saved.shape)}",
            "resume with the model that wrote the checkpoint",
        )
    if saved.dtype == kept.dtype:
        fill_(kept, saved)
        return
    found = torch.zeros_like(kept, dtype=saved.dtype)
    fill_(found, saved)
    weight, found = local_part(parameter), local_part(found)
    local_part(kept).copy_(compensated(weight, found) if kept.dtype == torch.float32 else found - weight)
