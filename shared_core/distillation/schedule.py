"""When the soft term is in the loss, and the alpha and temperature of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shared_core.config.training_time import ParsedPosition, parse_position
from shared_core.distillation.config import DistillConfig
from shared_core.engine.plan import Event
from shared_core.engine.technique import Context
from shared_core.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """The steps ``first .. last - 1`` have a soft term; `options` moves alpha and temperature over them."""

    config: DistillConfig
    first: int = 0
    last: float = math.inf

    @classmethod
    def resolved(cls, config: DistillConfig, context: Context) -> Schedule:
        """Return the schedule of a run."""
        begin, end = config.begin, config.end
        if context.total_steps is not None:
            context.resolve_range(begin, end, "distill")
        first = context.resolve(begin, "distill.begin")
        # the end of the run needs no length, so that an endless loader can be distilled on
        is_open = parse_position(end) == ParsedPosition(1.0, "fraction")
        last = math.inf if is_open else context.resolve(end, "distill.end")
        if last <= first:
            raise ConfigError(
                "distill", f"end must lie after begin, got begin {begin!r} = step {first}, end {end!r} = step {last}"
            )
        return cls(config, first, last)

    def is_active(self, context: Context) -> bool:
        """Return whether this step has a soft term."""
        return self.first <= context.step < self.last

    def options(self, context: Context) -> tuple[float, float]:
        """Return alpha and temperature of this step."""
        config = self.config
        return (
            self._at(context, config.alpha, config.alpha_end),
            self._at(context, config.temperature, config.temperature_end),
        )

    def _at(self, context: Context, first: float, last: float | None) -> float:
        if last is None:
            return first
        end = self.last if math.isfinite(self.last) else context.total_steps
        if end is None:
            raise ConfigError("distill", "alpha_end and temperature_end need a run of known length, or an end in steps")
        return first + (last - first) * min(1.0, (context.step - self.first) / max(1.0, end - 1 - self.first))

    def figures(self, alpha: float, temperature: float) -> dict[str, float]:
        """Return those of a step's options that move, for the log."""
        moving = {"alpha": (alpha, self.config.alpha_end), "temperature": (temperature, self.config.temperature_end)}
        return {f"distill/{name}": value for name, (value, end) in moving.items() if end is not None}

    def events(self) -> list[Event]:
        """Return when the soft term joins the loss, and when it leaves."""
        config = self.config
        told: list[Event] = [(self.first, f"soft term on, alpha {config.alpha:g}, T {config.temperature:g}")]
        return [*told, (int(self.last), "soft term off")] if self.last < math.inf else told
