"""`eff prune`: a trained model pruned without training, from the command line."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.arguments import (
    AllowPartial,
    AsJson,
    Calibration,
    Evaluate,
    Loss,
    Model,
    Out,
    Weights,
    bar,
    command_with_options,
    given_options,
)
from shared_core.cli.loading import check_new, function, open_model, save_network, score, user_batches
from shared_core.cli.shrink import made_up_inputs
from shared_core.errors import ConfigError
from shared_core.files.json_yaml import json_text
from shared_core.printing import echo

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.pruning import PruneConfig
    from shared_core.tools.shrink import ShrinkResult

REPORT_FILE = "eff_pruning.json"
_SHRINKABLE = ("neuron", "channel", "head")


def _during_training() -> tuple[str, ...]:
    from shared_core.pruning.config import DURING_TRAINING

    return DURING_TRAINING


PruneCommand = command_with_options("shared_core.pruning.config", "PruneConfig", _during_training)


def prune(
    context: typer.Context,
    model: Model,
    out: Out,
    weights: Weights = None,
    calibration: Calibration = None,
    batches: Annotated[int, typer.Option(help="Calibration batches to run, at most.")] = 100,
    loss: Loss = None,
    seed: Annotated[int, typer.Option(help="Of the draws of random and shapley.")] = 0,
    evaluate: Evaluate = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Also remove the pruned neurons, channels or heads: a smaller model.")
    ] = False,
    allow_partial: AllowPartial = False,
    as_json: AsJson = False,
) -> None:
    """Prune a trained model at once and save plain weights, which load without this library, and a report.

    A folder's model comes out as a folder that from_pretrained loads, its tokenizer beside it; another model as
    model.safetensors. With --shrink units are gone from tensors and configuration. eff_pruning.json tells what was
    pruned, what was left dense, and how quality changed.
    """
    from shared_core.pruning.config import GATHERED
    from shared_core.pruning.post_training import as_config, needs_calibration
    from shared_core.pruning.post_training import prune as prune_model

    asked = {"model": model, "weights": weights and str(weights), "calibration": calibration, "batches": batches,
             "loss": loss, "seed": seed, "eval": evaluate, "shrink": shrink}  # fmt: skip
    check_new(out, "eff prune")
    config = as_config(given_options(context))
    if shrink and config.granularity not in _SHRINKABLE:
        raise ConfigError(
            "eff prune", f"--shrink must come with --granularity {', '.join(_SHRINKABLE)}, got {config.granularity}"
        )
    if loss is not None and calibration is None:
        raise ConfigError("eff prune", "--loss must come with --calibration, whose batches it takes, got none")
    if calibration is None and config.criterion in GATHERED:
        what = f"--calibration must be given with {needs_calibration(config)}, got none"
        raise ConfigError("eff prune", what, "name a function that returns batches")
    judge = function(evaluate, "eff prune: --eval", "model") if evaluate else None
    run_batch = function(loss, "eff prune: --loss", "model", "batch") if loss else None
    network, example, folder = open_model(model, weights, "eff prune")
    data = user_batches(calibration, "eff prune: --calibration") if calibration else None
    data = None if data is None else list(itertools.islice(data, max(batches, 0)))
    needs_example = shrink or (data is None and needs_calibration(config))
    if example is None and needs_example:
        example = _example(network, data, is_folder=folder is not None, runs=run_batch is None)
    quality: dict[str, float] = {}
    _judge(quality, "dense", network, judge)
    with bar("calibration") as advance:
        done = prune_model(
            network,
            config,
            [example] if data is None and needs_example else data,
            loss=None if data is None else run_batch,
            num_batches=batches,
            seed=seed,
            allow_partial=allow_partial,
            progress=advance,
        )
    _judge(quality, "pruned", network, judge)
    result = _shrunk(network, example) if shrink else None
    if result is not None:
        _judge(quality, "shrunk", result.model, judge)
    values = {
        "asked": asked,
        "config": _applied(config),
        **done.to_dict(),
        "quality": quality,
        "shrink": _values(result) if result else None,
    }
    _write(out, result.model if result else network, values, folder, example if result else None)
    if as_json:
        echo(json_text(values))
    else:
        _tell(out, values)


def _example(network: nn.Module, data: list[Any] | None, *, is_folder: bool, runs: bool) -> Any:
    """Return inputs that a model can be run on: its first batch, or made up where that is made for a loss."""
    if data and runs:
        return data[0]
    if is_folder:
        return made_up_inputs(network, "eff prune")
    raise ConfigError(
        "eff prune",
        "MODEL must return (model, example_inputs) for --shrink and for units or costs without --calibration, got a "
        "model alone",
    )


def _judge(quality: dict[str, float], name: str, network: nn.Module, judge: Callable[[nn.Module], Any] | None) -> None:
    if judge is not None:
        quality[name] = score(judge, network, "eff prune")


def _shrunk(network: nn.Module, example: Any) -> ShrinkResult:
    from shared_core.tools.shrink import shrink as remove

    with bar("shrink"):
        return remove(network, example)


def _applied(config: PruneConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in _during_training()}


def _values(result: ShrinkResult) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "model"}


def _write(out: Path, network: nn.Module, values: dict[str, Any], folder: Path | None, example: Any) -> None:
    """Write the model and the report; a shrunk folder must load with the same outputs."""
    from shared_core.files.atomic import atomic_folder

    with atomic_folder(out) as temporary:
        save_network(network, folder, temporary, "eff prune", example)
        (temporary / REPORT_FILE).write_text(json_text(values) + "\n", encoding="utf-8")


def _tell(out: Path, values: dict[str, Any]) -> None:
    from rich.table import Table

    from shared_core.engine import coverage
    from shared_core.pruning.config import UNITS
    from shared_core.reports.console import Console

    console = Console()
    table = Table(title=f"pruned: {out}", title_justify="left")
    for heading in ("tensor", "weights", "zero", "sparsity"):
        table.add_column(heading, justify="left" if heading == "tensor" else "right", overflow="fold")
    for entry in values["tensors"]:
        table.add_row(entry["name"], str(entry["numel"]), str(entry["pruned"]), f"{entry['sparsity']:.1%}")
    console.print(table)
    lost, units = (sum(entry[key] for entry in values["units"]) for key in ("pruned", "units"))
    of_units = f"; {lost} of {units} units" if units else ""
    seen = f", from {values['examples']} examples" if values["examples"] else ""
    console.print(
        f"{values['pruned']} of {values['numel']} weights are zero ({values['sparsity']:.1%}){of_units}; "
        f"{values['criterion']}{seen}, scope {values['scope']}, {values['seconds']:.1f} s"
    )
    share, granularity = values["coverage"]["share"], values["granularity"]
    of = f" of granularity {granularity}" if granularity in UNITS else ""
    console.print(
        f"{coverage.percent(share)} of the weights that multiply activations are within reach{of}", markup=False
    )
    for note in values["notes"]:
        console.print(f"note: {note}", markup=False)
    for name, reason in values["left_out"].items():
        console.print(f"left dense: {name}: {reason}", markup=False)
    if values["shrink"]:
        removed, bytes_ = values["shrink"]["removed"], values["shrink"]["bytes"]
        console.print(f"shrunk: {sum(removed.values())} units removed, {bytes_[0]} -> {bytes_[1]} bytes")
        for name, reason in values["shrink"]["kept"].items():
            console.print(f"kept: {name}: {reason}", markup=False)
    else:
        console.print(values["note"], markup=False)
    if values["quality"]:
        console.print("quality: " + ", ".join(f"{name} {value:.4g}" for name, value in values["quality"].items()))
