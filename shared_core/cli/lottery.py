"""`eff lottery --rounds 10 -- python my_train.py …`: winning tickets of a training that nobody edits."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shared_core.cli.arguments import RunnerOptions, takes, training_command
from shared_core.config.options import option
from shared_core.errors import ConfigError
from shared_core.printing import echo

if TYPE_CHECKING:
    from shared_core.runs import TicketCurve


@dataclass(frozen=True, kw_only=True)
class LotteryOptions(RunnerOptions):
    """Options of `eff lottery`."""

    key: ClassVar[str] = "eff lottery"

    command: tuple[Any, ...] = training_command(
        "the training, `python my_train.py ARGS`; {round} stands for the run's name."
    )
    out: Path | None = option(None, "Folder of the search; one that was stopped goes on from it.")
    rounds: int = option(10, "Runs after the dense one.")
    rate: float = option(0.2, "Share of the weights left that each round prunes.")
    output_rate: float | None = option(None, "The same in the output layer; half of --rate.")
    conv_rate: float | None = option(None, "The same in convolutions; --rate.")
    rewind_to: str | None = option(None, "Step k: 500, 0.05 of the run, or 2ep; 0 by default.")
    rewind: str = option("weights", "weights, learning_rate (weights kept), or none (fine-tuning).")
    scope: str = option("local", "local: every tensor by itself; global: one threshold.")
    max_layer_sparsity: float | None = option(
        None,
        "With --scope global: largest share of one tensor that may go; 0.98, or what a round asks if more.",
    )
    control: tuple[str, ...] = option((), "Also train random_reinit or random_mask; may be given twice.")
    control_rounds: str | None = option(None, "Controls in these rounds only, as 5,10.")
    include: tuple[str, ...] = option((), "Only these modules (glob, type, first, last).")
    skip: tuple[str, ...] = option((), "Not these modules.")
    min_size: int = option(0, "Leave tensors with fewer weights dense.")
    metric: str | None = option(None, "Validation metric of the curve, by the trainer's name.")
    mode: str = option("auto", "Whether it is better when larger (max) or smaller (min).")
    quality: str = option("last", "Of a run: its last validation, or its best.")
    seed: int = option(0, "Seed of the controls' draws.")
    plot: Path | None = option(None, "Draw the curve into this file as well (.png, .svg, .pdf).")


_SEARCH = (
    "rewind", "output_rate", "conv_rate", "scope", "max_layer_sparsity", "seed", "include", "skip", "min_size",
    "metric", "mode", "quality",
)  # fmt: skip


@takes(LotteryOptions)
def lottery(asked: LotteryOptions) -> None:
    """Search winning lottery tickets: your training, run again and again, each time with fewer of its weights.

    Every run starts in a fresh process with its own seeds and data order. OUT holds a folder for each, tickets
    (safetensors), curve.json, curve.csv and curve.png.
    """
    from shared_core.engine.receipt import is_quiet
    from shared_core.reports.console import Console
    from shared_core.reports.plots import check_plot
    from shared_core.runs import LotterySearch, executor_of

    command, out, as_json, plot = asked.command, asked.out, asked.as_json, asked.plot
    executor, executor_set = asked.executor, asked.executor_set
    if out is None:
        raise ConfigError("eff lottery", "--out must be given, got none", "name the folder of the search")
    if plot is not None:
        check_plot(plot, "eff lottery")
    options: dict[str, Any] = {name: getattr(asked, name) for name in _SEARCH}
    options |= {"controls": asked.control, "control_rounds": _numbers(asked.control_rounds)}
    search = LotterySearch(asked.rounds, asked.rate, asked.rewind_to, **options)
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
