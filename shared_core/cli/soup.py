"""`eff soup`: average checkpoints, greedily by a metric of the user's, into a checkpoint of the same format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.loading import function
from shared_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor  # `eff --help` must not wait for torch

    Evaluate = Callable[[dict[str, Tensor]], float]


def soup(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Checkpoints: Hugging Face folders, Lightning .ckpt, state dict files, distributed checkpoints, or a "
            "run's folder; or PEFT adapters."
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option("--eval", help="module:function that takes a state dict and returns the metric."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write, in the first ingredient's format.")] = None,
    uniform: Annotated[bool, typer.Option("--uniform", help="Average all instead of searching greedily.")] = False,
    weights: Annotated[str | None, typer.Option(help="With --uniform: a weight for each, as 1,2,3.")] = None,
    mode: Annotated[str, typer.Option(help="Whether the metric is better when larger (max) or smaller (min).")] = "max",
    strict: Annotated[bool, typer.Option("--strict", help="Accept only averages that improve the metric.")] = False,
    journal: Annotated[Path | None, typer.Option(help="Keep scores here; a killed search goes on from it.")] = None,
    max_ingredients: Annotated[int | None, typer.Option(help="Stop when the soup has so many members.")] = None,
    rank: Annotated[int | None, typer.Option(help="Cut averages of adapters to this rank (SVD).")] = None,
    unpruned: Annotated[
        bool,
        typer.Option("--unpruned", help="Also take checkpoints from before their pruning schedule ended."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the path into this file (.png, .svg, .pdf).")] = None,
) -> None:
    """Average checkpoints of one architecture; greedy: add the next best one while the metric does not fall."""
    from shared_core.soup.ingredients import open_ingredients
    from shared_core.soup.path_report import check_matplotlib
    from shared_core.soup.pruned import masked_ingredients
    from shared_core.soup.saving import check_target, check_writable
    from shared_core.soup.sources import expand
    from shared_core.soup.uniform import check_weights

    if out is None:
        raise ConfigError("eff soup: --out must be given, got none; name the folder or file to write")
    if mode not in ("max", "min"):
        raise ConfigError(f"eff soup: --mode must be max or min, got {mode!r}")
    if uniform and (evaluate or journal or strict or plot or max_ingredients):
        raise ConfigError(
            "eff soup: --uniform must stand without --eval, --journal, --strict, --plot and --max-ingredients, which "
            "steer the greedy search; leave one or the other out"
        )
    if weights is not None and not uniform:
        raise ConfigError("eff soup: --weights must come with --uniform; add it")
    if not uniform and evaluate is None:
        raise ConfigError("eff soup: --eval must be given as module:function, got none; or average all with --uniform")
    found = expand(paths or [])
    if len(found) < 2:
        raise CheckpointError(f"eff soup: PATH must name at least two checkpoints, got {len(found)}; give more")
    opened = open_ingredients(found)
    check_target(out, opened[0])
    for file in (journal, plot):
        if file is not None:
            check_writable(file)
    if plot is not None:
        check_matplotlib()
    shares = None if weights is None else _numbers(weights)
    check_weights(shares, len(opened))
    usable, remask, notes = masked_ingredients(opened, keep_unpruned=unpruned)
    if shares is not None:
        shares = [share for share, item in zip(shares, opened, strict=True) if item in usable]
        check_weights(shares, len(usable))
    for note in notes:
        typer.echo(note, err=True)
    if uniform:
        _uniform(usable, shares, {"after_average": remask, "rank": rank}, opened[0], out, as_json)
    else:
        search = {"mode": mode, "strict": strict, "journal": journal, "max_ingredients": max_ingredients,
                  "after_average": remask, "rank": rank}  # fmt: skip
        _greedy(usable, function(str(evaluate), "eff soup: --eval"), search, opened[0], out, as_json, plot)


def _greedy(
    usable: list[Any],
    evaluate: Evaluate,
    search: dict[str, Any],
    first: Any,
    out: Path,
    as_json: bool,
    plot: Path | None,
) -> None:
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    from shared_core.soup.greedy import greedy_soup
    from shared_core.soup.path_report import path_json, path_plot, path_table
    from shared_core.soup.saving import save_soup, write_path

    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("evaluations (at most)", total=2 * len(usable) - 1)

        def evaluated(state_dict: dict[str, Tensor]) -> float:
            score = evaluate(state_dict)
            progress.advance(task)
            return score

        result = greedy_soup(usable, evaluated, **search)
    best = next(item for item in usable if item.name == result.ingredients[0])
    like = best if _is_like(best, first) else first
    save_soup(result.state_dict, like, out, lambda target: write_path(target, path_json(result)))
    if plot is not None:
        path_plot(result, plot)
    if as_json:
        typer.echo(path_json(result))
    else:
        Console().print(path_table(result))
        _say_rank_errors(result.state_dict)
        typer.echo(f"wrote {out}")


def _is_like(item: Any, first: Any) -> bool:
    """Return whether a soup, which has the names of the first ingredient, can be written as this one is."""
    return (item.kind, item.suffix) == (first.kind, first.suffix) and not item.is_renamed


def _say_rank_errors(state_dict: Any) -> None:
    from shared_core.soup.path_report import rank_errors

    lost = rank_errors(state_dict)
    if lost:
        worst = max(lost["rank_errors"], key=lost["rank_errors"].get)
        typer.echo(
            f"cut to the rank asked for: relative error {lost['rank_error']:.3g} in all, at most "
            f"{lost['rank_errors'][worst]:.3g} ({worst})"
        )


def _uniform(
    usable: list[Any], shares: list[float] | None, options: dict[str, Any], first: Any, out: Path, as_json: bool
) -> None:
    import json

    from shared_core.soup.path_report import rank_errors
    from shared_core.soup.saving import save_soup, write_path
    from shared_core.soup.uniform import uniform_soup

    state_dict = uniform_soup(usable, shares, **options)
    path = json.dumps({"ingredients": [item.name for item in usable], "weights": shares, **rank_errors(state_dict)})
    like = usable[0] if _is_like(usable[0], first) else first
    save_soup(state_dict, like, out, lambda target: write_path(target, path))
    if not as_json:
        _say_rank_errors(state_dict)
    typer.echo(path if as_json else f"uniform average of {len(usable)} ingredients\nwrote {out}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"eff soup: --weights must be numbers such as 1,2,3, got {text!r}") from None
