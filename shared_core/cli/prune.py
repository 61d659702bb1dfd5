"""`eff prune`: a trained model pruned without training, from the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shared_core.cli.arguments import JudgedOptions, LossOptions, alone, bar, command_with_options, takes
from shared_core.cli.loading import check_new, save_folder
from shared_core.cli.output import print_report, table
from shared_core.cli.shrink import made_up_inputs
from shared_core.config.options import option
from shared_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.pruning import PruneConfig
    from shared_core.tools.shrink import ShrinkResult

REPORT_FILE = "eff_pruning.json"
_SHRINKABLE = ("neuron", "channel", "head")


def _during_training() -> tuple[str, ...]:
    from shared_core.pruning.config import DURING_TRAINING

    return DURING_TRAINING


PruneCommand = command_with_options("prune", _during_training)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(JudgedOptions, LossOptions):
    """Options of `eff prune` beside those of the technique."""

    key: ClassVar[str] = "eff prune"

    batches: int = option(100, "Calibration batches to run, at most.", low=1)
    seed: int = option(0, "Of the draws of random and shapley.")
    shrink: bool = option(False, "Also remove the pruned neurons, channels or heads: a smaller model.")


@takes(PruneOptions)
def prune(asked: PruneOptions, technique: Mapping[str, str]) -> None:
    """Prune a trained model at once and save plain weights, which load without this library, and a report.

    A folder's model comes out as a folder that from_pretrained loads, its tokenizer beside it; another model as
    model.safetensors. With --shrink units are gone from tensors and configuration. eff_pruning.json tells what was
    pruned, what was left dense, and how quality changed.
    """
    from shared_core.pruning.config import GATHERED
    from shared_core.pruning.post_training import as_config
    from shared_core.pruning.post_training import prune as prune_model

    check_new(asked.out, asked.key)
    config = as_config(technique)
    if asked.shrink and config.granularity not in _SHRINKABLE:
        raise ConfigError(
            asked.key, f"--shrink must come with --granularity {', '.join(_SHRINKABLE)}, got {config.granularity}"
        )
    if asked.calibration is None and config.criterion in GATHERED:
        what = f"--calibration must be given with {config.needs_batches}, got none"
        raise ConfigError(asked.key, what, "name a function that returns batches")
    judge, run_batch = asked.judge(), asked.batch_loss()
    network, example, folder = asked.open()
    data = asked.data(asked.batches)
    needs_example = asked.shrink or (data is None and config.needs_batches)
    if example is None and needs_example:
        if data and run_batch is None:
            example = data[0]
        elif folder is None:
            raise alone(asked, "--shrink and for units or costs without --calibration")
        else:
            example = made_up_inputs(network, asked.key)
    quality: dict[str, float] = {}
    _judge(quality, "dense", network, judge)
    with bar("calibration") as advance:
        done = prune_model(
            network, config, [example] if data is None and needs_example else data,
            loss=None if data is None else run_batch, num_batches=asked.batches, seed=asked.seed,
            allow_partial=asked.allow_partial, progress=advance,
        )  # fmt: skip
    _judge(quality, "pruned", network, judge)
    result = _shrunk(network, example) if asked.shrink else None
    if result is not None:
        _judge(quality, "shrunk", result.model, judge)
    values = {
        "asked": {name: value for name, value in asked.asked().items() if name != "allow_partial"},
        "config": _applied(config),
        **done.to_dict(),
        "quality": quality,
        "shrink": _values(result) if result else None,
    }
    saved = result.model if result else network
    # a shrunk folder must load with the same outputs
    save_folder(asked.out, saved, folder, {REPORT_FILE: values}, asked.key, example if result else None)
    print_report(values, _lines(asked.out, values), as_json=asked.as_json)


def _judge(
    quality: dict[str, float], name: str, network: nn.Module, judge: Callable[[nn.Module], float] | None
) -> None:
    if judge is not None:
        quality[name] = judge(network)


def _shrunk(network: nn.Module, example: Any) -> ShrinkResult:
    from shared_core.tools.shrink import shrink as remove

    with bar("shrink"):
        return remove(network, example)


def _applied(config: PruneConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in _during_training()}


def _values(result: ShrinkResult) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "model"}


def _lines(out: Path, values: dict[str, Any]) -> Iterator[str | Table]:
    from shared_core.engine import coverage
    from shared_core.pruning.config import UNITS

    rows = [(entry["name"], entry["numel"], entry["pruned"], f"{entry['sparsity']:.1%}") for entry in values["tensors"]]
    yield table(f"pruned: {out}", ("tensor",), ("tensor", "weights", "zero", "sparsity"), rows)
    lost, units = (sum(entry[key] for entry in values["units"]) for key in ("pruned", "units"))
    of_units = f"; {lost} of {units} units" if units else ""
    seen = f", from {values['examples']} examples" if values["examples"] else ""
    yield (
        f"{values['pruned']} of {values['numel']} weights are zero ({values['sparsity']:.1%}){of_units}; "
        f"{values['criterion']}{seen}, scope {values['scope']}, {values['seconds']:.1f} s"
    )
    share, granularity = coverage.percent(values["coverage"]["share"]), values["granularity"]
    of = f" of granularity {granularity}" if granularity in UNITS else ""
    yield f"{share} of the weights that multiply activations are within reach{of}"
    yield from (f"note: {note}" for note in values["notes"])
    yield from (f"left dense: {name}: {reason}" for name, reason in values["left_out"].items())
    if values["shrink"]:
        removed, bytes_ = values["shrink"]["removed"], values["shrink"]["bytes"]
        yield f"shrunk: {sum(removed.values())} units removed, {bytes_[0]} -> {bytes_[1]} bytes"
        yield from (f"kept: {name}: {reason}" for name, reason in values["shrink"]["kept"].items())
    else:
        yield values["note"]
    if values["quality"]:
        yield "quality: " + ", ".join(f"{name} {value:.4g}" for name, value in values["quality"].items())
