"""How a model is going to be trained: ranks, strategy, precision, optimizer, batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shared_core.errors import ConfigError

Strategy = Literal["single", "ddp", "fsdp2"]
Precision = Literal["fp32", "mixed", "16-true"]
Optimizer = Literal["adamw", "adamw_8bit", "sgd_momentum", "sgd"]
Attention = Literal["fused", "eager"]

# bytes of moments a parameter, by the bytes of the parameter: torch keeps them in its dtype, bitsandbytes in codes
_MOMENTS = {"adamw": (2.0, 0.0), "adamw_8bit": (0.0, 2.0), "sgd_momentum": (1.0, 0.0), "sgd": (0.0, 0.0)}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What a run's memory and traffic depend on, beside the model.

    Args:
        ranks: Processes, one a device.
        strategy: ``single``, ``ddp`` (whole copies) or ``fsdp2`` (a part each, whole only while it computes).
        precision: ``fp32``, ``mixed`` (weights in fp32, products in 16 bit) or ``16-true`` (weights in 16 bit).
        optimizer: Whose moments are kept.
        micro_batch: Examples a device and forward.
        seq_len: Tokens an example.
        accumulate: Micro-batches an optimizer step.
        teacher_params: Of distillation's teacher on the device, 0 if there is none.
        attention: ``fused`` (scores are not kept for backward), or ``eager``: transformers' word for what keeps them.

    Raises:
        ConfigError: If a value makes no run.

    Example:
        >>> run = PlannedRun(ranks=8, strategy="fsdp2", precision="mixed", micro_batch=2, seq_len=1024)
        >>> run.tokens, run.weight_bytes, run.compute_bytes, run.parts, run.moment_bytes
        (2048, 4, 2, 8, 8.0)
    """

    ranks: int = 1
    strategy: Strategy = "single"
    precision: Precision = "mixed"
    optimizer: Optimizer = "adamw"
    micro_batch: int = 1
    seq_len: int = 2048
    accumulate: int = 1
    teacher_params: int = 0
    attention: Attention = "fused"

    def __post_init__(self) -> None:
        for name in ("ranks", "micro_batch", "seq_len", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"plan: {name} must be at least 1, got {getattr(self, name)}")
        for name, known in (
            ("strategy", Strategy), ("precision", Precision), ("optimizer", Optimizer), ("attention", Attention),
        ):  # fmt: skip
            if getattr(self, name) not in get_args(known):
                raise ConfigError(
                    f"plan: {name} must be one of {', '.join(get_args(known))}, got {getattr(self, name)!r}"
                )
        if (self.ranks == 1) != (self.strategy == "single"):
            raise ConfigError(
                "plan: strategy must be single with one rank, ddp or fsdp2 with more, got "
                f"{self.strategy} with {self.ranks}"
            )

    @property
    def tokens(self) -> int:
        """Tokens a device and forward."""
        return self.micro_batch * self.seq_len

    @property
    def parts(self) -> int:
        """Into how many parts weights, gradients and moments are cut."""
        return self.ranks if self.strategy == "fsdp2" else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes a parameter, and its gradient, is kept in."""
        return 2 if self.precision == "16-true" else 4

    @property
    def compute_bytes(self) -> int:
        """Bytes a value is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def moments(self) -> float:
        """Moments a parameter that are kept in its own dtype."""
        return _MOMENTS[self.optimizer][0]

    @property
    def moment_bytes(self) -> float:
        """Bytes of the optimizer's moments a parameter."""
        return self.moments * self.weight_bytes + _MOMENTS[self.optimizer][1]

    def ring(self, size: float) -> float:
        """Return what a rank sends to gather `size` bytes, or to reduce and scatter them: ``(R - 1)/R·size``."""
        return (self.ranks - 1) / self.ranks * size
