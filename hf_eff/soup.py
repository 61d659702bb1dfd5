"""ModelSoup as a callback of the Hugging Face Trainer."""

from __future__ import annotations

from typing import ClassVar

from hf_eff._technique_callback import TechniqueCallback


class ModelSoup(TechniqueCallback):
    """Averages this run's checkpoints when training ends.

    Args:
        options: Those of `shared_core.soup.SoupConfig`.

    Example:
        ``Trainer(..., callbacks=[ModelSoup(kind="greedy", metric="eval_accuracy")])``
    """

    key: ClassVar[str] = "soup"
