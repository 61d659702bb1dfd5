"""What 16-bit weights cannot hold: kept in float32 copies and gradients, rounded by chance, or kept beside the weight.

Copies follow what others write into the parameters. Under FSDP2 they are gathered to be saved, and rounded as a single
process would round them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shared_core.distributed.collectives import has_group, local_part
from shared_core.distributed.sharded_tensors import cut, fill_, is_sharded, place_of, whole
from shared_core.errors import CheckpointError
from shared_core.numerics import stochastic_round_
from shared_core.primary_weights.optimizer_swap import dtype_name, moments

_CHUNK = 1 << 22


class Draws:
    """The random numbers of one step: of each tensor its own, so that the order of tensors and parts does not matter.

    A process draws those for what other processes hold of a sharded tensor too: so each part is what one process would
    make of it on a CPU, and no two parts are rounded by the same numbers.
    """

    def __init__(self, generator: torch.Generator, places: Mapping[int, int]) -> None:
        self._seed = int(torch.randint(2**62, (), generator=generator))
        self._places = places
        self._generators: dict[int, dict[str, torch.Generator]] = {}

    def round_(self, parameter: Tensor, name: str, target: Tensor, source: Tensor) -> Tensor:
        """Write float32 values, stochastically rounded, into the next rows of a parameter's weights or state.

        `name` tells which, and `target` is what this process holds of it; its first rows must come first.
        """
        begun = self._generators.setdefault(id(parameter), {})
        if name not in begun:
            begun[name] = self._begun(parameter, name, target)
        return stochastic_round_(target, source, generator=begun[name])

    def end(self, parameter: Tensor) -> None:
        """Forget a parameter whose rows are all rounded: a generator takes five kilobytes."""
        self._generators.pop(id(parameter), None)

    def _begun(self, parameter: Tensor, name: str, target: Tensor) -> torch.Generator:
        salt = zlib.crc32(f"{self._places[id(parameter)]} {name}".encode())
        generator = torch.Generator(target.device).manual_seed((self._seed + salt) % 2**62)
        for count in _elements_before(parameter):
            values = torch.zeros(count, device=target.device)
            stochastic_round_(torch.empty_like(values, dtype=target.dtype), values, generator=generator)
        return generator


def _elements_before(parameter: Tensor) -> Iterator[int]:
    # In chunks: the numbers are drawn for nothing, and a large embedding would need as much memory again.
    rows = place_of(parameter)[:1] if is_sharded(parameter) else ()
    before = rows[0].start * math.prod(parameter.shape[1:]) if rows else 0
    for start in range(0, before, _CHUNK):
        yield min(_CHUNK, before - start)


def compensated(weight: Tensor, lost: Tensor) -> Tensor:
    """Return the float32 sum of a 16-bit weight and what its rounding lost, in bf16: ``w + c``.

    Where someone else has written the weight since (a mask, a clamp), c is of another value, and w counts alone: where
    half of it would move the rounded weight.
    """
    wide, extra = weight.float(), lost.float()
    # Half of it: c may be half an ulp, and a tie would round to the other neighbour.
    is_own = torch.add(wide, extra, alpha=0.5).to(weight.dtype) == weight
    return wide.add_(extra.mul_(is_own))


def round_compensated_(weight: Tensor, lost: Tensor, values: Tensor) -> None:
    """Write float32 values P, rounded, into a weight, and what that loses beside it: ``w ← rn(P), c ← rn(P - w)``.

    Kahan's compensated sum, with the sum of both in float32: from step to step w + c has 16 significant bits or more
    in bf16, so that updates above ``2^-18·|w|`` are not lost.

    Source: Kahan, 1965, *Further remarks on reducing truncation errors*; for weights: Zamirai et al., 2020,
    *Revisiting BFloat16 Training*, arXiv:2010.06192.
    """
    weight.copy_(values)
    # Beyond the largest value there is nothing to keep.
    lost.copy_((values - weight).nan_to_num_(0.0, 0.0, 0.0))


_SMALL, _TOGETHER = 1 << 14, 1 << 18


class _Bundle(NamedTuple):
    parameters: list[Tensor]
    dtype: torch.dtype
    values: Tensor
    """float32, those of all parameters one after the other; of one parameter its copy itself."""


class Copies:
    """float32 copies of parameters, which follow what others write into these.

    Copies of small parameters of one format and row shape lie one after the other, up to a megabyte: what is asked of
    every copy in every step is asked of a few tensors. Copies that are `known` keep their values.
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
            # Casting the model replaces what parameters hold: the copies must be made anew.
            if now.dtype != dtype:
                return False
            # bits, so that a NaN equals itself
            bits, rounded = now.view(torch.int16), values.to(dtype).view(torch.int16)
            # on a CPU asking first is ten times faster than `where` (torch 2.13)
            if not (now.is_cpu and torch.equal(rounded, bits)):
                # Where the bits agree, the copy keeps what lies beyond 16 bit; else what someone wrote counts.
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
        # One kernel for each of hundreds of norms would take longer than the arithmetic; cat would copy large ones.
        if size > _SMALL or is_sharded(parameter) or not parameter.is_contiguous():
            bundles.append([parameter])
            continue
        # What cat asks for; contiguous, so that rows are the parameter's memory order.
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
        # As it is: the optimizer's state belongs to the tensor object.
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
        """True if gradients are accumulated and reduced in 16 bit, and widened for the step alone."""
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
            # In this order: torch checks grad against grad_dtype at both assignments.
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameter.grad = wide = gradient.float()
            # With DDP the gradient is a view of its bucket, which the next backward writes into.
            if self.reduced_in_16_bit:
                self._reduced[parameter] = gradient
            return wide
        return gradient

    def restore(self) -> None:
        """Put the very tensors that were reduced, DDP's buckets, back with the values of the wide ones."""
        for parameter, gradient in self._reduced.items():
            wide, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            # With the wide one's values, which clipping or unscaling has changed.
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
    """Put back a parameter's saved float32 copy, or what rounding lost of it; either is made from the other."""
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
