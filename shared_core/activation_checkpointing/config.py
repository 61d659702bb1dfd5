"""The options of activation checkpointing, the names of its policies, and the syntax of memory budgets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.config.environments import RUN_ENVIRONMENTS
from shared_core.config.options import TechniqueConfig, option
from shared_core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from shared_core.activation_checkpointing.budget_planner import SegmentPlan, StepCost

BUDGET = "budget:"
"""Prefix of a policy with a memory budget."""


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig(TechniqueConfig):
    """Options for recomputing activations in the backward pass instead of storing them.

    Example:
        >>> CheckpointingConfig(policy="every_k", k=3).k
        3
    """

    about: ClassVar[str] = "Recomputes activations in the backward pass."
    key: ClassVar[str] = "checkpointing"
    switch: ClassVar[str] = "policy"

    finishes_after: ClassVar[tuple[str, ...]] = ("soup",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "trainer_checkpointing": "blocks would be recomputed twice; switch the trainer's off (gradient_checkpointing "
        "or activation_checkpointing of transformers: policy block does the same, every_k as its every_n_layers)",
        "fsdp1": "it has not been run with FSDP1; use FSDP2, or FSDP1's own policy",
    }
    works_in: ClassVar[tuple[str, ...]] = ("pruning_callback", "tensor_parallel")
    logs_nothing: ClassVar[str] = "the same in every step"

    policy: str = option(
        help="What to recompute: block, sublayer (attention), sqrt, stage (CNN), every_k, selective (all but matrix "
        "products), or as much as a budget needs: budget:2 (GiB), budget:0.5 (fraction, below 1), budget:300MiB, "
        "budget:least."
    )
    k: int = option(2, help="Recompute every k-th block.", low=1, only_with={"policy": ("every_k",)})
    include: tuple[str, ...] = option(
        (),
        help="Names or classes (globs) of the blocks; of nested matches, the outermost counts. Default: the repeated "
        "modules.",
    )

    @property
    def has_budget(self) -> bool:
        """True if the segments are planned from the first micro-batches."""
        return self.policy.startswith(BUDGET)

    @property
    def budget(self) -> tuple[float, str]:
        """The number in a budget and its unit: fraction, bytes or least."""
        parsed = parse_budget(self.policy)
        return parsed.value, parsed.unit

    def validate(self) -> None:
        """Check that the policy exists."""
        if self.has_budget:
            parse_budget(self.policy)
        elif self.policy not in POLICIES:
            known = nearest(self.policy, (*POLICIES, "budget:0.5"))
            raise ConfigError("checkpointing", f"policy must be a known one, got {self.policy!r}{known}")

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        for way in ("fsdp2", "tensor_parallel", "zero3"):
            if way in environment and self.has_budget:
                yield (
                    f"checkpointing with a budget cannot be combined with {RUN_ENVIRONMENTS[way]}: the profile would "
                    "count gathered or parallel weights as activations; use policy block, or plan on one "
                    "device and name the blocks in include"
                )


_SUFFIXES = {"GiB": 1 << 30, "MiB": 1 << 20}


@dataclass(frozen=True)
class Budget:
    """The memory that a step's activations may take: `value` in units of `unit`."""

    value: float
    unit: Literal["fraction", "bytes", "least"]

    def plan(self, cost: StepCost) -> SegmentPlan:
        """Return the segments that fit into the budget for a step of this cost."""
        # Imported late, so that listing the options does not wait for torch.
        from shared_core.activation_checkpointing.budget_planner import choose_segments, peak_bytes

        return choose_segments(cost, self.num_bytes(peak_bytes(cost, ())))

    def num_bytes(self, full_peak: int) -> float | None:
        """Return the budget in bytes, given the peak without checkpointing; None for the lowest possible."""
        return None if self.unit == "least" else self.value * (full_peak if self.unit == "fraction" else 1)


def parse_budget(policy: str) -> Budget:
    """Return the budget in a policy.

    ``budget:0.5``, or another number below 1, is a fraction of the peak without checkpointing. A number from 1 on is in
    GiB. The suffixes ``GiB`` and ``MiB`` set the unit. ``budget:least`` asks for the lowest possible peak.
    """
    kind, _, text = policy.partition(":")
    if (kind, text) == ("budget", "least"):
        return Budget(0.0, "least")
    suffix = text[-3:] if text[-3:] in _SUFFIXES else ""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text.removesuffix(suffix))
    if kind != "budget" or not 0 < value < math.inf:
        raise ConfigError(
            "checkpointing.policy",
            "a budget must be budget:<fraction below 1>, budget:<GiB>, budget:<number>MiB or budget:least, got "
            f"{policy!r}",
            "for example budget:0.5 for half of the peak without checkpointing",
        )
    if value < 1 and not suffix:
        return Budget(value, "fraction")
    return Budget(value * _SUFFIXES[suffix or "GiB"], "bytes")


POLICIES = ("block", "sublayer", "sqrt", "stage", "every_k", "selective")
"""Names that `apply_policy` accepts besides ``budget:…``."""
