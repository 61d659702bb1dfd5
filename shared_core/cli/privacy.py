"""`eff privacy`: what DP-SGD will spend, or how much noise it needs, before anything is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shared_core.cli.arguments import CommandOptions, takes
from shared_core.cli.output import print_report, table
from shared_core.config.options import option
from shared_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions(CommandOptions):
    """Options of `eff privacy`."""

    key: ClassVar[str] = "eff privacy"

    delta: float = option(1e-5, "Delta, below one over the number of examples.")
    noise_multiplier: float | None = option(None, "Print the epsilon of this noise multiplier.", above=0)
    target_epsilon: float | None = option(None, "Print the noise multiplier of this epsilon.", above=0)
    sample_rate: float | None = option(None, "Share of the examples that a step expects.")
    examples: int | None = option(None, "With --batch-size, in place of --sample-rate.")
    batch_size: int | None = option(None, "Examples of a step, over all processes.")
    steps: int | None = option(None, "Optimizer steps.")
    epochs: float | None = option(None, "In place of --steps: passes over the data.")
    as_json: bool = option(False, "Print JSON instead of a table.", flag="--json")

    def validate(self) -> None:
        """Refuse a delta that promises nothing, and a question that is none."""
        if not 0 < self.delta < 1 / (self.examples or 1):
            told = f"--delta must be in (0, 1 / {self.examples or 'examples'}), got {self.delta}"
            raise ConfigError(self.key, told, "take less")
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            got = f"got {self.noise_multiplier} and {self.target_epsilon}"
            raise ConfigError(self.key, f"one of --noise-multiplier and --target-epsilon must be given, {got}")

    def sampling(self) -> tuple[float, int]:
        """Return the share of the examples that a step expects, and the number of steps."""
        rate, steps = self.sample_rate, self.steps
        if self.examples and self.batch_size is not None and rate is None:
            rate = self.batch_size / self.examples
        if rate is None or not 0 < rate <= 1:
            how = "give --sample-rate, or --examples and --batch-size"
            raise ConfigError(self.key, f"--sample-rate must be in (0, 1], got {rate}", how)
        if steps is None and self.epochs is not None:
            steps = math.ceil(self.epochs * math.ceil(1 / rate - 1e-9))
        if steps is None or steps < 1:
            raise ConfigError(self.key, f"--steps must be at least 1, got {steps}", "give --steps or --epochs")
        return rate, steps


@takes(PrivacyOptions)
def privacy(asked: PrivacyOptions) -> None:
    """Count the epsilon of DP-SGD with Poisson sampling by every accountant, or solve for the noise multiplier."""
    from shared_core.privacy import classic_epsilon, epsilon, noise_multiplier_for

    sample_rate, steps = asked.sampling()
    delta, noise_multiplier = asked.delta, asked.noise_multiplier
    rows = []
    for accountant in ("rdp", "prv"):
        noise = noise_multiplier
        if noise is None:
            noise = noise_multiplier_for(asked.target_epsilon or 0.0, sample_rate, steps, delta, accountant=accountant)
        rows.append((accountant, noise, epsilon([(noise, sample_rate, steps)], delta, accountant)))
    if noise_multiplier is not None:
        rows.append(("classic", noise_multiplier, classic_epsilon(noise_multiplier, sample_rate, steps, delta)))
    told = {"sampling": "poisson", "sample_rate": sample_rate, "steps": steps, "delta": delta}
    found = {name: {"noise_multiplier": noise, "epsilon": spent} for name, noise, spent in rows}
    title = f"{steps} steps, poisson sampling with rate {sample_rate:.4g}, delta {delta:g}"
    figures = [(name, f"{noise:.4g}", f"{spent:.4g}") for name, noise, spent in rows]
    shown = table(title, ("accountant",), ("accountant", "noise multiplier", "epsilon"), figures)
    print_report({**told, "accountants": found}, [shown], as_json=asked.as_json)
