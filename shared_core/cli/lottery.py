"""`eff lottery --rounds 10 -- python my_train.py …`: winning tickets of a training that nobody edits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.arguments import ExecutorName, ExecutorOptions
from shared_core.errors import ConfigError
from shared_core.printing import echo

if TYPE_CHECKING:
    from shared_core.runs import TicketCurve


def lottery(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the training, `python my_train.py ARGS`; {round} stands for the run's name."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the search; one that was stopped goes on from it.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Runs after the dense one.")] = 10,
    rate: Annotated[float, typer.Option(help="Share of the weights left that each round prunes.")] = 0.2,
    output_rate: Annotated[
        float | None,
        typer.Option("--output-rate", help="The same in the output layer; half of --rate."),
    ] = None,
    conv_rate: Annotated[float | None, typer.Option("--conv-rate", help="The same in convolutions; --rate.")] = None,
    rewind_to: Annotated[
        str | None,
        typer.Option("--rewind-to", help="Step k: 500, 0.05 of the run, or 2ep; 0 by default."),
    ] = None,
    rewind: Annotated[
        str, typer.Option(help="weights, learning_rate (weights kept), or none (fine-tuning).")
    ] = "weights",
    scope: Annotated[str, typer.Option(help="local: every tensor by itself; global: one threshold.")] = "local",
    max_layer_sparsity: Annotated[
        float | None,
        typer.Option(
            "--max_layer_sparsity",
            "--max-layer-sparsity",
            help="With --scope global: largest share of one tensor that may go; 0.98, or what a round asks if more.",
        ),
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Also train random_reinit or random_mask; may be given twice.")
    ] = None,
    control_rounds: Annotated[
        str | None, typer.Option("--control-rounds", help="Controls in these rounds only, as 5,10.")
    ] = None,
    include: Annotated[list[str] | None, typer.Option(help="Only these modules (glob, type, first, last).")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Not these modules.")] = None,
    min_size: Annotated[int, typer.Option("--min-size", help="Leave tensors with fewer weights dense.")] = 0,
    metric: Annotated[str | None, typer.Option(help="Validation metric of the curve, by the trainer's name.")] = None,
    mode: Annotated[str, typer.Option(help="Whether it is better when larger (max) or smaller (min).")] = "auto",
    quality: Annotated[str, typer.Option(help="Of a run: its last validation, or its best.")] = "last",
    seed: Annotated[int, typer.Option(help="Seed of the controls' draws.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the curve into this file as well (.png, .svg, .pdf).")] = None,
    executor: ExecutorName = "local",
    executor_set: ExecutorOptions = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and the training's output to stderr.")] = False,
) -> None:
    """Search winning lottery tickets: your training, run again and again, each time with fewer of its weights.

    Every run starts in a fresh process with its own seeds and data order. OUT holds a folder for each, tickets
    (safetensors), curve.json, curve.csv and curve.png.
    """
    from shared_core.engine.receipt import is_quiet
    from shared_core.libraries import optional
    from shared_core.reports.console import Console
    from shared_core.runs import LotterySearch, executor_of

    if out is None:
        raise ConfigError("eff lottery", "--out must be given, got none", "name the folder of the search")
    if plot is not None:
        optional("matplotlib", "plots", "lottery plot")
    options: dict[str, Any] = {
        "rewind": rewind, "output_rate": output_rate, "conv_rate": conv_rate, "scope": scope,
        "max_layer_sparsity": max_layer_sparsity, "seed": seed,
        "include": include or [], "skip": skip or [], "min_size": min_size, "controls": control or [],
        "control_rounds": _numbers(control_rounds), "metric": metric, "mode": mode, "quality": quality,
    }  # fmt: skip
    search = LotterySearch(rounds, rate, rewind_to, **options)
    errors = Console(stderr=True, quiet=is_quiet())

    def progress(curve: TicketCurve) -> None:
        row = curve.rows[-1]
        reached = "" if row.quality is None else f", {curve.metric} {row.quality:.6g}"
        errors.print(f"{row.folder}: {100 * row.left:.2f} % of the weights{reached}", markup=False, highlight=False)

    curve = search.run_command(
        command or [], out, output=(sys.stderr if as_json else sys.stdout).buffer, progress=progress,
        executor=executor_of(executor, executor_set or [], out, "eff lottery"),
    )  # fmt: skip
    if plot is not None:
        curve.plot(plot)
    if as_json:
        echo(curve.json())
        return
    Console().print(curve.table())
    best = curve.smallest_winning
    if best is not None:
        ticket = out / f"round-{best.round - 1:02d}" / "ticket.safetensors"
        echo(f"sparsest ticket as good as the dense run: {100 * best.left:.2f} % of the weights, {ticket}")
    echo(f"wrote {out / 'curve.json'}, .csv and, with matplotlib, .png")


def _numbers(text: str | None) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError("eff lottery", f"--control_rounds must be numbers such as 5,10, got {text!r}") from None
