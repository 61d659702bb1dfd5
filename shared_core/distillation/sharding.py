"""A teacher of a sharded student is sharded in the same way, so that no process holds a whole one."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from shared_core.distillation.teacher_dtype import is_plain


def shard_like_(teacher: nn.Module, student: nn.Module) -> None:
    """Shard a teacher over the processes that share the student, in place; nothing if the student is whole.

    Each layer of a stack (``nn.ModuleList``) is gathered by itself, like the rest of the model. A teacher that is
    sharded already, or quantised, stays as it is. Products are made in the student's dtype.

    Args:
        teacher: A whole model, on every process.
        student: Sharded by FSDP2, or not.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> shard_like_(teacher, nn.Linear(2, 2))
        >>> type(teacher).__name__
        'Linear'
    """
    mesh = next((part.device_mesh for part in student.parameters() if isinstance(part, DTensor)), None)
    # packed weights have no rows to share: every process holds them, as they are few
    if mesh is None or any(isinstance(part, DTensor) or not is_plain(part) for part in teacher.parameters()):
        return
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True, "mp_policy": _policy(student)}
    stacks = [module for module in teacher.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(part) for stack in stacks for layer in stack for part in layer.modules() if part is not layer}
    for stack in stacks:
        for layer in stack:
            if id(layer) not in inner:
                fully_shard(layer, **options)
    fully_shard(teacher, **options)


def _policy(student: nn.Module) -> MixedPrecisionPolicy:
    wrapped = next((module for module in student.modules() if isinstance(module, FSDPModule)), None)
    state = wrapped._get_fsdp_state() if wrapped is not None else None
    found = getattr(state, "_mp_policy", None)  # not public as of torch 2.15
    return found if isinstance(found, MixedPrecisionPolicy) else MixedPrecisionPolicy()
