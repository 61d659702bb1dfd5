"""Float32 copies and gradients of 16-bit weights, stochastic rounding, and Kahan compensation.

Copies follow changes that others make to the parameters. Under FSDP2 they are gathered to be saved, and rounded as in
a single process.
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
    """The random numbers of one step. Each tensor has its own, so that the order of tensors and parts does not matter.

    For a sharded tensor, a process also draws the numbers of the other shards. So each shard is rounded as in a single
    process on a CPU, and no two shards use the same numbers.
    """

    def __init__(self, generator: torch.Generator, places: Mapping[int, int]) -> None:
        self._seed = int(torch.randint(2**62, (), generator=generator))
        self._places = places
        self._generators: dict[int, dict[str, torch.Generator]] = {}

    def round_(self, parameter: Tensor, name: str, target: Tensor, source: Tensor) -> Tensor:
        """Write float32 values, stochastically rounded, into the next rows of a parameter's weights or state.

        `name` identifies the weights or state, and `target` is this process's part of it. Rows must come in order.
        """
        begun = self._generators.setdefault(id(parameter), {})
        if name not in begun:
            begun[name] = self._begun(parameter, name, target)
        return stochastic_round_(target, source, generator=begun[name])

    def end(self, parameter: Tensor) -> None:
        """Release the generator of a parameter whose rows are all rounded. It takes five kilobytes."""
        self._generators.pop(id(parameter), None)

    def _begun(self, parameter: Tensor, name: str, target: Tensor) -> torch.Generator:
        salt = zlib.crc32(f"{self._places[id(parameter)]} {name}".encode())
        generator = torch.Generator(target.device).manual_seed((self._seed + salt) % 2**62)
        for count in _elements_before(parameter):
            values = torch.zeros(count, device=target.device)
            stochastic_round_(torch.empty_like(values, dtype=target.dtype), values, generator=generator)
        return generator


def _elements_before(parameter: Tensor) -> Iterator[int]:
    # In chunks: these numbers are discarded, and for a large embedding they would double the memory.
    rows = place_of(parameter)[:1] if is_sharded(parameter) else ()
    before = rows[0].start * math.prod(parameter.shape[1:]) if rows else 0
    for start in range(0, before, _CHUNK):
        yield min(_CHUNK, before - start)


def compensated(weight: Tensor, lost: Tensor) -> Tensor:
    """Return the float32 sum of a 16-bit weight and its rounding error in bf16: ``w + c``.

    If someone else has written the weight since (a mask, a clamp), c belongs to another value, and only w counts. This
    is detected where half of c would change the rounded weight.
    """
    wide, extra = weight.float(), lost.float()
    # Half, because c may be half an ulp, and a tie would round to the other neighbor.
    is_own = torch.add(wide, extra, alpha=0.5).to(weight.dtype) == weight
    return wide.add_(extra.mul_(is_own))


def round_compensated_(weight: Tensor, lost: Tensor, values: Tensor) -> None:
    """Write float32 values P, rounded, into a weight, and its rounding error into `lost`: ``w ← rn(P), c ← rn(P - w)``.

    Kahan's compensated sum, with w + c computed in float32. In bf16, w + c keeps 16 or more significant bits between
    steps, so that updates above ``2^-18·|w|`` are not lost.

    Source: Kahan, 1965, *Further remarks on reducing truncation errors*; for weights: Zamirai et al., 2020,
    *Revisiting BFloat16 Training*, arXiv:2010.06192.
    """
    weight.copy_(values)
    # Beyond the largest value there is no error to keep.
    lost.copy_((values - weight).nan_to_num_(0.0, 0.0, 0.0))


_SMALL, _TOGETHER = 1 << 14, 1 << 18


class _Bundle(NamedTuple):
    parameters: list[Tensor]
    dtype: torch.dtype
    values: Tensor
    """float32 copies of all parameters, concatenated; for one parameter its copy itself."""


class Copies:
    """float32 copies of parameters, which follow changes that others make to these.

    Copies of small parameters with the same format and row shape are bundled, up to a megabyte, so that the work of
    every step is done on a few tensors. Copies that are `known` keep their values.
    """

    @torch.no_grad()
    def __init__(self, parameters: Iterable[Tensor] = (), known: Mapping[Tensor, Tensor] | None = None) -> None:
        self.parameters = [*parameters]
        self.is_sharded = any(map(is_sharded, self.parameters))
        self._bundles: list[_Bundle] = []
        # By id: a tensor's == is elementwise, and its hash is a Python call.
        values: dict[int, Tensor] = {}
        for together in _bundled(self.parameters):
            bundle, copies = _copied(together, known or {})
            self._bundles.append(bundle)
            values.update(zip(map(id, together), copies, strict=True))
        # In the order of `parameters`, because bundles are sorted differently.
        self.values = [values[id(parameter)] for parameter in self.parameters]

    @property
    def by_parameter(self) -> dict[Tensor, Tensor]:
        """The copy of each parameter."""
        return dict(zip(self.parameters, self.values, strict=True))

    @torch.no_grad()
    def follow_(self) -> bool:
        """Copy values that others wrote: wherever the rounded copy differs from its parameter in any bit."""
        for parameters, dtype, copies in self._bundles:
            now, values = _joined(parameters), local_part(copies)
            # Casting the model replaces the parameters' storage, so the copies must be created again.
            if now.dtype != dtype:
                return False
            # compare bits, so that a NaN equals itself
            bits, rounded = now.view(torch.int16), values.to(dtype).view(torch.int16)
            # on a CPU checking first is ten times faster than `where` (torch 2.13)
            if not (now.is_cpu and torch.equal(rounded, bits)):
                # Where the bits agree, the copy keeps its extra precision. Elsewhere the written value counts.
                values.copy_(torch.where(rounded == bits, values, now))
        return True

    @torch.no_grad()
    def write_(self) -> None:
        """Write the copies, rounded, into the parameters."""
        parameters, values = self.parameters, self.values
        # foreach needs plain local tensors: DTensors would be dispatched one by one.
        if self.is_sharded:
            parameters, values = [*map(local_part, parameters)], [*map(local_part, values)]
        if parameters:
            torch._foreach_copy_(parameters, values)


def _bundled(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    bundles: list[list[Tensor]] = []
    unfilled: dict[object, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        size = parameter.numel()
        # One kernel per norm, with hundreds of norms, would take longer than the arithmetic. cat would copy large ones.
        if size > _SMALL or is_sharded(parameter) or not parameter.is_contiguous():
            bundles.append([parameter])
            continue
        # cat needs equal row shapes; contiguous, so that rows are in the parameter's memory order.
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
        # Keep the object: the optimizer's state belongs to it.
        copy = known[first] if first in known else nn.Parameter(first.detach().to(torch.float32, copy=True))
        return _Bundle(parameters, first.dtype, copy), [copy]
    values = _joined([known.get(parameter, parameter) for parameter in parameters]).float()
    # Views of the bundle: `follow_` and `write_` work on the bundle, the optimizer on each view.
    rows = torch.split(values, [*map(len, parameters)]) if first.dim() else values.unbind()
    return _Bundle(parameters, first.dtype, values), [*map(nn.Parameter, rows)]


class WideGradients:
    """Widen gradients to float32: during accumulation, or with a process group when they are complete.

    `torch.nn.parallel.DistributedDataParallel` reduces in buckets of the parameter's format and refuses gradients of
    another one (torch 2.13: ``Expected Half, got Float``), so with DDP gradients keep that format between steps.
    """

    def __init__(self) -> None:
        self.reduced_in_16_bit = False
        """True if gradients are accumulated and reduced in 16 bit, and widened only for the step."""
        self._reduced: dict[Tensor, Tensor] = {}
        self._widened: Sequence[Tensor] = ()
        """Parameters whose gradients are now float32. torch refuses others."""

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Let the next backward accumulate in float32 if the process group allows it."""
        self.reduced_in_16_bit = has_group()
        if not self.reduced_in_16_bit:
            for parameter in parameters:
                self.widen(parameter)

    def widen_all(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Apply `widen` to each parameter."""
        # The same list as last time is already widened, and torch keeps grad_dtype, so we need not check each.
        if not self.reduced_in_16_bit and self._widened is parameters:
            return [parameter.grad for parameter in parameters]
        self._widened = parameters
        return [self.widen(parameter) for parameter in parameters]

    def widen(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient in float32, and make later ones float32 unless a process group reduces them."""
        gradient = parameter.grad
        if gradient is None:
            # No gradient yet: backward will accumulate in float32 directly.
            if not self.reduced_in_16_bit:
                parameter.grad_dtype = torch.float32
        elif gradient.dtype == parameter.dtype:
            # In this order, because torch checks grad against grad_dtype at both assignments.
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameter.grad = wide = gradient.float()
            # With DDP the gradient is a view of its bucket, which the next backward writes into.
            if self.reduced_in_16_bit:
                self._reduced[parameter] = gradient
            return wide
        return gradient

    def restore(self) -> None:
        """Restore the reduced tensors (views of DDP's buckets), with the values of the wide ones."""
        for parameter, gradient in self._reduced.items():
            wide, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            # Copy the wide values, because clipping or unscaling may have changed them.
            parameter.grad = None if wide is None else gradient.copy_(wide)
        self._reduced = {}

    def end(self, parameters: Iterable[Tensor]) -> None:
        """Restore gradients to the format of their parameters."""
        self.restore()
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)


class CopiesOfShards:
    """The copies and moments of sharded parameters for a checkpoint: whole, on the CPU, by name.

    Moments are included, because torch 2.13 loads the optimizer state of sharded parameters in the parameters' format.
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
        """Gather them one by one. Every process must call it."""
        # Each is gathered on the device, moved to the CPU and dropped, so that the peak is one parameter.
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
        """Replace the moments that torch loaded in the parameters' format by the saved ones."""
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in saved.get(names.get(parameter, ""), {}).items():
                    state[key] = cut(value.to(parameter.device), parameter)


@torch.no_grad()
def restore_(kept: Tensor, parameter: Tensor, saved: Tensor, name: str) -> None:
    """Restore a parameter's float32 copy or its rounding error. Either can be computed from the other."""
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
