"""Curves that a trainer logged to TensorBoard, read by TensorBoard's own package."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from pathlib import Path

EVENTS = "events.out.tfevents.*"


def event_curves(folders: Iterable[Path]) -> dict[str, list[tuple[int, float]]]:
    """Return by tag (step, value) of all finite scalars; of a step that two folders hold, what the later one says.

    Args:
        folders: With event files, the oldest first: a resumed run writes into a new one.

    Raises:
        ImportError: If TensorBoard is not installed, or not whole.
    """
    accumulators = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    points: dict[str, dict[int, float]] = {}
    for folder in folders:
        # 0: all, not a sample
        found = accumulators.EventAccumulator(str(folder), size_guidance={accumulators.SCALARS: 0}).Reload()
        for tag in found.Tags()[accumulators.SCALARS]:
            values = {event.step: event.value for event in found.Scalars(tag) if math.isfinite(event.value)}
            points.setdefault(tag, {}).update(values)
    return {tag: sorted(values.items()) for tag, values in points.items() if values}


def hugging_face_name(tag: str) -> str:
    """Return a figure's name in the trainer's own log, from that in its TensorBoard.

    Example:
        >>> [hugging_face_name(tag) for tag in ("train/prune/sparsity", "eval/loss")]
        ['prune/sparsity', 'eval_loss']
    """
    kind, _, name = tag.partition("/")
    return {"train": name, "eval": f"eval_{name}", "test": f"test_{name}"}.get(kind, tag)
