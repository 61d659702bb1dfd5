"""`eff try my_script.py --prune_sparsity 0.8 …`: what each technique does to a short run of the user's own script."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shared_core.errors import ConfigError
from shared_core.printing import echo

PAGE, RESULT = "eff_try.html", "eff_try.json"


def try_out(
    context: typer.Context,
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT [FLAGS]...", help="The training script (train.py), or a module (my.train)."),
    ],
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 200,
    repeats: Annotated[int, typer.Option(help="Runs of each technique, each beside a plain one.")] = 1,
    eval_batches: Annotated[
        int,
        typer.Option("--eval-batches", help="Batches of a trainer's validation at most; 0: all."),
    ] = 100,
    metric: Annotated[
        str | None, typer.Option(help="What quality is compared by, by the trainer's name; default: a loss.")
    ] = None,
    mode: Annotated[str, typer.Option(help="Whether it is better when larger (max) or smaller (min).")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the page, its JSON and the runs' logs.")] = Path("eff_try"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try the techniques of a recipe on your own script: a few hundred steps with and without each of them.

    Our flags (--prune_sparsity, --qat_scheme, …, or --eff_recipe FILE) stand behind the script as in eff run, options
    of eff try before it. Runs take turns two by two, each in a process of its own. What the trainer writes goes into a
    folder that is removed ({out} in the script's arguments names it), and what follows the training is not run.
    """
    from shared_core.cli.arguments import bar
    from shared_core.files.atomic import atomic_write, make_folder
    from shared_core.files.json_yaml import json_text
    from shared_core.front_ends.flags import _nearest_flag, recipe_of, take_flags
    from shared_core.reports.page import write_page
    from shared_core.reports.try_page import print_findings, try_page
    from shared_core.runs import TryOut, chosen_metric, findings

    if script.startswith("-"):
        raise ConfigError("eff try", f"script must come before its flags, got {script!r}")
    flags, rest = take_flags(context.args)
    recipe = recipe_of(flags)
    if not recipe:
        raise ConfigError(
            "eff try",
            "at least one technique must be switched on",
            f"add a flag such as --prune_sparsity 0.8 (`eff flags` lists all){_nearest_flag(rest)}",
        )
    if mode not in ("auto", "min", "max"):
        raise ConfigError("eff try", f"--mode must be auto, min or max, got {mode!r}")
    work = TryOut(script, rest, recipe, out, steps=steps, repeats=repeats, eval_batches=eval_batches)
    make_folder(out)
    with bar(f"trying, {len(work.pairs)} pairs of runs") as advance:
        pairs = work.run(advance, lambda plain: chosen_metric(plain, metric, mode))
    found = findings(pairs, metric=metric, mode=mode)
    told = {"script": script, "steps": steps, "recipe": recipe.to_dict(), **found.as_dict()}
    text = json_text(told)
    with atomic_write(out / RESULT) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    write_page(out / PAGE, *try_page(found, script, steps, work.block))
    if as_json:
        echo(text)
        return
    print_findings(found)
    echo(f"how it was judged, and all figures: {out / PAGE}, and .md and .json beside it")
