"""Whether what techniques work on is still part of the model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shared_core.errors import TrainingError
from shared_core.sharded import reshard_
from shared_core.technique import Context, Technique

_LOOKS = ("before_eval", "before_save", "finish")  # not in every step: to go through a model takes long


def refuse_replaced(verb: str, techniques: Mapping[str, Technique], context: Context) -> None:
    """Refuse a model some of whose modules or parameters were replaced: a technique would work on what is left over.

    Args:
        verb: What is told next; nothing is looked at in a step.
        techniques: By their keys.
        context: With the model.

    Raises:
        TrainingError: If something that a technique holds is no longer in the model.
    """
    if verb not in _LOOKS:
        return
    model = context.model
    for key, technique in techniques.items():
        held = technique.holds()
        if not held or _in(model).issuperset(map(id, held.values())):
            continue
        reshard_(model)  # FSDP2's gathered parameters were in the places of its parts
        there = _in(model)
        name = next((name for name, one in held.items() if id(one) not in there), None)
        if name is not None:
            raise TrainingError(
                f"{key}: {name} must stay in the model until the end of training, got another object in its place by "
                f"step {context.step}; write into parameters (copy_, load_state_dict without assign=True), and replace "
                "modules before training"
            )


def _in(model: nn.Module) -> set[int]:
    return {*map(id, model.modules()), *map(id, model.parameters())}
