"""Explain a recipe before its run, using the start-up code on an untrained model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
from torch import nn

from shared_core.config.environments import Ability
from shared_core.config.training_time import Position
from shared_core.engine.checks import compatibility, coverage
from shared_core.engine.hooks import overrides
from shared_core.engine.plan import Touched
from shared_core.engine.protocols import Bakes, Deploys, LooksFirst, TrainsPeers
from shared_core.engine.recipe import Recipe
from shared_core.engine.registry import REGISTRY
from shared_core.engine.technique import Context, Technique
from shared_core.errors import CompatibilityError, ConfigError, EffError, UnknownLengthError
from shared_core.hardware import default_device

AFTER = "after training"
_POSITIONS = (Position, Position | None)
# trainer → where state and deployment data are saved
_PLACES = {
    "hf": ("eff_state.safetensors", "eff_deployment.json"),
    "lightning": ("the .ckpt under eff_state", "the .ckpt under eff_deployment"),
}


@dataclass(frozen=True)
class Explanation:
    """What is known about a run before it starts.

    Args:
        conflicts: Reasons why it would be refused, one line each; empty if it starts.
        remarks: Notes about allowed settings.
        timeline: ``step`` (None if only `at` is known), ``at``, ``technique``, ``what``, in order.
        touched: What each technique changes, if there is a model.
        abilities: How each technique runs on the device.
        checkpoint: What each technique saves.
        coverage: For each technique of layers, its share of the weights that multiply activations.
    """

    conflicts: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    timeline: list[dict[str, Any]] = field(default_factory=list)
    touched: dict[str, Touched] = field(default_factory=dict)
    abilities: dict[str, Ability] = field(default_factory=dict)
    checkpoint: dict[str, list[str]] = field(default_factory=dict)
    coverage: dict[str, coverage.Reach] = field(default_factory=dict)


def estimates(key: str, elements: int) -> list[dict[str, Any]]:
    """Return a technique's cost for so many elements, from measurements on one CPU thread.

    Each entry has ``what``, and ``seconds`` or ``bytes``. Above the largest measured size, cost is
    proportional to size.

    Example:
        >>> [held["what"] for held in estimates("prune", 1_000_000) if "bytes" in held]
        ['memory of the masks']
    """
    file = resources.files("shared_core.tools") / "measured.json"
    found = []
    for law in json.loads(file.read_text(encoding="utf-8")).get(key, ()):
        size = min(elements, law["largest"])
        value = (law["a"] + law["c"] * size ** law["k"]) * elements / max(size, 1)
        unit, factor = ("bytes", 2**20) if law["unit"] == "MiB" else ("seconds", 1e-3)
        found.append({"what": law["what"], unit: float(f"{value * factor:.3g}")})
    return found


def explain(
    recipe: Recipe,
    model: nn.Module | None = None,
    *,
    trainer: str = "hf",
    run_environment: Iterable[str] = (),
    total_steps: int | None = None,
    steps_per_epoch: float | None = None,
    device: torch.device | None = None,
) -> Explanation:
    """Return what a run would do.

    Techniques attach to the model, which must not be trained afterwards. A model without values costs nothing.

    Args:
        recipe: The techniques to switch on.
        model: The user's, on any device, also the meta device unless a config `needs_values`.
        trainer: ``hf`` or ``lightning``.
        run_environment: Keys of `environments.RUN_ENVIRONMENTS` that will hold.
        total_steps: Optimizer steps of the run; None if unknown, then positions are shown as written.
        steps_per_epoch: Optimizer steps per epoch.
        device: Where it will run; None: `default_device`.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> found = explain(Recipe.from_dict({"prune": {"sparsity": 0.5, "skip": "last"}}), model, total_steps=100)
        >>> dict(found.touched["prune"].tensors), [event["step"] for event in found.timeline]
        ({'0.weight': 32}, [0, 50])
    """
    report = Explanation()
    where = device or default_device()
    techniques = {key: REGISTRY[key].technique_class(config) for key, config in recipe.items()}
    # Without a model use an empty one: timelines and abilities need none.
    context = Context(model if model is not None else nn.Module(), trainer, is_preview=True)
    context.total_steps, context.steps_per_epoch = total_steps, steps_per_epoch
    try:
        compatibility.check(recipe, run_environment)
    except CompatibilityError as error:
        report.conflicts.extend(str(error).removeprefix("recipe: ").splitlines())
    if model is not None:
        _preview(techniques, context, report, allow_partial=recipe.allow_partial)
    report.remarks.extend(compatibility.remarks(recipe))
    for key, technique in techniques.items():
        report.timeline.extend(_events(key, technique, context, report.conflicts))
        report.abilities[key] = type(technique.config).ability(where)
        report.checkpoint[key] = _saved(technique, trainer)
    # By step: first those without a step, last those after training.
    report.timeline.sort(key=lambda event: (event["at"] == AFTER, event["step"] or 0))
    return report


def _preview(
    techniques: Mapping[str, Technique], context: Context, report: Explanation, *, allow_partial: bool
) -> None:
    counted = coverage.count(context.model)
    for key, technique in techniques.items():
        try:
            # Techniques attach one after another, as in a run: the next one sees a factorized layer.
            if isinstance(technique, LooksFirst):
                technique.before_attach(context)
            report.touched[key] = technique.attach(context)
            coverage.refuse_empty(key, report.touched[key])
        except EffError as error:
            report.conflicts.append(str(error))
    for key in report.touched:
        config, frozen = techniques[key].config, techniques[key].reaches_frozen
        found = coverage.reach(counted, report.touched[key], config, context.model, reaches_frozen=frozen)
        if found is not None:
            report.coverage[key] = found
            refusal = None if allow_partial else found.refusal(key, config)
            report.conflicts.extend([] if refusal is None else [str(refusal)])
    report.remarks.extend(coverage.lines(report.coverage))


def _events(key: str, technique: Technique, context: Context, conflicts: list[str]) -> list[dict[str, Any]]:
    try:
        context.plans[key] = technique.plan(context)
    # Without a length, fractions stay as written.
    except UnknownLengthError:
        return [{"step": None, "at": at, "technique": key, "what": name} for name, at in _written(technique).items()]
    except ConfigError as error:
        conflicts.append(str(error))
        return []
    return [
        {"step": step, "at": AFTER if step is None else f"step {step}", "technique": key, "what": what}
        for step, what in context.plans[key].events
    ]


def _written(technique: Technique) -> dict[str, str]:
    hints = type(technique.config).hints()
    values = {name: getattr(technique.config, name) for name, hint in hints.items() if hint in _POSITIONS}
    return {name: "by default" if value is None else str(value) for name, value in values.items()}


def _saved(technique: Technique, trainer: str) -> list[str]:
    state, deployment = _PLACES[trainer]
    lines = {
        f"its state in {state}": overrides(technique.state_dict, Technique.state_dict),
        f"data for deployment in {deployment}": isinstance(technique, Deploys),
        "plain weights with its work in them": isinstance(technique, Bakes),
        "its own files beside the final model": isinstance(technique, TrainsPeers),
    }
    return [line for line, is_saved in lines.items() if is_saved] or ["nothing"]
