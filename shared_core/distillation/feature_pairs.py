"""Pairs of submodules, one of the student and one of the teacher, whose features or attention maps are compared.

Hooks record the outputs of both. A learned projection maps the student's width to the teacher's.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shared_core.distillation.config import DistillConfig
from shared_core.distillation.forward_capture import ForwardHook
from shared_core.distillation.losses.features import RELATIONS, attention_kl, hidden_cosine, hidden_mse, relation_sum
from shared_core.distributed.collectives import has_group
from shared_core.distributed.sharded_tensors import is_sharded
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError, nearest
from shared_core.modules.calls import RunHook, remove_hooks

Normalize = Callable[[Tensor, Tensor | int], Tensor]


class WatchedPairs:
    """Hooks on both modules of each pair, until `detach`."""

    def __init__(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[tuple[str, str]], option: str) -> None:
        self.pairs = _expand(pairs, student, teacher, option)
        self.weight = 1.0
        """Weight of the sum over pairs, which is added to task loss and soft term."""
        self._option = option
        self._hooks = [(ForwardHook(), _TeacherHook()) for _ in self.pairs]
        self._handles: list[RemovableHandle] = []
        for (ours, theirs), (student_hook, teacher_hook) in zip(self.pairs, self._hooks, strict=True):
            modules = student.get_submodule(ours), teacher.get_submodule(theirs)
            for module, hook in zip(modules, (RunHook(student_hook), RunHook(teacher_hook)), strict=True):
                self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def activate(self, active: bool) -> None:
        """Start or stop recording outputs."""
        for hooks in self._hooks:
            for hook in hooks:
                hook.active, hook.latest = active, None

    def watch(self) -> None:
        """Record the outputs of the next forward for `try_out`."""
        WatchedPairs.activate(self, True)

    def try_out(self, mask: Tensor | None, inputs: Mapping[str, Any], normalize: Normalize) -> None:
        """Raise the errors that `loss` would raise for the recorded forward."""
        self.loss(mask, inputs, normalize)

    def outputs(self) -> Iterator[tuple[tuple[str, str], Any, Any]]:
        """Yield each pair's names and its modules' outputs in the latest forward, once."""
        # Removed when read: a module that a forward skips (layer drop) must not return an earlier output.
        for names, (ours, theirs) in zip(self.pairs, self._hooks, strict=True):
            found, target = ours.take(), theirs.take()
            if found is None or target is None:
                whose, name = ("student", names[0]) if found is None else ("teacher", names[1])
                rule = f"{self._option} module {name} of the {whose} must run in every forward, but did not"
                raise TrainingError("distill", rule)
            yield names, found.output, target

    def loss(self, mask: Tensor | None, inputs: Mapping[str, Any], normalize: Normalize) -> Tensor:
        """Return the sum over pairs for the latest forward. `mask`: positions that the loss counts, None: examples."""
        raise NotImplementedError

    def check_shards(self, student: nn.Module) -> None:
        """Raise if these pairs do not work with a student that FSDP2 shards; does nothing here."""

    def detach(self) -> None:
        """Remove the hooks from both models."""
        remove_hooks(self._handles)

    def state_dict(self) -> dict[str, Any]:
        """Return what is trained along with the student; nothing here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""


def real_positions(shape: Sequence[int], counted: Tensor | None, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return a mask of the feature positions that count: the loss's if the shapes match, otherwise all but padding.

    `shape` is ``(B, ...)`` without the features' width. `counted`, ``(B,)`` or ``(B, S)``, is the loss's mask, None:
    one position per example. Returns None if all positions count or no mask fits.
    """
    # Features may have another length than the logits (an encoder's). Then the padding mask of that length is used.
    if counted is not None and counted.shape == tuple(shape):
        return counted
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = inputs.get(name)
        if isinstance(mask, Tensor) and tuple(mask.shape) == tuple(shape):
            return mask != 0
    return None


def summed_over_positions(distances: Tensor, real: Tensor | None, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the distances summed over the positions that the loss counts, and the number of these positions.

    An example may have one position in the loss but many here (tokens of a classifier, pixels), or different ones (an
    encoder's). Then its mean over real positions is used for each of its positions in the loss. So padding adds
    nothing, and the sum is averaged like the trainer's loss. For `real` and `counted` see `real_positions`.

    Example:
        >>> distances = torch.tensor([[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]])
        >>> real = torch.tensor([[True, True, False], [True, True, True]])
        >>> [value.item() for value in summed_over_positions(distances, real, None)]
        [5.5, 2]
    """
    examples = len(distances)
    # First a mean over each example's positions, so that long examples keep their weight in the loss.
    if real is None:
        means = distances.reshape(examples, -1).mean(1)
    else:
        real = real.to(distances.device)
        # The loss counts positions of the same shape: sum over them directly.
        if counted is not None and counted.shape == distances.shape:
            return (distances * real).sum(), real.sum()
        means = (distances * real).sum(1) / real.sum(1).clamp(min=1)
    if counted is None:
        return means.sum(), torch.full((), examples, dtype=torch.int64, device=distances.device)
    # Each example is weighted by its positions in the loss; the trainer divides by their sum.
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
    """Return the pairs with every glob replaced by the matching names, in registration order."""
    found: list[tuple[str, str]] = []
    for ours, theirs in pairs:
        sides = _matches(student, ours, "student", option), _matches(teacher, theirs, "teacher", option)
        if len(sides[0]) != len(sides[1]):
            raise MatchError(
                "distill",
                f"{option} pair {ours}={theirs} must match equally many submodules in both models, got {len(sides[0])} "
                f"in the student and {len(sides[1])} in the teacher",
            )
        found += zip(*sides, strict=True)
    return found


def _matches(model: nn.Module, pattern: str, whose: str, option: str) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not matched:
        raise MatchError(
            "distill",
            f"{option} must name submodules, got {pattern!r}, not found in the {whose}{nearest(pattern, names)}",
        )
    return matched


# Rows of bfloat16 probabilities sum to 1 within this. With dropout of 10 % a single remaining value gives 1.11.
_TOLERANCE = 0.05


class AttentionPairs(WatchedPairs):
    """Compares the attention maps of each pair: KL from the student's to the teacher's, averaged over heads.

    Fused attention returns no maps, so Transformers models use eager attention while this is active.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, pairs: Sequence[tuple[str, str]]) -> None:
        super().__init__(student, teacher, pairs, "attention")
        self._switched: list[tuple[nn.Module, str]] = []
        self._switchable = [
            found
            for model, side in ((student, 0), (teacher, 1))
            for found in _owners(model, [p[side] for p in self.pairs])
        ]

    def activate(self, active: bool) -> None:
        """Start or stop recording maps, with eager attention."""
        super().activate(active)
        # Fused attention (SDPA, flash) returns no maps, so it is off only while the soft term is on.
        if active and not self._switched:
            for owner in self._switchable:
                before = owner.config._attn_implementation
                _implement(owner, "eager")
                self._switched.append((owner, before))
        elif not active:
            self._switch_back()

    def try_out(self, mask: Tensor | None, inputs: Mapping[str, Any], normalize: Normalize) -> None:
        """Raise `TrainingError` if a module did not run. Maps cannot be checked before attention is eager."""
        for _ in self.outputs():
            pass

    def _switch_back(self) -> None:
        for owner, before in self._switched:
            _implement(owner, before)
        self._switched = []

    def detach(self) -> None:
        """Restore both models."""
        super().detach()
        self._switch_back()

    def loss(self, mask: Tensor | None, inputs: Mapping[str, Any], normalize: Normalize) -> Tensor:
        """Return the sum over pairs for the latest forward."""
        terms = []
        for (ours, theirs), found, target in self.outputs():
            # (B, H, Q, K) on both sides; K may be padded, Q are the positions that count.
            student, teacher = _map(found, ours, "student"), _map(target, theirs, "teacher").detach()
            real = real_positions((len(student), student.shape[-2]), mask, inputs)
            # A padding-only query has NaN rows (softmax of all -inf), and 0 * NaN is NaN.
            student, teacher = (
                _certain_where_unread(student, real),
                _certain_where_unread(teacher.to(student.device), real),
            )
            # Some models return scores before softmax or probabilities after dropout, which are not distributions.
            _check_probabilities(student, ours, "student")
            _check_probabilities(teacher, theirs, "teacher")
            distances = attention_kl(student, teacher, average_heads=student.shape[1] != teacher.shape[1])
            terms.append(normalize(*summed_over_positions(distances, real, mask)))
        return torch.stack(terms).sum()


def _owners(model: nn.Module, names: Sequence[str]) -> list[Any]:
    """Return the outermost modules that contain these and can choose the attention implementation."""
    able = [name for name, module in model.named_modules() if hasattr(module, "set_attn_implementation")]
    found: dict[str, Any] = {}
    # `able` is in registration order, outermost first, so the first match is the outermost owner.
    for name in names:
        for owner in able:
            if owner == "" or name.startswith(f"{owner}."):
                found[owner] = model.get_submodule(owner)
                break
    return list(found.values())


def _implement(owner: Any, kind: str) -> None:
    owner.set_attn_implementation(kind)
    # If a model does not support an implementation, transformers may silently keep the old one.
    if owner.config._attn_implementation != kind:
        raise ConfigError(
            "distill",
            f"attention needs a model that returns its maps, but {type(owner).__name__} keeps using "
            f"{owner.config._attn_implementation}",
            "load it with attn_implementation='eager'",
        )


def _map(output: Any, name: str, whose: str) -> Tensor:
    """Return the map ``(B, H, Q, K)`` in a module's output: the output itself, or the last such tensor of a tuple."""
    items = output if isinstance(output, tuple | list) else [output]
    maps = [item for item in items if isinstance(item, Tensor) and item.ndim == 4]
    if not maps:
        raise ConfigError(
            "distill",
            f"attention module {name} of the {whose} must return its map (batch, heads, queries, keys), got none",
            "name the module that computes the probabilities, such as layer.0.attention.self",
        )
    # Models return (hidden, maps) or (hidden, maps, cache): the last tensor of four dimensions is the map.
    return maps[-1]


def _certain_where_unread(maps: Tensor, real: Tensor | None) -> Tensor:
    """Return maps where queries that do not count attend only to the first key, since they may hold NaN."""
    if real is None:
        return maps
    certain = torch.zeros(maps.shape[-1], dtype=maps.dtype, device=maps.device)
    certain[0] = 1
    return torch.where(real.to(maps.device)[:, None, :, None], maps, certain)


def _check_probabilities(maps: Tensor, name: str, whose: str) -> None:
    sums = maps.detach().sum(-1)
    if not bool(((sums - 1).abs() <= _TOLERANCE).all()):
        worst = float(sums.flatten()[(sums - 1).abs().argmax()])
        raise ConfigError(
            "distill",
            f"attention maps of {name} in the {whose} must hold probabilities, got a row that sums to {worst:.3g}",
            "maps after dropout cannot be compared: set the config's attention dropout "
            "(attention_probs_dropout_prob, attention_dropout) to 0",
        )


_NAME = "distill_projection_"


class HiddenPairs(WatchedPairs):
    """Compares the outputs of both modules of each pair."""

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
            # Unknown widths are checked in the first batch.
            if inputs is not None and outputs is not None and inputs != outputs:
                self._projections[index] = _projection(inputs, outputs, student, generator)
                student.register_parameter(f"{_NAME}{index}", self._projections[index])
                self._handles.append(modules[0].register_forward_hook(_Joined(self._projections[index])))
        # Trained like any parameter but left out of state dicts: checkpoints hold the plain student.
        self._handles.append(student.register_state_dict_post_hook(_leave_out))  # type: ignore[no-untyped-call]
        self._handles.append(student.register_load_state_dict_post_hook(_miss_nothing))  # type: ignore[no-untyped-call]

    def check_shards(self, student: nn.Module) -> None:
        """Raise if a student that FSDP2 shards needs projections."""
        # `fully_shard` has already collected the parameters, so a later one would be in no shard group.
        if self._projections and any(map(is_sharded, student.parameters())):
            names = "=".join(self.pairs[next(iter(self._projections))])
            raise CompatibilityError(
                "distill",
                f"hidden features must have equal widths under FSDP2, but differ at {names}: their projection is "
                "a parameter that no module's forward gathers",
                "use a hidden_loss on relations (rkd, similarity_preserving, cka), or DDP",
            )

    def loss(self, mask: Tensor | None, inputs: Mapping[str, Any], normalize: Normalize) -> Tensor:
        """Return the sum over pairs for the latest forward. Relations are averaged over the micro-batch."""
        found = enumerate(self.outputs())
        terms = [self._term(index, *pair, mask, inputs) for index, pair in found]
        return torch.stack([normalize(*term) for term in terms]).sum()

    def _term(
        self, index: int, names: tuple[str, str], ours: Any, theirs: Any, mask: Tensor | None, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        features, targets = _tensor(ours, names[0]), _tensor(theirs, names[1])
        targets = targets.detach().to(features.device)
        if self._kind in RELATIONS:
            flat = [_flat(each, mask, inputs) for each in (features, targets)]
            total, count = relation_sum(*flat, relation=self._kind)
            # Weighted by the trainer's count of positions, so that it stays a mean over micro-batches.
            positions = count if mask is None else mask.sum()
            return total / count.clamp(min=1) * positions, positions
        wrong = remedy = ""
        if index in self._projections:
            # W: (teacher's width, student's width), the regressor of FitNets without a bias.
            weight, width = self._projections[index], features.shape[-1]
            if width == weight.shape[1]:
                features = F.linear(features, weight)
            else:  # for example an activation inside a block
                wrong = f"the width of the layer registered last before them, {weight.shape[1]}, got {width}"
                remedy = "name the layer or block that returns them"
        if not wrong and features.shape != targets.shape:
            wrong = f"the teacher's shape {tuple(targets.shape)}, got {tuple(features.shape)}"
            remedy = "use a hidden_loss on relations (rkd, similarity_preserving, cka), which compares examples"
        if wrong:
            raise ConfigError("distill", f"hidden features of {names[0]} must have {wrong}", remedy)
        real = real_positions(features.shape[:-1], mask, inputs)
        features, targets = _filled(features, real), _filled(targets, real)
        distance = hidden_mse if self._kind == "mse" else hidden_cosine
        return summed_over_positions(distance(features, targets), real, mask)

    def detach(self) -> None:
        """Remove hooks and projections from both models."""
        super().detach()
        for index in self._projections:
            self._student._parameters.pop(f"{_NAME}{index}", None)

    def state_dict(self) -> dict[str, Any]:
        """Return the projections' weights."""
        return {str(index): weight.detach().clone() for index, weight in self._projections.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved projections."""
        for index, weight in self._projections.items():
            saved = state.get(str(index))
            if saved is None or saved.shape != weight.shape:
                rule = "saved projections must fit the hidden pairs of this run"
                raise CheckpointError("distill", rule, "resume with the same pairs")
            weight.copy_(saved)


class _Joined:
    """Forward hook that adds a projection to the graph of its module's output without changing values.

    DDP with find_unused_parameters, which the Hugging Face Trainer uses, walks the graph of forward's outputs. A
    projection is used only in the loss, so DDP would treat it as unused and then fail when its gradient arrives.
    """

    def __init__(self, projection: nn.Parameter) -> None:
        self._projection: nn.Parameter | None = projection

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._projection is None or not (has_group() and torch.is_grad_enabled()):
            return None
        joined = _Join.apply(_tensor(output, type(module).__name__), self._projection)  # type: ignore[no-untyped-call]
        if isinstance(output, Tensor):
            return joined
        rest = (joined, *output[1:])
        return output._make(rest) if hasattr(output, "_make") else type(output)(rest)

    def __getstate__(self) -> dict[str, Any]:
        return {"_projection": None}  # copies and pickles are not distilled


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, projection: Tensor) -> Tensor:
        return features.view_as(features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _projection(inputs: int, outputs: int, student: nn.Module, generator: torch.Generator) -> nn.Parameter:
    """Return an initial weight ``(outputs, inputs)``, uniform in ``±1 / sqrt(inputs)`` like `nn.Linear`'s."""
    like = next(student.parameters())
    # Drawn on the CPU with a separate generator, so it is the same on every device and rank.
    own = torch.Generator().manual_seed(int(torch.randint(2**31, (), generator=generator)))
    bound = 1 / math.sqrt(inputs)
    weight = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=own)
    return nn.Parameter(weight.to(like.device, like.dtype))


def _leave_out(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    for name in [name for name in state_dict if name.startswith(f"{prefix}{_NAME}")]:
        # `prefix` is the student's path if it is part of a larger model.
        del state_dict[name]


def _miss_nothing(module: nn.Module, incompatible: Any) -> None:
    # Changed in place, because torch reads this list object after the hooks.
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if not name.rpartition(".")[2].startswith(_NAME)]


def _width(model: nn.Module, module: nn.Module) -> int | None:
    """Return the output width of a module's last layer of known width, None if there is none."""
    # A module without layers, such as an activation, has the width of the layer registered before it.

    # The layer registered last inside the module decides, then the layers before the module.
    layers = list(model.modules())
    last = layers.index(list(module.modules())[-1])
    for layer in reversed(layers[: last + 1]):
        if getattr(layer, "out_channels", None) is not None:
            return None  # channels are not the last axis, so both models need equally many
        for attribute in ("out_features", "embedding_dim", "normalized_shape", "num_features"):
            found = getattr(layer, attribute, None)
            if isinstance(found, tuple) and found:
                found = found[-1]
            if isinstance(found, int):
                return found
        weight = layer._parameters.get("weight")
        if weight is not None and weight.ndim == 1:  # a custom norm
            return weight.shape[0]
    return None


def _tensor(output: Any, name: str) -> Tensor:
    found = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(found, Tensor):
        raise TrainingError("distill", f"hidden module {name} must return a tensor, got {type(found).__name__}")
    return found


def _filled(features: Tensor, real: Tensor | None) -> Tensor:
    """Return the features with zeros at positions that do not count, where NaN would spread to gradients."""
    return features if real is None else features.masked_fill(~real.to(features.device).unsqueeze(-1), 0)


def _flat(features: Tensor, mask: Tensor | None, inputs: Mapping[str, Any]) -> Tensor:
    """Return one vector per example or packed document: the mean over its tokens if a mask is known."""
    real = real_positions(features.shape[:-1], mask, inputs) if features.ndim == 3 else None
    documents = _documents(features, inputs)
    if real is None and documents is None:
        return features.reshape(len(features), -1)
    if real is None:
        real = torch.ones(features.shape[:-1], dtype=torch.bool)
    real = real.to(features.device)
    if documents is not None:
        features, real = features.flatten(0, 1), real.flatten() & documents
        return real.to(features.dtype) @ _filled(features, real.any(0)) / real.sum(1, keepdim=True).clamp(min=1)
    # Padding is zeroed and not counted, so this is the mean over each example's real tokens.
    return _filled(features, real).sum(1) / real.sum(1, keepdim=True).clamp(min=1)


def _documents(features: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the tokens of each document in a packed batch, counted over all rows; None if nothing is packed."""
    positions = inputs.get("position_ids")
    if inputs.get("attention_mask") is not None or not isinstance(positions, Tensor) or features.ndim != 3:
        return None
    if positions.shape != features.shape[:2]:
        return None
    numbers = F.pad(positions.diff(dim=1) != 1, (1, 0), value=True).flatten().cumsum(0).to(features.device)
    count = int(numbers[-1])
    return None if count == len(features) else numbers == torch.arange(1, count + 1, device=features.device)[:, None]


def open_pairs(
    config: DistillConfig, student: nn.Module, teachers: Sequence[nn.Module], generator: torch.Generator
) -> dict[str, WatchedPairs]:
    """Return the feature pairs that the options ask for, by option name."""
    found: dict[str, WatchedPairs] = {}
    if config.hidden:
        found["hidden"] = HiddenPairs(student, teachers[0], config.pairs("hidden"), config.hidden_loss, generator)
    if config.attention:
        found["attention"] = AttentionPairs(student, teachers[0], config.pairs("attention"))
    for name, pairs in found.items():
        pairs.weight = getattr(config, f"{name}_weight")
    return found
