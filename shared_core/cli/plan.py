"""`eff plan`: what a run needs of each device, before it is started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shared_core.printing import echo

if TYPE_CHECKING:
    from shared_core.contrib.planning import Plan

_GIB = 2**30


def plan(
    params: Annotated[float | None, typer.Option(help="Parameters of the model, such as 70e9.")] = None,
    config: Annotated[Path | None, typer.Option(help="A model's config.json, or its folder, in place.")] = None,
    layers: Annotated[int | None, typer.Option(help="With --params: blocks; else the usual number.")] = None,
    hidden: Annotated[int | None, typer.Option(help="With --params: width; else the usual one.")] = None,
    vocab: Annotated[int, typer.Option(help="With --params: tokens of the vocabulary.")] = 32_000,
    gpus: Annotated[int, typer.Option(help="Devices, one process each.")] = 1,
    strategy: Annotated[str | None, typer.Option(help="single, ddp or fsdp2; by default fsdp2 with several.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, mixed (weights in fp32) or 16-true.")] = "mixed",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw_8bit, sgd_momentum or sgd.")] = "adamw",
    micro_batch: Annotated[int, typer.Option(help="Examples a device and forward.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Tokens an example.")] = 2048,
    accumulate: Annotated[int, typer.Option(help="Micro-batches an optimizer step.")] = 1,
    recipe: Annotated[Path | None, typer.Option(help="A YAML file with the techniques that are on.")] = None,
    attention: Annotated[
        str | None,
        typer.Option(help="fused, or eager: scores are kept. By default the class's own with --config, else fused."),
    ] = None,
    teacher_params: Annotated[float, typer.Option(help="Parameters of distillation's teacher.")] = 0.0,
    memory: Annotated[float | None, typer.Option(help="GiB a device has: exit code 1 if it is not enough.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s a device sends: tells the least time for it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes, instead of a table.")] = False,
) -> None:
    """Tell the memory and traffic of a run on each device, by formula, for every technique of a recipe.

    Example: eff plan --params 70e9 --gpus 64 --seq-len 4096 --recipe recipe.yaml --memory 80
    """
    from shared_core.config.conflicts import RUN_ENVIRONMENTS
    from shared_core.contrib.planning import ModelShape, PlannedRun
    from shared_core.contrib.planning import plan as plan_run
    from shared_core.engine import compatibility
    from shared_core.engine.recipe import Recipe
    from shared_core.errors import ConfigError

    if (params is None) == (config is None):
        raise ConfigError(
            "eff plan", f"either --params or --config must be given, got {'neither' if params is None else 'both'}"
        )
    for name, value in (("memory", memory), ("bandwidth", bandwidth)):
        if value is not None and not value > 0:
            raise ConfigError("eff plan", f"--{name} must be above 0, got {value}")
    if not 0 <= teacher_params < float("inf"):
        raise ConfigError("eff plan", f"--teacher-params must be a number of at least 0, got {teacher_params}")
    shape = (
        ModelShape.of_config(config)
        if config is not None
        else ModelShape.of_params(params or 0, layers=layers, hidden=hidden, vocab=vocab)
    )
    counted, own_attention = (None, "fused") if config is None else _counted(config)
    if counted is not None:
        shape = dataclasses.replace(shape, params=counted)
    run = PlannedRun(
        ranks=gpus, strategy=strategy or ("fsdp2" if gpus > 1 else "single"),  # type: ignore[arg-type]
        precision=precision, optimizer=optimizer,  # type: ignore[arg-type]
        micro_batch=micro_batch, seq_len=seq_len, accumulate=accumulate, teacher_params=round(teacher_params),
        attention=attention or own_attention,  # type: ignore[arg-type]
    )  # fmt: skip
    techniques = Recipe.from_yaml(recipe) if recipe is not None else Recipe({})
    if recipe is not None and not techniques:
        raise ConfigError(
            "eff plan", f"{recipe} must switch on at least one technique", "leave --recipe out for a run without any"
        )
    compatibility.check(techniques, {run.strategy} & RUN_ENVIRONMENTS.keys())
    needs = plan_run(shape, run, techniques)
    fits = memory is None or needs.peak <= memory * _GIB
    if as_json:
        figures = {name: getattr(needs, name) for name in ("held", "peak", "host", "sent")}
        figures["fits"] = None if memory is None else fits
        parts = {"shape": dataclasses.asdict(shape), "run": dataclasses.asdict(run)}
        echo(json.dumps({**parts, **figures, "costs": [dataclasses.asdict(c) for c in needs.costs]}, indent=2))
    else:
        how = "" if config is None else " (by formula)" if counted is None else " (counted)"
        head = f"{shape.params:,} parameters{how}, {shape.layers} blocks of width {shape.hidden}"
        _show(needs, f"{head}; {run.ranks} x {run.strategy}")
        if bandwidth is not None:
            echo(f"sending takes {needs.sent / bandwidth / 1e9:.3g} s a step at least, at {bandwidth:g} GB/s")
        if memory is not None:
            echo(f"{'fits' if fits else 'does not fit'} in {memory:g} GiB")
    if not fits:
        raise typer.Exit(1)


def _counted(config: Path) -> tuple[int | None, str]:
    """Return the parameters of the model that a config describes and its attention, or None where nothing builds it."""
    from shared_core.cli.loading import empty_folder
    from shared_core.contrib.planning.plan import attention_of

    folder = config if config.is_dir() else config.parent
    if not config.is_dir() and config.name != "config.json":
        return None, "fused"
    try:
        model = empty_folder(folder, "eff plan")
        return sum(parameter.numel() for parameter in model.parameters()), attention_of(model)
    except Exception:  # a class that transformers has not, or a config of sizes alone: the formula holds
        return None, "fused"


def _show(needs: Plan, head: str) -> None:
    from rich.table import Table

    from shared_core.reports.console import Console

    table = Table(title=f"each device: {head}", title_justify="left")
    for heading in ("", "held GiB", "in a step GiB", "host GiB", "sent GB a step"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("why", overflow="fold")
    for cost in needs.costs:
        figures = (cost.held / _GIB, cost.during / _GIB, cost.host / _GIB, cost.sent / 1e9)
        table.add_row(cost.what, *(f"{value:,.2f}" if value else "" for value in figures), cost.why)
    table.add_section()
    held, peak, host = (f"{size / _GIB:,.2f}" for size in (needs.held, needs.peak, needs.host))
    table.add_row("all", held, f"peak {peak}", host, f"{needs.sent / 1e9:,.2f}", "the peak is a bound")
    Console(width=max(Console().width, 120)).print(table)
