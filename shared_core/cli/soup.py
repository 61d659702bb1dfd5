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
    weighted: Annotated[
        str | None,
        typer.Option(help="Average all with these weights, as 600,200,200: example counts for federated averaging."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--metric-mode", "--mode", help="Whether the metric is better when larger (max) or smaller (min)."
        ),
    ] = "max",
    strict: Annotated[bool, typer.Option("--strict", help="Accept only averages that improve the metric.")] = False,
    min_delta: Annotated[float, typer.Option(help="Accept only averages better by at least this.")] = 0,
    order: Annotated[
        str, typer.Option(help="metric: best first; random or given: only the first is evaluated alone.")
    ] = "metric",
    seed: Annotated[int, typer.Option(help="Of --order random.")] = 0,
    repeat: Annotated[
        bool, typer.Option(help="Evaluate the first member twice, to notice an evaluation with noise.")
    ] = True,
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
        raise ConfigError(f"eff soup: --metric-mode must be max or min, got {mode!r}")
    if order not in ("metric", "random", "given"):
        raise ConfigError(f"eff soup: --order must be metric, random or given, got {order!r}")
    all_in = "--weighted" if weighted is not None else "--uniform" if uniform else None
    if uniform and weighted is not None:
        raise ConfigError("eff soup: --weighted must stand without --uniform, which has no weights; leave one out")
    steering = {
        "--eval": evaluate, "--journal": journal, "--strict": strict, "--min-delta": min_delta, "--plot": plot,
        "--order": order != "metric", "--seed": seed, "--max-ingredients": max_ingredients,
    }  # fmt: skip
    given = [name for name, value in steering.items() if value]
    if all_in and given:
        raise ConfigError(
            f"eff soup: {all_in} must stand without {' and '.join(given)}, which steer the greedy search; leave "
            "one or the other out"
        )
    if all_in is None and evaluate is None:
        raise ConfigError("eff soup: --eval must be given as module:function, got none; or average all with --uniform")
    if seed and order != "random":
        raise ConfigError(f"eff soup: --seed must come with --order random, got it with --order {order}; add it")
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
    shares = None if weighted is None else _numbers(weighted)
    check_weights(shares, len(opened))
    usable, remask, notes = masked_ingredients(opened, keep_unpruned=unpruned)
    if shares is not None:
        shares = [share for share, item in zip(shares, opened, strict=True) if item in usable]
        check_weights(shares, len(usable))
    for note in notes:
        typer.echo(note, err=True)
    if all_in:
        _uniform(usable, shares, remask, out, as_json)
    else:
        search = {
            "mode": mode, "strict": strict, "min_delta": min_delta, "order": order, "seed": seed, "repeat": repeat,
            "journal": journal, "about": {"evaluate": evaluate}, "max_ingredients": max_ingredients,
        }  # fmt: skip
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
    from shared_core.soup.path_report import noise_of, path_json, path_plot, path_table
    from shared_core.soup.saving import save_soup, write_path

    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        alone = len(usable) if search["order"] == "metric" else 1
        total = alone + search["repeat"] + len(usable) - 1
        task = progress.add_task("evaluations (at most)", total=total)

        def evaluated(state_dict: dict[str, Tensor]) -> float:
            score = evaluate(state_dict)
            progress.advance(task)
            return score

        result = greedy_soup(usable, evaluated, after_average=remask, **search)
    best = next(item for item in usable if item.name == result.ingredients[0])
    save_soup(result.state_dict, best, out, lambda target: write_path(target, path_json(result)))
    if plot is not None:
        path_plot(result, plot)
    if (noise := noise_of(result)) is not None:
        typer.echo(noise, err=True)
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
    kind = "uniform" if shares is None else "weighted"
    typer.echo(path if as_json else f"{kind} average of {len(usable)} ingredients\nwrote {out}")


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"eff soup: --weighted must be numbers such as 600,200,200, got {text!r}") from None
