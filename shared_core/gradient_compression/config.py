"""The options of gradient compression."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.config.environments import RUN_ENVIRONMENTS, Ability
from shared_core.config.options import TechniqueConfig, option
from shared_core.config.training_time import Position

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class CommConfig(TechniqueConfig):
    """Options for sending gradients between processes in fewer bytes.

    Example:
        >>> CommConfig(hook="powersgd").rank
        1
    """

    about: ClassVar[str] = "Sends gradients in fewer bytes."
    key: ClassVar[str] = "comm"
    switch: ClassVar[str] = "hook"

    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "layers sum the gradients of their parts themselves, before they could be rounded; use DDP "
        "or FSDP2",
        "deepspeed": "DeepSpeed reduces gradients itself; its own communication_data_type sends 16 bits",
        "fsdp1": "FSDP reduces gradients itself; its mixed precision's reduce_dtype sends 16 bits",
        "lbfgs": "its line search compares gradients, and inexact ones mislead it; use another optimizer",
    }
    works_in: ClassVar[tuple[str, ...]] = ("pruning_callback",)
    logs_nothing: ClassVar[str] = "the same in every step"

    hook: Literal["fp16", "bf16", "powersgd"] = option(
        help="Send gradients rounded to 16 bits (fp16, bf16), or as low-rank products (powersgd)."
    )
    rank: int = option(
        1, help="Rank of the products; higher is more accurate, sends more.", low=1, only_with={"hook": ("powersgd",)}
    )
    begin: Position = option(
        0.1,
        help="First step to compress: a fraction of the run (0.1), a step (500) or epochs (2ep). Earlier gradients are "
        "sent whole.",
        only_with={"hook": ("powersgd",)},
    )

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return "refused" if torch was built without distributed support."""
        import torch

        if not torch.distributed.is_available():
            return Ability("refused", "torch was built without torch.distributed")
        return Ability("native", "with two or more processes, under DDP or FSDP2")

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        if self.hook != "powersgd":
            return
        if "fsdp2" in environment:
            yield (
                f"comm with hook powersgd cannot be combined with {RUN_ENVIRONMENTS['fsdp2']}: it averages "
                "full gradients on every process, but FSDP2 needs only a shard on each; use hook bf16 or fp16"
            )
        for other in ("loss_scale", "fp16"):
            if other in recipe or other in environment:
                yield (
                    f"comm with hook powersgd cannot be combined with {RUN_ENVIRONMENTS.get(other, other)}: its "
                    "error feedback is stored in units of the loss scale, which changes; use hook bf16 or fp16, or "
                    "train in bf16"
                )
