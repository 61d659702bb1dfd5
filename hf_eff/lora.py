"""QLoRA as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class QLora(TechniqueCallback):
    """Trains low-rank adapters on linear layers frozen in 4 or 8 bits, and merges them at the end.

    Args:
        options: Those of `shared_core.quantization.LoraConfig`.

    Example:
        ``Trainer(..., callbacks=[QLora(rank=16)])``
    """

    key: ClassVar[str] = "lora"
