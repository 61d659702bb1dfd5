"""The options of FP8 training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from shared_core.config.environments import LBFGS, Ability
from shared_core.config.options import Figure, TechniqueConfig, option

if TYPE_CHECKING:
    import torch

# recipe → formats of inputs and weights, and of gradients with respect to a layer's output
_FORMATS: dict[str, tuple[str, str]] = {
    "tensorwise": ("fp8_e4m3", "fp8_e5m2"),
    "delayed": ("fp8_e4m3", "fp8_e5m2"),
    "rowwise": ("fp8_e4m3", "fp8_e4m3"),
    "blockwise": ("fp8_e4m3", "fp8_e4m3"),
    "mx": ("fp8_e4m3", "fp8_e4m3"),
    "s2fp8": ("fp8_e5m2", "fp8_e5m2"),
    "hfp8": ("fp8_ibm", "fp8_e5m2"),
    "mxfp4": ("fp4_e2m1", "fp4_e2m1"),
    "nvfp4": ("fp4_e2m1", "fp4_e2m1"),
    "int16": ("int16", "int16"),
}
_DTYPES = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp4_e2m1": "float4_e2m1fn_x2",
    "int16": "int16",
}
_SCALED_MM_EVERYWHERE = (
    "tensorwise",
    "delayed",
    "rowwise",
)  # on CPUs too; blocks on some GPUs
_HYBRID = ("tensorwise", "delayed")  # recipes that may have another format for gradients


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Config(TechniqueConfig):
    """Multiplies linear layers in FP8, or another narrow format, forward and backward.

    Example:
        >>> Fp8Config(recipe="delayed").gradient_dtype
        torch.float8_e5m2
        >>> Fp8Config(recipe="rowwise").gradient_dtype
        torch.float8_e4m3fn
    """

    about: ClassVar[str] = "Multiplies linear layers in 8 bits."
    key: ClassVar[str] = "fp8"
    switch: ClassVar[str] = "recipe"

    finishes_after: ClassVar[tuple[str, ...]] = ("soup", "checkpointing", "activations")
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "scales need whole weights and inputs, and layers hold parts; use DDP or FSDP2",
        "deepspeed": "a step with NaN or infinity must be skipped, and DeepSpeed applies every step; use DDP or FSDP2",
        "fsdp1": "FSDP1 flattens the weights, so no rows or blocks can share a scale; use DDP or FSDP2",
        "lbfgs": LBFGS,
    }
    figures: ClassVar[Mapping[str, Figure]] = {
        "layers": Figure("number of layers that multiply in FP8"),
        "discarded_steps": Figure("steps discarded for NaN or infinity", in_bar=True),
    }
    recipe: Literal[
        "tensorwise", "delayed", "rowwise", "blockwise", "mx", "s2fp8", "hfp8", "mxfp4", "nvfp4", "int16"
    ] = option(
        help="how to scale: per tensor (tensorwise, or delayed: from past steps), per row (rowwise, powers of two), "
        "per 1x128 and 128x128 (blockwise) or 1x32 (mx, powers of two); emulated: s2fp8, hfp8, mxfp4, nvfp4, int16"
    )
    format: Literal["auto", "hybrid", "e4m3"] = option(
        "auto",
        help="number format; hybrid: e4m3 forward, e5m2 gradients; e4m3: both; auto: the recipe's default",
        each={
            "hybrid": {"recipe": _HYBRID},
            "e4m3": {"recipe": tuple(name for name, (forward, _) in _FORMATS.items() if forward == "fp8_e4m3")},
        },
    )
    amax_history: int = option(
        16,
        help="past steps whose largest magnitude sets the scale",
        low=1,
        high=1024,
        only_with={"recipe": ("delayed",)},
    )
    backend: Literal["auto", "emulated", "scaled_mm", "torchao"] = option(
        "auto",
        help="kernels; auto: torch's scaled_mm on GPUs with FP8, else emulated, with the same numbers; torchao: its "
        "float8 training",
        each={"scaled_mm": {"recipe": _SCALED_MM_EVERYWHERE}, "torchao": {"recipe": ("tensorwise", "rowwise")}},
    )
    max_skips: int = option(
        50, low=1, help="stop with an error after discarding this many steps in a row (NaN or infinity)"
    )
    include: tuple[str, ...] = option(
        (), help="modules to include: name globs, types, first, last; default: all but first and last, with s2fp8 all"
    )
    skip: tuple[str, ...] = option((), help="modules to leave in high precision: name globs, types, first, last")
    min_size: int = option(0, help="leave modules with fewer weights in high precision", low=0)

    @classmethod
    def ability(cls, device: torch.device) -> Ability:
        """Return native, with the recipes, if a scaled matmul computes the same as the emulation."""
        from shared_core.fp8.native import BLOCKS, why_not_native

        reasons = {
            recipe: why_not_native(recipe, cls(recipe=recipe).gradient_dtype, device)  # type: ignore[arg-type]
            for recipe in BLOCKS
        }
        here = [recipe for recipe, reason in reasons.items() if reason is None]
        if here:
            return Ability("native", f"recipes {', '.join(here)}; the others are emulated")
        return Ability(
            "emulated",
            f"{reasons['rowwise']}: products run in float32, slower than without",
        )

    @property
    def forward_format(self) -> str:
        """The format of inputs and weights, as in `shared_core.numerics.FORMATS`."""
        return _FORMATS[self.recipe][0]

    @property
    def gradient_format(self) -> str:
        """The name of the format of gradients with respect to a layer's output."""
        return "fp8_e4m3" if self.format == "e4m3" else _FORMATS[self.recipe][1]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The type of gradients with respect to a layer's output."""
        import torch

        return cast("torch.dtype", getattr(torch, _DTYPES[self.gradient_format]))

    @property
    def has_scales(self) -> bool:
        """True if operands are FP8 codes with one scale per block, as for scaled matmuls."""
        return self.forward_format == "fp8_e4m3"

    @property
    def has_session_state(self) -> bool:
        """True if the recipe does work once per optimizer step, for which it needs a session."""
        return self.recipe in ("delayed", "hfp8", "int16")

    @property
    def needs_loss_scaling(self) -> bool:
        """True if gradients are cast without a scale, so that small ones vanish without a loss scaler."""
        return self.recipe == "hfp8"

    @property
    def backward_is_narrow(self) -> bool:
        """True if gradients are in e5m2. Its range is narrower than bf16's, so a loss scaler helps with bf16 too."""
        return self.gradient_format == "fp8_e5m2" and self.recipe in (*_HYBRID, "hfp8")

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a message for each requirement that the recipe lacks."""
        if self.needs_loss_scaling and "loss_scale" not in recipe:
            yield (
                f"fp8 with recipe {self.recipe} needs loss_scale: it casts gradients without a scale, and "
                "small ones would vanish; add --loss_scale_kind dynamic --loss_scale_format fp8_e5m2"
            )
