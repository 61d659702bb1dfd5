"""Pairs of submodules, one of the student and one of the teacher, whose outputs are watched."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distillation.batch import ForwardHook
from shared_core.errors import MatchError, TrainingError, nearest

Normalise = Callable[[Tensor, Tensor | int], Tensor]


class WatchedPairs:
    """Hooks on both modules of every pair, until `detach`.

    Args:
        student: Whose modules come first in a pair.
        teacher: The one teacher.
        pairs: Names of submodules, or globs that match as many of both: the student's, the teacher's.
        option: Which option named them.

    Raises:
        MatchError: If a name matches nothing, or a pair matches more on one side.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[tuple[str, str]], option: str) -> None:
        self.pairs = _expand(pairs, student, teacher, option)
        self._option = option
        self._hooks = [(ForwardHook(), _TeacherHook()) for _ in self.pairs]
        self._handles: list[RemovableHandle] = []
        for (ours, theirs), (student_hook, teacher_hook) in zip(self.pairs, self._hooks, strict=True):
            self._handles.append(student.get_submodule(ours).register_forward_hook(student_hook, with_kwargs=True))
            self._handles.append(teacher.get_submodule(theirs).register_forward_hook(teacher_hook, with_kwargs=True))

    def activate(self, active: bool) -> None:
        """Keep outputs from now on, or no longer."""
        for hooks in self._hooks:
            for hook in hooks:
                hook.active, hook.latest = active, None

    def outputs(self) -> Iterator[tuple[tuple[str, str], Any, Any]]:
        """Yield each pair's names and what its modules returned in the latest forward, once.

        Raises:
            TrainingError: If a module did not run.
        """
        for names, (ours, theirs) in zip(self.pairs, self._hooks, strict=True):
            found, target = ours.take(), theirs.take()
            if found is None or target is None:
                whose, name = ("student", names[0]) if found is None else ("teacher", names[1])
                raise TrainingError(
                    f"distill: {self._option} module {name} of the {whose} must run in every forward, and did not"
                )
            yield names, found.output, target

    def loss(self, mask: Tensor | None, inputs: Mapping[str, Any], normalise: Normalise) -> Tensor:
        """Return the sum over pairs for the latest forward.

        Args:
            mask: Which positions count in the loss; None: one for each example.
            inputs: The student's, whose attention masks tell padding.
            normalise: As of `shared_core.technique.Context`.

        Raises:
            TrainingError: If a module did not run.
        """
        raise NotImplementedError

    def check_shards(self, student: nn.Module) -> None:
        """Refuse what does not work with a student that FSDP2 shards: nothing."""

    def detach(self) -> None:
        """Take the hooks off both models."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def state_dict(self) -> dict[str, Any]:
        """Return what is trained beside the student: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""


def real_positions(shape: Sequence[int], counted: Tensor | None, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return which positions of features count: those of the loss where it has the same, else all but padding.

    Args:
        shape: ``(B, ...)``, that of the features without their width.
        counted: ``(B,)`` or ``(B, S)`` bool, the positions of the loss; None: one for each example.
        inputs: The student's; an attention mask of this shape tells padding.

    Returns:
        ``shape`` bool; None: all count, or nothing tells.
    """
    if counted is not None and counted.shape == tuple(shape):
        return counted
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = inputs.get(name)
        if isinstance(mask, Tensor) and tuple(mask.shape) == tuple(shape):
            return mask != 0
    return None


def summed_over_positions(distances: Tensor, real: Tensor | None, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the distances summed over the positions that the loss counts, and how many those are.

    Where an example has one position in the loss and many here (tokens of a classifier, pixels), or others (an
    encoder's), its mean over its real ones stands for each position that it has in the loss. So padding adds nothing,
    and the sum is averaged as the trainer averages its loss.

    Args:
        distances: ``(B, ...)``, finite.
        real: What `real_positions` returned for their shape.
        counted: As there.

    Example:
        >>> distances = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
        >>> real = torch.tensor([[True, True, False], [True, True, True]])
        >>> [value.item() for value in summed_over_positions(distances, real, None)]
        [5.5, 2]
    """
    examples = len(distances)
    if real is None:
        means = distances.reshape(examples, -1).mean(1)
    else:
        real = real.to(distances.device)
        if counted is not None and counted.shape == distances.shape:
            return (distances * real).sum(), real.sum()
        means = (distances * real).sum(1) / real.sum(1).clamp(min=1)
    if counted is None:
        return means.sum(), torch.full((), examples, dtype=torch.int64, device=distances.device)
    rows = counted.reshape(examples, -1).sum(1).to(distances.device)
    return (means * rows).sum(), rows.sum()


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


def _expand(
    pairs: Sequence[tuple[str, str]], student: nn.Module, teacher: nn.Module, option: str
) -> list[tuple[str, str]]:
    """Return the pairs with every glob replaced by the names that it matches, in the order of registration."""
    found: list[tuple[str, str]] = []
    for ours, theirs in pairs:
        sides = _matches(student, ours, "student", option), _matches(teacher, theirs, "teacher", option)
        if len(sides[0]) != len(sides[1]):
            raise MatchError(
                f"distill: {option} pair {ours}={theirs} must match as many submodules of both, got {len(sides[0])} of "
                f"the student and {len(sides[1])} of the teacher"
            )
        found += zip(*sides, strict=True)
    return found


def _matches(model: nn.Module, pattern: str, whose: str, option: str) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matched:
        raise MatchError(
            f"distill: {option} must name submodules, got {pattern!r}, which the {whose} has not"
            f"{nearest(pattern, names)}"
        )
    return matched
