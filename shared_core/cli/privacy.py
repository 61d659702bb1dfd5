"""`eff privacy`: what DP-SGD will spend, or how much noise it needs, before anything is trained."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer

from shared_core.printing import echo


def privacy(
    delta: Annotated[float, typer.Option(help="Delta, below one over the number of examples.")] = 1e-5,
    noise_multiplier: Annotated[float | None, typer.Option(help="Print the epsilon of this noise multiplier.")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="Print the noise multiplier of this epsilon.")] = None,
    sample_rate: Annotated[float | None, typer.Option(help="Share of the examples that a step expects.")] = None,
    examples: Annotated[int | None, typer.Option(help="With --batch-size, in place of --sample-rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of a step, over all processes.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="In place of --steps: passes over the data.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Count the epsilon of DP-SGD with Poisson sampling by every accountant, or solve for the noise multiplier."""
    from rich.table import Table

    from shared_core.errors import ConfigError
    from shared_core.privacy import classic_epsilon, epsilon, noise_multiplier_for
    from shared_core.reports.console import Console

    if examples and batch_size is not None and sample_rate is None:
        sample_rate = batch_size / examples
    if sample_rate is None or not 0 < sample_rate <= 1:
        raise ConfigError(
            "eff privacy",
            f"--sample-rate must be in (0, 1], got {sample_rate}",
            "give --sample-rate, or --examples and --batch-size",
        )
    if steps is None and epochs is not None:
        steps = math.ceil(epochs * math.ceil(1 / sample_rate - 1e-9))
    if steps is None or steps < 1:
        raise ConfigError("eff privacy", f"--steps must be at least 1, got {steps}", "give --steps or --epochs")
    if not 0 < delta < 1 / (examples or 1):
        raise ConfigError(
            "eff privacy", f"--delta must be in (0, 1 / {examples or 'examples'}), got {delta}", "take less"
        )
    if (noise_multiplier is None) == (target_epsilon is None):
        raise ConfigError(
            "eff privacy",
            f"one of --noise-multiplier and --target-epsilon must be given, got {noise_multiplier} and "
            f"{target_epsilon}",
        )
    for name, value in (("noise-multiplier", noise_multiplier), ("target-epsilon", target_epsilon)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError("eff privacy", f"--{name} must be above 0, got {value}")
    rows = []
    for accountant in ("rdp", "prv"):
        noise = noise_multiplier
        if noise is None:
            noise = noise_multiplier_for(float(target_epsilon or 0), sample_rate, steps, delta, accountant=accountant)
        rows.append((accountant, noise, epsilon([(noise, sample_rate, steps)], delta, accountant)))
    if noise_multiplier is not None:
        rows.append(("classic", noise_multiplier, classic_epsilon(noise_multiplier, sample_rate, steps, delta)))
    if as_json:
        told = {"sampling": "poisson", "sample_rate": sample_rate, "steps": steps, "delta": delta}
        found = {name: {"noise_multiplier": noise, "epsilon": spent} for name, noise, spent in rows}
        echo(json.dumps({**told, "accountants": found}, indent=2))
        return
    table = Table(title=f"{steps} steps, poisson sampling with rate {sample_rate:.4g}, delta {delta:g}")
    for heading in ("accountant", "noise multiplier", "epsilon"):
        table.add_column(heading, justify="left" if heading == "accountant" else "right")
    for name, noise, spent in rows:
        table.add_row(name, f"{noise:.4g}", f"{spent:.4g}")
    Console().print(table)
