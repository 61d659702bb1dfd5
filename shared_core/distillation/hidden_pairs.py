"""Pairs of submodules, one of the student and one of the teacher, whose outputs are brought together."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distillation.batch import ForwardHook
from shared_core.distillation.feature_losses import hidden_cosine_sum, hidden_mse_sum
from shared_core.distillation.projection import init_projection
from shared_core.distillation.relations import RELATIONS, relation_sum
from shared_core.errors import CheckpointError, ConfigError, MatchError, TrainingError, nearest

_NAME = "distill_projection_"


class HiddenPairs:
    """Watches both modules of every pair and compares what they return.

    Args:
        student: Gets one projection a pair whose widths differ, until `detach`.
        teacher: The one teacher.
        pairs: Names of submodules, or globs that match as many of both: the student's, the teacher's.
        kind: ``mse`` or ``cosine``, or a key of `RELATIONS`, which compare examples and need no equal widths.
        generator: For the projections' first values.

    Raises:
        MatchError: If a name matches nothing, or a pair matches more on one side.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        pairs: Sequence[tuple[str, str]],
        kind: str,
        generator: torch.Generator,
    ) -> None:
        self._student, self._kind, self._pairs = student, kind, _expand(pairs, student, teacher)
        self._hooks: list[tuple[ForwardHook, _TeacherHook]] = []
        self._handles: list[RemovableHandle] = []
        self._projections: dict[int, nn.Parameter] = {}
        for index, (ours, theirs) in enumerate(self._pairs):
            modules = student.get_submodule(ours), teacher.get_submodule(theirs)
            hooks = ForwardHook(), _TeacherHook()
            self._hooks.append(hooks)
            self._handles.append(modules[0].register_forward_hook(hooks[0], with_kwargs=True))
            self._handles.append(modules[1].register_forward_hook(hooks[1], with_kwargs=True))
            if kind not in RELATIONS:
                inputs, outputs = _width(student, modules[0]), _width(teacher, modules[1])
                if inputs is not None and outputs is not None and inputs != outputs:
                    self._projections[index] = _projection(inputs, outputs, student, generator)
                    student.register_parameter(f"{_NAME}{index}", self._projections[index])
        # trained like any parameter, and in no state dict: a checkpoint is the plain student's
        self._handles.append(student.register_state_dict_post_hook(_leave_out))  # type: ignore[no-untyped-call]
        self._handles.append(student.register_load_state_dict_post_hook(_miss_nothing))  # type: ignore[no-untyped-call]

    @property
    def num_projections(self) -> int:
        """How many pairs have different widths."""
        return len(self._projections)

    def activate(self, active: bool) -> None:
        """Keep outputs from now on, or no longer."""
        for ours, theirs in self._hooks:
            ours.active = theirs.active = active
            ours.latest, theirs.latest = None, None

    def loss(self, mask: Tensor | None, normalise: Callable[[Tensor, Tensor | int], Tensor]) -> Tensor:
        """Return the sum over pairs for the latest forward.

        Args:
            mask: Which positions count, where features have one vector a position; None for all.
            normalise: As of `shared_core.technique.Context`; relations are means over the micro-batch.

        Raises:
            TrainingError: If a module did not run.
        """
        total: Tensor | None = None
        for index, (names, (ours, theirs)) in enumerate(zip(self._pairs, self._hooks, strict=True)):
            found, target = ours.take(), theirs.take()
            if found is None or target is None:
                whose, name = ("student", names[0]) if found is None else ("teacher", names[1])
                raise TrainingError(
                    f"distill: hidden module {name} of the {whose} must run in every forward, and did not"
                )
            term = self._term(index, _tensor(found.output, names[0]), _tensor(target, names[1]), mask, normalise)
            total = term if total is None else total + term
        if total is None:
            raise TrainingError("distill: hidden must hold a pair")
        return total

    def _term(
        self,
        index: int,
        features: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        normalise: Callable[[Tensor, Tensor | int], Tensor],
    ) -> Tensor:
        targets = targets.detach().to(features.device)
        if self._kind in RELATIONS:
            flat = [each.reshape(len(each), -1) if mask is None else _mean(each, mask) for each in (features, targets)]
            total, count = relation_sum(*flat, relation=self._kind)
            # weighted by positions, as the trainer counts them, so that it stays a mean over micro-batches
            positions = count if mask is None else mask.sum()
            return normalise(total / count.clamp(min=1) * positions, positions)
        if index in self._projections:
            features = F.linear(features, self._projections[index])
        if features.shape != targets.shape:
            raise ConfigError(
                f"distill: hidden features of {self._pairs[index][0]} must have the teacher's shape "
                f"{tuple(targets.shape)}, got {tuple(features.shape)}; take a hidden_loss of relations (rkd, "
                "similarity_preserving, cka), which compare examples"
            )
        fits = mask if mask is not None and features.shape[:-1] == mask.shape else None
        compare = hidden_mse_sum if self._kind == "mse" else hidden_cosine_sum
        return normalise(*compare(features, targets, mask=fits))

    def detach(self) -> None:
        """Take hooks and projections off both models."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for index in self._projections:
            self._student._parameters.pop(f"{_NAME}{index}", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the projections' weights."""
        return {str(index): weight.detach().clone() for index, weight in self._projections.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back saved projections.

        Raises:
            CheckpointError: If they are of other pairs.
        """
        for index, weight in self._projections.items():
            saved = state.get(str(index))
            if saved is None or saved.shape != weight.shape:
                raise CheckpointError("distill: saved projections must be of these hidden pairs; resume with the same")
            weight.copy_(saved)


class _TeacherHook:
    """Keeps the latest output of a teacher's module."""

    def __init__(self) -> None:
        self.active = False
        self.latest: Any = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.active:
            self.latest = output

    def take(self) -> Any:
        latest, self.latest = self.latest, None
        return latest


def _projection(inputs: int, outputs: int, student: nn.Module, generator: torch.Generator) -> nn.Parameter:
    like = next(student.parameters())
    seed = int(torch.randint(2**31, (), generator=generator))
    weight, _ = init_projection(inputs, outputs, seed=seed, bias=False, device=like.device, dtype=like.dtype)
    return nn.Parameter(weight)


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in [name for name in state_dict if name.startswith(f"{prefix}{_NAME}")]:
        del state_dict[name]


def _miss_nothing(module: nn.Module, incompatible: Any) -> None:
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if not name.rpartition(".")[2].startswith(_NAME)]


def _expand(pairs: Sequence[tuple[str, str]], student: nn.Module, teacher: nn.Module) -> list[tuple[str, str]]:
    """Return the pairs with every glob replaced by the names that it matches, in the order of registration."""
    found: list[tuple[str, str]] = []
    for ours, theirs in pairs:
        sides = _matches(student, ours, "student"), _matches(teacher, theirs, "teacher")
        if len(sides[0]) != len(sides[1]):
            raise MatchError(
                f"distill: hidden pair {ours}={theirs} must match as many submodules of both, got {len(sides[0])} of "
                f"the student and {len(sides[1])} of the teacher"
            )
        found += zip(*sides, strict=True)
    return found


def _matches(model: nn.Module, pattern: str, whose: str) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matched:
        raise MatchError(
            f"distill: hidden must name submodules, got {pattern!r}, which the {whose} has not{nearest(pattern, names)}"
        )
    return matched


def _width(model: nn.Module, module: nn.Module) -> int | None:
    """Return the number of features that a module's last layer of known width returns, None if that is not told.

    A module without layers, such as an activation, has the width of those registered before it.
    """
    layers = list(model.modules())
    last = layers.index(list(module.modules())[-1])
    for layer in reversed(layers[: last + 1]):
        if getattr(layer, "out_channels", None) is not None:
            return None  # channels are not the last axis: both must have as many
        for attribute in ("out_features", "embedding_dim", "normalized_shape", "num_features"):
            found = getattr(layer, attribute, None)
            if isinstance(found, tuple) and found:
                found = found[-1]
            if isinstance(found, int):
                return found
        weight = layer._parameters.get("weight")
        if weight is not None and weight.ndim == 1:  # a norm of the user's own
            return weight.shape[0]
    return None


def _tensor(output: Any, name: str) -> Tensor:
    found = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(found, Tensor):
        raise TrainingError(f"distill: hidden module {name} must return a tensor, got {type(found).__name__}")
    return found


def _mean(features: Tensor, mask: Tensor) -> Tensor:
    """Return one vector an example: the mean over the positions that count."""
    if features.shape[:-1] != mask.shape or features.ndim < 3:
        return features.reshape(len(features), -1)
    counts = mask.unsqueeze(-1).to(features.dtype)
    return (features * counts).sum(1) / counts.sum(1).clamp(min=1)
