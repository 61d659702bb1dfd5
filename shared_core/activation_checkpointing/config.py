"""The options of activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shared_core.config import TechniqueConfig, option

BUDGET = "budget:"
"""Before the memory that a plan keeps within."""


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig(TechniqueConfig):
    """Options of activation checkpointing: ``--checkpointing_policy`` as a flag, ``checkpointing:`` in a recipe.

    Example:
        >>> CheckpointingConfig(policy="every_k", k=3).k
        3
    """

    key: ClassVar[str] = "checkpointing"
    switch: ClassVar[str] = "policy"

    policy: str = option(
        help="What is recomputed in backward: block, sublayer (attention), sqrt, stage (CNN), every_k, selective "
        "(all but matrix products), or what fits: budget:<GiB from 1 on, fraction below>, budget:300MiB, budget:least."
    )
    k: int = option(2, help="Of every_k: recompute every k-th block.", low=1, only_with={"policy": ("every_k",)})
    include: tuple[str, ...] = option(
        (), help="Names or classes of the blocks, with wildcards; by default the repeated ones that are found."
    )

    @property
    def has_budget(self) -> bool:
        """Whether a plan is made from the first micro-batches."""
        return self.policy.startswith(BUDGET)

    @property
    def budget(self) -> tuple[float, str]:
        """The number that a budget names, and of what: fraction, bytes, least."""
        from shared_core.activation_checkpointing.budget import parse_budget

        parsed = parse_budget(self.policy)
        return parsed.value, parsed.unit

    def validate(self) -> None:
        """Refuse a policy that does not exist."""
        # not above: it imports FSDP2 and the compiler, seconds that those who only list the options must not wait
        from shared_core.activation_checkpointing.policies import check_policy

        check_policy(self.policy)
