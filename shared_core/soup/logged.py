"""Metrics that a trainer logged when it saved a checkpoint, to rank ingredients without evaluating each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shared_core.errors import CheckpointError, nearest
from shared_core.soup.config import larger_is_better
from shared_core.soup.ingredients import Source, open_ingredients
from shared_core.soup.sources import LIGHTNING, RUN_KEY, Ingredient, load_torch_file, read_json


def rank_by_logged(
    ingredients: Sequence[Source], metric: str, mode: Literal["auto", "max", "min"] = "auto"
) -> tuple[list[Ingredient], list[float]]:
    """Return the ingredients, best first by a metric that their trainers logged, and these metrics.

    For ``greedy_soup(..., order="given")``, which then evaluates only the first alone, and averages.

    Args:
        ingredients: Checkpoints of either trainer.
        metric: As the trainer logged it, such as ``eval_accuracy``.
        mode: Whether it is better when larger or smaller; ``"auto"``: smaller for losses and errors by their names.

    Raises:
        CheckpointError: If an ingredient was saved without this metric, or with one that is not finite.
    """
    opened = open_ingredients(ingredients)
    found = []
    for item in opened:
        logged = logged_metrics(item)
        if metric not in logged:
            raise CheckpointError(
                f"soup: {item.name} must be saved with {metric!r}, to be ranked by it, got "
                f"{', '.join(sorted(logged)) or 'no metric of its step'}{nearest(metric, logged)}; leave it out, or "
                "let --eval rank"
            )
        if not math.isfinite(logged[metric]):
            got = f"got {logged[metric]}; leave it out"
            raise CheckpointError(f"soup: {item.name} must be saved with a finite {metric!r}, {got}")
        found.append(logged[metric])
    sign = -1.0 if mode == "max" or (mode == "auto" and larger_is_better(metric)) else 1.0
    order = sorted(range(len(opened)), key=lambda number: sign * found[number])
    return [opened[number] for number in order], [found[number] for number in order]


def logged_metrics(ingredient: Ingredient) -> dict[str, float]:
    """Return the metrics of an ingredient's own step that lie in its checkpoint; empty if none do.

    Read are ``trainer_state.json`` of the Hugging Face Trainer, and in a Lightning checkpoint what our callbacks wrote
    and the scores that ModelCheckpoint keeps by file name.

    Args:
        ingredient: As `open_ingredient` returns it; one that lies in no file has none.
    """
    if ingredient.path is None:
        return {}
    if ingredient.path.is_dir():
        state = ingredient.path / "trainer_state.json"
        return _of_trainer_state(read_json(state)) if state.is_file() else {}
    return _of_lightning(load_torch_file(ingredient.path), ingredient.path) if ingredient.kind == LIGHTNING else {}


def _of_trainer_state(state: Mapping[str, Any]) -> dict[str, float]:
    # a log entry of an earlier step is of other weights, even where it is the last one
    entries = [entry for entry in state.get("log_history", ()) if entry.get("step") == state.get("global_step")]
    merged = {name: value for entry in entries for name, value in entry.items()}
    return _numbers({name: value for name, value in merged.items() if name not in ("step", "epoch")})


def _of_lightning(checkpoint: Mapping[str, Any], path: Path) -> dict[str, float]:
    found = {}
    for name, state in checkpoint.get("callbacks", {}).items():
        if not (name.startswith("ModelCheckpoint") and isinstance(state, Mapping)):
            continue
        # `current_score` is not read: in last.ckpt it may be that of an earlier validation
        scores = {Path(saved).name: score for saved, score in state.get("best_k_models", {}).items()}
        if state.get("monitor") is not None and path.name in scores:
            found[state["monitor"]] = scores[path.name]
    return _numbers({**found, **checkpoint.get(RUN_KEY, {}).get("metrics", {})})


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in values.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # a text, a list, a tensor of several numbers
            continue
    return found
