"""`eff search`: search for small models that are cut from a trained one and trained by the user's script."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import typer

from shared_core.cli.arguments import RunnerOptions, bar, takes, training_command
from shared_core.cli.loading import copy_beside, load_folder, load_weights, made_up_inputs, open_model
from shared_core.cli.trainings import DISTILL, GOES_ON, ChainCommand, stoppable
from shared_core.config.options import option
from shared_core.files.user_code import function
from shared_core.libraries import optional
from shared_core.printing import amount, by_reason, echo, is_quiet, share_text

if TYPE_CHECKING:
    from torch import nn

    from shared_core.runs import Candidates, ModelSearch, SearchRow


class SearchCommand(ChainCommand):
    """Accepts --distill_* options. The training command follows --."""

    several: ClassVar[tuple[str, ...]] = ()


_SIZES = ("layers", "hidden_size", "intermediate_size", "attention_heads", "key_value_heads", "bits")


def _size(what: str) -> Any:
    return option((), f"Numbers of {what} to try, such as 2,4.", flag_type=str)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(RunnerOptions):
    """Options of `eff search`."""

    key: ClassVar[str] = "eff search"

    model: str = option(
        help="A Hugging Face folder, or module:function that returns a transformers model or (model, inputs).",
        argument=True,
        reads="model",
    )
    command: tuple[Any, ...] = training_command(
        "your training command, `python my_train.py ARGS`, with {student} and {out}."
    )
    out: Path = option(help="Folder of the search. A stopped search continues from it.")
    weights: Path | None = option(None, "For module:function: a folder or file with the trained weights.", reads="path")
    calibration: str = option(
        help="module:function that returns batches: tensors, tuples, dicts or what --loss takes.", reads="function"
    )
    inputs: str | None = option(
        None, "module:function that returns example inputs. Default: generated, for a folder.", reads="function"
    )
    loss: str | None = option(
        None, "module:function that takes (model, batch) and returns its loss; default: output.loss.", reads="function"
    )
    cost: Literal["bytes", "flops", "latency", "onnxruntime"] = option(
        "bytes", "Cost of a model, or of its forward pass: latency in torch, or in onnxruntime after export."
    )
    limit: float = option(0.5, "Largest cost, as a share of the model's.", above=0, high=1)
    trials: int = option(20, "Number of trainings.", low=1)
    layers: tuple[int, ...] = _size("layers")
    hidden_size: tuple[int, ...] = _size("residual channels")
    intermediate_size: tuple[int, ...] = _size("neurons per MLP")
    attention_heads: tuple[int, ...] = _size("query heads per layer")
    key_value_heads: tuple[int, ...] = _size("key-value heads per layer")
    bits: tuple[int, ...] = _size("bits per weight on average")
    scheme: Literal["int8", "int8_dynamic", "int8_weight"] = option("int8", "For --bits: what quantizes layers.")
    metric: str | None = option(None, "Validation metric to optimize, as the trainer names it. Default: the loss.")
    mode: Literal["auto", "max", "min"] = option("auto", "Whether a larger (max) or smaller (min) metric is better.")
    sampler: Literal["tpe", "random"] = option("tpe", "How to propose sizes: Optuna's TPE, or at random as a baseline.")
    stop_early: bool = option(True, "Stop trainings whose validations are in the worst quarter.")
    batches: int = option(100, "Number of calibration batches.", low=1)
    trained: str | None = option(None, "Glob for the model that the script writes in {out}, if it is not found.")
    seed: int = option(0, "Seed of the search.", low=0)

    def candidates(self, network: nn.Module, example: Any) -> Candidates:
        """Return the candidates of a model, on the given batches."""
        from itertools import islice

        from shared_core.cli.loading import user_batches
        from shared_core.runs import Candidates

        loss = function(self.loss, f"{self.key}: --loss", "model", "batch") if self.loss else None
        data = [*islice(user_batches(self.calibration, f"{self.key}: --calibration"), self.batches)]
        sizes = {name: getattr(self, name) for name in _SIZES if getattr(self, name)}
        return Candidates(
            network, data, example, sizes=sizes, cost=self.cost, scheme=self.scheme, loss=loss, seed=self.seed
        )


@takes(SearchOptions)
def search(asked: SearchOptions, given: Mapping[str, list[str]]) -> None:
    """Search for small models: cut your trained model to many sizes, and train each with your own script.

    Every candidate learns from the uncut model by distillation; put --distill_* flags before or after --. Optuna
    proposes depth, width, heads and bits, for the best metric within the limit of a cost. OUT holds search.json,
    front.png, and a folder, log, recipe and receipt per candidate. Each model of the Pareto front is a folder that
    loads.
    """
    from shared_core.reports.page import Console
    from shared_core.runs import RunError, executor_of
    from shared_core.runs.command import TrainingCommand

    TrainingCommand.parse(asked.command, asked.key)  # a missing script is told before torch is imported
    optional("optuna", "search", asked.key)
    out = asked.out
    network, example, folder = open_model(asked.model, asked.weights, asked.key)
    example = function(asked.inputs, f"{asked.key}: --inputs")() if asked.inputs else example
    if example is None:
        rule = f"{asked.model} must return (model, example_inputs), got a model alone"
        asked.require(folder, rule, "return both, or pass --inputs")
        example = made_up_inputs(network, asked.key)
    with bar("cutting"):
        candidates = asked.candidates(network, example)
    errors = Console(stderr=True, quiet=is_quiet())

    def say(text: str) -> None:
        errors.print(text, markup=False, highlight=False, soft_wrap=True)

    for line in by_reason(candidates.left_out, "Not cut"):
        say(line)
    work = _work(asked, given, candidates, folder, executor_of(asked.executor, asked.executor_set, out, asked.key))

    def kept() -> str:
        return f"{work.tried} of {asked.trials} trainings are finished in {out}; {GOES_ON}"

    try:
        stream = (sys.stderr if asked.as_json else sys.stdout).buffer
        with stoppable(asked.key, kept):
            found = work.run(
                asked.trials, output=stream,
                begin=lambda row: say(f"{row.name}: {share_text(row.share or 0)} of the cost, training"),
                end=lambda row: say(_ends(row, work.table.metric)),
            )  # fmt: skip
    except RunError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    for row in found.front:
        path = out / str(row.model)
        load_folder(path, asked.key) if folder else type(network).from_pretrained(path)  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):
        found.plot(out / "front.png")
    if asked.as_json:
        echo(found.json())
        return
    Console().print(found.table())
    states = [row.state for row in found.rows]
    echo(", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)))
    if (best := found.best) is not None:
        echo(f"the best within the limit: {out / str(best.model)}")
    echo(f"wrote {out / 'search.json'} and, with matplotlib, front.png")


def _work(
    asked: SearchOptions, given: Mapping[str, list[str]], candidates: Candidates, folder: Path | None, executor: Any
) -> ModelSearch:
    from shared_core.engine.registry import flags
    from shared_core.runs import ModelSearch

    options = {}
    for name, values in given.items():
        is_switch = name in flags() and flags()[name][1].type in ("bool", bool)
        is_one = len(values) == 1 or (is_switch and not values)
        asked.require(is_one, f"--{name} must have one value, got {len(values)}")
        options[name.removeprefix(DISTILL)] = values[0] if values else "true"

    def save(model: Any, target: Path) -> None:
        model.save_pretrained(target)
        if folder is not None:
            copy_beside(folder, target)

    names = ("limit", "metric", "mode", "sampler", "stop_early", "seed", "trained")
    return ModelSearch(
        asked.command, asked.out, candidates, teacher=folder, options=options, executor=executor, save=save,
        load=lambda model, path: load_weights(model, path, asked.key),
        **{name: getattr(asked, name) for name in names},
    )  # fmt: skip


def _ends(row: SearchRow, metric: str | None) -> str:
    if row.state == "impossible":
        return f"{row.name}: impossible: {row.note}"
    if row.state == "too costly":
        return f"{row.name}: {share_text(row.share or 0)} of the cost, above the limit"
    if row.state == "stopped":
        return f"{row.name}: stopped after {row.seconds:.0f} s, its validations are among the worst"
    reached = "a metric that is not finite" if row.quality is None else f"{metric} {row.quality:.6g}"
    return f"{row.name}: {amount(row.parameters or 0)} parameters, {reached}, {row.seconds:.0f} s"
