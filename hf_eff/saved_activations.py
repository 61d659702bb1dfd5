"""Compressed and offloaded activations as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class CompressedActivations(TechniqueCallback):
    """Stores what forward saves for backward smaller, or on the host.

    Args:
        options: Those of `shared_core.saved_activations.ActivationsConfig`.

    Example:
        ``Trainer(..., callbacks=[CompressedActivations(pack="exact")])``
    """

    key: ClassVar[str] = "activations"
