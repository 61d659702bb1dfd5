"""A technique from outside of efftrain: noise on gradients (Neelakantan et al., 2015, arXiv:1511.06807)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shared_core import Context, Figure, Technique, TechniqueConfig, local_part, option, part_of, register
from shared_core.config.environments import NO_WHOLE_WEIGHTS


@dataclass(frozen=True, kw_only=True)
class GradientNoiseConfig(TechniqueConfig):
    """Adds noise of variance ``eta / (1 + t)^0.55`` to the gradients of step t."""

    key = "noise"
    switch = "eta"
    before = ("prune",)  # zeros of masks come after the noise
    conflicts: ClassVar = {**NO_WHOLE_WEIGHTS, "dp": "its noise is the one that is accounted for; leave noise out"}
    figures: ClassVar = {"deviation": Figure("standard deviation of the latest noise", in_bar=True)}

    eta: float = option(help="variance of the noise at the first step", above=0.0)


class GradientNoise(Technique):
    """Draws from the session's generator, whose state is saved: a resumed run draws what the other would have."""

    config: GradientNoiseConfig
    deviation, num_noised, is_noised = 0.0, 0, False

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Go on from the state returned by `state_dict`, if there is one."""
        if state is not None:
            self.num_noised = int(state["num_noised"])

    def before_step(self, context: Context) -> None:
        """Add noise to complete gradients, before they are clipped."""
        self.deviation = math.sqrt(self.config.eta / (1 + context.step) ** 0.55)
        gradients = [one.grad for one in context.model.parameters() if one.grad is not None]
        self.is_noised = bool(gradients)
        for gradient in gradients:
            noise = torch.randn(gradient.shape, generator=context.generator, device="cpu") * self.deviation
            # the whole noise is drawn on every rank; FSDP2 holds a part of the gradient
            local_part(gradient).add_(part_of(noise.to(gradient.device), gradient))

    def after_step(self, context: Context, applied: bool) -> None:
        """Count the step, unless it was skipped or had no gradients."""
        self.num_noised += applied and self.is_noised

    def figures(self) -> dict[str, float]:
        """Return what the progress bar and the logger show."""
        return {"noise/deviation": self.deviation}

    def report(self) -> dict[str, Any]:
        """Return what the receipt says."""
        return {"noised_steps": self.num_noised}

    def state_dict(self) -> dict[str, Any]:
        """Return the count; the session saves the generator."""
        return {"num_noised": self.num_noised}


register(GradientNoise, GradientNoiseConfig)
