"""`eff low-rank`: a trained model whose layers are products of two smaller ones, without training."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shared_core.cli.arguments import JudgedOptions, LossOptions, bar, command_with_options, takes
from shared_core.cli.loading import check_new, copy_beside
from shared_core.cli.output import print_report, table
from shared_core.cli.shrink import made_up_inputs
from shared_core.config.options import option
from shared_core.errors import ConfigError
from shared_core.files.json_yaml import json_text

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn  # `eff --help` must not wait for torch

REPORT_FILE = "eff_low_rank.json"

LowRankCommand = command_with_options("low_rank", lambda: ("merge",))


@dataclass(frozen=True, kw_only=True)
class LowRankOptions(JudgedOptions, LossOptions):
    """Options of `eff low-rank` beside those of the technique."""

    key: ClassVar[str] = "eff low-rank"

    merged: bool = option(False, "Write whole weights of low rank, which load as before, and save nothing.")
    repeats: int = option(10, "Forwards that are timed, before and after.", low=1)


@takes(LowRankOptions)
def low_rank(asked: LowRankOptions, technique: Mapping[str, str]) -> None:
    """Factorise a trained model and save it, with a report of what that saves and loses.

    The folder holds low_rank.safetensors, which shared_core.low_rank.load puts into a model of the same class and
    configuration, and eff_low_rank.json, which a training run takes for its rank: --low_rank_rank eff_low_rank.json.
    """
    from shared_core.low_rank import LowRankConfig, factorize, merge
    from shared_core.low_rank.config import MEASURED
    from shared_core.tools.measuring import difference, forward_flops, latency, outputs, state_bytes

    check_new(asked.out, asked.key)
    config = LowRankConfig.from_dict(technique)
    needs = [name for name in ("sensitivity", *MEASURED) if name in (config.rule.kind, config.decomposition)]
    if needs and asked.calibration is None:
        raise ConfigError(asked.key, f"--calibration must be given with {needs[0]}, got none")
    judge, run_batch = asked.judge(), asked.batch_loss()
    network, example, folder = asked.open()
    data = asked.data(config.calibration_batches)
    if example is None and data and run_batch is None:
        example = data[0]
    if example is None and folder:
        with contextlib.suppress(ConfigError):  # sounds: the run is not measured, as without a folder
            example = made_up_inputs(network)
    dense = copy.deepcopy(network)
    quality = {"dense": judge(dense)} if judge else {}  # first: what it returns is found out
    with bar("factorising") as advance:
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
    _write(asked.out, network, values, folder, merged=asked.merged)
    print_report(values, _lines(asked.out, values), as_json=asked.as_json)


def _write(out: Path, network: nn.Module, values: dict[str, Any], folder: Path | None, *, merged: bool) -> None:
    from safetensors.torch import save_model

    from shared_core.files.atomic import atomic_folder
    from shared_core.low_rank.factorize import WEIGHTS_FILE

    saved: Any = network
    with atomic_folder(out) as temporary:
        if folder is not None and merged:
            saved.save_pretrained(temporary)
        else:
            save_model(network, str(temporary / ("model.safetensors" if merged else WEIGHTS_FILE)))
            if folder is not None:
                saved.config.save_pretrained(temporary)
        if folder is not None:
            copy_beside(folder, temporary)
        (temporary / REPORT_FILE).write_text(json_text(values) + "\n", encoding="utf-8")


def _lines(out: Path, values: dict[str, Any]) -> Iterator[str | Table]:
    from shared_core.engine import coverage

    headings = ("layer", "scheme", "rank", "parameters", "energy kept", "weight error", "output error")
    yield table(f"factorised: {out}", headings[:2], headings, map(_row, values["layers"]))
    share = coverage.percent(values["coverage"]["share"])
    yield f"{share} of the weights that multiply activations are within reach"
    yield from (f"left alone: {name}: {reason}" for name, reason in values["left_out"].items())
    for name, unit in (("parameters", ""), ("bytes", ""), ("flops", ""), ("milliseconds", " (median of a forward)")):
        if name in values:
            before, after = values[name]["before"], values[name]["after"]
            yield f"{name}: {before:,} -> {after:,} ({after / before:.2f}x){unit}"
    if "output_difference" in values:
        yield f"largest difference of the outputs: {values['output_difference']:.1e}"
    if "quality" in values:
        yield "quality: " + ", ".join(f"{name} {value:.4g}" for name, value in values["quality"].items())


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    output = entry.get("output_error")
    return (
        entry["name"], entry["scheme"], f"{entry['rank']} of {entry['full_rank']}",
        f"{entry['parameters_before']:,} -> {entry['parameters_after']:,}", f"{entry['energy']:.1%}",
        f"{entry['weight_error']:.3g}", "–" if output is None else f"{output:.3g}",
    )  # fmt: skip
