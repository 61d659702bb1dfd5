"""`eff plan`: what a run needs of each device, before it is started."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from shared_core.cli.arguments import CommandOptions, takes
from shared_core.cli.output import print_report, table
from shared_core.config.options import option
from shared_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from shared_core.contrib.planning import Plan, PlannedRun

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommandOptions):
    """Settings of a run that its memory depends on."""

    precision: str = option("mixed", "fp32, mixed (weights in fp32) or 16-true.")
    optimizer: str = option("adamw", "adamw, adamw_8bit, sgd_momentum or sgd.")
    micro_batch: int = option(1, "Examples a device and forward.")
    seq_len: int = option(2048, "Tokens an example, of a language model.")
    teacher_params: float = option(0.0, "Parameters of distillation's teacher.", low=0)

    def run(self, **others: Any) -> PlannedRun:
        """Return the run with these settings and others."""
        from shared_core.contrib.planning import PlannedRun

        own: dict[str, Any] = {"precision": self.precision, "optimizer": self.optimizer}
        teacher = round(self.teacher_params)
        return PlannedRun(micro_batch=self.micro_batch, seq_len=self.seq_len, teacher_params=teacher, **own, **others)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """Options of `eff plan`."""

    key: ClassVar[str] = "eff plan"

    params: float | None = option(None, "Parameters of the model, such as 70e9.")
    config: Path | None = option(None, "A model's config.json, or its folder, in place.")
    layers: int | None = option(None, "With --params: blocks; else the usual number.")
    hidden: int | None = option(None, "With --params: width; else the usual one.")
    vocab: int = option(32_000, "With --params: tokens of the vocabulary.")
    gpus: int = option(1, "Devices, one process each.")
    strategy: str | None = option(None, "single, ddp or fsdp2; by default fsdp2 with several.")
    accumulate: int = option(1, "Micro-batches an optimizer step.")
    recipe: Path | None = option(None, "A YAML file with the techniques that are on.")
    attention: str | None = option(
        None, "fused, or eager: scores are kept. By default the class's own with --config, else fused."
    )
    memory: float | None = option(None, "GiB a device has: exit code 1 if it is not enough.", above=0)
    bandwidth: float | None = option(None, "GB/s a device sends: tells the least time for it.", above=0)
    as_json: bool = option(False, "Print JSON, in bytes, instead of a table.", flag="--json")

    def validate(self) -> None:
        """Refuse a model that is told twice, or not at all."""
        if (self.params is None) == (self.config is None):
            got = "neither" if self.params is None else "both"
            raise ConfigError(self.key, f"either --params or --config must be given, got {got}")


@takes(PlanOptions)
def plan(asked: PlanOptions) -> None:
    """Tell the memory and traffic of a run on each device, by formula, for every technique of a recipe.

    Example: eff plan --params 70e9 --gpus 64 --seq-len 4096 --recipe recipe.yaml --memory 80
    """
    from shared_core.config.conflicts import RUN_ENVIRONMENTS
    from shared_core.contrib.planning import ModelShape
    from shared_core.contrib.planning import plan as plan_run
    from shared_core.engine import compatibility
    from shared_core.engine.recipe import Recipe

    config, memory, bandwidth = asked.config, asked.memory, asked.bandwidth
    shape = (
        ModelShape.of_config(config)
        if config is not None
        else ModelShape.of_params(asked.params or 0, layers=asked.layers, hidden=asked.hidden, vocab=asked.vocab)
    )
    counted, own_attention = (None, "fused") if config is None else _counted(config)
    if counted is not None:
        shape = dataclasses.replace(shape, params=counted)
    run = asked.run(
        ranks=asked.gpus, strategy=asked.strategy or ("fsdp2" if asked.gpus > 1 else "single"),
        accumulate=asked.accumulate, attention=asked.attention or own_attention,
    )  # fmt: skip
    techniques = Recipe({}) if asked.recipe is None else Recipe.from_yaml(asked.recipe)
    if asked.recipe is not None and not techniques:
        told = f"{asked.recipe} must switch on at least one technique"
        raise ConfigError(asked.key, told, "leave --recipe out for a run without any")
    compatibility.check(techniques, {run.strategy} & RUN_ENVIRONMENTS.keys())
    needs = plan_run(shape, run, techniques)
    fits = memory is None or needs.peak <= memory * _GIB
    figures = {name: getattr(needs, name) for name in ("held", "peak", "host", "sent")}
    figures["fits"] = None if memory is None else fits
    parts = {"shape": dataclasses.asdict(shape), "run": dataclasses.asdict(run)}
    how = "" if config is None else " (by formula)" if counted is None else " (counted)"
    head = f"{shape.params:,} parameters{how}, {shape.layers} blocks of width {shape.hidden}"
    shown: list[str | Table] = [_table(needs, f"{head}; {run.ranks} x {run.strategy}")]
    if bandwidth is not None:
        shown.append(f"sending takes {needs.sent / bandwidth / 1e9:.3g} s a step at least, at {bandwidth:g} GB/s")
    if memory is not None:
        shown.append(f"{'fits' if fits else 'does not fit'} in {memory:g} GiB")
    costs = [dataclasses.asdict(cost) for cost in needs.costs]
    print_report({**parts, **figures, "costs": costs}, shown, as_json=asked.as_json, width=120)
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


def _table(needs: Plan, head: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for cost in needs.costs:
        figures = (cost.held / _GIB, cost.during / _GIB, cost.host / _GIB, cost.sent / 1e9)
        rows.append((cost.what, *(f"{value:,.2f}" if value else "" for value in figures), cost.why))
    headings = ("", "held GiB", "in a step GiB", "host GiB", "sent GB a step", "why")
    made = table(f"each device: {head}", ("", "why"), headings, rows)
    made.add_section()
    held, peak, host = (f"{size / _GIB:,.2f}" for size in (needs.held, needs.peak, needs.host))
    made.add_row("all", held, f"peak {peak}", host, f"{needs.sent / 1e9:,.2f}", "the peak is a bound")
    return made
