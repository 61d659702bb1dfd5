"""`eff export`: a quantised model as a file that another runtime reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.folders import keep_report
from shared_core.cli.loading import build_model, load_weights, user_batches
from shared_core.cli.progress_bar import bar
from shared_core.errors import ConfigError
from shared_core.strict_json import json_text

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch


def export(
    model: Annotated[
        str, typer.Argument(help="module:function that returns (model, example_inputs); inputs: tensor, tuple, dict.")
    ],
    out: Annotated[Path | None, typer.Option(help="The file to write.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="What qat saved: a folder, a .safetensors beside eff_deployment.json, or a Lightning .ckpt."),
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="onnx, or executorch for phones and boards.")] = "onnx",
    opset: Annotated[int, typer.Option(help="Of onnx: 21 to 23.")] = 21,
    static_batch: Annotated[
        bool, typer.Option("--static-batch", help="Of onnx: fix the batch to the example's; executorch always does.")
    ] = False,
    calibration: Annotated[
        str | None, typer.Option(help="module:function that returns batches of inputs: codes between convolutions too.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not run the file in its runtime and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a model for another runtime, quantised layers as codes, and check what was written.

    The function builds the plain model; --weights loads what training with qat saved, and its ranges. Without
    --weights the function returns a model that is quantised already.
    """
    if kind not in ("onnx", "executorch"):
        raise ConfigError(f"eff export: --format must be onnx or executorch, got {kind!r}")
    if out is None:
        raise ConfigError("eff export: --out must be given, got none; name the file to write")
    if out.is_dir():
        raise ConfigError(f"eff export: --out must be a file, got the folder {out}; name a file in it")
    if not out.parent.is_dir():
        raise ConfigError(f"eff export: --out must lie in a folder that exists, got {out}; make it first")
    network, inputs = build_model(model, "eff export")
    if inputs is None:
        raise ConfigError(f"eff export: {model} must return (model, example_inputs), got a model alone; return both")
    if weights is not None:
        load_quantized(network, weights)
    batches = None if calibration is None else list(user_batches(calibration, "eff export: --calibration"))
    if kind == "executorch":
        _export_program(network, inputs, out, verify=not no_verify, batches=batches, as_json=as_json)
        return
    from shared_core.quantization.export_onnx import export_onnx

    with bar("exporting"):
        report = export_onnx(
            network, inputs, out,
            opset=opset, dynamic_batch=not static_batch, verify=not no_verify, calibration=batches,
        )  # fmt: skip
    keep_report(out, dataclasses.asdict(report))
    if as_json:
        typer.echo(json_text(dataclasses.asdict(report)))
        return
    typer.echo(f"wrote {report.path}: {report.bytes} bytes, {len(report.quantized)} layers quantised")
    if report.float_layers:
        typer.echo(f"left in float: {', '.join(report.float_layers)}")
    if report.largest_difference is None:
        typer.echo("not compared with the model")
    else:
        typer.echo(f"largest difference to the model: {report.largest_difference:.2g}")
    if report.relative_change is not None:
        typer.echo(f"codes between layers change the outputs by {report.relative_change:.2%}")
    nodes = ", ".join(f"{count} {name}" for name, count in report.integer_nodes.items())
    typer.echo(f"integer kernels of onnxruntime here: {nodes or 'none'}")


def _export_program(
    network: nn.Module, inputs: Any, out: Path, *, verify: bool, batches: list[Any] | None, as_json: bool
) -> None:
    from shared_core.quantization.export_executorch import export_executorch

    with bar("exporting"):
        report = export_executorch(network, inputs, out, verify=verify, calibration=batches)
    keep_report(out, dataclasses.asdict(report))
    if as_json:
        typer.echo(json_text(dataclasses.asdict(report)))
        return
    typer.echo(f"wrote {report.path}: {report.bytes} bytes, {len(report.quantized)} layers quantised")
    typer.echo(f"integer kernels of XNNPACK: {', '.join(report.integer) or 'none'}")
    if report.float_layers:
        typer.echo(f"left in float: {', '.join(report.float_layers)}")
    others = ", ".join(f"{count} {name}" for name, count in report.other_operators.items())
    typer.echo(f"portable kernels: {others or 'none'}")
    change = report.relative_change
    typer.echo("not compared with the model" if change is None else f"outputs change by {change:.2%} of the largest")


def load_quantized(model: nn.Module, path: Path, where: str = "eff export") -> None:
    """Load the baked weights and the ranges that training with qat saved into a plain model.

    Args:
        model: The plain model; changed in place.
        path: A folder, a ``.safetensors`` file beside ``eff_deployment.json``, or a ``.ckpt``.
        where: The command, for errors.

    Raises:
        CheckpointError: If it is missing, damaged, of another model, or without ranges.
    """
    from shared_core.plain_checkpoint import read_deployment
    from shared_core.quantization import apply_ranges

    beside = path if path.is_dir() or path.suffix == ".ckpt" or not path.exists() else path.parent
    ranges = read_deployment(beside).get("qat", {}).get("ranges", {})
    prefix = load_weights(model, path, where)
    apply_ranges(model, {name.removeprefix(prefix): value for name, value in ranges.items() if name.startswith(prefix)})
