"""Converted layers on oneDNN's int8 kernels, which torch brings along on CPUs: what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shared_core.quantization.integer_modules import CodeModule

_PART = 1 << 21
LOWEST = -128  # moves signed codes to unsigned ones, for which the instructions are made


class OneDnnLayer(CodeModule):
    """Base of layers that keep their weight's codes in oneDNN's layout too, as long as these are on a CPU."""

    kind: ClassVar[str]
    """The stock layer's name."""
    kernel: str
    """What `conversion_report` says of it."""
    _packed: Any

    @classmethod
    def take(cls, module: Any, kernel: str) -> Self:
        """Change a converted layer's class to this one, and return it; its buffers stay as they are.

        Args:
            module: One whose class this one derives from, and which oneDNN can compute.
            kernel: See there.
        """
        module.__class__ = cls
        taken: Self = module
        taken.kernel = kernel
        taken._pack()
        return taken

    def _pack(self) -> None:
        raise NotImplementedError

    def _runs(self, input: Tensor) -> bool:
        return self._packed is not None and input.device.type == "cpu" and input.numel() > 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_packed": None}  # oneDNN's layout can be neither copied nor saved

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._pack()


def in_parts(x: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of a tensor, those along its last axis, in parts of at most 8 MiB in float32.

    A larger temporary tensor is memory that is asked of the system anew in every forward, and its first touch takes
    longer than the arithmetic on it. One part where a compiler fuses that anyway.

    Example:
        >>> [*map(len, in_parts(torch.zeros(3, 2000, 1000)))]
        [2097, 2097, 1806]
    """
    if torch.compiler.is_compiling() or x.numel() <= _PART:
        return (x,)
    rows: tuple[Tensor, ...] = torch.split(x.reshape(-1, x.shape[-1]), max(1, _PART // x.shape[-1]))
    return rows


def joined(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return what was computed of `in_parts` as one tensor of a shape."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts]).view(shape)


def static_codes(
    x: Tensor,
    scale: float,
    zero_point: int,
    qmin: int,
    qmax: int,
    memory_format: torch.memory_format = torch.preserve_format,
) -> Tensor:
    """Return ``clamp(ne(x/s) + z, qmin, qmax)`` of a float32 tensor, which stays as it is, as uint8, 128 more.

    Example:
        >>> static_codes(torch.tensor([0.5, 1.2, 9.0]), 1.0, 2, -8, 7).tolist()
        [130, 131, 135]
    """
    return unsigned((x / scale).round_().add_(zero_point).clamp_(qmin, qmax), memory_format)


def unsigned(codes: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """Return whole numbers from -128 to 127 as uint8, 128 more.

    Example:
        >>> unsigned(torch.tensor([-128.0, 0.0, 127.0])).tolist()
        [0, 128, 255]
    """
    # torch converts to int8 five times as fast as to uint8 (2.13)
    return codes.to(torch.int8, memory_format=memory_format).view(torch.uint8).bitwise_xor_(-LOWEST)


def keep_nan_(output: Tensor, input: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return an output, NaN where the input holds one: a NaN has no code.

    Args:
        output: Changed in place.
        input: What it was computed of.
        dims: Those of the input over which one NaN reaches all of the output.
    """
    nan = input.amax(dims, keepdim=True).isnan()
    if torch.compiler.is_compiling() or bool(nan.any()):
        output.add_(torch.where(nan, torch.nan, 0.0))
    return output
