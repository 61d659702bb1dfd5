"""`eff prune`, `low-rank` and `shrink`: make a trained model smaller without training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shared_core.cli.arguments import JudgedOptions, LossOptions, bar, command_with_options, print_report, takes
from shared_core.cli.loading import check_new, copy_beside, made_up_inputs, save_folder
from shared_core.config.options import option
from shared_core.errors import ConfigError
from shared_core.files.user_code import function
from shared_core.printing import amount, by_reason, counted, duration, most_telling, share_text, size_text, table

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.pruning import PruneConfig
    from shared_core.tools.shrink import ShrinkResult


PRUNING_FILE = "eff_pruning.json"
_SHRINKABLE = ("neuron", "channel", "head")


def _during_training() -> tuple[str, ...]:
    from shared_core.pruning.config import DURING_TRAINING

    return DURING_TRAINING


PruneCommand = command_with_options("prune", _during_training)


@dataclass(frozen=True, kw_only=True)
class PruneOptions(JudgedOptions, LossOptions):
    """Options of `eff prune` beside those of the technique."""

    key: ClassVar[str] = "eff prune"
    technique: ClassVar[str] = "prune"

    batches: int = option(100, "Number of calibration batches.", low=1)
    seed: int = option(0, "Seed of the criteria random and shapley.")
    shrink: bool = option(False, "Also remove the pruned neurons, channels or heads, for a smaller model.")


@takes(PruneOptions)
def prune(asked: PruneOptions, technique: Mapping[str, str]) -> None:
    """Prune a trained model without training, and save plain weights.

    A Hugging Face folder is saved as one, with its tokenizer, and any other model as model.safetensors. --shrink also
    removes pruned units from tensors and config. eff_pruning.json reports what was pruned, what stayed dense and how
    the quality changed.
    """
    from shared_core.pruning.config import GATHERED
    from shared_core.pruning.post_training import as_config
    from shared_core.pruning.post_training import prune as prune_model

    check_new(asked.out, asked.key)
    config = as_config(technique)
    rule = f"--shrink needs --granularity {', '.join(_SHRINKABLE)}, got {config.granularity}"
    asked.require(config.granularity in _SHRINKABLE or not asked.shrink, rule)
    is_enough = asked.calibration is not None or config.criterion not in GATHERED
    rule = f"--calibration must be given with {config.needs_batches}, got none"
    asked.require(is_enough, rule, "name a function that returns batches")
    judge, run_batch = asked.judge(), asked.batch_loss()
    network, example, folder = asked.open()
    data = asked.data(asked.batches)
    needs_example = asked.shrink or (data is None and config.needs_batches)
    if example is None and needs_example:
        if data and run_batch is None:
            example = data[0]
        else:
            asked.require_inputs(folder, "--shrink and for units or costs without --calibration")
            example = made_up_inputs(network, asked.key)
    quality = {"dense": judge(network)} if judge else {}
    with bar("calibration") as advance:
        done = prune_model(
            network, config, [example] if data is None and needs_example else data,
            loss=None if data is None else run_batch, num_batches=asked.batches, seed=asked.seed,
            allow_partial=asked.allow_partial, progress=advance,
        )  # fmt: skip
    quality |= {"pruned": judge(network)} if judge else {}
    result = _shrunk(network, example) if asked.shrink else None
    quality |= {"shrunk": judge(result.model)} if judge and result is not None else {}
    values = {
        "asked": {name: value for name, value in asked.asked().items() if name != "allow_partial"},
        "config": _applied(config),
        **done.to_dict(),
        "quality": quality,
        "shrink": _shrink_values(result) if result else None,
    }
    saved = result.model if result else network
    # a shrunk folder must load with the same outputs
    save_folder(asked.out, saved, folder, {PRUNING_FILE: values}, asked.key, example if result else None)
    print_report(values, _pruning_lines(asked.out, values, asked.every_layer), as_json=asked.as_json)


def _shrunk(network: nn.Module, example: Any) -> ShrinkResult:
    from shared_core.tools.shrink import shrink as remove

    with bar("shrink"):
        return remove(network, example)


def _applied(config: PruneConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in _during_training()}


def _pruning_lines(out: Path, values: dict[str, Any], every: bool) -> Iterator[str | Table]:
    from shared_core.pruning.config import UNITS

    lost, units = (sum(entry[key] for entry in values["units"]) for key in ("pruned", "units"))
    of_units = f", {lost:,} of {counted(units, 'unit')}" if units else ""
    share = f"{share_text(values['sparsity'])} of {amount(values['numel'])} weights"
    yield f"Pruned {share} in {counted(len(values['tensors']), 'layer')}{of_units}, in {duration(values['seconds'])}."
    seen = f" on {counted(values['examples'], 'example')}" if values["examples"] else ""
    yield f"Criterion: {values['criterion']}{seen}. Scope: {values['scope']}."
    yield from _quality(values)
    title, tensors = most_telling(values["tensors"], lambda entry: float(entry["sparsity"]), "layer", every)
    rows = [(entry["name"], entry["numel"], entry["pruned"], share_text(entry["sparsity"])) for entry in tensors]
    yield table(f"The sparsest layers, {title}", ("tensor",), ("tensor", "weights", "zero", "sparsity"), rows)
    found, granularity = share_text(values["coverage"]["share"]), values["granularity"]
    of = f" with granularity {granularity}" if granularity in UNITS else ""
    yield f"{found} of the weights in matrix products could be pruned{of}."
    yield from (f"note: {note}" for note in values["notes"])
    yield from by_reason(values["left_out"], "Left dense")
    if values["shrink"]:
        removed, bytes_ = sum(values["shrink"]["removed"].values()), values["shrink"]["bytes"]
        yield f"Removed {counted(removed, 'unit')}: {size_text(bytes_[1])} instead of {size_text(bytes_[0])}."
        yield from by_reason(values["shrink"]["kept"], "Kept")
    else:
        yield values["note"]
    yield f"Wrote {out}."


def _quality(values: dict[str, Any]) -> Iterator[str]:
    if values.get("quality"):
        yield f"Quality: {', '.join(f'{name} {value:.4g}' for name, value in values['quality'].items())}."


LOW_RANK_FILE = "eff_low_rank.json"

LowRankCommand = command_with_options("low_rank", lambda: ("merge",))


@dataclass(frozen=True, kw_only=True)
class LowRankOptions(JudgedOptions, LossOptions):
    """Options of `eff low-rank` beside those of the technique."""

    key: ClassVar[str] = "eff low-rank"
    technique: ClassVar[str] = "low_rank"

    merged: bool = option(False, "Multiply the factors into plain weights, which load as before but are not smaller.")
    repeats: int = option(10, "Number of timed forward passes, before and after.", low=1)


@takes(LowRankOptions)
def low_rank(asked: LowRankOptions, technique: Mapping[str, str]) -> None:
    """Factorize the layers of a trained model, and report what it saves and loses.

    The folder holds low_rank.safetensors, which shared_core.low_rank.load loads into a model of the same class and
    config. A training run can take the ranks from the report: --low_rank_rank eff_low_rank.json.
    """
    from shared_core.low_rank import LowRankConfig, factorize, merge
    from shared_core.low_rank.config import MEASURED
    from shared_core.low_rank.factorize import WEIGHTS_FILE
    from shared_core.tools.measuring import difference, forward_flops, latency, outputs, state_bytes

    check_new(asked.out, asked.key)
    config = LowRankConfig.from_dict(technique)
    needs = [name for name in ("sensitivity", *MEASURED) if name in (config.rule.kind, config.decomposition)]
    rule = f"--calibration must be given with {', '.join(needs)}, got none"
    asked.require(asked.calibration is not None or not needs, rule)
    judge, run_batch = asked.judge(), asked.batch_loss()
    network, example, folder = asked.open()
    data = asked.data(config.calibration_batches)
    if example is None and data and run_batch is None:
        example = data[0]
    if example is None and folder:
        with contextlib.suppress(ConfigError):  # audio input: the run is not measured, as without a folder
            example = made_up_inputs(network, asked.key)
    dense = copy.deepcopy(network)
    quality = {"dense": judge(dense)} if judge else {}  # first, so that a wrong return value shows early
    with bar("factorizing") as advance:
        done = factorize(network, config, data, loss=run_batch, allow_partial=asked.allow_partial, progress=advance)
    values: dict[str, Any] = {"asked": config.to_dict(), **done.to_dict(), "merged": asked.merged}
    if asked.merged:
        merge(network)
    values["bytes"] = {"before": state_bytes(dense), "after": state_bytes(network)}
    if example is not None:
        before, after = (forward_flops(each, example) for each in (dense, network))
        values["flops"] = {"before": before, "after": after}
        before_ms, after_ms = latency(dense, network, example, asked.repeats)
        values["milliseconds"] = {"before": round(before_ms, 4), "after": round(after_ms, 4)}
        values["output_difference"] = difference(outputs(dense, example), outputs(network, example))
    if judge is not None:
        values["quality"] = {**quality, "low_rank": judge(network)}
    saved: Any = network

    def add(temporary: Path) -> None:
        if folder is not None and not asked.merged:
            saved.config.save_pretrained(temporary)
            copy_beside(folder, temporary)

    source, file = (folder, "model.safetensors") if asked.merged else (None, WEIGHTS_FILE)
    save_folder(asked.out, network, source, {LOW_RANK_FILE: values}, asked.key, add=add, file=file)
    print_report(values, _low_rank_lines(asked.out, values, asked.every_layer), as_json=asked.as_json)


def _low_rank_lines(out: Path, values: dict[str, Any], every: bool) -> Iterator[str | Table]:
    yield f"Factorized {counted(len(values['layers']), 'layer')}."
    for what, name, shown in (
        ("Parameters", "parameters", amount),
        ("Size", "bytes", size_text),
        ("FLOPs of a forward pass", "flops", amount),
        ("Time of a forward pass", "milliseconds", lambda time: duration(time / 1e3)),
    ):  # fmt: skip
        if name in values:
            before, after = values[name]["before"], values[name]["after"]
            yield f"{what}: {shown(after)} instead of {shown(before)} ({after / before:.2f} times)."
    if "output_difference" in values:
        yield f"Largest difference of the outputs: {values['output_difference']:.1e}."
    yield from _quality(values)
    headings = ("layer", "scheme", "rank", "parameters", "energy kept", "weight error", "output error")
    title, layers = most_telling(values["layers"], _error, "layer", every)
    yield table(f"The largest errors, {title}", headings[:2], headings, map(_row, layers))
    yield f"{share_text(values['coverage']['share'])} of the weights in matrix products could be factorized."
    yield from by_reason(values["left_out"], "Left whole")
    yield f"Wrote {out}."


def _error(entry: Mapping[str, Any]) -> float:
    output = entry.get("output_error")
    return float(entry["weight_error"] if output is None else output)


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    output = entry.get("output_error")
    return (
        entry["name"], entry["scheme"], f"{entry['rank']} of {entry['full_rank']}",
        f"{amount(entry['parameters_before'])} → {amount(entry['parameters_after'])}", share_text(entry["energy"]),
        f"{entry['weight_error']:.3g}", "–" if output is None else f"{output:.3g}",
    )  # fmt: skip


SHRINK_FILE = "eff_shrink.json"


_SIZES = ("layers", "hidden_size", "intermediate_size", "attention_heads", "key_value_heads")


@dataclass(frozen=True, kw_only=True)
class ShrinkOptions(LossOptions):
    """Options of `eff shrink`."""

    key: ClassVar[str] = "eff shrink"
    needs: ClassVar = dict.fromkeys(_SIZES, ("calibration",))
    without: ClassVar = {"multiple_of": _SIZES, "allow_inexact": _SIZES}

    model: str = option(
        help="A Hugging Face folder, or module:function that returns (model, example_inputs).",
        argument=True,
        reads="model",
    )
    inputs: str | None = option(
        None, "module:function that returns example inputs. Default: generated, for a folder.", reads="function"
    )
    multiple_of: int = option(1, "Keep a multiple of this many neurons or channels.")
    allow_inexact: bool = option(False, "Also narrow the inputs of layer norms, which is not exact.")
    layers: int | None = option(None, "Cut to this many layers.")
    hidden_size: int | None = option(None, "Cut the residual stream to this many channels.")
    intermediate_size: int | None = option(None, "Cut each MLP to this many neurons.")
    attention_heads: int | None = option(None, "Cut each layer to this many query heads.")
    key_value_heads: int | None = option(None, "Cut each layer to this many key-value heads.")
    batches: int = option(100, "Number of calibration batches.", low=1)
    criterion: str = option("activations", "How to choose units to keep: activations, magnitude or random.")
    layer_criterion: str = option("block_influence", "How to choose layers to keep: block_influence, loss or random.")
    seed: int = option(0, "Seed of random choices.")

    def sizes(self) -> dict[str, int]:
        """Return the target sizes."""
        return {name: getattr(self, name) for name in _SIZES if self.is_given(name)}

    def validate(self) -> None:
        """Raise an error for batches that nothing uses."""
        rule = "--calibration needs a size to cut to, such as --layers 8"
        self.require(self.calibration is None or self.sizes(), rule)


@takes(ShrinkOptions)
def shrink(asked: ShrinkOptions) -> None:
    """Remove units that are zero: channels, neurons, attention heads, residual width.

    With sizes, such as --layers 8 --hidden-size 512, and --calibration, it cuts a trained decoder to these sizes
    by removing the layers and units that matter least on the batches (Minitron). Train the result with
    --distill_teacher afterwards.

    A Hugging Face folder is saved as one, with its tokenizer, and reloaded to check its outputs. Any other model is
    saved as model.safetensors, in the shapes that eff_shrink.json lists.
    """
    from shared_core.tools.shrink import shrink as remove
    from shared_core.tools.shrink import shrink_to

    check_new(asked.out, asked.key)
    run_batch = asked.batch_loss()
    network, example, folder = asked.open()
    example = function(asked.inputs, "eff shrink: --inputs")() if asked.inputs else example
    if example is None:
        asked.require_inputs(folder)
        example = made_up_inputs(network, asked.key)
    result: ShrinkResult
    if (data := asked.data(asked.batches)) is None:
        with bar("shrinking"):
            result = remove(network, example, multiple_of=asked.multiple_of, allow_inexact=asked.allow_inexact)
    else:
        with bar("cutting"):
            result = shrink_to(
                network, asked.sizes(), data, example, criterion=asked.criterion,
                layer_criterion=asked.layer_criterion, loss=run_batch, seed=asked.seed,
            )  # fmt: skip
    report = _shrink_values(result)
    for name in ("bytes", "flops", "milliseconds", "parameters", "loss"):
        if report.get(name) is not None:
            report[name] = dict(zip(("before", "after"), report[name], strict=True))
    save_folder(asked.out, result.model, folder, {SHRINK_FILE: report}, asked.key, example)
    print_report(report, _shrink_lines(asked.out, result), as_json=asked.as_json)


def _shrink_values(result: ShrinkResult) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "model"}


def _shrink_lines(out: Path, result: ShrinkResult) -> Iterator[str | Table]:
    yield str(result)
    yield f"Largest difference of the outputs: {result.largest_difference:.1e}."
    if result.removed:
        title, groups = most_telling(
            [*result.removed.items()], lambda group: float(group[1]), "group", False, f"{SHRINK_FILE} has all"
        )
        rows = [(name, result.units[name], count) for name, count in groups]
        yield table(f"Units removed, {title}", ("group",), ("group", "units", "removed"), rows)
    yield from by_reason(result.kept, "Kept")
    yield from (f"Config: {name} is {after}, was {before}." for name, (before, after) in result.config.items())
    yield from (f"note: {note}" for note in result.notes)
    yield f"Wrote {out}."
