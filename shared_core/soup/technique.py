"""The soup of a run's own checkpoints, made at the end of training by the trainer's own validation metric."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from shared_core.errors import CheckpointError, ConfigError, MatchError, nearest
from shared_core.ranks import broadcast_
from shared_core.soup.batch_norms import batch_norms, estimate_norms_
from shared_core.soup.config import SoupConfig
from shared_core.soup.greedy import greedy_soup
from shared_core.soup.sources import IN_MEMORY, Ingredient, storage_key
from shared_core.soup.uniform import uniform_soup
from shared_core.technique import Context, SavedCheckpoint, Technique


class ModelSoup(Technique):
    """Averages this run's checkpoints when training ends; the model then holds the soup.

    The final weights are an ingredient too, unless they are those of the newest checkpoint. Candidates are written
    straight into the model and scored by the trainer's evaluation, with masks re-applied; every process follows the
    main process's score.
    """

    key = "soup"

    def __init__(self, config: SoupConfig) -> None:
        super().__init__(config)
        self._report: dict[str, Any] = {}

    def begin(self, context: Context) -> None:
        """Check what can be known before training: that checkpoints can be listed and BatchNorm exists if asked for."""
        context.services.checkpoints()
        if self._options.bn_batches and not batch_norms(context.model):
            raise MatchError(
                f"soup: bn_batches must be 0 for a model without BatchNorm, got {self._options.bn_batches}; remove it"
            )

    @property
    def _options(self) -> SoupConfig:
        return cast(SoupConfig, self.config)

    def finish(self, model: nn.Module, context: Context) -> None:
        """Replace the model's weights, in place, by the soup of its checkpoints.

        Raises:
            CheckpointError: If the run saved no checkpoint, or they are not of this model.
            ConfigError: If the trainer's evaluation does not report the metric.
        """
        options, say = self._options, context.services.say
        usable = self._usable(context)
        into = {name: value.detach() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        ingredients = [_ingredient(saved, context, into) for saved in usable]
        if not _holds(ingredients[-1], into):
            ingredients.append(_final_weights(into, context.step))
        if len(ingredients) == 1:
            say(f"efftrain: soup: the only ingredient is {ingredients[0].name}, which the model holds already")

        def replaced(_: dict[str, Tensor]) -> None:
            context.weights_replaced()
            self._estimate_norms(model, context)

        def score(_: dict[str, Tensor]) -> float:
            return self._score(context)

        if options.kind == "uniform":
            uniform_soup(ingredients, after_average=replaced, into=into)
            names = [item.name for item in ingredients]
            self._report = {"kind": "uniform", "ingredients": names, "candidates": len(names)}
            say(f"efftrain: soup: uniform average of {len(names)} ingredients")
            return
        result = greedy_soup(
            ingredients,
            score,
            mode="max" if options.larger_is_better else "min",
            strict=options.strict,
            max_ingredients=options.max_ingredients,
            after_average=replaced,
            into=into,
        )
        self._report = {
            "kind": "greedy",
            "metric": options.metric,
            "ingredients": result.ingredients,
            "candidates": len(ingredients),
            "best_single": result.history[0]["single"],
            "score": result.score,
            "history": result.history,
        }
        say(
            f"efftrain: soup: {len(result.ingredients)} of {len(ingredients)} ingredients, {options.metric} "
            f"{result.score:.6g} (best single {result.history[0]['single']:.6g})"
        )

    def _usable(self, context: Context) -> list[SavedCheckpoint]:
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
        return usable if self._options.last is None else usable[-self._options.last :]

    def _score(self, context: Context) -> float:
        metrics = context.services.evaluate()
        metric = self._options.metric
        if metric not in metrics:
            raise ConfigError(
                f"soup: metric must be one that evaluation reports, got {metric!r}{nearest(metric, metrics)}"
            )
        device = next((parameter.device for parameter in context.model.parameters()), torch.device("cpu"))
        # metrics may differ in the last bit between processes, and one that decides otherwise would hang the others
        return float(broadcast_(torch.tensor(float(metrics[metric]), dtype=torch.float64, device=device)))

    def _estimate_norms(self, model: nn.Module, context: Context) -> None:
        if self._options.bn_batches:
            estimate_norms_(model, context.services.calibrate, self._options.bn_batches)

    def report(self) -> dict[str, Any]:
        """Return members, path and scores of the soup; empty before the end of training."""
        return dict(self._report)


def _ingredient(saved: SavedCheckpoint, context: Context, into: dict[str, Tensor]) -> Ingredient:
    groups: dict[Any, list[str]] = {}
    for name, tensor in into.items():
        groups.setdefault(storage_key(tensor) or name, []).append(name)

    def load() -> dict[str, Tensor]:
        weights = dict(context.services.load_weights(saved.path))
        for names in groups.values():  # a file may hold a tied tensor once, or as two copies
            held = next((weights[name] for name in names if name in weights), None)
            if held is not None:
                weights.update(dict.fromkeys(names, held))
        return weights

    return Ingredient(str(saved.path), "checkpoint of this run", saved.path, load)


def _final_weights(into: dict[str, Tensor], step: int) -> Ingredient:
    copies: dict[int, Tensor] = {}  # tied tensors stay tied
    final = {
        name: copies.setdefault(value.data_ptr() or id(value), value.to("cpu", copy=True))
        for name, value in into.items()
    }
    return Ingredient(f"final weights (step {step})", IN_MEMORY, None, lambda: final)


def _holds(ingredient: Ingredient, weights: dict[str, Tensor]) -> bool:
    """Return whether a checkpoint has the same bits as these weights."""
    same = all(
        key in weights and torch.equal(ingredient.tensor(key).to(weights[key].device, weights[key].dtype), weights[key])
        for key in ingredient.specs
    )
    ingredient.close()
    return same
