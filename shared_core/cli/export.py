"""`eff export`: a model as a file that another runtime reads."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shared_core.cli.arguments import bar
from shared_core.cli.loading import build_model, keep_report, load_folder, load_weights, user_batches
from shared_core.cli.shrink import made_up_inputs
from shared_core.errors import ConfigError
from shared_core.files.atomic import check_writable
from shared_core.files.json_yaml import json_text

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch

    from shared_core.tools.export.executorch import ProgramReport
    from shared_core.tools.export.onnx import ExportReport

_EXAMPLE_LENGTH = 16  # of inputs whose length stays open


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder, or module:function that returns (model, inputs); inputs: tensor, tuple, dict."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The file to write.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="What qat saved: a folder, a .safetensors beside eff_deployment.json, or a Lightning .ckpt."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="For a folder of a model that reads tokens: how many, with padding; of onnx: open without."),
    ] = None,
    dynamic_length: Annotated[
        bool, typer.Option("--dynamic-length", help="Of onnx: leave the second axis of the inputs open too.")
    ] = False,
    kind: Annotated[str, typer.Option("--format", help="onnx, or executorch for phones and boards.")] = "onnx",
    opset: Annotated[int, typer.Option(help="Of onnx: 21 to 23.")] = 21,
    static_batch: Annotated[
        bool, typer.Option("--static-batch", help="Of onnx: fix the batch to the example's; executorch always does.")
    ] = False,
    calibration: Annotated[
        str | None, typer.Option(help="module:function that returns batches of inputs: codes between convolutions too.")
    ] = None,
    weight_codes: Annotated[
        str,
        typer.Option(
            help="Of onnx: signed, the fastest with VNNI or AMX; unsigned, for x86 without, where products with signed "
            "ones saturate; auto: signed if onnxruntime sums them exactly here."
        ),
    ] = "auto",
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not run the file in its runtime and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a model for another runtime, quantised layers as codes, and check what was written.

    A folder that training with qat saved has its ranges beside the weights. A function builds the plain model, and
    --weights loads these; without --weights it returns a model that is quantised already, or stays in float.
    """
    if kind not in ("onnx", "executorch"):
        raise ConfigError("eff export", f"--format must be onnx or executorch, got {kind!r}")
    if out is None:
        raise ConfigError("eff export", "--out must be given, got none", "name the file to write")
    if out.is_dir():
        raise ConfigError("eff export", f"--out must be a file, got the folder {out}", "name a file in it")
    if not out.parent.is_dir():
        raise ConfigError("eff export", f"--out must lie in a folder that exists, got {out}", "make it first")
    is_onnx = kind == "onnx"
    suffix = ".onnx" if is_onnx else ".pte"
    if out.exists() and out.suffix != suffix:  # such as the weights that are to be exported
        raise ConfigError(
            "eff export",
            f"--out must be a new file, or a {suffix} file to write anew, got {out}, which exists",
            "name another",
        )
    check_writable(out, "eff export: --out")
    if dynamic_length and not is_onnx:
        raise ConfigError("eff export", "--dynamic-length must come with --format onnx, got executorch", "leave it out")
    network, example = _model_and_inputs(model, weights, length, _EXAMPLE_LENGTH if is_onnx else None)
    if Path(model).is_dir():
        reads_tokens = "input_ids" in example
        if dynamic_length and not reads_tokens:
            raise ConfigError("eff export", f"--dynamic-length must come with a model that reads tokens, got {model}")
        dynamic_length = dynamic_length or (reads_tokens and length is None)
    batches = None if calibration is None else list(user_batches(calibration, "eff export: --calibration"))
    if not is_onnx:
        _export_program(network, example, out, verify=not no_verify, batches=batches, as_json=as_json)
        return
    from shared_core.tools.export.onnx import export_onnx

    with bar("exporting"):
        report = export_onnx(
            network, example, out,
            opset=opset, dynamic_batch=not static_batch, dynamic_length=dynamic_length, verify=not no_verify,
            calibration=batches, weight_codes=weight_codes,  # type: ignore[arg-type]
        )  # fmt: skip
    keep_report(out, dataclasses.asdict(report))
    if as_json:
        typer.echo(json_text(dataclasses.asdict(report)))
        return
    _tell_written(report)
    taken = (f"{name} ({', '.join(map(str, shape))})" for name, shape in report.inputs.items())
    typer.echo(f"it takes {', '.join(taken)}")
    if report.largest_difference is None:
        typer.echo("not compared with the model")
    else:
        typer.echo(f"largest difference to the model: {report.largest_difference:.2g}")
    if report.relative_change is not None:
        typer.echo(f"codes between layers change the outputs by {report.relative_change:.2%}")
    nodes = ", ".join(f"{count} {name}" for name, count in report.integer_nodes.items())
    typer.echo(f"integer kernels of onnxruntime here: {nodes or 'none'}")
    if report.unsigned_weights and nodes:
        typer.echo("weights as unsigned codes: exact without VNNI; --weight-codes signed is faster with it")


def _model_and_inputs(
    model: str, weights: Path | None, length: int | None, default_length: int | None
) -> tuple[nn.Module, Any]:
    if (folder := Path(model)).is_dir():
        if weights is not None:
            raise ConfigError("eff export", f"--weights must be left out for a folder, got {weights}")
        from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE
        from shared_core.quantization import apply_ranges

        network: Any = load_folder(folder, "eff export").float()
        for module in network.modules():
            if getattr(getattr(module, "config", None), "use_cache", False):
                module.config.use_cache = False  # the exporters know no cache among the outputs (torch 2.13)
        network.set_experts_implementation("batched_mm")  # ONNX has no grouped_mm, the default (transformers 5.23)
        if (folder / DEPLOYMENT_FILE).exists() and (ranges := _saved_ranges(folder)):
            apply_ranges(network, ranges)
        return network, _inputs(network, default_length if length is None else length)
    if length is not None:
        raise ConfigError(
            "eff export", f"--length must come with a folder, got {model}", "its function returns the inputs"
        )
    network, example = build_model(model, "eff export")
    if example is None:
        raise ConfigError(
            "eff export", f"{model} must return (model, example_inputs), got a model alone", "return both"
        )
    if weights is not None:
        load_quantized(network, weights)
    return network, example


def _inputs(network: nn.Module, length: int | None) -> dict[str, Any]:
    import torch

    inputs = made_up_inputs(network, "eff export", length or 8)
    if (tokens := inputs.get("input_ids")) is None:
        return inputs
    if length is None or length < 2:
        raise ConfigError("eff export", f"--length must be at least 2 for a model that reads tokens, got {length}")
    if "attention_mask" in inspect.signature(network.forward).parameters:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][1, -1] = 0  # the comparison with the model then sees padding
    return inputs


def _saved_ranges(folder: Path) -> dict[str, Any]:
    from shared_core.checkpoint_formats.plain import read_deployment

    ranges: dict[str, Any] = read_deployment(folder).get("qat", {}).get("ranges", {})
    return ranges


def _export_program(
    network: nn.Module, inputs: Any, out: Path, *, verify: bool, batches: list[Any] | None, as_json: bool
) -> None:
    from shared_core.tools.export.executorch import export_executorch

    with bar("exporting"):
        report = export_executorch(network, inputs, out, verify=verify, calibration=batches)
    keep_report(out, dataclasses.asdict(report))
    if as_json:
        typer.echo(json_text(dataclasses.asdict(report)))
        return
    _tell_written(report)
    typer.echo(f"integer kernels of XNNPACK: {', '.join(report.integer) or 'none'}")
    others = ", ".join(f"{count} {name}" for name, count in report.other_operators.items())
    typer.echo(f"portable kernels: {others or 'none'}")
    change = report.relative_change
    typer.echo("not compared with the model" if change is None else f"outputs change by {change:.2%} of the largest")


def _tell_written(report: ExportReport | ProgramReport) -> None:
    how = f"{len(report.quantized)} layers quantised" if report.quantized else "all of it in float"
    typer.echo(f"wrote {report.path}: {report.bytes} bytes, {how}")
    if report.quantized and report.float_layers:
        typer.echo(f"left in float: {', '.join(report.float_layers)}")


def load_quantized(model: nn.Module, path: Path, where: str = "eff export") -> None:
    """Load the baked weights and the ranges that training with qat saved into a plain model.

    Args:
        model: The plain model; changed in place.
        path: A folder, a ``.safetensors`` file beside ``eff_deployment.json``, or a ``.ckpt``.
        where: The command, for errors.

    Raises:
        CheckpointError: If it is missing, damaged, of another model, or without ranges.
    """
    from shared_core.quantization import apply_ranges

    beside = path if path.is_dir() or path.suffix == ".ckpt" or not path.exists() else path.parent
    ranges = _saved_ranges(beside)
    prefix = load_weights(model, path, where)
    apply_ranges(model, {name.removeprefix(prefix): value for name, value in ranges.items() if name.startswith(prefix)})
