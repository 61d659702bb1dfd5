"""The options of quantization-aware training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.config.environments import EFFICIENT_LOADING, NO_WHOLE_WEIGHTS, RUN_ENVIRONMENTS, Ability
from shared_core.config.options import Figure, OverridableConfig, option
from shared_core.config.training_time import Position

if TYPE_CHECKING:
    import torch

Scheme = Literal[
    "int8",
    "int8_weight",
    "int8_dynamic",
    "int4_weight",
    "int8_dynamic_int4_weight",
    "fp8",
    "fp8_static",
    "fp8_block",
    "mxfp4",
    "nvfp4",
    "ternary",
    "binary",
]
Range = Literal["ema", "minmax", "percentile", "kl", "mse", "lsq", "lsq_plus", "pact"]
_INTEGERS = ("int8", "int8_weight", "int8_dynamic", "int4_weight", "int8_dynamic_int4_weight")
_ROUNDED_WEIGHTS = ("ema", "minmax", "percentile", "kl", "mse", "pact")
"""Ranges for which weights have no learned scale."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QatConfig(OverridableConfig):
    """Trains with weights and activations rounded to few bits.

    Example:
        >>> QatConfig(scheme="int8", overrides={"head": {"weight_bits": 4}}).overrides
        ('head:weight_bits=4',)
    """

    about: ClassVar[str] = "Trains with weights and inputs rounded to few bits."
    key: ClassVar[str] = "qat"
    switch: ClassVar[str] = "scheme"

    # The soup evaluates with active quantizers. Hooks on a layer's forward must be gone before layers become plain.
    finishes_after: ClassVar[tuple[str, ...]] = ("soup", "checkpointing", "activations")
    conflicts: ClassVar[Mapping[str, str]] = {
        "fp8": "both replace the same linear layers; train in FP8 first and with qat in a second run, or drop one",
        "averaging_callback": "ranges are observed on the weights in training, and an average lies between the codes; "
        "the technique average does both",
        **NO_WHOLE_WEIGHTS,
    }
    works_in: ClassVar[tuple[str, ...]] = ("tensor_parallel",)
    figures: ClassVar[Mapping[str, Figure]] = {
        "active": Figure("1 while values are rounded, 0 before `begin`", in_bar=True),
        "layers": Figure("number of quantized layers"),
        "range_updates": Figure("number of range updates"),
    }
    conditions: ClassVar[Mapping[str, str]] = {
        "is_static": "a scheme that observes activations (int8 or fp8_static; ternary or binary with activation_bits)"
    }
    overridable: ClassVar[tuple[str, ...]] = ("scheme", "weight_bits", "activation_bits", "group_size")

    scheme: Scheme = option(
        help="formats and scales. int8: weights per channel, activations per tensor; int8_weight, int4_weight: only "
        "weights, per channel or group; int8_dynamic, int8_dynamic_int4_weight: activations per token; fp8: per "
        "channel and token; fp8_static: activations per tensor; fp8_block: blocks of 128 x 128, activations in groups "
        "of 128; mxfp4, nvfp4: blocks of 32 or 16; ternary, binary: weights",
        each={"fp8_static": {"range": ("ema", "minmax", "percentile")}},  # the other ranges seek integers
    )
    begin: Position = option(0.0, help="when fake quantization starts; ranges are observed from the first step")
    freeze_observers: Position = option(1.0, help="when activation ranges are frozen; at least step 1")
    fold_batch_norm: bool = option(True, help="fold batch norms into the weights before quantizing, as at inference")
    freeze_bn: Position = option(1.0, help="when folded batch norms switch to their running statistics for good")
    range: Range = option(
        "ema",
        help="activation ranges from the moving average of each step's minimum and maximum (ema), from all steps "
        "(minmax, percentile, kl, mse), or learned (lsq, lsq_plus with a zero point, pact)",
        only_with={"is_static": (True,)},
    )
    ema_constant: float = option(
        0.01,
        help="minimum weight c of a new step in the average: r = r + max(c, 9/(n + 10))·(w - r) after n steps",
        above=0.0,
        high=1.0,
        only_with={"range": ("ema",)},
    )
    percentile: float = option(
        99.99,
        help="share of the values inside the range, in percent",
        above=50.0,
        high=100.0,
        only_with={"range": ("percentile",)},
    )
    clip_gelu: float | None = option(
        None,
        help="upper limit of the range where a layer reads a GELU output; 10 is usual",
        above=0.0,
        only_with={"is_static": (True,), "range": _ROUNDED_WEIGHTS},
    )
    weight_bits: int | None = option(
        None,
        help="bits b per weight, -(2^(b-1) - 1) to 2^(b-1) - 1; default: the scheme's",
        low=2,
        high=8,
        only_with={"scheme": _INTEGERS},
    )
    activation_bits: int | None = option(
        None,
        help="bits b per activation, -2^(b-1) to 2^(b-1) - 1; default: the scheme's",
        low=2,
        high=8,
        only_with={"scheme": ("int8", "int8_dynamic", "int8_dynamic_int4_weight", "ternary", "binary")},
    )
    group_size: int | None = option(
        None,
        help="weights per scale; default: the largest of 128, 64, 32 that divides the inputs",
        low=2,
        only_with={"scheme": ("int4_weight", "int8_dynamic_int4_weight")},
    )
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest",
        help="rounding of weights in training: nearest, or up with the probability of the remainder; saved weights use "
        "nearest",
        only_with={"scheme": _INTEGERS, "range": _ROUNDED_WEIGHTS},
    )
    gate: Literal["unrounded", "rounded"] = option(
        "unrounded",
        help="pass gradients where x/s + z, or its rounded value (as torch's ops), is in range",
    )
    calibration_batches: int = option(
        10, help="training batches to re-estimate ranges of replaced weights, as in a soup", low=1
    )
    include: tuple[str, ...] = option((), help="modules to include: name globs, types, first, last; default: all")
    skip: tuple[str, ...] = option((), help="modules to leave in float: name globs, types, first, last")
    min_size: int = option(0, help="leave modules with fewer weights in float", low=0)
    overrides: tuple[str, ...] = option(
        (),
        help="options of single modules: PATTERN:OPTION=VALUE, such as head:weight_bits=8, or a mapping in YAML; the "
        "last match counts",
    )
    keep: bool = option(False, help="keep the fake-quantizing modules in the model after training")

    def validate(self) -> None:
        """Raise `ConfigError` for invalid overrides."""
        self.override_options()

    @property
    def is_static(self) -> bool:
        """True if activations have observed ranges."""
        return _is_static(self.scheme, self.activation_bits is not None)

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return native, with the kernels that run converted layers."""
        kernels = "torchao's kernels" if find_spec("torchao") else "torch's integer products; torchao has faster ones"
        return Ability("native", f"training computes on float values; `convert` then uses {kernels}")

    @property
    def learns_ranges(self) -> bool:
        """True if training learns the ranges with the weights instead of observing them."""
        return self.range in ("lsq", "lsq_plus", "pact")

    @property
    def observes_activations(self) -> bool:
        """True if layers may have input ranges, which must be re-estimated for other weights."""
        others = self.override_options()
        has_bits = self.activation_bits is not None or any(name == "activation_bits" for _, name, _ in others)
        schemes = {self.scheme, *(value for _, name, value in others if name == "scheme")}
        return any(_is_static(scheme, has_bits) for scheme in schemes)

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        averages = [key for key in ("average", "soup") if key in recipe]
        if self.keep and "lora" in recipe:
            yield (
                "qat with keep cannot be combined with lora: adapters are merged into plain layers at the end; "
                "apply_ranges restores quantizers in these"
            )
        if self.learns_ranges and "efficient_loading" in environment:
            yield (
                f"qat with range {self.range} cannot be combined with {RUN_ENVIRONMENTS['efficient_loading']}: "
                f"{EFFICIENT_LOADING.format('weights and no ranges')}"
            )
        if "tensor_parallel" in environment and (self.range not in ("ema", "minmax") or self.clip_gelu is not None):
            yield (
                f"qat with range {self.range}{' and clip_gelu' if self.clip_gelu else ''} cannot be combined with "
                f"{RUN_ENVIRONMENTS['tensor_parallel']}: replicated inputs would be counted once per process, "
                "the plan has no learned scales, and GELU outputs cannot be recognized; use ema or "
                "minmax, without clip_gelu"
            )
        for key in averages:
            if self.learns_ranges:
                yield (
                    f"qat with range {self.range} cannot be combined with {key}: averaged weights have no learned "
                    "scales; use an observed range, such as ema, which is re-estimated for them"
                )
            if self.observes_activations and "manual_optimization" in environment:
                yield (
                    f"{key} with ranges of qat cannot be combined with {RUN_ENVIRONMENTS['manual_optimization']}: "
                    "averaged weights need new ranges, estimated by running training_step, which here steps the "
                    "optimizer; use scheme int8_dynamic or int8_weight"
                )


def _is_static(scheme: str, has_activation_bits: bool) -> bool:
    return scheme in ("int8", "fp8_static") or (scheme in ("ternary", "binary") and has_activation_bits)
