"""What `eff soup` does once its options are checked: search, average, diagnose."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import typer

from shared_core.cli.loading import device_name, function
from shared_core.cli.progress_bar import bar
from shared_core.cli.run import front_ends
from shared_core.errors import CheckpointError, ConfigError, MissingExtraError
from shared_core.strict_json import json_text

_TASKS: dict[str, Literal["max", "min"]] = {
    "accuracy": "max", "f1": "max", "loss": "min", "perplexity": "min",
    "mse": "min", "mae": "min", "pearson": "max", "spearman": "max",
}  # fmt: skip


@dataclass
class Judge:
    """What scores a state dict, which scores are better, and what a journal has to know of it."""

    evaluate: Callable[[dict[str, Any]], float]
    mode: Literal["max", "min"]
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_function(cls, name: str, mode: str | None) -> Judge:
        """Return the user's function as a judge."""
        evaluate = function(name, "eff soup: --eval", "weights")
        file = getattr(sys.modules[name.partition(":")[0]], "__file__", None)
        # scores of a function that was changed since are not its own
        code = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else None
        return cls(evaluate, cast(Any, mode or "max"), {"evaluate": name, "evaluate_file": code})

    @classmethod
    def of_task(cls, task: str, first: Any, data: Path | None, **options: Any) -> Judge:
        """Return a built-in metric of the model in the first ingredient's folder.

        Raises:
            ConfigError: If there is no such metric.
            CheckpointError: If ingredients are no folders of transformers models, or the data cannot be read.
        """
        from shared_core.soup.sources import HF_FOLDER

        if task not in _TASKS:
            raise ConfigError(f"eff soup: --task must be one of {', '.join(_TASKS)}, got {task!r}; or give --eval")
        if first.kind != HF_FOLDER or not first.config:
            raise CheckpointError(
                f"eff soup: --task must have Hugging Face folders with config.json, got {first.name} ({first.kind}); "
                "give --eval"
            )
        options["device"] = device_name(options["device"], "eff soup")
        for front_end in front_ends():
            make = getattr(front_end, "evaluator", None)
            if make is not None:
                evaluate = make(task, first.path, data, **options)
                about = {**options, "text": list(options["text"]), "task": task, "data": evaluate.digest}
                return cls(evaluate, _TASKS[task], about)
        raise MissingExtraError("eff soup --task", "transformers", "hf")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    number = itertools.count(1)
    with bar("evaluations (at most)") as advance:
        yield lambda: advance(next(number), total)


def search(
    usable: list[Any],
    judge: Judge,
    options: dict[str, Any],
    first: Any,
    out: Path,
    as_json: bool,
    plot: Path | None,
    logged: dict[str, float],
) -> None:
    """Make a greedy soup, write it and tell its path."""
    from rich.console import Console

    from shared_core.soup.greedy import greedy_soup
    from shared_core.soup.path_report import noise_of, path_json, path_plot, path_table
    from shared_core.soup.saving import save_soup, write_path

    alone = len(usable) if options["order"] == "metric" else 1
    with _progress(alone + options["repeat"] + len(usable) - 1) as advance:
        result = greedy_soup(
            usable,
            judge.evaluate,
            mode=judge.mode,
            about=judge.about,
            progress=advance,
            **options,
        )
    for row in result.history if logged else ():
        row["logged"] = logged[row["name"]]
    save_soup(
        result.state_dict,
        _like(result.ingredients[0], first, usable),
        out,
        lambda target: write_path(target, path_json(result)),
        _aside,
    )
    if plot is not None:
        path_plot(result, plot)
    if (noise := noise_of(result)) is not None:
        typer.echo(noise, err=True)
    if as_json:
        typer.echo(path_json(result))
    else:
        Console().print(path_table(result))
        _say_rank_errors(result.state_dict)
        typer.echo(f"wrote {out}")


def _aside(note: str) -> None:
    typer.echo(note, err=True)


def _like(best: str, first: Any, usable: list[Any]) -> Any:
    """Return the ingredient to write a soup as: the best, before others the first, but one with a config if any has."""
    found = (*(item for item in usable if item.name == best), first, *usable)
    alike = (item for item in found if (item.kind, item.suffix) == (first.kind, first.suffix))
    able = [item for item in alike if not item.is_renamed]  # a soup has the names of the first
    return next((item for item in able if item.config), able[0] if able else first)


def _say_rank_errors(state_dict: Any) -> None:
    from shared_core.soup.path_report import rank_errors

    lost = rank_errors(state_dict)
    if lost:
        worst = max(lost["rank_errors"], key=lost["rank_errors"].get)
        typer.echo(
            f"cut to the rank asked for: relative error {lost['rank_error']:.3g} in all, at most "
            f"{lost['rank_errors'][worst]:.3g} ({worst})"
        )


def average(
    usable: list[Any], shares: list[float] | None, options: dict[str, Any], first: Any, out: Path, as_json: bool
) -> None:
    """Write the uniform or weighted average of all."""
    from shared_core.soup.path_report import rank_errors
    from shared_core.soup.saving import save_soup, write_path
    from shared_core.soup.uniform import average_of

    with bar("averaging"):
        found = average_of(usable, shares, **options)
    weights = None if shares is None else found.weights
    path = json.dumps({
        "ingredients": found.ingredients, "weights": weights, "left_out": found.left_out,
        **rank_errors(found.state_dict),
    })  # fmt: skip
    like = _like(found.ingredients[0], first, usable)
    save_soup(found.state_dict, like, out, lambda target: write_path(target, path), _aside)
    for name, reason in found.left_out.items():
        typer.echo(f"{name} is {reason}", err=True)
    if not as_json:
        _say_rank_errors(found.state_dict)
    kind = "uniform" if shares is None else "weighted"
    typer.echo(path if as_json else f"{kind} average of {len(found.ingredients)} ingredients\nwrote {out}")


def diagnosis(
    usable: list[Any], judge: Judge, remask: Any, jobs: int, journal: Path | None, as_json: bool, plot: Path | None
) -> None:
    """Tell metrics, distances and barriers of the ingredients."""
    from rich.console import Console

    from shared_core.soup.diagnosis import diagnose
    from shared_core.soup.diagnosis_report import diagnosis_plot, diagnosis_table

    with _progress(4 * len(usable) - 2) as advance:
        found = diagnose(
            usable, judge.evaluate, mode=judge.mode, jobs=jobs, progress=advance, journal=journal, about=judge.about,
            after_average=remask,
        )  # fmt: skip
    if plot is not None:
        diagnosis_plot(found, plot)
    if as_json:
        typer.echo(json_text(found.to_dict()))
    else:
        # rich would cut the last columns off, where a terminal breaks the line
        Console(width=max(Console().width, 120)).print(diagnosis_table(found))
    for warning in found.warnings:
        typer.echo(warning, err=True)
