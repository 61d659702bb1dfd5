"""float32 gradients of 16-bit parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
        self.reduced_in_16_bit = dist.is_available() and dist.is_initialized()
        if not self.reduced_in_16_bit:
            for parameter in parameters:
                self.widen(parameter)

    def widen_all(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what `widen` does for each."""
        if not self.reduced_in_16_bit and self._widened is parameters:
            return [parameter.grad for parameter in parameters]
        self._widened = parameters
        return [self.widen(parameter) for parameter in parameters]

    def widen(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient made float32, and make those to come so where no process group reduces them."""
        gradient = parameter.grad
        if gradient is None:
            if not self.reduced_in_16_bit:
                parameter.grad_dtype = torch.float32
        elif gradient.dtype == parameter.dtype:
            parameter.grad = None
            parameter.grad_dtype = torch.float32
            parameter.grad = wide = gradient.float()
            if self.reduced_in_16_bit:
                self._reduced[parameter] = gradient
            return wide
        return gradient

    def give_back(self) -> None:
        """Put the reduced tensors back after the step, with the values of the wide ones.

        The very tensors: with ``gradient_as_bucket_view`` they are windows into DDP's buckets.
        """
        for parameter, gradient in self._reduced.items():
            wide, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if wide is None else gradient.copy_(wide)
        self._reduced = {}

    def end(self, parameters: Iterable[Tensor]) -> None:
        """Leave parameters whose gradients have their own format."""
        self.give_back()
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
