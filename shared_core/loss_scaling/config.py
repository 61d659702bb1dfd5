"""The options of loss scaling, with a published floor of the scale as pairs of step and floor."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from shared_core.config.environments import DEEPSPEED, RUN_ENVIRONMENTS
from shared_core.config.options import Figure, TechniqueConfig, option
from shared_core.errors import ConfigError

FLOAT32_MAX = 3.4028234663852886e38
Pairs = tuple[tuple[int, float], ...]


def parse_floor(floor: str | Sequence[tuple[int, float]]) -> Pairs | Literal["auto"]:
    """Return the floor as ``(step, floor)`` pairs, or ``"auto"``.

    Source: Mellempudi et al., 2019, arXiv:1905.12334, section 3.1.
    """
    if floor == "auto":
        return "auto"
    pairs: list[tuple[float, float]] = []
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        parts = [part.split(":") for part in floor.split(",")] if isinstance(floor, str) else list(floor)
        pairs = [(float(step), float(value)) for step, value in parts]
    good = all(step >= 0 and step.is_integer() and 0 < value <= FLOAT32_MAX for step, value in pairs)
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(pairs))
    if not (pairs and good and rising):
        raise ConfigError(
            "loss_scale",
            "floor must be auto or pairs of step and floor, both rising, no floor above "
            f"{FLOAT32_MAX}, such as 40000:8192,150000:32768, got {floor!r}",
        )
    return tuple((int(step), value) for step, value in pairs)


def floor_text(floor: str | Sequence[tuple[int, float]] | None) -> str | None:
    """Return a floor as the text that `parse_floor` reads."""
    if floor is None or isinstance(floor, str):
        return floor
    pairs = parse_floor(floor)
    return pairs if isinstance(pairs, str) else ",".join(f"{step}:{value!r}" for step, value in pairs)


def floor_at(pairs: Pairs, step: int) -> float:
    """Return the floor at a step, 0 before the first pair."""
    return max((value for at, value in pairs if at <= step), default=0.0)


MIN_SCALE = 2.0**-14
_TELEMETRY = ("telemetry_every", "flush_every", "histogram_every")


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(TechniqueConfig):
    """Scales the loss so that fp16 gradients do not underflow.

    Example:
        >>> LossScaleConfig(kind="dynamic").init_scale
        65536.0
    """

    about: ClassVar[str] = "Keeps fp16 gradients from underflow."
    key: ClassVar[str] = "loss_scale"
    switch: ClassVar[str] = "kind"

    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "its statistics sum gradients over all processes and would count whole layers several "
        "times; train in bf16, or use DDP or FSDP2",
        "bf16": "bf16 has fp32's exponent range, so gradients do not underflow and a scale only adds skipped steps; "
        "drop loss_scale or train in fp16. It is allowed where fp8 casts gradients to e5m2, whose range is narrower: "
        "fp8 recipe tensorwise, delayed or hfp8 with loss_scale format fp8_e5m2",
        "deepspeed": DEEPSPEED,
        "fsdp1": "FSDP1 has its own scaler; use FSDP2 or DDP",
        "lbfgs": "LBFGS evaluates its closure many times a step and cannot skip one; use another optimizer",
        "manual_optimization": "with manual optimization your code calls optimizer.step itself; use LossScaler in it "
        "directly",
    }
    works_in: ClassVar[tuple[str, ...]] = ("pruning_callback",)
    figures: ClassVar[Mapping[str, Figure]] = {
        "scale": Figure("current scale", in_bar=True),
        "skipped": Figure("steps skipped so far"),
        "underflow": Figure(
            "share of scaled gradients that are not zero and below the smallest normal number", in_bar=True
        ),
        "zero": Figure("share of scaled gradients that are zero"),
        "headroom": Figure("powers of two between the largest scaled gradient and overflow"),
        "flushed": Figure("share of nonzero activation gradients that became zero", only="with `flush_every`"),
        "grad_below_normal": Figure(
            "share of gradients below the format's normal numbers", only="with `histogram_every`"
        ),
        "grad_below_subnormal": Figure(
            "share of gradients that become zero in that format", only="with `histogram_every`"
        ),
        "update_to_weight": Figure("log2 of the median update over the median weight", only="with `histogram_every`"),
    }

    kind: Literal["dynamic", "static", "enhanced", "auto"] = option(
        help="how to set the scale; dynamic: lower on overflow, higher after growth_interval good steps; static: "
        "fixed; enhanced: dynamic above a rising floor; auto: from the largest gradient of the step"
    )
    init_scale: float = option(65536.0, above=0, high=FLOAT32_MAX, at_least="min_scale", help="scale of the first step")
    growth_factor: float = option(2.0, above=1, high=FLOAT32_MAX, help="multiplies the scale when it grows")
    backoff_factor: float = option(0.5, above=0, below=1, help="multiplies the scale after an overflow")
    growth_interval: int = option(2000, low=1, high=2**31 - 1, help="steps without overflow before the scale grows")
    min_scale: float = option(MIN_SCALE, above=0, high=FLOAT32_MAX, help="the scale never falls below this")
    max_skips: int = option(50, low=1, help="stop with an error after this many skipped steps in a row")
    floor: str | None = option(
        None,
        help="lowest scale, as step:floor pairs such as 40000:8192,150000:32768, or auto (the default)",
        only_with={"kind": ("enhanced",)},
    )
    floor_window: int = option(
        200, low=1, help="steps between moves of an auto floor", only_with={"kind": ("enhanced",)}
    )
    floor_overflows: float = option(
        0.02,
        above=0,
        high=1,
        help="share of overflowing steps that lowers an auto floor",
        only_with={"kind": ("enhanced",)},
    )
    format: Literal["fp16", "fp8_e5m2"] = option("fp16", help="gradient format that auto and telemetry assume")
    margin: float = option(
        2.0,
        low=0,
        high=14,
        help="bits kept free between the largest gradient and the format's maximum",
        only_with={"kind": ("auto",)},
    )
    smoothing: float = option(
        0.9, low=0, below=1, help="weight of the past in the smoothed largest gradient", only_with={"kind": ("auto",)}
    )
    telemetry_every: int = option(100, low=0, help="measure gradient underflow every N applied steps; 0: never")
    flush_every: int = option(
        0, low=0, help="repeat a backward in fp32 every N applied steps, and count flushed gradients; 0: never"
    )
    histogram_every: int = option(
        0,
        low=0,
        help="count log2 of weights, activations, gradients and updates every N applied steps; 0: never",
    )

    def validate(self) -> None:
        """Check that the scale starts at or above every floor."""
        pairs = parse_floor(self.floor or "auto")
        if pairs != "auto" and self.init_scale < (first := floor_at(pairs, 0)):
            raise self._error("init_scale", f"must be at least the floor of step 0, {first}")

    def scaler_options(self) -> dict[str, Any]:
        """Return the options of `LossScaler`: all except telemetry."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _TELEMETRY}

    def allows(self, other: str, recipe: Mapping[str, Any]) -> bool:
        """Return True if gradients are cast to e5m2, whose range is narrower than bf16's."""
        fp8 = recipe.get("fp8")
        return other == "bf16" and fp8 is not None and fp8.backward_is_narrow and self.format == "fp8_e5m2"

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a message for each combination that these options rule out."""
        if not self.flush_every:
            return
        for sharded in ("fsdp1", "fsdp2"):
            if sharded in environment:
                yield (
                    f"loss_scale with flush_every cannot be combined with {RUN_ENVIRONMENTS[sharded]}: its repeated "
                    "backward does not gather sharded weights; use histogram_every, which shows small gradients too"
                )
        if "checkpointing" in recipe:
            yield (
                "loss_scale with flush_every cannot be combined with checkpointing: its repeated backward "
                "also counts recomputed forwards; use histogram_every, which shows small gradients too"
            )
