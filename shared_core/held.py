"""Whether what techniques work on is still part of the model, and frozen where it must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from shared_core.errors import TrainingError
from shared_core.sharded import reshard_
from shared_core.technique import Context, Technique

_Held = tuple[str, str, nn.Module | Tensor]

LOOKS = ("before_eval", "before_save")
"""The verbs before which it is asked; not in every step: to go through a model takes long."""


def refuse_changed(techniques: Mapping[str, Technique], context: Context) -> None:
    """Refuse a model of which something was replaced or unfrozen: a technique would work on what is left over.

    Args:
        techniques: By their keys.
        context: With the model.

    Raises:
        TrainingError: If something that a technique holds is no longer in the model, or trains and must not.
    """
    for key, technique in techniques.items():
        for name, tensor in technique.frozen().items():
            if tensor.requires_grad:
                raise TrainingError(
                    f"{key}: {name} must stay frozen until the end of training, got it trainable by step "
                    f"{context.step}; leave out what unfreezes whole modules, such as Lightning's BackboneFinetuning"
                )
    held = [(key, *one) for key, technique in techniques.items() for one in technique.holds().items()]
    if held and _gone(held, context.model):
        reshard_(context.model)  # FSDP2's gathered parameters were in the places of its parts
        for key, name, _ in _gone(held, context.model):
            raise TrainingError(
                f"{key}: {name} must stay in the model until the end of training, got another object in its place by "
                f"step {context.step}; write into parameters (copy_, load_state_dict without assign=True), and replace "
                "modules before training"
            )


def _gone(held: Iterable[_Held], model: nn.Module) -> list[_Held]:
    there = {*map(id, model.modules()), *map(id, model.parameters())}
    return [one for one in held if id(one[-1]) not in there]
