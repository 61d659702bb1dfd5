"""`eff low-rank`: a trained model whose layers are products of two smaller ones, without training."""

from __future__ import annotations

import contextlib
import copy
import itertools
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
from shared_core.cli.loading import check_new, copy_beside, function, open_model, score, user_batches
from shared_core.cli.shrink import made_up_inputs
from shared_core.errors import ConfigError
from shared_core.files.json_yaml import json_text
from shared_core.printing import echo

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

REPORT_FILE = "eff_low_rank.json"

LowRankCommand = command_with_options("shared_core.low_rank.config", "LowRankConfig", lambda: ("merge",))


def low_rank(
    context: typer.Context,
    model: Model,
    out: Out,
    weights: Weights = None,
    calibration: Calibration = None,
    loss: Loss = None,
    evaluate: Evaluate = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Write whole weights of low rank, which load as before, and save nothing.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Forwards that are timed, before and after.")] = 10,
    allow_partial: AllowPartial = False,
    as_json: AsJson = False,
) -> None:
    """Factorise a trained model and save it, with a report of what that saves and loses.

    The folder holds low_rank.safetensors, which shared_core.low_rank.load puts into a model of the same class and
    configuration, and eff_low_rank.json, which a training run takes for its rank: --low_rank_rank eff_low_rank.json.
    """
    from shared_core.low_rank import LowRankConfig, factorize, merge
    from shared_core.low_rank.config import MEASURED
    from shared_core.tools.measuring import difference, forward_flops, latency, outputs, state_bytes

    check_new(out, "eff low-rank")
    config = LowRankConfig.from_dict(given_options(context))
    needs = [name for name in ("sensitivity", *MEASURED) if name in (config.rule.kind, config.decomposition)]
    if needs and calibration is None:
        raise ConfigError("eff low-rank", f"--calibration must be given with {needs[0]}, got none")
    if loss is not None and calibration is None:
        raise ConfigError("eff low-rank", "--loss must come with --calibration, whose batches it takes, got none")
    if repeats < 1:
        raise ConfigError("eff low-rank", f"--repeats must be at least 1, got {repeats}")
    judge = function(evaluate, "eff low-rank: --eval", "model") if evaluate else None
    run_batch = function(loss, "eff low-rank: --loss", "model", "batch") if loss else None
    network, example, folder = open_model(model, weights, "eff low-rank")
    data = user_batches(calibration, "eff low-rank: --calibration") if calibration else None
    data = None if data is None else list(itertools.islice(data, config.calibration_batches))
    if example is None and data and run_batch is None:
        example = data[0]
    if example is None and folder:
        with contextlib.suppress(ConfigError):  # sounds: the run is not measured, as without a folder
            example = made_up_inputs(network)
    dense = copy.deepcopy(network)
    quality = {"dense": score(judge, dense, "eff low-rank")} if judge else {}  # first: what it returns is found out
    with bar("factorising") as advance:
        done = factorize(network, config, data, loss=run_batch, allow_partial=allow_partial, progress=advance)
    values: dict[str, Any] = {"asked": config.to_dict(), **done.to_dict(), "merged": merged}
    if merged:
        merge(network)
    values["bytes"] = {"before": state_bytes(dense), "after": state_bytes(network)}
    if example is not None:
        before, after = (forward_flops(each, example) for each in (dense, network))
        values["flops"] = {"before": before, "after": after}
        before_ms, after_ms = latency(dense, network, example, repeats)
        values["milliseconds"] = {"before": round(before_ms, 4), "after": round(after_ms, 4)}
        values["output_difference"] = difference(outputs(dense, example), outputs(network, example))
    if judge is not None:
        values["quality"] = {**quality, "low_rank": score(judge, network, "eff low-rank")}
    _write(out, network, values, folder, merged=merged)
    if as_json:
        echo(json_text(values))
    else:
        _tell(out, values)


def _write(out: Path, network: nn.Module, values: dict[str, Any], folder: Path | None, *, merged: bool) -> None:
    from safetensors.torch import save_model

    from shared_core.files.atomic import atomic_folder
    from shared_core.low_rank.saving import WEIGHTS_FILE

    saved: Any = network
    with atomic_folder(out) as temporary:
        if folder is not None and merged:
            saved.save_pretrained(temporary)
        else:
            save_model(network, str(temporary / ("model.safetensors" if merged else WEIGHTS_FILE)))
            if folder is not None:
                saved.config.save_pretrained(temporary)
        if folder is not None:
            copy_beside(folder, temporary)
        (temporary / REPORT_FILE).write_text(json_text(values) + "\n", encoding="utf-8")


def _tell(out: Path, values: dict[str, Any]) -> None:
    from rich.table import Table

    from shared_core.engine import coverage
    from shared_core.reports.console import Console

    console = Console()
    table = Table(title=f"factorised: {out}", title_justify="left")
    for heading in ("layer", "scheme", "rank", "parameters", "energy kept", "weight error", "output error"):
        table.add_column(heading, justify="left" if heading in ("layer", "scheme") else "right", overflow="fold")
    for entry in values["layers"]:
        output = entry.get("output_error")
        table.add_row(
            entry["name"],
            entry["scheme"],
            f"{entry['rank']} of {entry['full_rank']}",
            f"{entry['parameters_before']:,} -> {entry['parameters_after']:,}",
            f"{entry['energy']:.1%}",
            f"{entry['weight_error']:.3g}",
            "–" if output is None else f"{output:.3g}",
        )
    console.print(table)
    share = coverage.percent(values["coverage"]["share"])
    console.print(f"{share} of the weights that multiply activations are within reach", markup=False)
    for name, reason in values["left_out"].items():
        console.print(f"left alone: {name}: {reason}", markup=False)
    for name, unit in (("parameters", ""), ("bytes", ""), ("flops", ""), ("milliseconds", " (median of a forward)")):
        if name in values:
            before, after = values[name]["before"], values[name]["after"]
            console.print(f"{name}: {before:,} -> {after:,} ({after / before:.2f}x){unit}")
    if "output_difference" in values:
        console.print(f"largest difference of the outputs: {values['output_difference']:.1e}")
    if "quality" in values:
        console.print("quality: " + ", ".join(f"{name} {value:.4g}" for name, value in values["quality"].items()))
