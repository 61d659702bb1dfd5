"""The ingredients of the soup at the end of a run: its checkpoints, and the weights that it ends with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CheckpointError
from shared_core.ranks import any_rank, local_part
from shared_core.sharded import is_sharded, place_of, reshard_
from shared_core.soup.peft_model import PeftAdapter
from shared_core.soup.sources import ADAPTER, IN_MEMORY, Ingredient, TensorSpec, storage_key
from shared_core.technique import Context, SavedCheckpoint


class RunIngredients:
    """Opens a run's checkpoints under the names of its model.

    Args:
        model: The model at the end of the run.
        context: Of the run.
        adapter: That of a PEFT model, whose checkpoints hold no more.
    """

    def __init__(self, model: nn.Module, context: Context, adapter: PeftAdapter | None) -> None:
        self._context, self._adapter = context, adapter
        self.into: dict[str, Tensor] | None = None
        """The model's own tensors, to write averages into; None for adapters, whose ranks change.

        Of sharded ones this process's parts, and ingredients then are the same parts of checkpoints.
        """
        self._whole: dict[str, Tensor] = {}
        if adapter is None:
            reshard_(model)
            state = model.state_dict()
            self._whole = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
            self.into = {name: local_part(value) for name, value in self._whole.items()}
        sharded = next((value for value in self._whole.values() if is_sharded(value)), None)
        self._parts_on = None if sharded is None else sharded.device
        self.logged: dict[str, float | None] = {}
        """The metric that was logged with each."""

    def opened(self, last: int | None) -> tuple[list[Ingredient], Ingredient]:
        """Return the newest `last` usable checkpoints, oldest first, and the final weights, last if none holds them.

        Raises:
            CheckpointError: If the run saved none, or none after what it prunes or quantises was complete.
        """
        usable = self._usable()
        usable = usable if last is None else usable[-last:]
        found = [self._checkpoint(saved) for saved in usable]
        self.logged = {item.name: saved.metric for item, saved in zip(found, usable, strict=True)}
        weights = self.into if self._adapter is None else self._adapter.weights(like=found[-1])
        # also an older one: the trainer may have loaded the best
        held = next((item for item in reversed(found) if self._holds(item, weights or {})), None)
        if held is not None:
            return found, held
        name, copies = f"final weights (step {self._context.step})", _copied(weights or {})
        if self._adapter is None:
            final = Ingredient(name, IN_MEMORY, None, lambda: copies, **self._parts())
        else:
            final = Ingredient(name, ADAPTER, None, lambda: copies, self._adapter.fields())
        return [*found, final], final

    def ranked(self, ingredients: list[Ingredient], sign: float) -> list[Ingredient]:
        """Return the ingredients, best first by the logged metric times `sign`; those without one last."""

        def key(item: Ingredient) -> float:
            metric = self.logged.get(item.name)
            return -math.inf if metric is None or not math.isfinite(metric) else sign * metric

        return sorted(reversed(ingredients), key=key, reverse=True)

    def _usable(self) -> list[SavedCheckpoint]:
        context = self._context
        saved = sorted(context.services.checkpoints(), key=lambda checkpoint: checkpoint.step)
        if not saved:
            raise CheckpointError(
                "soup: run must have saved at least one checkpoint, got none; save some while training (save_steps or "
                "save_strategy, ModelCheckpoint) and keep them (save_total_limit, save_top_k)"
            )
        first = context.first_usable_step
        usable = [checkpoint for checkpoint in saved if checkpoint.step >= first]
        if len(usable) < len(saved):
            context.services.say(
                f"efftrain: soup: {len(saved) - len(usable)} checkpoints from before step {first} are left out: their "
                "weights were not yet pruned or quantised as the final ones are"
            )
        if not usable:
            raise CheckpointError(
                f"soup: run must have saved a checkpoint at or after step {first}, where pruning or quantisation is "
                f"complete, got the last at step {saved[-1].step}; save later ones or end the schedule earlier"
            )
        return usable

    def _checkpoint(self, saved: SavedCheckpoint) -> Ingredient:
        services = self._context.services
        if self._adapter is not None:
            return self._adapter.ingredient(saved.path, lambda: services.load_weights(saved.path))
        groups: dict[Any, list[str]] = {}
        for name, tensor in self._whole.items():
            groups.setdefault(storage_key(tensor) or name, []).append(name)

        def load() -> Mapping[str, Tensor]:
            if self._parts_on is not None:
                return _Parts(services.load_weights(saved.path), self._whole, groups.values(), saved.path)
            weights = dict(services.load_weights(saved.path))
            for names in groups.values():  # a file may hold a tied tensor once, or as two copies
                held = next((weights[name] for name in names if name in weights), None)
                if held is not None:
                    weights.update(dict.fromkeys(names, held))
            return weights

        return Ingredient(str(saved.path), "checkpoint of this run", saved.path, load, **self._parts())

    def _parts(self) -> dict[str, Any]:
        if self._parts_on is None:
            return {}
        specs = {name: TensorSpec(tuple(part.shape), part.dtype) for name, part in (self.into or {}).items()}
        return {"specs": specs, "parts_on": self._parts_on}

    def _holds(self, ingredient: Ingredient, weights: dict[str, Tensor]) -> bool:
        """Return whether a checkpoint has the same bits as these weights."""
        same = all(
            key in weights
            and torch.equal(ingredient.tensor(key).to(weights[key].device, weights[key].dtype), weights[key])
            for key in ingredient.specs
        )
        ingredient.close()
        return same if self._parts_on is None else not any_rank(not same, self._parts_on)


class _Parts(Mapping[str, Tensor]):
    """What this process holds of each of a checkpoint's tensors, cut out when it is asked for.

    Args:
        weights: The checkpoint's, whole.
        like: The model's, sharded.
        tied: Names of the model that are one tensor's.
        path: What errors call the checkpoint.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], like: Mapping[str, Tensor], tied: Iterable[list[str]], path: Path
    ) -> None:
        self._weights, self._like, self._path = weights, like, path
        saved = set(weights)
        self._saved_as = {name: next((n for n in names if n in saved), None) for names in tied for name in names}

    def __getitem__(self, name: str) -> Tensor:
        saved_as, like = self._saved_as[name], self._like[name]
        tensor = None if saved_as is None else self._weights[saved_as]
        if tensor is None or tensor.shape != like.shape:
            raise CheckpointError(
                f"{self._path}: {name!r} must have the model's shape {tuple(like.shape)}, got "
                f"{'none' if tensor is None else tuple(tensor.shape)}; it is of another model"
            )
        return tensor[place_of(like)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


def _copied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    copies: dict[int, Tensor] = {}  # tied tensors stay tied
    return {
        key: copies.setdefault(value.data_ptr() or id(value), value.to("cpu", copy=True))
        for key, value in weights.items()
    }
