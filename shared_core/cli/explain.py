"""`eff explain`: what a recipe will do to a run: when, to which modules, at what memory; nothing is trained."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import typer

from shared_core.cli.arguments import takes
from shared_core.cli.output import print_report, table
from shared_core.cli.plan import RunOptions
from shared_core.config.options import option
from shared_core.errors import ConfigError, EffError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.engine.recipe import Recipe

_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(RunOptions):
    """Options of `eff explain`."""

    key: ClassVar[str] = "eff explain"
    needs: ClassVar = {
        "epochs": ("examples", "batch_size"), "examples": ("batch_size",), "batch_size": ("examples",)
    }  # fmt: skip
    without: ClassVar = {"epochs": ("steps",)}

    recipe: Path = option(help="A recipe, YAML.", argument=True)
    model: str | None = option(
        None, "A Hugging Face folder, or module:function that returns the model or (model, inputs)."
    )
    steps: int | None = option(None, "Optimizer steps of the run.", above=0)
    epochs: float | None = option(None, "In place of --steps, with the next two: epochs.", above=0)
    examples: int | None = option(None, "Examples of an epoch.", above=0)
    batch_size: int | None = option(None, "Examples of an optimizer step, over all devices.", above=0)
    trainer: Literal["hf", "lightning"] = option("hf", "The trainer of the run.")
    surrounding: tuple[str, ...] = option(
        (), "What else holds, such as fp16 or fsdp2 (eff compat lists all); repeat it."
    )
    as_json: bool = option(False, "Print JSON, in bytes, instead of tables.", flag="--json")

    def validate(self) -> None:
        """Refuse run environments that do not exist."""
        from shared_core.config.conflicts import RUN_ENVIRONMENTS
        from shared_core.errors import nearest

        for key in self.surrounding:
            if key not in RUN_ENVIRONMENTS:
                told = f"--surrounding must be one that exists, got {key!r}{nearest(key, RUN_ENVIRONMENTS)}"
                raise ConfigError(self.key, told)

    def length(self) -> tuple[int | None, float | None]:
        """Return the optimizer steps of the run and of an epoch, None where they are unknown.

        Example:
            >>> [ExplainOptions(recipe="r", **given).length()
            ...  for given in ({"epochs": 3, "examples": 1000, "batch_size": 64}, {"steps": 100})]
            [(48, 16), (100, None)]
        """
        if self.examples is None or self.batch_size is None:
            return self.steps, None
        per_epoch = math.ceil(self.examples / self.batch_size)
        return self.steps if self.epochs is None else math.ceil(self.epochs * per_epoch), per_epoch


@takes(ExplainOptions)
def explain(asked: ExplainOptions) -> None:
    """Tell what a recipe will do: when, to which modules, conflicts, memory, what is saved. Nothing is trained.

    Exit code 1 if the run would be refused. Example: eff explain recipe.yaml --model my_models:build --steps 1000
    """
    from shared_core.engine.recipe import Recipe

    total, per_epoch = asked.length()
    run = asked.run()
    read = Recipe.from_yaml(asked.recipe)
    if not read:
        told = f"{asked.recipe} must switch on at least one technique"
        raise ConfigError(asked.key, told, "eff init writes a recipe")
    options = {
        "trainer": asked.trainer, "run_environment": asked.surrounding, "total_steps": total,
        "steps_per_epoch": per_epoch,
    }  # fmt: skip
    shown = {"recipe": read.to_dict(), "steps": {"total": total, "per_epoch": per_epoch}}
    shown |= _explained(read, asked.model, run, options)
    print_report(shown, _lines(shown), as_json=asked.as_json, width=110)
    if shown["conflicts"]:
        raise typer.Exit(1)


def _explained(recipe: Recipe, name: str | None, run: Any, options: dict[str, Any]) -> dict[str, Any]:
    from shared_core.contrib.planning.plan import counted_costs
    from shared_core.tools import explain as explanation

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
    """Return the model in a folder or from ``module:function``, with its example inputs if it has any."""
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


def _lines(told: dict[str, Any]) -> Iterator[str | Table]:
    def drawn(title: str, rows: Sequence[tuple[str, ...]], *headings: str) -> Table:
        return table(title, [heading for heading in headings if not heading.endswith("iB")], headings, rows)

    total = told["steps"]["total"]
    title = "when" if total is None else f"when, of {total:,} optimizer steps"
    told_of = [(event["at"], event["technique"], event["what"]) for event in told["timeline"]]
    yield drawn(title, told_of, "at", "technique", "what")
    rows = []
    for key, entry in told["techniques"].items():
        here = f"{entry['here']['level']} {entry['here']['why']}".strip()
        rows.append((key, _matched(entry), here, "; ".join(entry["checkpoint"])))
    yield drawn("what", rows, "technique", "on", "here", "saved")
    costs = [(key, line) for key, entry in told["techniques"].items() for line in entry["measured"]]
    if costs:
        yield drawn("measured on one thread of a CPU (docs/cost.md)", costs, "technique", "cost")
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
        yield drawn(title, figures, "", f"held {unit}", f"in a step {unit}", "why")
    yield from (f"note: {line}" for line in told["remarks"])
    yield from (f"conflict: {line}" for line in told["conflicts"])


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
