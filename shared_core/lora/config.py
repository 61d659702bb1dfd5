"""The options of low-rank adapters over a frozen base."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.config.environments import (
    AVERAGED_COPY,
    EFFICIENT_LOADING,
    LBFGS,
    OTHER_NAMES,
    RUN_ENVIRONMENTS,
    ZERO3,
    Ability,
    missing,
)
from shared_core.config.options import Figure, TechniqueConfig, option

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig(TechniqueConfig):
    """Freezes the linear layers, optionally quantized, and trains small adapters on them.

    Example:
        >>> LoraConfig(rank=16).base, LoraConfig(rank=16).scale
        ('none', 2.0)
    """

    about: ClassVar[str] = "Trains adapters on a frozen base model."
    key: ClassVar[str] = "lora"
    switch: ClassVar[str] = "rank"
    libraries: ClassVar[Mapping[str, str]] = {"peft": "lora"}

    # adapters are merged while quantizers are live, so that the sum is what is baked
    finishes_after: ClassVar[tuple[str, ...]] = ("prune", "lottery", "cluster")
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "parallel plans split stock layers and do not know layers with adapters; use DDP or FSDP2",
        "prune": "merging the adapters would fill the base's zeros; prune the merged model afterwards",
        "qat": "qat rounds the sum of base and adapters, which neither bitsandbytes' codes nor adapter files can hold; "
        "pass --lora_base none and --lora_save merged, so that qat quantizes the frozen weights, also to 4 bits",
        "fp8": "both replace the same linear layers; drop one",
        "soup": "an average of merged weights has a higher rank than the adapters; pass --lora_save merged "
        "without --lora_requantize, or average folders of adapters with `eff soup`",
        "zero3": ZERO3,
        "fsdp1": "FSDP1 flattens frozen codes and trained floats into one tensor; use DDP",
        "efficient_loading": EFFICIENT_LOADING.format("merged weights and no adapters"),
        "lbfgs": LBFGS,
        "vllm_rollouts": f"{OTHER_NAMES}, or use PEFT's adapters",
        "averaging_callback": AVERAGED_COPY,
    }
    needs_values: ClassVar[bool] = True
    figures: ClassVar[Mapping[str, Figure]] = {
        "layers": Figure("number of layers with an adapter"),
        "trained": Figure("number of trained parameters"),
    }

    rank: int = option(
        help="rank r of the adapters: r·(inputs + outputs) trained parameters per layer", low=1, high=2**16
    )
    alpha: float = option(32.0, help="scale of the adapters: BA is multiplied by alpha / rank", above=0.0)
    dropout: float = option(0.0, help="dropout on the adapters' input in training", low=0.0, below=1.0)
    base: Literal["none", "nf4", "fp4", "int8"] = option(
        "none",
        help="format of the frozen weights: none (unchanged); with bitsandbytes: nf4 (QLoRA), fp4, int8 (LLM.int8())",
    )
    save: Literal["adapters", "merged"] = option(
        "adapters",
        help="what to save; adapters: adapter_model.safetensors and adapter_config.json, as PEFT does; merged: the "
        "whole model with the adapters added to its weights",
    )
    double_quant: bool = option(
        True, help="also quantize the block scales of nf4 and fp4 to 8 bits", only_with={"base": ("nf4", "fp4")}
    )
    requantize: bool = option(
        False,
        help="after merging in float, round the weights to the base format again",
        only_with={"base": ("nf4", "fp4", "int8"), "save": ("merged",)},
    )
    include: tuple[str, ...] = option(
        (), help="linear layers to adapt: name globs, types, first, last; default: all but the output layer"
    )
    skip: tuple[str, ...] = option((), help="linear layers without an adapter: name globs, types, first, last")
    min_size: int = option(0, help="linear layers with fewer weights get no adapter", low=0)
    train: tuple[str, ...] = option(
        (),
        help="modules to train in full: name globs, types, last, or none; default: the output layer, if it has fewer "
        "outputs than inputs (a classifier) and shares no weight",
    )

    @classmethod
    def how_to_load(cls, options: Mapping[str, Any]) -> str | None:
        """Name PEFT if the folder holds adapters."""
        if options.get("save") == "merged":
            return None
        return (
            "This folder holds adapters. Load the base model, then `PeftModel.from_pretrained(base, FOLDER)` of peft."
        )

    def validate(self) -> None:
        """Refuse nothing beside something."""
        if "none" in self.train and len(self.train) > 1:
            raise self._error("train", "must be none alone, or patterns")

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return refused without peft; tells what is left without bitsandbytes."""
        codes, found = missing({"bitsandbytes": "lora"}, cls.key), super().ability(device)
        return dataclasses.replace(found, why=f"base none alone: {codes}") if codes and not found.why else found

    @property
    def scale(self) -> float:
        """The factor of the adapters' product."""
        return self.alpha / self.rank

    def allows(self, other: str, recipe: Mapping[str, Any]) -> bool:
        """Return True with qat if merged weights are saved and the base is in float, with soup if none are rounded."""
        allowed = {"qat": self.base == "none", "soup": not self.requantize}
        return self.save == "merged" and allowed.get(other, False)

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        if "fsdp2" in environment and self.base != "none":
            yield (
                f"lora with base {self.base} cannot be combined with {RUN_ENVIRONMENTS['fsdp2']}, which would "
                "separate the quantized weights of bitsandbytes from their scales; use base none"
            )
