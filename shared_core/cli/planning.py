"""`eff plan`, `explain` and `privacy`: what a run needs, does and spends, before it starts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.cli.arguments import CommandOptions, print_report, takes
from shared_core.config.options import option
from shared_core.errors import ConfigError, EffError, in_short
from shared_core.printing import counted, duration, listed, share_text, size_text, table

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.contrib.planning import Plan, PlannedRun
    from shared_core.engine.recipe import Recipe


_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class RunOptions(CommandOptions):
    """Settings of a run that determine its memory."""

    precision: str = option("mixed", "Precision: fp32, mixed (weights in fp32) or 16-true.")
    optimizer: str = option("adamw", "Optimizer: adamw, adamw_8bit, sgd_momentum or sgd.")
    micro_batch: int = option(1, "Examples per device and forward pass.")
    seq_len: int = option(2048, "Tokens per example, for a language model.", flag="--length")
    teacher_params: float = option(0.0, "Parameters of the teacher, with distillation.", low=0)

    def run(self, **others: Any) -> PlannedRun:
        """Return the run with these settings and some changes."""
        from shared_core.contrib.planning import PlannedRun

        own: dict[str, Any] = {"precision": self.precision, "optimizer": self.optimizer}
        teacher = round(self.teacher_params)
        return PlannedRun(micro_batch=self.micro_batch, seq_len=self.seq_len, teacher_params=teacher, **own, **others)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """Options of `eff plan`."""

    key: ClassVar[str] = "eff plan"

    recipe: Path | None = option(None, "A recipe (YAML). Default: no techniques.", argument=True, reads="path")
    params: float | None = option(None, "Parameters of the model, such as 70e9.")
    model: Path | None = option(None, "A model's folder or its config.json, instead of --params.", reads="path")
    layers: int | None = option(None, "With --params: number of blocks. Default: the usual number for this size.")
    hidden: int | None = option(None, "With --params: width. Default: the usual one for this size.")
    vocab: int = option(32_000, "With --params: size of the vocabulary.")
    gpus: int = option(1, "Number of devices, with one process each.")
    strategy: str | None = option(None, "Strategy: single, ddp or fsdp2. Default: fsdp2 on several devices.")
    accumulate: int = option(1, "Micro-batches per optimizer step.")
    attention: str | None = option(
        None, "Attention: fused, or eager (keeps the scores). Default: the class's own with --model, else fused."
    )
    memory: float | None = option(None, "Available GiB per device. The exit code is 1 if that is not enough.", above=0)
    bandwidth: float | None = option(None, "GB/s that a device can send, to estimate the time of the traffic.", above=0)
    as_json: bool = option(False, "Print JSON, in bytes, instead of a table.", flag="--json")

    def validate(self) -> None:
        """Raise an error if the model is given twice or not at all."""
        got = "neither" if self.params is None else "both"
        is_one = (self.params is None) != (self.model is None)
        self.require(is_one, f"either --params or --model must be given, got {got}")


@takes(PlanOptions)
def plan(asked: PlanOptions) -> None:
    """Estimate the memory and traffic of a run on each device.

    The estimate includes every technique of the recipe. With --memory, the exit code is 1 if the run does not fit.
    """
    from shared_core.config.environments import RUN_ENVIRONMENTS
    from shared_core.contrib.planning import ModelShape
    from shared_core.contrib.planning import plan as plan_run
    from shared_core.engine.checks import compatibility
    from shared_core.engine.recipe import Recipe

    config, memory, bandwidth = asked.model, asked.memory, asked.bandwidth
    shape = (
        ModelShape.of_config(config)
        if config is not None
        else ModelShape.of_params(asked.params or 0, layers=asked.layers, hidden=asked.hidden, vocab=asked.vocab)
    )
    exact, own_attention = (None, "fused") if config is None else _counted(config)
    if exact is not None:
        shape = dataclasses.replace(shape, params=exact)
    run = asked.run(
        ranks=asked.gpus, strategy=asked.strategy or ("fsdp2" if asked.gpus > 1 else "single"),
        accumulate=asked.accumulate, attention=asked.attention or own_attention,
    )  # fmt: skip
    techniques = Recipe({}) if asked.recipe is None else Recipe.from_yaml(asked.recipe)
    rule = f"{asked.recipe} must switch on at least one technique"
    asked.require(asked.recipe is None or techniques, rule, "leave it out for a run without any")
    compatibility.check(techniques, {run.strategy} & RUN_ENVIRONMENTS.keys())
    needs = plan_run(shape, run, techniques)
    fits = memory is None or needs.peak <= memory * _GIB
    figures = {name: getattr(needs, name) for name in ("held", "peak", "host", "sent")}
    figures["fits"] = None if memory is None else fits
    parts = {"shape": dataclasses.asdict(shape), "run": dataclasses.asdict(run)}
    how = "" if config is None else " (by formula)" if exact is None else " (counted)"
    head = f"{shape.params:,} parameters{how}, {counted(shape.layers, 'block')} of width {shape.hidden}"
    shown: list[str | Table] = [_table(needs, f"{head}, {counted(run.ranks, 'device')} ({run.strategy})")]
    if bandwidth is not None:
        time = duration(needs.sent / bandwidth / 1e9)
        shown.append(f"At {bandwidth:g} GB/s, sending takes at least {time} a step.")
    if memory is not None:
        size = size_text(memory * _GIB)
        shown.append(f"The run {'fits' if fits else 'does not fit'} in {memory:g} GiB ({size}).")
    costs = [dataclasses.asdict(cost) for cost in needs.costs]
    print_report({**parts, **figures, "costs": costs}, shown, as_json=asked.as_json, failed=not fits)


def _counted(config: Path) -> tuple[int | None, str]:
    """Return a config's number of parameters and its attention, or None if the model cannot be built."""
    from shared_core.cli.loading import empty_folder
    from shared_core.contrib.planning.plan import attention_of

    folder = config if config.is_dir() else config.parent
    if not config.is_dir() and config.name != "config.json":
        return None, "fused"
    try:
        model = empty_folder(folder, "eff plan")
        return sum(parameter.numel() for parameter in model.parameters()), attention_of(model)
    except Exception:  # a class that transformers lacks, or a config with sizes only: use the formula
        return None, "fused"


def _table(needs: Plan, head: str) -> Table:
    def shown(size: float) -> str:
        return size_text(size) if size else ""

    # columns that would stay empty would only make the others narrow
    others = {"on the host": "host", "sent a step": "sent"}
    others = {heading: name for heading, name in others.items() if any(getattr(cost, name) for cost in needs.costs)}
    rows = [
        (cost.what, shown(cost.held), shown(cost.during), _share(cost.held + cost.during, needs.peak),
         *(shown(getattr(cost, name)) for name in others.values()), cost.why)
        for cost in needs.costs
    ]  # fmt: skip
    headings = ("", "held", "in a step", "of the peak", *others, "why")
    made = table(f"Each device: {head}", ("", "why"), headings, rows)
    made.add_section()
    sums = (shown(getattr(needs, name)) for name in others.values())
    made.add_row("all", shown(needs.held), f"at most {shown(needs.peak)}", "", *sums, "")
    return made


def _share(size: float, peak: float) -> str:
    return share_text(size / peak) if size and peak else ""


_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(RunOptions):
    """Options of `eff explain`."""

    key: ClassVar[str] = "eff explain"
    needs: ClassVar = {
        "epochs": ("examples", "batch_size"), "examples": ("batch_size",), "batch_size": ("examples",),
        "measure": ("model",),
    }  # fmt: skip
    without: ClassVar = {"epochs": ("steps",)}

    recipe: Path = option(help="A recipe (YAML).", argument=True, reads="path")
    model: str | None = option(
        None, "A Hugging Face folder, or module:function that returns the model or (model, inputs).", reads="model"
    )
    steps: int | None = option(None, "Optimizer steps of the run.", above=0)
    epochs: float | None = option(None, "Epochs, instead of --steps. Needs --examples and --batch-size.", above=0)
    examples: int | None = option(None, "Examples per epoch.", above=0)
    batch_size: int | None = option(None, "Examples per optimizer step, over all devices.", above=0)
    measure: int | None = option(
        None, "Train this many steps with and without each technique, to measure its share of a step.", low=2
    )
    trainer: Literal["hf", "lightning"] = option("hf", "The trainer of the run.")
    surrounding: tuple[str, ...] = option(
        (), "The environment of the run, such as fp16 or fsdp2 (`eff compat` lists them). Repeatable."
    )
    as_json: bool = option(False, "Print JSON, in bytes, instead of tables.", flag="--json")

    def validate(self) -> None:
        """Raise an error for unknown run environments."""
        from shared_core.config.environments import RUN_ENVIRONMENTS
        from shared_core.errors import nearest

        for key in self.surrounding:
            rule = f"--surrounding must be a known environment, got {key!r}"
            self.require(key in RUN_ENVIRONMENTS, rule + nearest(key, RUN_ENVIRONMENTS))

    def length(self) -> tuple[int | None, float | None]:
        """Return the optimizer steps of the run and of an epoch, None if unknown.

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
    """Show what a recipe will do, before you train.

    It lists steps, layers, conflicts, estimates of time and memory, and what is saved. With --measure, it also trains a
    copy of the model for a few steps. The exit code is 1 if the run would be refused.
    """
    from shared_core.engine.recipe import Recipe

    total, per_epoch = asked.length()
    run = asked.run()
    read = Recipe.from_yaml(asked.recipe)
    asked.require(read, f"{asked.recipe} must switch on at least one technique", "eff init writes a recipe")
    options = {
        "trainer": asked.trainer, "run_environment": asked.surrounding, "total_steps": total,
        "steps_per_epoch": per_epoch,
    }  # fmt: skip
    shown = {"recipe": read.to_dict(), "steps": {"total": total, "per_epoch": per_epoch}}
    shown |= _explained(read, asked.model, run, options)
    shown["measured"] = None if asked.measure is None or shown["conflicts"] else _shares(read, asked, total)
    print_report(shown, _lines(shown), as_json=asked.as_json, failed=bool(shown["conflicts"]))


def _explained(recipe: Recipe, name: str | None, run: Any, options: dict[str, Any]) -> dict[str, Any]:
    from shared_core.contrib.planning.plan import counted_costs
    from shared_core.tools import explain as explanation

    model = inputs = None
    if name is not None:
        model, inputs = build(name, values=any(config.needs_values for config in recipe.values()))
    try:
        explained = explanation.explain(recipe, model, **options)
    except RuntimeError:  # a technique read values
        if name is None or not _is_empty(model):
            raise
        model, inputs = build(name, values=True)
        explained = explanation.explain(recipe, model, **options)
    techniques = {}
    for key in recipe:
        touched, ability = explained.touched.get(key), explained.abilities[key]
        matched = {} if touched is None else dataclasses.asdict(touched) | {"elements": sum(touched.tensors.values())}
        reach = explained.coverage.get(key)
        techniques[key] = {
            **matched,
            "coverage": reach and reach.to_dict(),
            "here": dataclasses.asdict(ability),
            "checkpoint": explained.checkpoint[key],
            "estimates": explanation.estimates(key, matched["elements"]) if matched else [],
        }
    report: dict[str, Any] = {
        "conflicts": explained.conflicts, "remarks": explained.remarks, "timeline": explained.timeline,
        "techniques": techniques, "model": None, "memory": None,
    }  # fmt: skip
    if model is not None and name is not None:
        sizes = {key: sum(touched.tensors.values()) for key, touched in explained.touched.items()}
        saved, shape = _activations(model, inputs, name)
        costs = counted_costs(model, run, recipe, touched=sizes, shape=shape, activations=saved)
        report["memory"] = [dataclasses.asdict(cost) for cost in costs]
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        number = sum(parameter.numel() for parameter in model.parameters())
        report["model"] = {"name": name, "parameters": number, "trained": learned, "without_values": _is_empty(model)}
    return report


def _shares(recipe: Recipe, asked: ExplainOptions, total: int | None) -> list[dict[str, Any]]:
    """Return the measured time that each technique adds to a step, on random tokens or the user's inputs."""
    import torch
    from torch.utils._pytree import tree_map_only

    from shared_core.cli.loading import load_folder, made_up_inputs
    from shared_core.engine.recipe import Recipe
    from shared_core.hardware import default_device
    from shared_core.tools.step_shares import step_shares

    name, device = str(asked.model), default_device()

    def make() -> tuple[nn.Module, Any]:
        model, inputs = build(name, values=True)
        if inputs is None:
            found = made_up_inputs(model, asked.key, asked.seq_len)
            inputs = {key: torch.cat([value[:1]] * asked.micro_batch) for key, value in found.items()}
            inputs |= {"labels": inputs["input_ids"]} if set(inputs) == {"input_ids"} else {}
        return model.to(device).train(), tree_map_only(torch.Tensor, lambda one: one.to(device), inputs)

    def loaded(config: Any) -> Any:
        folder = getattr(config, "teacher", None)
        if not isinstance(folder, str) or not Path(folder).is_dir():
            return config
        return dataclasses.replace(config, teacher=load_folder(Path(folder), asked.key).to(device))

    configs = {key: loaded(config) for key, config in recipe.items()}
    return step_shares(make, Recipe(configs), steps=asked.measure or 2, total_steps=total)


def build(name: str, *, values: bool = False, where: str = "eff explain") -> tuple[nn.Module, Any]:
    """Return the model in a folder or from ``module:function``, with its example inputs if it has any."""
    if not values:
        try:
            return _build(name, "meta", where)
        except EffError:
            raise
        except Exception:  # the user's code needs values; other errors show again below
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
    """Return the bytes that autograd keeps for example inputs (or why not), and the shape in a config."""
    from shared_core.contrib.planning import ModelShape
    from shared_core.contrib.planning.plan import activation_bytes

    if inputs is not None:
        try:
            return activation_bytes(model, inputs), None
        except Exception as error:  # the user's forward or a technique's layer may need values
            return f"forward raised {in_short(error):.100}", None
    try:
        return None, ModelShape.of_config(Path(name)) if Path(name).is_dir() else None
    except ConfigError:  # not a language model
        return None, None


def _lines(report: dict[str, Any]) -> Iterator[str | Table]:
    def drawn(title: str, rows: Sequence[tuple[str, ...]], *headings: str, numbers: tuple[str, ...] = ()) -> Table:
        return table(title, [heading for heading in headings if heading not in numbers], headings, rows)

    total = report["steps"]["total"]
    title = "When" if total is None else f"When, of {counted(total, 'optimizer step')}"
    events = [(event["at"], event["technique"], event["what"]) for event in report["timeline"]]
    yield drawn(title, events, "at", "technique", "what")
    if report["model"] is not None:
        applied = [(key, _matched(entry)) for key, entry in report["techniques"].items()]
        yield drawn("What", applied, "technique", "applies to")
    rows = []
    for key, entry in report["techniques"].items():
        here = f"{entry['here']['level']}: {entry['here']['why']}".strip(" :")
        rows.append((key, here, "; ".join(entry["checkpoint"])))
    yield drawn("Here and in checkpoints", rows, "technique", "on this machine", "saved")
    peak = sum(cost["held"] + cost["during"] for cost in report["memory"] or ())
    costs = [
        (key, entry["what"], _cost(entry, peak))
        for key, one in report["techniques"].items()
        for entry in one["estimates"]
    ]
    if costs:
        title = "Estimates for this model, from measurements on one thread of a CPU (docs/cost.md)"
        yield drawn(title, costs, "technique", "cost", "about", numbers=("about",))
    elif report["model"] is None:
        yield "Add --model to see which layers each technique applies to, and estimates of time and memory."
    if report["measured"] is not None:
        shares = [
            (one["technique"], duration(one["plain"]), duration(one["seconds"]),
             f"{round(100 * one['share']):+d} % ± {200 * one['error']:.0f} %")
            for one in report["measured"] if "share" in one
        ]  # fmt: skip
        title = "A training step of this model, measured on this machine (median; ± two standard errors)"
        headings = ("plain", "with it", "share of a step")
        yield drawn(title, shares, "technique", *headings, numbers=headings)
        yield from (
            f"not measured: {one['technique']}: {one['reason']}" for one in report["measured"] if "reason" in one
        )
    elif report["model"] is not None:
        yield "Add --measure 10 for the share of a step. For your own script, use eff try."
    if report["memory"] is not None:
        held, during = (sum(cost[name] for cost in report["memory"]) for name in ("held", "during"))
        figures = [
            (cost["what"], *(size_text(cost[name]) if cost[name] else "" for name in ("held", "during")),
             _share(cost["held"] + cost["during"], peak), cost["why"])
            for cost in report["memory"]
        ]  # fmt: skip
        figures.append(("all", size_text(held), f"at most {size_text(held + during)}", "", ""))
        model = report["model"]
        trained = share_text(model["trained"] / max(model["parameters"], 1))
        title = f"Memory of one device: {counted(model['parameters'], 'parameter')}, {trained} of them trained"
        headings = ("held", "in a step", "of the peak")
        yield drawn(title, figures, "", *headings, "why", numbers=headings)
    yield from (f"note: {line}" for line in report["remarks"])
    yield from (f"conflict: {line}" for line in report["conflicts"])


def _cost(entry: dict[str, Any], peak: int) -> str:
    """Return an estimate with a unit of time or memory."""
    if "seconds" in entry:
        return duration(entry["seconds"])
    share = _share(entry["bytes"], peak)
    return f"{size_text(entry['bytes'])}{f', {share} of the memory' if share else ''}"


def _matched(entry: dict[str, Any]) -> str:
    if "tensors" not in entry:
        return "needs --model"
    if not entry["tensors"]:
        return str(entry["what"])
    names = list(entry["tensors"])
    elements = counted(entry["elements"], "element")
    text = f"{len(names)} {entry['what']} with {elements}: {listed(names, _SHOWN)}"
    if entry["coverage"] is not None:
        text = f"{share_text(entry['coverage']['share'])} of the weights in matrix products\n{text}"
    for reason, count in Counter(entry["left_out"].values()).most_common():
        text += f"\n{count:,} left out: {reason}"
    return text


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions(CommandOptions):
    """Options of `eff privacy`."""

    key: ClassVar[str] = "eff privacy"

    delta: float = option(1e-5, "Delta, below one over the number of examples.")
    noise_multiplier: float | None = option(None, "Print the epsilon of this noise multiplier.", above=0)
    target_epsilon: float | None = option(None, "Print the noise multiplier of this epsilon.", above=0)
    sample_rate: float | None = option(None, "Expected share of the examples in a step.", above=0, high=1)
    examples: int | None = option(None, "Number of examples, with --batch-size, instead of --sample-rate.", low=1)
    batch_size: int | None = option(None, "Examples per step, over all processes.", low=1)
    steps: int | None = option(None, "Optimizer steps.", low=1)
    epochs: float | None = option(None, "Passes over the data, instead of --steps.", above=0)
    as_json: bool = option(False, "Print JSON instead of a table.", flag="--json")

    def validate(self) -> None:
        """Raise an error for a useless delta or an incomplete question."""
        rule = f"--delta must be in (0, 1 / {self.examples or 'examples'}), got {self.delta}"
        self.require(0 < self.delta < 1 / (self.examples or 1), rule, "use a smaller delta")
        rule = f"got {self.noise_multiplier} and {self.target_epsilon}"
        is_one = (self.noise_multiplier is None) != (self.target_epsilon is None)
        self.require(is_one, f"one of --noise-multiplier and --target-epsilon must be given, {rule}")

    def sampling(self) -> tuple[float, int]:
        """Return the expected share of the examples per step, and the number of steps."""
        rate, steps = self.sample_rate, self.steps
        if self.examples and self.batch_size is not None and rate is None:
            rate = self.batch_size / self.examples
        rate = rate or 0.0
        rule = f"--sample-rate must be in (0, 1], got {rate or 'none'}"
        self.require(0 < rate <= 1, rule, "give --sample-rate, or --examples and --batch-size")
        steps = steps or math.ceil((self.epochs or 0) * math.ceil(1 / rate - 1e-9))
        self.require(steps, "--steps must be given", "give --steps or --epochs")
        return rate, steps


@takes(PrivacyOptions)
def privacy(asked: PrivacyOptions) -> None:
    """Compute the epsilon of DP-SGD with Poisson sampling, or the noise for an epsilon.

    It prints the result of every accountant.
    """
    from shared_core.privacy import classic_epsilon, epsilon, noise_multiplier_for

    sample_rate, steps = asked.sampling()
    delta, noise_multiplier = asked.delta, asked.noise_multiplier
    rows = []
    for accountant in ("rdp", "prv"):
        noise = noise_multiplier
        if noise is None:
            noise = noise_multiplier_for(asked.target_epsilon or 0.0, sample_rate, steps, delta, accountant=accountant)
        rows.append((accountant, noise, epsilon([(noise, sample_rate, steps)], delta, accountant)))
    if noise_multiplier is not None:
        rows.append(("classic", noise_multiplier, classic_epsilon(noise_multiplier, sample_rate, steps, delta)))
    report = {"sampling": "poisson", "sample_rate": sample_rate, "steps": steps, "delta": delta}
    found = {name: {"noise_multiplier": noise, "epsilon": spent} for name, noise, spent in rows}
    title = f"{counted(steps, 'step')}, Poisson sampling with rate {sample_rate:.4g}, delta {delta:g}"
    figures = [(name, f"{noise:.4g}", f"{spent:.4g}") for name, noise, spent in rows]
    shown = table(title, ("accountant",), ("accountant", "noise multiplier", "epsilon"), figures)
    print_report({**report, "accountants": found}, [shown], as_json=asked.as_json)
