"""Initialize a shallower student with some of its teacher's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shared_core.distillation.config import parse_layers
from shared_core.distributed.sharded_tensors import fill_, is_sharded
from shared_core.errors import ConfigError, MatchError

EVEN = "even"
"""Layers spread evenly over the teacher's, including its first and last."""


def chosen_layers(layers: str, student: int, teacher: int) -> list[int]:
    r"""Return for each student layer the teacher layer it is copied from.

    ``even`` uses layer :math:`i (t - 1) / (s - 1)`, rounded: 6 of 12 layers as in DistilBERT.

    Source: Sanh et al. (DistilBERT), 2019, arXiv:1910.01108, section 3.

    Example:
        >>> chosen_layers("even", 6, 12)
        [0, 2, 4, 7, 9, 11]
        >>> chosen_layers("last", 2, 12), chosen_layers("0, 5", 2, 12)
        ([10, 11], [0, 5])
    """
    if layers == EVEN:
        # Both ends included: i (L_t - 1) / (L_s - 1), rounded. A student with one layer gets the first.
        numbers = [round(i * (teacher - 1) / (student - 1)) if student > 1 else 0 for i in range(student)]
    elif layers in ("first", "last"):
        numbers = list(range(student) if layers == "first" else range(teacher - student, teacher))
    else:
        numbers = parse_layers(layers)
    if len(numbers) != student or max(numbers) >= teacher or (student > teacher and layers in (EVEN, "first", "last")):
        raise ConfigError(
            "distill",
            f"init_layers must name {student} of the teacher's {teacher} layers (0 to {teacher - 1}), one per student "
            f"layer (as numbers if the student has more), got {layers!r}",
        )
    return numbers


@torch.no_grad()
def copy_layers_(student: nn.Module, teacher: nn.Module, layers: str = EVEN) -> dict[str, Any]:
    """Copy the teacher's weights into a shallower student of the same width, in place; return what was copied.

    Stacks are each ``nn.ModuleList`` with the same name in both (for example an encoder's and a decoder's). All tensors
    of the chosen layers are copied. Of the rest, such as embeddings and heads, those with equal name and shape are.

    Args:
        student: Changed in place.
        teacher: The source of the weights, which are copied in the student's dtype.
        layers: See `chosen_layers`; the same for every stack.

    Returns:
        ``layers`` copied per stack, the number of tensors ``copied``, and the names ``left`` unchanged.

    Raises:
        MatchError: If the models share no stack.
        ConfigError: If a layer has other shapes or is not floating point.

    Example:
        >>> import torch
        >>> stacks = {size: nn.Sequential(nn.ModuleList(nn.Linear(1, 1) for _ in range(size))) for size in (1, 3)}
        >>> copy_layers_(stacks[1], stacks[3], "last")
        {'layers': {'0': [2]}, 'copied': 2, 'left': []}
    """
    stacks = _stacks(student, teacher)
    if not stacks:
        raise MatchError(
            "distill",
            "init_layers needs a torch.nn.ModuleList of the same name in student and teacher, got none",
            "use a student of the teacher's architecture with fewer layers, or initialize it yourself",
        )
    chosen = {name: chosen_layers(layers, *sizes) for name, sizes in stacks.items()}
    ours, theirs = student.state_dict(), teacher.state_dict()
    left, sources = [], {}
    for name, tensor in ours.items():
        # Tensors outside stacks may differ (a head of another size) and stay unchanged. Layers must fit.
        stack = next((stack for stack in stacks if name.startswith(f"{stack}.")), None)
        source = theirs.get(name if stack is None else _renamed(name, stack, chosen[stack]))
        if source is not None and _fits(tensor, source):
            sources[name] = source
        elif stack is None:
            left.append(name)
        else:
            found = "no tensor of that name"
            if source is not None:
                found = f"{type(source).__name__} {source.dtype} {tuple(source.shape)}"
            raise ConfigError(
                "distill",
                f"init_layers needs layers of the student's widths, got {found} in the teacher for {name} "
                f"{tuple(tensor.shape)}",
                "use a student that is shallower, not narrower, and float weights in both (see teacher_dtype)",
            )
    # Written only after every name was checked, so an error leaves the student unchanged.
    for name, source in sources.items():
        fill_(ours[name], source)
    return {"layers": chosen, "copied": len(sources), "left": left}


def _stacks(student: nn.Module, teacher: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the outermost shared stacks and their numbers of layers in student and teacher."""
    others = dict(teacher.named_modules())
    found: dict[str, tuple[int, int]] = {}
    for name, module in student.named_modules():
        other = others.get(name)
        if not (isinstance(module, nn.ModuleList) and isinstance(other, nn.ModuleList) and len(module) and len(other)):
            continue
        # An inner stack (experts of a layer) is copied whole with its outer layer.
        if not any(name.startswith(f"{stack}.") for stack in found):
            found[name] = (len(module), len(other))
    return found


def _renamed(name: str, stack: str, chosen: list[int]) -> str:
    layer, _, rest = name.removeprefix(f"{stack}.").partition(".")
    return f"{stack}.{chosen[int(layer)]}.{rest}"


def _fits(tensor: Tensor, source: Tensor) -> bool:
    # A DTensor is also a wrapper subclass, but its values can be copied.
    if is_traceable_wrapper_subclass(source) and not is_sharded(source):
        return False  # quantized, by teacher_dtype or before
    return source.shape == tensor.shape and source.is_floating_point() == tensor.is_floating_point()
