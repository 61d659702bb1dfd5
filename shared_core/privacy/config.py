"""The options of differential privacy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared_core.config.options import TechniqueConfig, option
from shared_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(TechniqueConfig):
    """How much noise hides one example, and how the loss of privacy is counted.

    Example:
        >>> PrivacyConfig(target_epsilon=8.0).max_grad_norm
        1.0
    """

    key: ClassVar[str] = "dp"
    switch: ClassVar[str] = "noise_multiplier"
    other_switch: ClassVar[str] = "target_epsilon"

    noise_multiplier: float | None = option(
        None,
        help="Standard deviation of the noise on the sum of clipped gradients, as a multiple of max_grad_norm.",
        low=0,
    )
    target_epsilon: float | None = option(
        None, help="Solve for the noise_multiplier with which the whole run spends this epsilon, instead.", above=0
    )
    max_grad_norm: float = option(1.0, help="L2 norm to which the gradient of each example is clipped.", above=0)
    delta: float = option(
        1e-5, help="Delta at which epsilon is told; below one over the number of examples.", above=0, below=1
    )
    accountant: Literal["rdp", "prv"] = option(
        "rdp", help="Counts epsilon: Renyi moments (rdp), or numerical composition (prv), which is tighter."
    )
    grad_sample_mode: Literal["hooks", "functorch"] = option(
        "hooks", help="Gradients of single examples by Opacus' rules for each layer (hooks), or by vmap for all."
    )
    check_loss: bool = option(
        True, help="In Lightning, compare the first batch's loss with its halves': it must be a mean over examples."
    )
    seed: int | None = option(
        None,
        help="Makes batches and noise reproducible; whoever knows it can take the noise off again. By default they are "
        "drawn from the system's entropy.",
        low=0,
    )

    def validate(self) -> None:
        """Refuse no noise multiplier, or two.

        Raises:
            ConfigError: Unless one of the two is given.
        """
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ConfigError(
                "dp: one of noise_multiplier and target_epsilon must be given, got "
                f"{self.noise_multiplier} and {self.target_epsilon}"
            )
