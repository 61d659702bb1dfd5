"""The options of gradient compression."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shared_core.config.conflicts import RUN_ENVIRONMENTS
from shared_core.config.model_shape import Cost, ModelShape, PlannedRun
from shared_core.config.options import TechniqueConfig, option
from shared_core.config.training_time import Position


@dataclass(frozen=True, kw_only=True)
class CommConfig(TechniqueConfig):
    """In what form the processes of DDP send each other their gradients.

    Example:
        >>> CommConfig(hook="powersgd").rank
        1
    """

    key: ClassVar[str] = "comm"
    switch: ClassVar[str] = "hook"

    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "gradients of parts are summed inside of their layers, where nothing rounds them; use DDP "
        "or FSDP version 2",
        "deepspeed": "DeepSpeed reduces gradients itself; its own communication_data_type sends 16 bits",
        "fsdp1": "FSDP reduces gradients itself; its mixed precision's reduce_dtype sends 16 bits",
        "lbfgs": "its line search compares gradients, and inexact ones mislead it; use another optimizer",
    }
    works_in: ClassVar[tuple[str, ...]] = ("pruning_callback",)
    logs_nothing: ClassVar[str] = "the same in every step"

    hook: Literal["fp16", "bf16", "powersgd"] = option(
        help="Send gradients over processes rounded to 16 bits (fp16, bf16), or as products of low rank (powersgd)."
    )
    rank: int = option(
        1, help="Rank of powersgd's products; more is closer and sends more.", low=1, only_with={"hook": ("powersgd",)}
    )
    begin: Position = option(
        0.1,
        help="First step that powersgd compresses, gradients before it are sent whole: a fraction of the run (0.1), a "
        "step (500) or epochs (2ep).",
        only_with={"hook": ("powersgd",)},
    )

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        if self.hook != "powersgd":
            return
        if "fsdp2" in environment:
            yield (
                f"comm with hook powersgd cannot be combined with {RUN_ENVIRONMENTS['fsdp2']}: its products average "
                "whole gradients on every process, of which FSDP2 wants a part on each; take hook bf16 or fp16"
            )
        for other in ("loss_scale", "fp16"):
            if other in recipe or other in environment:
                yield (
                    f"comm with hook powersgd cannot be combined with {RUN_ENVIRONMENTS.get(other, other)}: what it "
                    "lost of a gradient is kept in units of the loss scale, which changes; take hook bf16 or fp16, or "
                    "train in bf16"
                )

    def memory_costs(self, shape: ModelShape, run: PlannedRun) -> list[Cost]:
        """Return the bytes of gradients that are not sent, and of the error that powersgd keeps."""
        # FSDP2 sends each micro-batch's gradients (a reduce-scatter, half an all-reduce): 2 bytes in the place of
        # compute_bytes.
        if run.strategy == "fsdp2":  # the reduce-scatter alone, in every micro-batch
            sent = (2.0 - run.compute_bytes) * run.accumulate * run.ring(shape.params)
            return [Cost(f"comm: {self.hook}", sent=min(sent, 0.0), why="gradients in 2 bytes")]
        # An all-reduce is a reduce-scatter and an all-gather: twice a ring's bytes.
        whole = 2 * run.ring(shape.params * run.weight_bytes)
        if self.hook in ("fp16", "bf16"):
            sent = 2.0 / run.weight_bytes
            return [Cost(f"comm: {self.hook}", sent=(sent - 1) * whole, why="gradients in 2 bytes")]
        # 18·r·h of 12·h² in a block; what lies outside is counted as a matrix of V x h
        sent = self.rank * (18 * shape.hidden * shape.layers + shape.vocab + shape.hidden) / shape.params
        held = 4.0 * shape.params
        why = f"r·(m + n) of a matrix with r = {self.rank} from begin on; held: the error, 4 bytes a parameter"
        return [Cost("comm: powersgd", held=held, sent=(sent - 1) * whole, why=why)]
