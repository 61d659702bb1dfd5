"""The options of differential privacy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.config.environments import DEEPSPEED, LBFGS
from shared_core.config.options import Figure, TechniqueConfig, option
from shared_core.errors import ConfigError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig(TechniqueConfig):
    """Options for training with differential privacy (DP-SGD).

    Example:
        >>> PrivacyConfig(target_epsilon=8.0).max_grad_norm
        1.0
    """

    about: ClassVar[str] = "Trains with differential privacy (DP-SGD)."
    key: ClassVar[str] = "dp"
    switch: ClassVar[str] = "noise_multiplier"
    other_switches: ClassVar[tuple[str, ...]] = ("target_epsilon",)
    libraries: ClassVar[Mapping[str, str]] = {"opacus": "privacy"}
    without: ClassVar[Mapping[str, tuple[str, ...]]] = {"secure_mode": ("seed",)}

    own_checkpoints: ClassVar[tuple[str, str] | None] = (
        "whose steps no epsilon covers",
        "start from weights that never saw these data",
    )
    conflicts: ClassVar[Mapping[str, str]] = {
        "tensor_parallel": "gradients of single examples are computed outside the layers, where parts are not summed; "
        "use DDP or FSDP2",
        "lora": "Opacus cannot compute gradients of single examples for layers with adapters; leave lora out and "
        "freeze layers yourself",
        "primary_weights": "16-bit gradients would round the noise; load the model in float32",
        "lottery": "every round sees the data again, and the rounds are not accounted for together; train one model",
        "cluster": "noise on the summed gradients of shared weights has not been tested; cluster the trained model "
        "with `eff compress`",
        "qat": "ranges of activations come from single examples, without noise; train with dp, then use `eff quantize`",
        "fp8": "scales come from single examples, without noise; train in bf16",
        "loss_scale": "the scaler skips steps, and skips are not accounted for; train in float32 or bf16",
        "fp16": "its scaler skips steps, and skips are not accounted for; train in float32 or bf16",
        "checkpointing": "the recomputed forward would count every example twice; use smaller micro-batches and "
        "accumulate more",
        "comm": "dp sends its noised gradients itself, so a DDP hook would see none; drop comm",
        "deepspeed": DEEPSPEED,
        "fsdp1": "flat shards of FSDP1 have no gradient of one example; use DDP",
        "lbfgs": LBFGS,
        "manual_optimization": "your code steps the optimizer itself, so nothing tells which batches a step has; use "
        "automatic optimization",
        "several_optimizers": "each step must be one draw over all parameters; use one optimizer with groups",
    }
    figures: ClassVar[Mapping[str, Figure]] = {"epsilon": Figure("epsilon spent so far", in_bar=True)}

    noise_multiplier: float | None = option(
        None,
        help="Standard deviation of the noise on the sum of clipped gradients, as a multiple of max_grad_norm; 0 only "
        "clips and samples (epsilon is infinite).",
        low=0,
    )
    target_epsilon: float | None = option(
        None, help="Choose the noise_multiplier so that the whole run spends this epsilon.", above=0
    )
    max_grad_norm: float = option(1.0, help="L2 norm to clip each example's gradient to.", above=0)
    delta: float = option(1e-5, help="Delta of the guarantee; below one over the number of examples.", above=0, below=1)
    accountant: Literal["rdp", "prv"] = option(
        "rdp", help="How to compute epsilon: Rényi moments (rdp), or numerical composition (prv), which is tighter."
    )
    grad_sample_mode: Literal["hooks", "functorch"] = option(
        "hooks",
        help="How to get per-example gradients: norms and sums by rules per layer (hooks), or vmap (functorch).",
    )
    check_loss: bool = option(
        True,
        help="Check that the first batch's loss is the mean of its halves' (in Lightning, and in loops whose model "
        "returns its loss).",
    )
    secure_mode: bool = option(
        False,
        help="Draw noise as in Opacus' secure mode, against floating-point attacks. Several times slower. Not with "
        "seed.",
    )
    seed: int | None = option(
        None,
        help="Make batches and noise reproducible. Anyone who knows the seed can remove the noise. Default: the "
        "system's entropy.",
        low=0,
    )

    def validate(self) -> None:
        """Check that exactly one of `noise_multiplier` and `target_epsilon` is given."""
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ConfigError(
                "dp",
                f"exactly one of noise_multiplier and target_epsilon must be given, got {self.noise_multiplier} and "
                f"{self.target_epsilon}",
            )

    def refusals(self, recipe: Mapping[str, Any], environment: Collection[str]) -> Iterator[str]:
        """Yield a line for each combination that these options rule out."""
        prune, distill = recipe.get("prune"), recipe.get("distill")
        low_rank, activations = recipe.get("low_rank"), recipe.get("activations")
        if prune is not None and not prune.sees_weights_alone:
            yield (
                "dp with these options of prune cannot be combined: they use gradients and activations of single "
                "examples, which epsilon does not cover; use criterion magnitude, threshold or random for single "
                "weights, n_m or blocks"
            )
        if distill is not None and not distill.works_on_single_examples:
            yield (
                "dp with these options of distill cannot be combined: other students, projections, relations between "
                "examples and chunked heads bypass the gradients of single examples; leave out teacher mutual, hidden, "
                "attention, chunked and unlabeled_field"
            )
        if low_rank is not None and low_rank.needs_batches:
            yield (
                f"dp with decomposition {low_rank.decomposition} of low_rank cannot be combined: its factors depend on "
                "inputs of single examples without noise; use decomposition svd, which reads only weights"
            )
        if activations is not None and activations.rounds:
            yield (
                f"dp with pack {activations.pack} of activations cannot be combined: gradients of single examples need "
                "the layers' full inputs, so rounding saves nothing, and with shared scales one example would change "
                "the gradients of others; use pack exact"
            )

    def remarks(self, recipe: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for everything that the guarantee does not cover."""
        if "distill" in recipe:
            yield (
                "dp: the guarantee does not cover what the teacher learned from these data; it holds only if the "
                "teacher never saw them"
            )
        if "low_rank" in recipe and recipe["low_rank"].rule.kind == "report":
            yield (
                "dp: the guarantee does not cover ranks that eff low-rank found on these data; it holds only if they "
                "were found on other data"
            )
        if "soup" in recipe:
            yield (
                "dp: the guarantee does not cover the validation data that select a soup; it covers the training data"
            )
