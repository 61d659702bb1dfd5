"""The options of low-rank training, and the meaning of `rank`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared_core.config.environments import AVERAGED_COPY, FSDP1, OTHER_NAMES, RUN_ENVIRONMENTS, ZERO3
from shared_core.config.options import Figure, TechniqueConfig, option
from shared_core.errors import ConfigError
from shared_core.files.json_yaml import parse_json

_SHARES = ("energy", "budget", "sensitivity")


@dataclass(frozen=True)
class RankRule:
    """How ranks are chosen."""

    kind: str
    """``number``, ``share``, ``energy``, ``budget``, ``sensitivity`` or ``report``."""
    value: Any
    """The number, the share in (0, 1], or the path of a report."""


def parse_rank(given: Any) -> RankRule:
    """Parse a rank option."""
    text = str(given).strip()
    kind, colon, number = text.partition(":")
    if text.endswith(".json"):
        return RankRule("report", text)
    try:
        is_number = not colon and (isinstance(given, int) or text.isdecimal())
        value = int(text) if is_number else float(number if colon else text)
        fits = value >= 1 if is_number else 0 < value <= 1
        if isinstance(given, bool) or (colon and kind not in _SHARES) or not fits:
            raise ValueError
        return RankRule("number" if is_number else kind if colon else "share", value)
    except ValueError:
        shares = "a share in (0, 1], energy:, budget: or sensitivity: followed by such a share"
        rule = f"rank must be a whole number from 1, {shares}, or a report (.json), got {given!r}"
        raise ConfigError("low_rank", rule, "16, 0.25, energy:0.95 and budget:0.5 are examples") from None


def read_report(path: str) -> dict[str, Mapping[str, Any]]:
    """Return the structure in a report of `eff low-rank`: rank and scheme by layer."""
    try:
        layers = parse_json(Path(path).read_text(encoding="utf-8"))["layers"]
        return {str(each["name"]): {"rank": int(each["rank"]), "scheme": str(each["scheme"])} for each in layers}
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"rank must name a report of eff low-rank, got {path!r} ({type(error).__name__}: {error})"
        raise ConfigError("low_rank", rule, "run eff low-rank first") from error


MEASURED = ("scaled", "whitened")
"""Decompositions that need the inputs of layers."""


@dataclass(frozen=True, kw_only=True)
class LowRankConfig(TechniqueConfig):
    """Replaces layers with products of two smaller ones.

    Example:
        >>> LowRankConfig(rank="energy:0.9").rule
        RankRule(kind='energy', value=0.9)
    """

    about: ClassVar[str] = "Replaces a layer with the product of two smaller ones."
    key: ClassVar[str] = "low_rank"
    switch: ClassVar[str] = "rank"

    needs_values: ClassVar[bool] = True
    saved_structure: ClassVar[tuple[str, str] | None] = (
        "whose layers are factorized in the checkpoint",
        "load the weights with shared_core.low_rank.load and start a new run",
    )
    own_checkpoints: ClassVar[tuple[str, str] | None] = (
        "whose layers are not factorized",
        "load its weights into the model and start a new run",
    )
    finishes_after: ClassVar[tuple[str, ...]] = ("primary_weights",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "parallel plans split stock layers and do not know factors; use DDP or FSDP2, or factorize "
        "the saved model with `eff low-rank`",
        "lora": "both train small factors of the same layers; train with low_rank first, or factorize the merged model"
        " with `eff low-rank`",
        "lottery": "a ticket masks whole weights, which factorized layers do not have; factorize the winning ticket "
        "with `eff low-rank`",
        "prune": "the product of two sparse factors is dense; pass --low_rank_merge false, so that the model "
        "stays factorized",
        "cluster": "the product of two factors does not keep shared values; pass --low_rank_merge false, so "
        "that the model stays factorized",
        "qat": "the product of two quantized factors is not on a grid; pass --low_rank_merge false, so that "
        "the model stays factorized",
        "zero3": ZERO3,
        "fsdp1": FSDP1,
        "peft": "only adapters are saved, without the factors below them. Factorize before adding adapters, or merge "
        "them first",
        "vllm_rollouts": OTHER_NAMES,
        "averaging_callback": AVERAGED_COPY,
    }
    figures: ClassVar[Mapping[str, Figure]] = {
        "layers": Figure("number of factorized layers"),
        "parameters": Figure("parameters, as a share of the original model's"),
    }

    rank: Any = option(
        flag_type=str,
        help="Rank of the factors: a number (16), a share of the smaller side (0.25), energy:0.95 per matrix, "
        "budget:0.5 of the covered parameters, sensitivity:0.5 by measured loss (only eff low-rank), or a report of "
        "eff low-rank (.json).",
    )
    decomposition: Literal["svd", "scaled", "whitened"] = option(
        "svd",
        help="What the truncation minimizes: the error of the weight (svd), or of the output, from input sizes "
        "(scaled) or second moments (whitened).",
    )
    calibration_batches: int = option(
        16, help="Batches to measure inputs (scaled, whitened) or the loss (sensitivity).", low=1
    )
    conv: Literal["auto", "channel", "spatial"] = option(
        "auto",
        help="Split convolutions into k x k and 1 x 1 (channel), k x 1 and 1 x k (spatial), or the better (auto).",
    )
    force: bool = option(False, help="Also factorize layers where it saves nothing, up to full (exact) rank.")
    multiple_of: int = option(
        1, help="Round ranks up to a multiple of this: 8 or 16 for tensor cores, 16 for FP8.", low=1
    )
    merge: bool = option(
        False, help="Multiply the factors into plain layers at the end. Otherwise, the model stays factorized."
    )
    include: tuple[str, ...] = option((), help="Modules to include: name globs, types, first, last. Default: all.")
    skip: tuple[str, ...] = option(("last",), help="Modules to skip: name globs, types, first, last (the head).")
    min_size: int = option(4096, help="Leave layers with fewer weights than this unchanged.", low=0)

    @property
    def rule(self) -> RankRule:
        """The parsed value of `rank`."""
        return parse_rank(self.rank)

    @property
    def needs_batches(self) -> bool:
        """True if the decomposition needs inputs."""
        return self.decomposition in MEASURED

    def validate(self) -> None:
        """Refuse an invalid rank, and force together with a rank that is chosen by its savings."""
        if self.rule.kind in ("budget", "sensitivity") and self.force:
            rule = f"needs a rank given as a number, a share or energy:, got {self.rank!r}"
            raise ConfigError("low_rank", f"force {rule}", "leave force out")

    def allows(self, other: str, recipe: Mapping[str, Any]) -> bool:
        """Return True if the model stays factorized, for techniques whose result the product would destroy."""
        return other in ("prune", "cluster", "qat") and not self.merge

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a message for each combination that these options rule out."""
        if "fsdp2" in environment and self.merge:
            yield (
                f"low_rank with merge cannot be combined with {RUN_ENVIRONMENTS['fsdp2']}, which has sharded the "
                "factors and cannot gather their products. Leave merge out, and call shared_core.low_rank.merge on "
                "the loaded model"
            )
