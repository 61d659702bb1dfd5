"""Fp8 as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class Fp8(TechniqueCallback):
    """Trains with linear layers that multiply FP8 values, forward and backward.

    Args:
        options: Those of `shared_core.fp8.Fp8Config`.

    Example:
        ``Trainer(..., callbacks=[Fp8(recipe="rowwise")])``
    """

    key: ClassVar[str] = "fp8"
