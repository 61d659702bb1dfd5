"""`eff explain`: what a recipe will do to a run: when, to which modules, at what memory; nothing is trained."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.errors import ConfigError, EffError
from shared_core.printing import echo

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.engine.recipe import Recipe

_SHOWN = 4


def explain(
    recipe: Annotated[Path, typer.Argument(help="A recipe, YAML.")],
    model: Annotated[
        str | None,
        typer.Option(help="A Hugging Face folder, or module:function that returns the model or (model, inputs)."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the run.")] = None,
    epochs: Annotated[float | None, typer.Option(help="In place of --steps, with the next two: epochs.")] = None,
    examples: Annotated[int | None, typer.Option(help="Examples of an epoch.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of an optimizer step, over all devices.")] = None,
    trainer: Annotated[str, typer.Option(help="hf or lightning.")] = "hf",
    surrounding: Annotated[
        list[str] | None, typer.Option(help="What else holds, such as fp16 or fsdp2 (eff compat lists all); repeat it.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, mixed or 16-true: decides activations.")] = "mixed",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw_8bit, sgd_momentum or sgd.")] = "adamw",
    micro_batch: Annotated[int, typer.Option(help="Examples a forward.")] = 1,
    seq_len: Annotated[int, typer.Option(help="Tokens an example, of a language model.")] = 2048,
    teacher_params: Annotated[float, typer.Option(help="Parameters of distillation's teacher.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes, instead of tables.")] = False,
) -> None:
    """Tell what a recipe will do: when, to which modules, conflicts, memory, what is saved. Nothing is trained.

    Exit code 1 if the run would be refused. Example: eff explain recipe.yaml --model my_models:build --steps 1000
    """
    from shared_core.config.conflicts import RUN_ENVIRONMENTS
    from shared_core.contrib.planning import PlannedRun
    from shared_core.engine.recipe import Recipe
    from shared_core.errors import nearest

    if trainer not in ("hf", "lightning"):
        raise ConfigError("eff explain", f"--trainer must be hf or lightning, got {trainer!r}")
    for key in surrounding or ():
        if key not in RUN_ENVIRONMENTS:
            raise ConfigError(
                "eff explain", f"--surrounding must be one that exists, got {key!r}{nearest(key, RUN_ENVIRONMENTS)}"
            )
    total, per_epoch = run_length(steps, epochs, examples, batch_size)
    if not 0 <= teacher_params < math.inf:
        raise ConfigError("eff explain", f"--teacher-params must be a number of at least 0, got {teacher_params}")
    run = PlannedRun(
        precision=precision, optimizer=optimizer,  # type: ignore[arg-type]
        micro_batch=micro_batch, seq_len=seq_len, teacher_params=round(teacher_params),
    )  # fmt: skip
    read = Recipe.from_yaml(recipe)
    if not read:
        raise ConfigError("eff explain", f"{recipe} must switch on at least one technique", "eff init writes a recipe")
    options = {
        "trainer": trainer, "run_environment": surrounding or (), "total_steps": total, "steps_per_epoch": per_epoch
    }  # fmt: skip
    told = {"recipe": read.to_dict(), "steps": {"total": total, "per_epoch": per_epoch}}
    told |= _told(read, model, run, options)
    if as_json:
        from shared_core.files.json_yaml import json_text

        echo(json_text(told))
    else:
        _show(told)
    if told["conflicts"]:
        raise typer.Exit(1)


def run_length(
    steps: int | None, epochs: float | None, examples: int | None, batch_size: int | None
) -> tuple[int | None, float | None]:
    """Return the optimizer steps of a run and of an epoch, None where they are unknown.

    Example:
        >>> run_length(None, 3, 1000, 64), run_length(100, None, None, None)
        ((48, 16), (100, None))
    """
    for name, value in (("steps", steps), ("epochs", epochs), ("examples", examples), ("batch-size", batch_size)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError("eff explain", f"--{name} must be above 0, got {value}")
    if (examples is None) != (batch_size is None):
        raise ConfigError("eff explain", "--examples and --batch-size must be given together", "give both")
    if epochs is not None and (steps is not None or examples is None):
        raise ConfigError("eff explain", "--epochs must come with --examples and --batch-size, and without --steps")
    per_epoch = None if examples is None or batch_size is None else math.ceil(examples / batch_size)
    if epochs is not None and per_epoch is not None:
        steps = math.ceil(epochs * per_epoch)
    return steps, per_epoch


def _told(recipe: Recipe, name: str | None, run: Any, options: dict[str, Any]) -> dict[str, Any]:
    from shared_core.contrib.planning.plan import counted_costs
    from shared_core.tools.planning import explain as explanation

    model = inputs = None
    if name is not None:
        model, inputs = build(name, values=any(config.needs_values for config in recipe.values()))
    try:
        explained = explanation.explain(recipe, model, **options)
    except RuntimeError:  # a technique looked at values
        if name is None or not _is_empty(model):
            raise
        model, inputs = build(name, values=True)
        explained = explanation.explain(recipe, model, **options)
    techniques, measured = {}, explanation.measured_costs()
    for key in recipe:
        touched, ability = explained.touched.get(key), explained.abilities[key]
        matched = {} if touched is None else dataclasses.asdict(touched) | {"elements": sum(touched.tensors.values())}
        reach = explained.coverage.get(key)
        techniques[key] = {
            **matched,
            "coverage": reach and reach.to_dict(),
            "here": dataclasses.asdict(ability),
            "checkpoint": explained.checkpoint[key],
            "measured": measured.get(key, []),
        }
    told: dict[str, Any] = {
        "conflicts": explained.conflicts, "remarks": explained.remarks, "timeline": explained.timeline,
        "techniques": techniques, "model": None, "memory": None,
    }  # fmt: skip
    if model is not None and name is not None:
        sizes = {key: sum(touched.tensors.values()) for key, touched in explained.touched.items()}
        saved, shape = _activations(model, inputs, name)
        costs = counted_costs(model, run, recipe, touched=sizes, shape=shape, activations=saved)
        told["memory"] = [dataclasses.asdict(cost) for cost in costs]
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        number = sum(parameter.numel() for parameter in model.parameters())
        told["model"] = {"name": name, "parameters": number, "trained": learned, "without_values": _is_empty(model)}
    return told


def build(name: str, *, values: bool = False, where: str = "eff explain") -> tuple[nn.Module, Any]:
    """Return the model in a folder or from ``module:function``, with its example inputs if it has any.

    Args:
        name: The folder, or the function.
        values: Whether weights must have their values; else the meta device is tried first, which takes no memory.
        where: Who asks.
    """
    if not values:
        try:
            return _build(name, "meta", where)
        except EffError:
            raise
        except Exception:  # the user's code wants values: what is wrong beside that shows again below
            return _build(name, "cpu", where)
    return _build(name, "cpu", where)


def _build(name: str, device: str, where: str) -> tuple[nn.Module, Any]:
    import torch

    from shared_core.cli.loading import build_model, empty_folder, load_folder

    if Path(name).is_dir():
        return (empty_folder if device == "meta" else load_folder)(Path(name), where).train(), None
    with torch.device(device):
        return build_model(name, where)


def _is_empty(model: nn.Module | None) -> bool:
    return model is not None and any(parameter.is_meta for parameter in model.parameters())


def _activations(model: nn.Module, inputs: Any, name: str) -> tuple[int | str | None, Any]:
    """Return the bytes that autograd keeps of example inputs (or why not), and the shape that a config tells."""
    from shared_core.contrib.planning import ModelShape
    from shared_core.contrib.planning.plan import saved_bytes

    if inputs is not None:
        try:
            return saved_bytes(model, inputs), None
        except Exception as error:  # the user's forward or a technique's layer, which may need values
            return f"forward raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]:.100}", None
    try:
        return None, ModelShape.of_config(Path(name)) if Path(name).is_dir() else None
    except ConfigError:  # no language model
        return None, None


def _show(told: dict[str, Any]) -> None:
    from rich.table import Table

    from shared_core.reports.console import Console

    console = Console(width=max(Console().width, 110), markup=False)

    def table(title: str, rows: Sequence[tuple[str, ...]], *headings: str) -> None:
        drawn = Table(title=title, title_justify="left")
        for heading in headings:
            drawn.add_column(heading, overflow="fold", justify="right" if heading.endswith("iB") else "left")
        for row in rows:
            drawn.add_row(*row)
        console.print(drawn)

    total = told["steps"]["total"]
    title = "when" if total is None else f"when, of {total:,} optimizer steps"
    told_of = [(event["at"], event["technique"], event["what"]) for event in told["timeline"]]
    table(title, told_of, "at", "technique", "what")
    rows = []
    for key, entry in told["techniques"].items():
        here = f"{entry['here']['level']} {entry['here']['why']}".strip()
        rows.append((key, _matched(entry), here, "; ".join(entry["checkpoint"])))
    table("what", rows, "technique", "on", "here", "saved")
    costs = [(key, line) for key, entry in told["techniques"].items() for line in entry["measured"]]
    if costs:
        table("measured on one thread of a CPU (docs/cost.md)", costs, "technique", "cost")
    if told["memory"] is not None:
        held, during = (sum(cost[name] for cost in told["memory"]) for name in ("held", "during"))
        unit, size = ("GiB", 2**30) if held + during > 2**30 else ("MiB", 2**20)
        figures = [
            (cost["what"], f"{cost['held'] / size:,.2f}", f"{cost['during'] / size:,.2f}", cost["why"])
            for cost in told["memory"]
        ]
        figures.append(("all", f"{held / size:,.2f}", f"peak {(held + during) / size:,.2f}", "the peak is a bound"))
        model = told["model"]
        title = f"memory of one device: {model['parameters']:,} parameters, {model['trained']:,} of them trained"
        table(title, figures, "", f"held {unit}", f"in a step {unit}", "why")
    for kind in ("remarks", "conflicts"):
        for line in told[kind]:
            label = "note" if kind == "remarks" else "conflict"
            console.print(f"{label}: {line}", highlight=False, soft_wrap=True)


def _matched(entry: dict[str, Any]) -> str:
    if "what" not in entry:
        return ""
    if not entry["tensors"]:
        return str(entry["what"])
    names = list(entry["tensors"])
    more = f", … {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    text = f"{len(names)} {entry['what']}, {entry['elements']:,} elements: {', '.join(names[:_SHOWN])}{more}"
    if entry["coverage"] is not None:
        from shared_core.engine.coverage import percent

        text = (
            f"{percent(entry['coverage']['share'])} of the weights that multiply activations are within reach\n{text}"
        )
    for reason, count in Counter(entry["left_out"].values()).most_common():
        text += f"\nleft out: {count}, {reason}"
    return text
