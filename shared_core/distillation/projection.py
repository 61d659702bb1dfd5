"""A learned map from the student's width to the teacher's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared_core.errors import ConfigError


def init_projection(
    student_width: int,
    teacher_width: int,
    *,
    seed: int = 0,
    bias: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:
    """Return the first weight and bias of a projection, uniform in ``±1 / sqrt(student_width)`` as `nn.Linear`'s.

    The draw is made on the CPU by a generator of its own: the same on every device and every rank, and the global
    random state is as it was.

    Args:
        student_width: Features in, >= 1.
        teacher_width: Features out, >= 1.
        seed: Of the generator.
        bias: Whether there is a bias.
        device: Where the result lies.
        dtype: Of the result.

    Returns:
        The weight ``(teacher_width, student_width)`` and the bias ``(teacher_width,)`` or None.

    Raises:
        ConfigError: If a width is below 1.

    Example:
        >>> weight, bias = init_projection(4, 2)
        >>> weight.shape, bias.shape, bool(weight.abs().max() <= 0.5)
        (torch.Size([2, 4]), torch.Size([2]), True)
    """
    for name, width in (("student_width", student_width), ("teacher_width", teacher_width)):
        if width < 1:
            raise ConfigError(f"projection: {name} must be at least 1, got {width}")
    generator = torch.Generator().manual_seed(seed)
    bound = 1 / math.sqrt(student_width)
    weight = torch.empty(teacher_width, student_width).uniform_(-bound, bound, generator=generator)
    offset = torch.empty(teacher_width).uniform_(-bound, bound, generator=generator) if bias else None
    return weight.to(device, dtype), None if offset is None else offset.to(device, dtype)
