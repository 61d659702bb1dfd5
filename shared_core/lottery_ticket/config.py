"""The options of one run of a lottery ticket experiment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared_core.config.environments import NO_WHOLE_WEIGHTS
from shared_core.config.options import Figure, Options, TechniqueConfig, option
from shared_core.config.training_time import Position
from shared_core.errors import CheckpointError, require

TICKET_FILE, RESULT_FILE = "ticket.safetensors", "round.json"
"""In the folder of a run: what it found, and its figures, which are written last."""
_REWOUND = (
    "weights are rewound at step k, and the next masks come from the trained weights; average in the winning "
    "ticket's own run"
)


@dataclass(frozen=True, kw_only=True)
class TicketOptions(Options):
    """Options of tickets that are the same in all runs of a search."""

    out: Any = option(help="Folder for the results.")
    rewind: Literal["weights", "learning_rate", "none"] = option(
        "weights",
        help="What to rewind after each run. weights: reset the remaining weights to their values at step k; "
        "learning_rate: keep their values, and replay the schedule from step k; none: keep their values and the last "
        "learning rate, which should not be 0.",
    )
    rate: float = option(0.2, help="Share of the remaining weights to prune after each run.", above=0, below=1)
    output_rate: float | None = option(
        None,
        help="Rate of the output layer. Default: half of rate.",
        low=0,
        below=1,
        only_with={"scope": ("local",)},
    )
    conv_rate: float | None = option(
        None, help="Rate of convolutions, usually 0.1 to 0.15. Default: rate.", low=0, below=1,
        only_with={"scope": ("local",)},
    )  # fmt: skip
    scope: Literal["local", "global"] = option(
        "local", help="Where to compare weights. local: in every tensor, by its rate; global: one threshold for all."
    )
    max_layer_sparsity: float | None = option(
        None, help="Largest share to prune from one tensor; others make up for the rest. Default: 0.98, or the round's "
        "overall share if higher.", above=0, high=1, only_with={"scope": ("global",)},
    )  # fmt: skip
    seed: int = option(0, help="Seed of the controls.", low=0)
    include: tuple[str, ...] = option(
        (), help="Modules to include: name globs, types, first, last. Default: all. Frozen ones must be named."
    )
    skip: tuple[str, ...] = option((), help="Modules to skip: name globs, types, first, last.")
    min_size: int = option(0, help="Leave tensors with fewer weights than this dense.", low=0)


@dataclass(frozen=True, kw_only=True)
class LotteryConfig(TicketOptions, TechniqueConfig):
    """Trains one round of a search for lottery tickets; `eff lottery` writes these options for every round.

    Example:
        >>> LotteryConfig(out="runs/lottery/round-00", rewind_to=500).rewind
        'weights'
    """

    about: ClassVar[str] = "Finds a sparse network that trains from early weights."
    key: ClassVar[str] = "lottery"
    switch: ClassVar[str] = "out"

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"control": ("ticket",)}
    finishes_after: ClassVar[tuple[str, ...]] = ("average",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "prune": "a round takes its masks from its ticket alone; drop prune, or prune the winning ticket in a "
        "second run",
        "lora": "the base is frozen, and a ticket masks trained weights; search without lora",
        "primary_weights": "the float32 copies would not be rewound; load the model in float32",
        "soup": "candidates from before the rewinding step are dense; soup the winning ticket's own runs with `eff "
        "soup`",
        "average": _REWOUND,
        "averaging_callback": _REWOUND,
        "deepspeed": "rewinding clears the optimizer state of each weight, and DeepSpeed keeps it in flat parts; use "
        "DDP or FSDP2",
        **NO_WHOLE_WEIGHTS,
    }
    works_in: ClassVar[tuple[str, ...]] = ("tensor_parallel",)
    figures: ClassVar[Mapping[str, Figure]] = {"left": Figure("share of the prunable weights that is left")}

    out: str = option(help="Folder for this run's results: the ticket, the weights to rewind to, the metrics.")
    ticket: str | None = option(None, help="The ticket file to train. Without it, a dense run finds the first ticket.")
    rewind_to: Position = option(
        0, help="Step k to rewind to: a step (500), a fraction of the run (0.1) or epochs (2ep); 0: the initialization."
    )
    control: Literal["none", "random_reinit", "random_mask"] = option(
        "none",
        help="Train a control instead. random_reinit: the ticket's masks from step 0 with new weights; random_mask: "
        "random masks that keep as many weights per tensor as the ticket.",
    )

    def check_files(self) -> None:
        """Raise `CheckpointError` where there is no ticket file."""
        is_there = self.ticket is None or Path(self.ticket).is_file()
        rule = f"ticket must be an existing ticket file, got {self.ticket}"
        require(is_there, self.key, rule, "check the path", CheckpointError)

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a message for each combination that these options rule out."""
        if "qat" in recipe and self.rewind != "weights":
            yield (
                f"lottery with rewind {self.rewind} cannot be combined with qat: at step k the quantization ranges are "
                "those of the replay, not of the loaded trained weights. Use rewind weights, or quantize the winning "
                "ticket"
            )
