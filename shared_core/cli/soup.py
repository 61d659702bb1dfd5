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
        typer.Argument(help="Checkpoints: Hugging Face folders, Lightning .ckpt, state dict files, or a run's folder."),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option("--eval", help="module:function that takes a state dict and returns the metric."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write the soup, in the ingredients' format.")] = None,
    uniform: Annotated[bool, typer.Option("--uniform", help="Average all instead of searching greedily.")] = False,
    weights: Annotated[str | None, typer.Option(help="With --uniform: a weight for each, as 1,2,3.")] = None,
    mode: Annotated[str, typer.Option(help="Whether the metric is better when larger (max) or smaller (min).")] = "max",
    strict: Annotated[bool, typer.Option("--strict", help="Accept only averages that improve the metric.")] = False,
    journal: Annotated[Path | None, typer.Option(help="Keep scores here; a killed search goes on from it.")] = None,
    max_ingredients: Annotated[int | None, typer.Option(help="Stop when the soup has so many members.")] = None,
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
    odd = next((item for item in opened if (item.kind, item.suffix) != (opened[0].kind, opened[0].suffix)), None)
    if odd is not None:
        raise CheckpointError(
            f"eff soup: ingredients must have one format, got {opened[0].name} ({opened[0].kind}) and {odd.name} "
            f"({odd.kind}); convert one"
        )
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
        _uniform(usable, shares, remask, out, as_json)
    else:
        search = {"mode": mode, "strict": strict, "journal": journal, "max_ingredients": max_ingredients}
        _greedy(usable, function(str(evaluate), "eff soup: --eval"), search, remask, out, as_json, plot)


def _greedy(
    usable: list[Any],
    evaluate: Evaluate,
    search: dict[str, Any],
    remask: Any,
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

        result = greedy_soup(usable, evaluated, after_average=remask, **search)
    best = next(item for item in usable if item.name == result.ingredients[0])
    save_soup(result.state_dict, best, out, lambda target: write_path(target, path_json(result)))
    if plot is not None:
        path_plot(result, plot)
    if as_json:
        typer.echo(path_json(result))
    else:
        Console().print(path_table(result))
        typer.echo(f"wrote {out}")


def _uniform(usable: list[Any], shares: list[float] | None, remask: Any, out: Path, as_json: bool) -> None:
    import json

    from shared_core.soup.saving import save_soup, write_path
    from shared_core.soup.uniform import uniform_soup

    state_dict = uniform_soup(usable, shares, after_average=remask)
    path = json.dumps({"ingredients": [item.name for item in usable], "weights": shares})
    save_soup(state_dict, usable[0], out, lambda target: write_path(target, path))
    typer.echo(path if as_json else f"uniform average of {len(usable)} ingredients\nwrote {out}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"eff soup: --weights must be numbers such as 1,2,3, got {text!r}") from None
