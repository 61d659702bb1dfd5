"""Activation checkpointing as a technique of a session."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shared_core.activation_checkpointing.config import CheckpointingConfig
from shared_core.activation_checkpointing.policies import BUDGET, apply_policy
from shared_core.activation_checkpointing.segments import Handle
from shared_core.errors import TrainingError
from shared_core.technique import Context, Technique


class ActivationCheckpointing(Technique):
    """Recomputes activations in backward in place of keeping them; gradients stay the same to the bit.

    Args:
        config: The options.

    Example:
        >>> from shared_core import Recipe, Session
        >>> net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        >>> session = Session(Recipe.from_dict({"checkpointing": {"policy": "every_k", "k": 2}}))
        >>> session.attach(net)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> session.begin([optimizer], total_steps=1)
        >>> session.loss(net(torch.ones(2, 4)).sum()).backward()
        >>> session.before_optimizer_step()
        >>> session.techniques["checkpointing"].report()["recomputations"]
        2
    """

    key: ClassVar[str] = "checkpointing"
    config: CheckpointingConfig

    def __init__(self, config: CheckpointingConfig) -> None:
        super().__init__(config)
        self.handle: Handle | None = None
        """What is wrapped; None until a budget is planned."""
        self._first_forward: RemovableHandle | None = None
        self._steps = self._num_said = 0

    def attach(self, model: nn.Module, context: Context) -> None:
        """Wrap the blocks; a budget needs the first micro-batch of training for that."""
        if self.config.policy.startswith(BUDGET):
            self._first_forward = model.register_forward_pre_hook(self._resolve, with_kwargs=True)
        else:
            self.handle = apply_policy(model, self.config.policy, k=self.config.k, include=self.config.include)

    def _resolve(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan and wrap, in front of the first training forward, which runs by the plan already."""
        if model.training and torch.is_grad_enabled() and self._first_forward is not None:
            self._first_forward.remove()
            self._first_forward = None
            self.handle = apply_policy(model, self.config.policy, (args, kwargs))

    def before_optimizer_step(self, context: Context) -> None:
        """Refuse to go on as if memory were saved when backward recomputed nothing."""
        self._steps += 1
        if self._steps == 1 and len(context.optimizers) < 2:  # else the blocks may belong to another one's loss
            self._check()
        notes = self.handle.tally.notes if self.handle is not None else []
        for text in notes[self._num_said :]:
            context.services.say(f"efftrain: checkpointing: {text}")
        self._num_said = len(notes)

    def _check(self) -> None:
        tally = self.handle.tally if self.handle is not None else None
        if tally is None or not (tally.recomputations or tally.compiled):
            raise TrainingError(
                f"checkpointing: policy {self.config.policy} must recompute blocks in backward, got none recomputed: "
                "the blocks did not run in train mode, or need no gradients; name others with include, or drop it"
            )

    def finish(self, model: nn.Module, context: Context) -> None:
        """Unwrap the blocks; weights need no baking."""
        if self._steps:
            self._check()
        self.detach(model)

    def detach(self, model: nn.Module) -> None:
        """Give the blocks their own forward back."""
        if self._first_forward is not None:
            self._first_forward.remove()
        if self.handle is not None:
            self.handle.remove()

    def report(self) -> dict[str, Any]:
        """Return what was wrapped, how often it was run again, and the bytes that one backward found dropped."""
        if self.handle is None:
            return {"policy": self.config.policy}
        tally = self.handle.tally
        return {
            "policy": self.config.policy,
            "blocks": len(self.handle.names),
            "segments": len(self.handle.segments),
            "modules": self.handle.names,
            "recomputations": tally.recomputations,
            "recomputations_per_step": tally.recomputations / max(self._steps, 1),
            "modules_recomputed": tally.blocks.total(),
            "never_recomputed": [name for name in self.handle.names if name not in tally.blocks],
            "saved_bytes": tally.saved_bytes,
            **({"compiled": tally.compiled} if tally.compiled or tally.uncompiled else {}),
        }
