"""The options of FP8 training."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch

from shared_core.config import TechniqueConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Config(TechniqueConfig):
    """How linear layers multiply in FP8, forward and backward.

    Example:
        >>> Fp8Config(recipe="delayed").gradient_dtype
        torch.float8_e5m2
        >>> Fp8Config(recipe="rowwise").gradient_dtype
        torch.float8_e4m3fn
    """

    key: ClassVar[str] = "fp8"
    switch: ClassVar[str] = "recipe"

    recipe: Literal["tensorwise", "delayed", "rowwise", "blockwise", "mx"] = option(
        help="what shares a scale: tensorwise: a tensor; delayed: the same, from past steps; rowwise: a row, powers of "
        "two; blockwise: 1x128 and 128x128; mx: 1x32, powers of two"
    )
    format: Literal["auto", "hybrid", "e4m3"] = option(
        "auto",
        help="hybrid: e4m3 forward, e5m2 gradients (tensorwise, delayed); e4m3: both; auto: hybrid where it is allowed",
    )
    amax_history: int = option(16, help="steps whose largest magnitude sets the next scale (delayed)", low=1, high=1024)
    backend: Literal["auto", "emulated", "scaled_mm"] = option(
        "auto",
        help="auto: torch's scaled matmul on GPUs that multiply FP8, else the same numbers emulated; or always one",
    )
    include: tuple[str, ...] = option((), help="modules: name patterns, types, first, last; empty: all")
    skip: tuple[str, ...] = option((), help="modules to leave in high precision: name patterns, types, first, last")

    def validate(self) -> None:
        """Refuse a format or a backend that the recipe does not have."""
        if self.format == "hybrid" and self.recipe not in ("tensorwise", "delayed"):
            raise self._error("format", f"must be e4m3 (or auto) with recipe={self.recipe}")
        if self.backend == "scaled_mm" and self.recipe in ("blockwise", "mx"):
            raise self._error("backend", f"must be emulated (or auto) with recipe={self.recipe}")

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The FP8 type of gradients with respect to a layer's output; inputs and weights are e4m3."""
        hybrid = self.format != "e4m3" and self.recipe in ("tensorwise", "delayed")
        return torch.float8_e5m2 if hybrid else torch.float8_e4m3fn
