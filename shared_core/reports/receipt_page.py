"""A receipt as sections of a page: what was asked, and what happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared_core.engine.receipt import headline
from shared_core.engine.registry import REGISTRY
from shared_core.reports.page import Block, Section, Table, markdown


def card_section(values: Mapping[str, Any], *, has_deployment: bool = False) -> str:
    """Return the section of a model card as Markdown: what was asked, what happened, how the model is loaded.

    Example:
        >>> receipt = {"recipe": {"prune": {"sparsity": 0.5}}, "steps": {"applied": 9, "skipped": 0}, "front_end": "hf"}
        >>> receipt |= {"techniques": {"prune": {"sparsity": 0.25}}, "seconds": {}}
        >>> print(card_section(receipt))
        ## Efficient training
        <BLANKLINE>
        Trained with efftrain. Options that differ from their defaults:
        <BLANKLINE>
        | technique | option | value |
        |---|---|---:|
        | prune | sparsity | 0.5 |
        <BLANKLINE>
        9 steps applied, 0 skipped.
        <BLANKLINE>
        | technique | what happened |
        |---|---|
        | prune | sparsity 0.25 |
        <BLANKLINE>
        It loads as it would without efftrain: `from_pretrained` of this folder.
    """
    version = values.get("environment", {}).get("libraries", {}).get("efftrain")
    intro = f"Trained with efftrain{f' {version}' if version else ''}. Options that differ from their defaults:"
    # a card is published: of a teacher's place on this machine the name is enough, and notes may name folders
    recipe = {
        key: {
            name: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
            for name, value in options.items()
        }
        for key, options in values["recipe"].items()
    }
    told = "{applied:,} steps applied, {skipped:,} skipped.".format(**values["steps"])
    figures = [[key, _headline(report)] for key, report in values["techniques"].items()]
    blocks: list[Block] = [intro, asked(recipe), told, Table(["technique", "what happened"], figures)]
    return "\n\n".join([markdown(Section("Efficient training", blocks)), *_loading(recipe, has_deployment)])


def _loading(recipe: Mapping[str, Any], has_deployment: bool) -> list[str]:
    """Return how a saved model is loaded, as Markdown."""
    structures = {key: REGISTRY[key].config_class.saved_structure for key in recipe if key in REGISTRY}
    lines = [
        f"With `{key}`, {structure[0]}: {structure[1].partition(' and ')[0]}."
        for key, structure in structures.items()
        if structure is not None
    ] or ["It loads as it would without efftrain: `from_pretrained` of this folder."]
    if has_deployment:
        lines.append(
            "Beside the weights, `eff_deployment.json` has what quantised inference needs, such as ranges of inputs: "
            "`eff export FOLDER --out model.onnx` reads it (`--format` has other runtimes)."
        )
    return lines


def asked(recipe: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the options that differ from their defaults; of a technique without one, that it was on."""
    rows: list[list[Any]] = []
    for key, options in recipe.items():
        usual = _defaults(key)
        chosen = [(name, value) for name, value in options.items() if name not in usual or value != usual[name]]
        rows += [[key, name, "none" if value is None else value] for name, value in chosen] or [
            [key, "all options", "at their defaults"]
        ]
    return Table(["technique", "option", "value"], rows)


def _defaults(key: str) -> dict[str, Any]:
    if key not in REGISTRY:  # of a newer version
        return {}
    found = {}
    for field in dataclasses.fields(REGISTRY[key].config_class):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        found[field.name] = list(made) if isinstance(made, tuple) else made  # a receipt is JSON
    return found


def happened(values: Mapping[str, Any]) -> list[Block]:
    """Return steps, time, one row a technique, what was left out and why, notes and the environment."""
    steps, told, spent = values["steps"], values["techniques"], values["seconds"]
    planned = "" if steps.get("planned") is None else f" of {steps['planned']:,} planned"
    figures = [[key, _headline(report), round(float(spent.get(key, 0.0)), 2)] for key, report in told.items()]
    left = [[key, name, why] for key, report in told.items() for name, why in report.get("left_out", {}).items()]
    environment = values["environment"]
    found = {
        "device": environment["device"], "python": environment["python"], **environment["libraries"],
        "float32 products": environment.get("float32_matmul_precision", "none"),
    }  # fmt: skip
    reported = {report["note"]: None for report in told.values() if report.get("note")}
    return [
        f"{steps['applied']:,} steps applied{planned}, {steps['skipped']:,} skipped; "
        f"{'finished' if values['finished'] else 'cut short'} after {values['wall_seconds']:,.1f} s, driven by "
        f"{values['front_end']}.",
        Table(["technique", "what happened", "own time (s)"], figures),
        *([Table(["technique", "left out", "why"], left)] if left else []),
        *map(str, [*reported, *values["notes"]]),
        Table(["environment", "version"], list(found.items())),
    ]


def _headline(report: Mapping[str, Any]) -> str:
    return headline({name: value for name, value in report.items() if name != "note"})  # a paragraph of its own
