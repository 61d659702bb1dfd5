"""`eff soup`: average checkpoints, greedily by the user's metric, into a checkpoint of the same format."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from shared_core.cli.arguments import CommandOptions, bar, force, takes
from shared_core.cli.loading import build_model, device_name, fit_weights_, load_folder, score
from shared_core.config.options import option
from shared_core.errors import CheckpointError, MissingExtraError, require
from shared_core.files.atomic import check_writable
from shared_core.files.json_yaml import json_text
from shared_core.files.user_code import function, user_module
from shared_core.front_ends.finding import front_ends
from shared_core.printing import counted, echo, share_text

if TYPE_CHECKING:
    from shared_core.distributed.job import Job

_DARE = ("dare_linear", "dare_ties")
_TASK_VECTORS = ("ties", *_DARE)
_MERGES = (*_TASK_VECTORS, "slerp")
_SEARCH = ("strict", "min_delta", "order", "rank_by", "max_ingredients", "repeat")
_JUDGED = ("evaluate", "model", "task", "mode", "journal", "plot", "jobs")
_OF_TASK = ("data", "text", "batch_size", "max_length", "device")

_TASKS: dict[str, Literal["max", "min"]] = {
    "accuracy": "max", "f1": "max", "loss": "min", "perplexity": "min",
    "mse": "min", "mae": "min", "pearson": "max", "spearman": "max",
}  # fmt: skip


class ModelScore:
    """Scores state dicts by the user's function of a model, into which each is loaded.

    Args:
        evaluate: ``module:function`` of a model.
        model: ``module:function`` that builds it.
        folder: Its Hugging Face folder, where no function builds it.
    """

    def __init__(self, evaluate: str, model: str | None, folder: Path | None) -> None:
        self._names = evaluate, model, folder
        self._judge = function(evaluate, "eff soup: --eval", "model")
        if folder is None:
            self._model = build_model(str(model), "eff soup", "--model")[0]
        else:
            self._model = load_folder(folder, "eff soup")

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelScore, self._names  # each process builds its own

    def __call__(self, weights: Mapping[str, Any]) -> float:
        """Return the quality of the model with these weights."""
        fit_weights_(self._model, weights, "the checkpoints", "eff soup")
        return score(self._judge, self._model, "eff soup")


@dataclass
class Judge:
    """The function that scores a state dict, its direction, and its settings for the journal."""

    evaluate: Callable[[dict[str, Any]], float]
    mode: Literal["max", "min"]
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_function(cls, name: str, model: str | None, first: Any, mode: str | None) -> Judge:
        """Return the user's quality function as a judge."""
        from shared_core.checkpoint_formats import HF_FOLDER

        rule = f"--eval needs a model, but {first.name} has no config to build it from"
        has_model = model is not None or (first.kind == HF_FOLDER and first.config)
        require(has_model, "eff soup", rule, "add --model my_module:build, a function that returns it", CheckpointError)
        evaluate = ModelScore(name, model, None if model else first.path)
        file = getattr(user_module(name.rpartition(":")[0]), "__file__", None)
        # scores from an earlier version of the function must not be reused
        code = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else None
        return cls(evaluate, cast(Any, mode or "max"), {"evaluate": name, "evaluate_file": code})

    @classmethod
    def of_task(cls, task: str, first: Any, data: Path | None, **options: Any) -> Judge:
        """Return a built-in metric of the model in the first ingredient's folder."""
        from shared_core.checkpoint_formats import HF_FOLDER

        require(
            task in _TASKS, "eff soup", f"--task must be one of {', '.join(_TASKS)}, got {task!r}", "or give --eval"
        )
        is_model = first.kind == HF_FOLDER and first.config and not any(first.prefixes.values())
        rule = f"--task needs Hugging Face folders of one model with config.json, got {first.name} ({first.kind})"
        require(is_model, "eff soup", rule, "give --eval", CheckpointError)
        options["device"] = device_name(options["device"], "eff soup")
        for front_end in front_ends():
            make = getattr(front_end, "evaluator", None)
            if make is not None:
                evaluate = make(task, first.path, data, **options)
                about = {**options, "text": list(options["text"]), "task": task, "data": evaluate.digest}
                return cls(evaluate, _TASKS[task], about)
        raise MissingExtraError("eff soup --task", "transformers", "hf")


@dataclass(frozen=True, kw_only=True)
class SoupOptions(CommandOptions):
    """Arguments and options of `eff soup`."""

    key: ClassVar[str] = "eff soup"
    technique: ClassVar[str] = "soup"
    needs: ClassVar = {"task": ("data",)}
    conditions: ClassVar = {"draws": f"--order random, or --kind {' or '.join(_DARE)}"}
    without: ClassVar = {
        "diagnose": ("out", "force", "kind", "rank", "seed", *_SEARCH), "rank_by": ("order",),
        "jobs": ("rank_by", "order"),
    }  # fmt: skip

    paths: tuple[Path, ...] = option(
        (),
        "Checkpoints: Hugging Face folders, Lightning .ckpt, state dict files, distributed checkpoints, or a "
        "run's folder; or PEFT adapters.",
        argument=True,
        reads="path",
    )
    evaluate: str | None = option(
        None, "module:function that takes a model and returns its quality.", flag="--eval", reads="function"
    )
    model: str | None = option(
        None,
        "module:function that builds the model for --eval. Default: the model of a Hugging Face folder.",
        reads="function",
    )
    task: str | None = option(
        None,
        "A metric instead of --eval, for Hugging Face folders, on --data: accuracy, f1, loss, perplexity, mse, mae, "
        "pearson or spearman.",
    )
    data: Path | None = option(
        None,
        "A .jsonl, .csv or .parquet file, or the folder of a saved data set, with a column label or labels and columns "
        "of text, input_ids, pixel_values or image (also img, file_name, path); for images also an .npz of images, or "
        "a folder of images per class.",
        reads="path",
    )
    text: str | None = option(None, "One or two columns of text, such as a,b. Default: all.")
    batch_size: int = option(32, "Examples per batch.", low=1)
    max_length: int | None = option(None, "Tokens per example. Default: what model and tokenizer allow.", low=2)
    device: str = option("auto", "Where --task runs the model: auto, cpu, cuda, cuda:1, ...")
    out: Path | None = option(None, "Where to write the soup, in the format of the first checkpoint.")
    force: bool = force()
    kind: Literal["greedy", "uniform", "weighted", "ties", "dare_linear", "dare_ties", "slerp"] | None = option(
        None,
        "How to average: greedy (add while the metric does not fall), uniform (all), weighted (all, by --weights), a "
        "merge of differences to --base (ties, dare_linear, dare_ties), or slerp (of two).",
    )
    base: Path | None = option(
        None,
        "The checkpoint that all were fine-tuned from.",
        reads="path",
        only_with={"kind": _TASK_VECTORS},
        required=True,
    )
    density: float | None = option(
        None,
        "The share of each difference to keep, in (0, 1].",
        only_with={"kind": _TASK_VECTORS},
        required=True,
    )
    lambda_: float = option(
        1.0,
        "Factor of the merged difference.",
        flag="--lambda",
        only_with={"kind": _TASK_VECTORS},
    )
    t: float = option(
        0.5, "Position between the checkpoints: 0 is the first, 1 the second.", only_with={"kind": ("slerp",)}
    )
    weights: tuple[float, ...] | None = option(
        None,
        "Weight of each checkpoint, such as 600,200,200: example counts for federated averaging.",
        flag_type=str,
        only_with={"kind": ("weighted", *_TASK_VECTORS)},
    )
    diagnose: bool = option(False, "Write no soup. Print metrics, distances and barriers of the checkpoints.")
    mode: Literal["max", "min"] | None = option(
        None, "Whether a larger (max, the default) or smaller (min) --eval is better."
    )
    strict: bool = option(False, "Accept only averages that improve the metric.")
    min_delta: float = option(0.0, "Accept only averages better by at least this.")
    order: Literal["metric", "random", "given"] = option(
        "metric",
        "Order of the checkpoints: metric (best first), or random or given (only the first is evaluated alone).",
    )
    rank_by: str | None = option(
        None,
        "Order by a logged metric: eval_accuracy, or eval_fid:min if the name does not show the direction. Only the "
        "first is evaluated alone.",
    )
    seed: int = option(0, "Seed of random choices.", only_with={"draws": (True,)})
    repeat: bool = option(True, "Evaluate the first checkpoint twice, to detect a noisy metric.")
    max_ingredients: int | None = option(None, "Largest number of checkpoints in the soup.")
    jobs: int = option(1, "Number of processes that evaluate single checkpoints.", low=1)
    journal: Path | None = option(None, "A file for the scores. A killed search continues from it.")
    rank: int | None = option(None, "Truncate averages of adapters to this rank (SVD).")
    unpruned: bool = option(False, "Also take checkpoints from before their pruning schedule ended.")
    as_json: bool = option(False, "Print JSON instead of a table.", flag="--json")
    plot: Path | None = option(None, "Plot the search to this file (.png, .svg, .pdf).")

    @property
    def averages(self) -> bool:
        """True if all are averaged or merged at once, without evaluation."""
        return self.kind not in (None, "greedy")

    @property
    def draws(self) -> bool:
        """True if random choices are involved."""
        return self.order == "random" or self.kind in _DARE

    def validate(self) -> None:
        """Raise an error for options that do not apply to this kind, and for missing ones."""
        self.require(self.out or self.diagnose, "--out must be given", "name the folder or file to write")
        if self.averages:
            self._check_average()
        else:
            self._check_judged()

    def _check_average(self) -> None:
        for why, names in (
            ("only the greedy search needs them", _SEARCH),
            ("only averages of adapters need it", ("rank",) if self.kind in _MERGES else ()),
            ("it evaluates no candidates", (*_JUDGED, *_OF_TASK)),
        ):
            given = [self.named(name)[1] for name in names if self.is_given(name)]
            rule = f"--kind {self.kind} cannot be combined with {' and '.join(given)}: {why}"
            self.require(not given, rule, "leave these out, or choose another kind")
        rule = "--weights must be given with --kind weighted"
        self.require(self.kind != "weighted" or self.weights, rule, "give one number per checkpoint")

    def _check_judged(self) -> None:
        got = "none" if self.task is None else "both"
        rule = f"--eval must be given as module:function, or --task with --data, got {got}"
        self.require((self.evaluate is None) != (self.task is None), rule, "or average all with --kind uniform")
        other, odd = ("--task", _OF_TASK) if self.task is None else ("--eval", ("mode", "model"))
        for name in odd:
            rule = f"{self.named(name)[1]} needs {other}, got none"
            self.require(not self.is_given(name), rule, "leave it out")

    def judge(self, first: Any) -> Judge:
        """Return the judge: the user's function, or a metric of the model in the first ingredient's folder."""
        if self.evaluate is not None:
            return Judge.of_function(self.evaluate, self.model, first, self.mode)
        columns = tuple((self.text or "").replace(",", " ").split())
        options = {"batch_size": self.batch_size, "max_length": self.max_length, "device": self.device}
        return Judge.of_task(str(self.task), first, self.data, text=columns, **options)


@dataclass(frozen=True)
class Checkpoints:
    """The first checkpoint given, those that can be averaged, and a function that restores the newest masks."""

    first: Any
    usable: list[Any]
    remask: Callable[[dict[str, Any]], None] | None
    shares: list[float] | None
    """The weight of each usable ingredient, if weights are given."""
    base: Any
    """The checkpoint that all were fine-tuned from, if given."""

    @classmethod
    def opened(cls, options: SoupOptions, *, is_main: bool = True) -> Checkpoints:
        """Open the named checkpoints. The main process reports those left out."""
        from shared_core.checkpoint_formats import expand
        from shared_core.reports.page import check_plot
        from shared_core.soup.averaging import masked_ingredients
        from shared_core.soup.ingredients import open_ingredients
        from shared_core.soup.merging import check_weights
        from shared_core.soup.saving import check_beside, check_target

        found = expand(options.paths)
        bases = [] if options.base is None else expand([*found, options.base])[len(found) :]
        rule = f"--base must name one checkpoint, got {len(bases)}"
        require(len(bases) < 2, "eff soup", rule, "name one of them", CheckpointError)
        # first, so that a pattern without matches is reported
        opened = open_ingredients([*found, *bases]) if found else []
        opened, base = opened[: len(found)], next(iter(opened[len(found) :]), None)
        rule = f"PATH must name at least two checkpoints, got {len(found)}"
        run = next((path for path in found if any(path.glob("checkpoint-*"))), None)
        remedy = (
            "give two or more"
            if run is None
            else f"{run} holds a final model too, so name its checkpoints: {run}/checkpoint-*"
        )
        require(len(found) > 1, "eff soup", rule, remedy, CheckpointError)
        if options.out is not None:
            check_target(options.out, opened[0])
            check_beside(opened)
        if options.journal is not None:
            check_writable(options.journal, "eff soup: --journal")
        if options.plot is not None:
            check_plot(options.plot, "eff soup")
        shares = None if options.weights is None else [*options.weights]
        check_weights(shares, len(opened))
        usable, remask, notes = masked_ingredients(opened, keep_unpruned=options.unpruned)
        if shares is not None:
            shares = [share for share, item in zip(shares, opened, strict=True) if item in usable]
            check_weights(shares, len(usable))
        for note in notes if is_main else ():
            _aside(note)
        return cls(opened[0], usable, remask, shares, base)

    def like(self, best: str) -> Any:
        """Return the ingredient whose format a soup uses: the best, else the first, preferably one with a config."""
        first, usable = self.first, self.usable
        found = (*(item for item in usable if item.name == best), first, *usable)
        alike = (item for item in found if (item.kind, item.suffix) == (first.kind, first.suffix))
        able = [item for item in alike if not item.is_renamed]  # a soup has the names of the first
        return next((item for item in able if item.config), able[0] if able else first)


@takes(SoupOptions)
def soup(options: SoupOptions) -> None:
    """Average checkpoints of one model, as long as a metric does not get worse.

    Other kinds average or merge all checkpoints. Under torchrun, the processes share the evaluations of single
    checkpoints.
    """
    from shared_core.distributed.job import Job

    with Job.joined() as job:
        _soup(options, job)


def _soup(options: SoupOptions, job: Job) -> None:
    from shared_core.distributed.job import check_alone
    from shared_core.soup.scoring import score_share

    if options.averages or options.order != "metric" or options.rank_by or options.jobs > 1:
        # here checkpoints are not evaluated one by one, so several processes would not help
        check_alone("eff soup", " with --order, --rank-by, --jobs or a --kind that searches nothing", job.size)
    checkpoints = Checkpoints.opened(options, is_main=job.is_main)
    if options.averages:
        _average(checkpoints, options, cast(Path, options.out))
        return
    judge = options.judge(checkpoints.first)
    job.meet("checkpoints opened")  # before a process writes files that another would find
    if not job.is_main:
        score_share(checkpoints.usable, judge.evaluate, job, checkpoints.remask)
    elif options.out is None:
        _diagnose(checkpoints, judge, options, job)
    else:
        _search(checkpoints, judge, options, options.out, job)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    number = itertools.count(1)
    with bar("evaluations (at most)") as advance:
        yield lambda: advance(next(number), total)


def _search(checkpoints: Checkpoints, judge: Judge, options: SoupOptions, out: Path, job: Job) -> None:
    """Make a greedy soup, write it and report its path."""
    from shared_core.reports.page import Console
    from shared_core.soup.greedy import greedy_soup, noise_of, path_json, path_plot, path_table
    from shared_core.soup.saving import save_soup, write_path

    usable, order = checkpoints.usable, options.order
    logged: dict[str, float] = {}
    if options.rank_by is not None:
        usable, logged = _ranked(usable, options.rank_by)
        judge.about["rank_by"], order = options.rank_by, "given"
    alone = len(usable) if order == "metric" else 1
    with _progress(alone + options.repeat + len(usable) - 1) as advance:
        result = greedy_soup(
            usable, judge.evaluate, mode=judge.mode, about=judge.about, progress=advance, strict=options.strict,
            min_delta=options.min_delta, order=order, seed=options.seed, repeat=options.repeat,
            jobs=options.jobs, journal=options.journal, max_ingredients=options.max_ingredients, rank=options.rank,
            after_average=checkpoints.remask, job=job,
        )  # fmt: skip
    for row in result.history if logged else ():
        row["logged"] = logged[row["name"]]
    like = checkpoints.like(result.ingredients[0])
    save_soup(result.state_dict, like, out, lambda target: write_path(target, path_json(result)), _aside)
    if options.plot is not None:
        path_plot(result, options.plot)
    if (noise := noise_of(result)) is not None:
        _aside(noise)
    if options.as_json:
        echo(path_json(result))
    else:
        Console().print(path_table(result))
        _say_rank_errors(result.state_dict)
        echo(f"Wrote {out}.")


def _ranked(usable: list[Any], rank_by: str) -> tuple[list[Any], dict[str, float]]:
    """Return checkpoints sorted by a metric that the trainer logged, and its values."""
    from shared_core.soup.scoring import rank_by_logged

    metric, colon, better = rank_by.partition(":")
    rule = f"--rank-by must be a metric, or metric:max or metric:min, got {rank_by!r}"
    require(metric and better in (("max", "min") if colon else ("",)), "eff soup", rule)
    usable, values = rank_by_logged(usable, metric, cast(Any, better or "auto"))
    return usable, {item.name: value for item, value in zip(usable, values, strict=True)}


def _aside(note: str) -> None:
    echo(note, err=True)


def _say_rank_errors(state_dict: Any) -> None:
    from shared_core.soup.greedy import rank_errors

    lost = rank_errors(state_dict)
    if lost:
        worst = max(lost["rank_errors"], key=lost["rank_errors"].get)
        echo(
            f"Truncating to the rank changes the adapter by {share_text(lost['rank_error'])}. {worst} changes most, by "
            f"{share_text(lost['rank_errors'][worst])}."
        )


def _average(checkpoints: Checkpoints, options: SoupOptions, out: Path) -> None:
    """Write the uniform or weighted average of all, or a merge."""
    from shared_core.soup.greedy import rank_errors
    from shared_core.soup.merging import average_of
    from shared_core.soup.saving import save_soup, write_path

    about: dict[str, Any] = {}
    with bar("averaging") as advance:
        if options.kind in _MERGES:
            found, about = _merged(checkpoints, options)
        else:
            found = average_of(
                checkpoints.usable, checkpoints.shares, after_average=checkpoints.remask, rank=options.rank,
                progress=advance,
            )  # fmt: skip
    path = json.dumps({
        "ingredients": found.ingredients, "weights": None if checkpoints.shares is None else found.weights,
        "left_out": found.left_out, **about, **rank_errors(found.state_dict),
    })  # fmt: skip
    like = checkpoints.like(found.ingredients[0])
    save_soup(found.state_dict, like, out, lambda target: write_path(target, path), _aside)
    for name, reason in found.left_out.items():
        _aside(f"{name} is {reason}")
    if not options.as_json:
        _say_rank_errors(found.state_dict)
    what, members = "Merged" if about else "Averaged", counted(len(found.ingredients), "checkpoint")
    text = f"{what} {members} ({options.kind}).\nWrote {out}."
    echo(path if options.as_json else text)


def _merged(checkpoints: Checkpoints, options: SoupOptions) -> tuple[Any, dict[str, Any]]:
    """Return the merge of all, and its settings."""
    from shared_core.soup.merging import Average, slerp_soup, task_vector_soup

    usable, remask = checkpoints.usable, checkpoints.remask
    about: dict[str, Any] = {"kind": options.kind}
    if options.kind == "slerp":
        about["t"] = options.t
        state_dict = slerp_soup(usable, options.t, after_average=remask)
    else:
        about |= {"base": checkpoints.base.name, "density": options.density, "lambda": options.lambda_}
        if options.kind in _DARE:
            about["seed"] = options.seed
        state_dict = task_vector_soup(
            usable, checkpoints.base, cast(Any, options.kind), density=cast(float, options.density),
            weights=checkpoints.shares, lambda_=options.lambda_, seed=options.seed, after_average=remask,
        )  # fmt: skip
    return Average(state_dict, [item.name for item in usable], checkpoints.shares or [], {}), about


def _diagnose(checkpoints: Checkpoints, judge: Judge, options: SoupOptions, job: Job) -> None:
    """Report metrics, distances and barriers of the ingredients."""
    from shared_core.reports.page import Console
    from shared_core.soup.diagnosis import diagnose, diagnosis_plot, diagnosis_table

    with _progress(4 * len(checkpoints.usable) - 2) as advance:
        found = diagnose(
            checkpoints.usable, judge.evaluate, mode=judge.mode, jobs=options.jobs, progress=advance,
            journal=options.journal, about=judge.about, after_average=checkpoints.remask, job=job,
        )  # fmt: skip
    if options.plot is not None:
        diagnosis_plot(found, options.plot)
    if options.as_json:
        echo(json_text(found.to_dict()))
    else:
        Console().print(diagnosis_table(found))
    for warning in found.warnings:
        _aside(warning)
