"""The soup of a run's own checkpoints, made at the end of training with the trainer's validation metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from shared_core.checkpoint_formats import Ingredient
from shared_core.distributed.collectives import broadcast_
from shared_core.distributed.sharded_tensors import reshard_
from shared_core.engine.checks.claims import Claim, Same
from shared_core.engine.plan import Plan, Touched
from shared_core.engine.technique import Context, Technique
from shared_core.errors import MatchError
from shared_core.front_ends.preflight import check_all
from shared_core.modules.matching import plain_name
from shared_core.printing import counted
from shared_core.soup.adapters import RANK_FIELDS, AdapterWeights, PeftAdapter, adapter_of, candidate_for
from shared_core.soup.averaging import estimate_norms_, refuse_no_norms
from shared_core.soup.config import SoupConfig
from shared_core.soup.greedy import Order, greedy_soup, noise_of, path_dict, rank_errors
from shared_core.soup.ingredients import RunIngredients
from shared_core.soup.merging import average_of


class ModelSoup(Technique):
    """Averages this run's checkpoints when training ends, and leaves the soup in the model.

    The final weights are an ingredient too, unless a checkpoint holds them. Candidates are written directly into the
    model and scored by the trainer's evaluation, with masks re-applied. For a PEFT model they are adapters of other
    ranks. Every process follows the main process's score.
    """

    replaces_weights = True
    config: SoupConfig

    def __init__(self, config: SoupConfig) -> None:
        super().__init__(config)
        self._adapter: PeftAdapter | None = None
        self._reported: tuple[int, set[str]] | None = None
        self._report: dict[str, Any] = {}

    def before_attach(self, context: Context) -> None:
        """Find the adapter of a PEFT model, which cannot be averaged by A and B separately."""
        self._adapter = adapter_of(context.model)

    def plan(self, context: Context) -> Plan:
        """Return what happens after training."""
        return Plan([(None, f"checkpoints are averaged ({self.config.kind}) and evaluated")])

    def attach(self, context: Context) -> Touched:
        """Return the parameters that are averaged."""
        return Touched.parameters(context.model.named_parameters(), what="parameters")

    def begin(self, context: Context, state: Mapping[str, Any] | None) -> None:
        """Check before training that checkpoints can be listed, and that options have an effect."""
        context.services.checkpoints()
        refuse_no_norms("soup", self.config.bn_batches, context.model)
        if self.config.rank is not None and self._adapter is None:
            got = f"{self.config.rank} for {type(context.model).__name__}"
            raise MatchError("soup", f"rank must be given for a PEFT model only, got {got}", "remove it")

    def evaluated(self, context: Context, metrics: Mapping[str, float | Tensor]) -> None:
        """Check during training that validation reports the metric, since one batch at the start may not show it."""
        # Loggers may report one step in several calls (one per dataset), so collect names until the step changes.
        step, names = self._reported or (context.step, set())
        if context.step != step:
            check_all(self.config.needed_metrics(), names)
        self._reported = context.step, names | set(metrics)

    def finish(self, context: Context) -> None:
        """Replace the model's weights, or a PEFT model's adapter, by the soup of its checkpoints."""
        # If the search ends early, or the run saved no checkpoint, the model keeps its final weights.
        model = context.model
        options, say = self.config, context.services.say
        run = RunIngredients(model, context, self._adapter)
        opened = run.opened(len(options.weights) or options.last)
        if opened is None:
            self._report = {"kind": options.kind, "ingredients": [], "candidates": 0}
            return
        ingredients, final = opened
        if len(ingredients) == 1:
            say(f"efftrain: soup: the only ingredient is {final.name}, which the model already holds")

        def load(candidate: dict[str, Tensor]) -> None:
            if self._adapter is not None:
                # First load the tensors, then shard again, then have others re-read the weights.
                self._adapter.load(candidate)
            reshard_(model)
            context.report_weights_replaced()

        def written(candidate: dict[str, Tensor]) -> None:
            load(candidate)
            if options.bn_batches:
                estimate_norms_(model, context.services.calibrate, options.bn_batches)

        target = {"into": run.into, "after_average": written, "rank": options.rank}
        try:
            if options.kind == "greedy":
                self._search(run, ingredients, target, context)
            else:
                self._average(ingredients, target, context)
            # The last validation saw the final weights. Unless they are the soup, validate again.
            context.unvalidated |= self._report["ingredients"] != [final.name] or bool(options.bn_batches)
        # Also on KeyboardInterrupt: the model must never be left with a rejected candidate.
        except BaseException:
            candidate_for([final], run.into, load, None).write_single(final)
            raise

    def _average(self, ingredients: list[Ingredient], target: dict[str, Any], context: Context) -> None:
        options, say = self.config, context.services.say
        # With fewer checkpoints than weights, the newest keep theirs.
        weights = options.weights[-len(ingredients) :]
        members = ingredients[-len(weights) :] if weights else ingredients
        if len(weights) < len(options.weights):
            say(f"efftrain: soup: only {len(members)} ingredients, so only the last {len(weights)} weights are used")
        found = average_of(members, weights or None, **target)
        self._report = {
            "kind": options.kind,
            "ingredients": found.ingredients,
            "candidates": len(members),
            "left_out": found.left_out,
            **rank_errors(found.state_dict),
            **_ranks(found.state_dict),
        }
        if weights:
            self._report["weights"] = found.weights
        for name, reason in found.left_out.items():
            say(f"efftrain: soup: {name} is {reason}")
        say(f"efftrain: soup: {options.kind} average of {len(found.ingredients)} ingredients")

    def _search(
        self, run: RunIngredients, ingredients: list[Ingredient], target: dict[str, Any], context: Context
    ) -> None:
        options, say = self.config, context.services.say
        # The orders "logged" and "newest" are prepared here, and the search uses them as given.
        order: Order = "given"
        if options.order in ("metric", "random"):
            order = cast(Order, options.order)
        elif options.order == "newest":
            ingredients = ingredients[::-1]
        else:
            ingredients = run.ranked(ingredients, 1.0 if options.larger_is_better else -1.0)
            if not any(metric is not None for metric in run.logged.values()):
                say(f"efftrain: soup: no checkpoint was saved with {options.metric}, so the newest is tried first")
        result = greedy_soup(
            ingredients,
            lambda _: self._score(context),
            mode="max" if options.larger_is_better else "min",
            strict=options.strict,
            min_delta=options.min_delta,
            order=order,
            seed=options.seed,
            repeat=options.repeat,
            max_ingredients=options.max_ingredients,
            **target,
        )
        self._report = {
            "kind": "greedy",
            "metric": options.metric,
            "candidates": len(ingredients),
            "best_single" if order == "metric" else "first_single": result.history[0]["single"],
            **path_dict(result),
            **_ranks(result.state_dict),
        }
        say(
            f"efftrain: soup: {len(result.ingredients)} of {len(ingredients)} ingredients, {options.metric} "
            f"{result.score:.6g} ({result.history[0]['reason']} {result.history[0]['single']:.6g})"
        )
        if (noise := noise_of(result)) is not None:
            say(f"efftrain: soup: {noise}")

    def _score(self, context: Context) -> float:
        metrics = context.services.evaluate()
        check_all(self.config.needed_metrics(), metrics)
        score = float(metrics[self.config.metric])
        device = next((parameter.device for parameter in context.model.parameters()), torch.device("cpu"))
        # Metrics may differ in the last bit between processes, and different decisions would deadlock.
        return float(broadcast_(torch.tensor(score, dtype=torch.float64, device=device)))

    def claims(self, context: Context) -> Mapping[str, Claim]:
        """Return the claim that parameters stay those of the soup, including masks and quantizers."""
        return {plain_name(name): Same() for name, _ in context.model.named_parameters()}

    def report(self) -> dict[str, Any]:
        """Return members, path and scores of the soup. Empty before the end of training."""
        return dict(self._report)

    @staticmethod
    def summary(report: Mapping[str, Any]) -> list[str]:
        """Return a report in plain sentences, the result first. It may have been read from a file."""
        if not report:
            return ["The soup is made after training."]
        members, tried = len(report["ingredients"]), counted(report["candidates"], "checkpoint")
        text = f"Averaged {members:,} of {tried} ({report['kind']})" if members else f"Averaged none of {tried}"
        first = report.get("best_single", report.get("first_single"))
        if (score := report.get("score")) is None:
            return [f"{text}."]
        which = "best" if "best_single" in report else "first"
        before = "" if first is None else f", {first:.4g} for the {which} checkpoint alone"
        return [f"{text}.", f"Metric {report['metric']}: {score:.4g}{before}."]


def _ranks(soup: dict[str, Tensor]) -> dict[str, Any]:
    """Return the rank fields needed to load an adapter's weights."""
    if not isinstance(soup, AdapterWeights):
        return {}
    return {"adapter": {name: soup.config.get(name) for name in RANK_FIELDS}}
