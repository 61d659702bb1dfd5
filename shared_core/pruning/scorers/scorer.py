"""The interface of scorers, and the criteria without gradients or inputs: magnitude, threshold and random."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shared_core.config.options import checked
from shared_core.distributed.collectives import any_rank, local_part
from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.errors import CheckpointError, ConfigError, TrainingError, nearest
from shared_core.numerics.deferred_checks import refuse

NAN_REMEDY = "check the batches for NaN; if training has diverged, lower the learning rate or clip gradients"
SAME_RUN = "resume with the model and recipe that wrote the checkpoint"
SCORERS: dict[str, type[Scorer]] = {}
"""Scorers by criterion. A subclass of `Scorer` with a criterion registers itself here."""


class Scorer:
    """Scores each weight by one criterion. The lowest scores are pruned first.

    Call `attach` once, `observe_step` once per optimizer step, `reduce` and then `scores` when masks are updated, and
    `reset` after that. A step whose gradients contain NaN or infinity is skipped and counted in `num_left_out`. Usually
    a scaler skips it too. If it is applied, the weights show it.

    Args:
        modules: Weight name → a module that holds it.
        generator: For random criteria, equal on every rank.
        costs: Weight name → cost of one of its weights, by which scores are divided (energy-aware pruning).

    Raises:
        ConfigError: If a cost is missing or not above 0.
    """

    criterion: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it gathers in training, of ``gradients``, ``activations`` and ``per_example_gradients``."""
    zero_is_lowest: ClassVar[bool] = True
    """True if a weight that was 0 since the last update scores 0, and no score is lower."""
    keeps_going: ClassVar[bool] = False
    """True if `reset` keeps what was gathered."""
    _saw_nothing: ClassVar[str] = (
        "but its hooks saw no training forward; attach it before torch.compile, and keep the model in train mode"
    )

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        *,
        generator: torch.Generator | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        self.modules = dict(modules)
        where = f"prune {self.criterion}"
        self.costs: dict[str, float] | None = None
        if costs is not None:
            each = {name: costs.get(name) for name in self.modules}
            self.costs = {name: checked(cost, float, where, f"cost of {name}", above=0) for name, cost in each.items()}
        self.num_observed = 0
        """Optimizer steps observed since the last `reset`."""
        self.num_left_out = 0
        """Steps since then with NaN or infinite gradients."""
        self._ever: set[str] = set()
        self._set_up(generator)

    def __init_subclass__(cls) -> None:
        if "criterion" in vars(cls):
            SCORERS[cls.criterion] = cls

    def attach(self) -> None:
        """Register the hooks, if any. Safe to call twice."""

    def detach(self) -> None:
        """Remove the hooks and keep what was gathered. Safe to call twice."""

    @torch.no_grad()
    def observe_step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, loss_scale: float = 1.0
    ) -> None:
        """Take in one optimizer step before it is applied. With several processes every rank must call it.

        Args:
            weights: Name → current weight.
            gradients: Gradients of the complete step: accumulated, reduced, unscaled, not clipped. A missing name means
                that the weight had no gradient, which counts as 0.
            loss_scale: The factor on the loss when hooks saw its gradients (fp16). `gradients` are already unscaled.
        """
        if gradients and not all_finite(gradients.values()):
            self.num_left_out += 1
            self.discard_step()
            return
        self._observe(weights, gradients, loss_scale)
        self.num_observed += 1

    def discard_step(self) -> None:
        """Forget what hooks saw since the last `observe_step`, because the step was not applied."""

    def gather(self) -> None:
        """Gather sharded statistics, for `state_dict`, until `release`. Every rank must call it."""

    def release(self) -> None:
        """Undo `gather`."""

    def reduce(self) -> None:
        """Sum the statistics over all ranks. Every rank must call it; repeated calls are safe."""

    @property
    def ready(self) -> bool:
        """True if there is something to score by."""
        return self.num_observed > 0

    def has_seen(self, name: str) -> bool:
        """Return True if this weight can be scored, once any can."""
        return (self.costs is None or name in self.costs) and (not self.needs or name in self._ever)

    @torch.no_grad()
    def scores(self, name: str, weight: Tensor) -> Tensor:
        """Return the scores of one weight: a new tensor of its shape, float32 (float64 for float64)."""
        self._require_ready()
        scores = self._divided(name, self._scores(name, weight.detach()))
        if scores.numel():
            refuse(scores.max().isnan(), lambda: self._nan_in(name))
        return scores

    def _nan_in(self, name: str) -> TrainingError:
        return TrainingError(f"prune {self.criterion}", f"scores must not be NaN, got NaN in {name}", NAN_REMEDY)

    @torch.no_grad()
    def part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        """Return a slice of one weight's flattened scores, not checked for NaN."""
        self._require_ready()
        return self._divided(name, self._part(name, weight.detach(), where))

    def reset(self) -> None:
        """Restart the averages after an update of the masks. A no-op with `keeps_going`."""
        if not self.keeps_going:
            self.num_observed = self.num_left_out = 0
            self._forget()

    def report(self) -> dict[str, Any]:
        """Return what a receipt reports about weights that were scored differently from others."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values. `load_state_dict` continues bit for bit."""
        return {
            "criterion": self.criterion,
            "num_observed": self.num_observed,
            "num_left_out": self.num_left_out,
            "ever": sorted(self._ever),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        if state.get("criterion") != self.criterion:
            rule = f"saved criterion must be {self.criterion!r}, got {state.get('criterion')!r}"
            raise CheckpointError("prune", rule, SAME_RUN)
        self.num_observed, self.num_left_out = int(state["num_observed"]), int(state["num_left_out"])
        self._ever = set(state.get("ever", self.modules))  # older runs did not save it

    def window_state(self) -> dict[str, Any]:
        """Return what this rank gathered since the last `observe_step`."""
        return {}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `window_state`."""

    def _set_up(self, generator: torch.Generator | None) -> None:
        """Check the modules and create the state, at the end of `__init__`."""
        self._forget()

    @abstractmethod
    def _scores(self, name: str, weight: Tensor) -> Tensor: ...

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        return self._scores(name, weight).reshape(-1)[where]

    def _observe(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], loss_scale: float) -> None:
        pass

    def _forget(self) -> None:
        """Clear everything gathered."""

    def _divided(self, name: str, scores: Tensor) -> Tensor:
        return scores if self.costs is None else scores.div_(self.costs[name])

    def _require_ready(self) -> None:
        if self.ready:
            return
        reason = "got none since the last update; update masks after the first step, or calibrate"
        if self.num_left_out:
            text = "with only NaN or infinite gradients; lower the loss scale or learning rate"
            reason = f"got {self.num_left_out} {text}"
        elif self.num_observed:
            reason = self._saw_nothing
        rule = f"a step must have been observed before weights are scored, {reason}"
        raise TrainingError(f"prune {self.criterion}", rule)


def magnitude(weight: Tensor) -> Tensor:
    """Return ``|w|`` as float32 (float64 for float64), a new tensor (Han et al. 2015, arXiv:1506.02626).

    Args:
        weight: Any shape, any floating dtype.

    Example:
        >>> magnitude(torch.tensor([-2.0, 0.5]))
        tensor([2.0000, 0.5000])
    """
    weight = weight.detach()
    return weight.abs() if weight.dtype == torch.float64 else weight.float().abs()


class Magnitude(Scorer):
    """``|w|`` (Han et al. 2015, arXiv:1506.02626)."""

    criterion: ClassVar[str] = "magnitude"

    @property
    def ready(self) -> bool:
        """Always True: weights are enough."""
        return True

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        return magnitude(weight)

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        return magnitude(weight.reshape(-1)[where])


def make_scorer(
    criterion: str, modules: Mapping[str, nn.Module], *, generator: torch.Generator | None = None, **options: Any
) -> Scorer:
    """Return a new scorer that is not attached yet.

    Args:
        criterion: A key of `SCORERS`.
        modules: Weight name → a module that holds it.
        generator: For random criteria, equal on every rank.
        **options: Options of the scorer, such as `costs`.

    Raises:
        ConfigError: If the criterion is unknown or an option is invalid.

    Example:
        >>> make_scorer("magnitude", {}).scores("w", torch.tensor([-2.0, 0.5]))
        tensor([2.0000, 0.5000])
    """
    if criterion not in SCORERS:
        raise ConfigError("prune", f"criterion must be a known one, got {criterion!r}{nearest(criterion, SCORERS)}")
    return SCORERS[criterion](modules, generator=generator, **options)


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype of scores: float64 unchanged, everything else as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def saved_tensors(state: Mapping[str, Any], key: str, like: Mapping[str, torch.Size], where: str) -> dict[str, Tensor]:
    """Return copies of the saved tensors under `key`, by weight name."""
    tensors = dict(state[key])
    for name, tensor in tensors.items():
        if name not in like or tensor.shape != like[name]:
            wanted = f"of shape {tuple(like[name])}" if name in like else "absent, as this run does not prune it"
            rule = f"saved {key} of {name} must be {wanted}, got {tuple(tensor.shape)}"
            raise CheckpointError(where, rule, SAME_RUN)
    return {name: tensor.clone() for name, tensor in tensors.items()}


def all_finite(gradients: Collection[Tensor]) -> bool:
    """Return True if every gradient is finite, with one pass over each and one device synchronization.

    For gradients sharded by FSDP2 the parts of all processes are checked, and every process must call it.
    """
    if any(map(is_sharded, gradients)):
        device = next(iter(gradients)).device
        return not any_rank(not all_finite([local_part(gradient) for gradient in gradients]), device)
    values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    # A sum keeps every NaN and infinity, and is by far the fastest pass on a CPU. 16 bits would overflow.
    sums = [value.sum(dtype=torch.promote_types(value.dtype, torch.float32)).double() for value in values]
    return not sums or bool(torch.stack([total.to(sums[0].device) for total in sums]).isfinite().all())


@torch.no_grad()
def below_threshold_mask(weight: Tensor, eps: float) -> Tensor:
    """Return which weights to keep: all with ``|w| < eps`` are pruned, however many.

    Magnitudes are compared in float32 (float64 for float64). A NaN is kept: it has no magnitude.

    Args:
        weight: Floating point, any shape and device.
        eps: At least 0; 0 prunes nothing.

    Returns:
        bool tensor of the same shape and device, True = keep.

    Raises:
        ConfigError: If `eps` is negative or NaN.

    Example:
        >>> below_threshold_mask(torch.tensor([-0.5, 0.1, 0.2]), 0.2)
        tensor([ True, False,  True])
    """
    checked(eps, float, "below_threshold_mask", "eps", low=0)
    scores = magnitude(weight)
    # In the dtype of the scores: a weight of float32 0.1 is not below 0.1.
    return scores.lt(scores.new_tensor(eps)).logical_not_()


_PIECE = 1 << 17  # stays in cache


class Random(Scorer):
    """One random number in [0, 1) per weight for the whole run, so that pruned weights stay the lowest.

    The number is an integer function of a seed (drawn once from the generator), the weight's index in `modules` (its
    name if it has none) and the flat index. It is equal on every rank and device, and a slice costs only its length.
    """

    criterion: ClassVar[str] = "random"
    zero_is_lowest: ClassVar[bool] = False
    keeps_going: ClassVar[bool] = True

    def _set_up(self, generator: torch.Generator | None) -> None:
        super()._set_up(generator)
        if generator is None:
            raise ConfigError("prune random", "generator must be given, got None", "use the same seed on every rank")
        self.seed = int(torch.randint(2**62, (), generator=generator))
        # By index: a trainer may add a prefix to every name, which must not change the numbers.
        self._places = {name: place for place, name in enumerate(self.modules)}

    @property
    def ready(self) -> bool:
        """Always True."""
        return True

    def _scores(self, name: str, weight: Tensor) -> Tensor:
        scores = torch.empty(weight.numel(), dtype=_wider(weight.dtype), device=weight.device)
        for start in range(0, weight.numel(), _PIECE):
            stop = min(start + _PIECE, weight.numel())
            scores[start:stop] = self._draw(name, torch.arange(start, stop, device=weight.device))
        return scores.view(weight.shape)

    def _part(self, name: str, weight: Tensor, where: slice) -> Tensor:
        # Each number depends only on the seed, the tensor and its own index, so slices agree with the whole.
        index = torch.arange(*where.indices(weight.numel()), device=weight.device)
        return self._draw(name, index).to(_wider(weight.dtype))

    def _draw(self, name: str, index: Tensor) -> Tensor:
        key = hashlib.blake2b(f"{self.seed}:{self._places.get(name, name)}".encode(), digest_size=8).digest()
        # SplitMix64 (Steele, Lea and Flood 2014) of a counter. int64 products wrap like its unsigned ones.
        bits = index * _signed(0x9E3779B97F4A7C15) + _signed(int.from_bytes(key, "little"))
        bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
        bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
        bits = bits ^ _shifted(bits, 31)
        # The top 24 bits, which float32 represents exactly: uniform in [0, 1).
        return _shifted(bits, 40).float() * 2.0**-24

    def state_dict(self) -> dict[str, Any]:
        """Also return the seed."""
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also restore the seed, which determines every number."""
        super().load_state_dict(state)
        self.seed = int(state["seed"])


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return the bits shifted right with zeros filled in. torch's shift repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
