"""Pairs of submodules whose features are brought together, or the relations between examples in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared_core.distillation.feature_losses import hidden_cosine_each, hidden_mse_each
from shared_core.distillation.projection import init_projection
from shared_core.distillation.relations import RELATIONS, relation_sum
from shared_core.distillation.watched_pairs import Normalise, WatchedPairs, real_positions, summed_over_positions
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, TrainingError
from shared_core.sharded import is_sharded

_NAME = "distill_projection_"


class HiddenPairs(WatchedPairs):
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
        super().__init__(student, teacher, pairs, "hidden")
        self._student, self._kind = student, kind
        self._projections: dict[int, nn.Parameter] = {}
        for index, names in enumerate(self.pairs if kind not in RELATIONS else ()):
            modules = student.get_submodule(names[0]), teacher.get_submodule(names[1])
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

    def check_shards(self, student: nn.Module) -> None:
        """Refuse projections of a student that FSDP2 shards.

        Raises:
            CompatibilityError: If there are both.
        """
        if self._projections and any(map(is_sharded, student.parameters())):
            names = "=".join(self.pairs[next(iter(self._projections))])
            raise CompatibilityError(
                f"distill: hidden features must have equal widths under FSDP2, got others at {names}: the projection "
                "between them is a parameter that no module's forward gathers; take a hidden_loss of relations (rkd, "
                "similarity_preserving, cka), or DDP"
            )

    def loss(self, mask: Tensor | None, inputs: Mapping[str, Any], normalise: Normalise) -> Tensor:
        """Return the sum over pairs for the latest forward; relations are means over the micro-batch."""
        terms = [
            self._term(index, names, _tensor(ours, names[0]), _tensor(theirs, names[1]), mask, inputs, normalise)
            for index, (names, ours, theirs) in enumerate(self.outputs())
        ]
        return torch.stack(terms).sum()

    def _term(
        self,
        index: int,
        names: tuple[str, str],
        features: Tensor,
        targets: Tensor,
        mask: Tensor | None,
        inputs: Mapping[str, Any],
        normalise: Normalise,
    ) -> Tensor:
        targets = targets.detach().to(features.device)
        if self._kind in RELATIONS:
            flat = [_flat(each, mask, inputs) for each in (features, targets)]
            total, count = relation_sum(*flat, relation=self._kind)
            # weighted by positions, as the trainer counts them, so that it stays a mean over micro-batches
            positions = count if mask is None else mask.sum()
            return normalise(total / count.clamp(min=1) * positions, positions)
        if index in self._projections:
            features = F.linear(features, self._projections[index])
        if features.shape != targets.shape:
            raise ConfigError(
                f"distill: hidden features of {names[0]} must have the teacher's shape "
                f"{tuple(targets.shape)}, got {tuple(features.shape)}; take a hidden_loss of relations (rkd, "
                "similarity_preserving, cka), which compare examples"
            )
        real = real_positions(features.shape[:-1], mask, inputs)
        features, targets = _filled(features, real), _filled(targets, real)
        distance = hidden_mse_each if self._kind == "mse" else hidden_cosine_each
        return normalise(*summed_over_positions(distance(features, targets), real, mask))

    def detach(self) -> None:
        """Take hooks and projections off both models."""
        super().detach()
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


def _filled(features: Tensor, real: Tensor | None) -> Tensor:
    """Return the features with zeros where nothing counts: what stands there may be NaN, and so would gradients be."""
    return features if real is None else features.masked_fill(~real.to(features.device).unsqueeze(-1), 0)


def _flat(features: Tensor, mask: Tensor | None, inputs: Mapping[str, Any]) -> Tensor:
    """Return one vector an example: of tokens their mean, where it is told which of them count."""
    real = real_positions(features.shape[:-1], mask, inputs) if features.ndim == 3 else None
    if real is None:
        return features.reshape(len(features), -1)
    real = real.to(features.device)
    return _filled(features, real).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
