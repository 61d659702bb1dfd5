"""`eff export`: a model as a file, or a folder, that another runtime reads."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from shared_core.cli.arguments import bar
from shared_core.cli.loading import check_new, copy_beside, keep_report, user_batches
from shared_core.cli.quantized_models import model_and_inputs, saved_codes
from shared_core.errors import ConfigError
from shared_core.files.atomic import check_writable
from shared_core.files.json_yaml import json_text
from shared_core.printing import echo
from shared_core.reports.export_lines import export_lines
from shared_core.reports.quantization_page import cache_line

_SUFFIX = {"onnx": ".onnx", "executorch": ".pte", "compressed-tensors": "", "torchao": "", "gguf": ".gguf"}
# of options that not onnx alone has
_FORMATS = {
    "--static-batch": ("onnx", "executorch"),
    "--calibration": ("onnx", "executorch", "compressed-tensors"),
    "--kv-cache": ("compressed-tensors",),
}
_EXAMPLE_LENGTH = 16  # of inputs whose length stays open


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="A Hugging Face folder, or module:function that returns (model, inputs); inputs: tensor, tuple, dict."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="The file, or of compressed-tensors and torchao the folder.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="What qat saved: a folder, a .safetensors beside eff_deployment.json, or a Lightning .ckpt. Without "
            "that file beside them weights are in float."
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(help="For a folder of a model that reads tokens: how many, with padding; of onnx: open without."),
    ] = None,
    dynamic_length: Annotated[
        bool, typer.Option("--dynamic-length", help="Of onnx: leave the second axis of the inputs open too.")
    ] = False,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            help="onnx; executorch for phones and boards; compressed-tensors for vLLM and transformers; torchao for "
            "transformers; gguf for llama.cpp.",
        ),
    ] = "onnx",
    opset: Annotated[int, typer.Option(help="Of onnx: 21 to 23.")] = 21,
    static_batch: Annotated[
        bool, typer.Option("--static-batch", help="Of onnx: fix the batch to the example's; executorch always does.")
    ] = False,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="module:function that returns batches of inputs: codes between convolutions too, or, of "
            "compressed-tensors, of --kv-cache and of inputs in NVFP4. By default, of onnx, those "
            "that eff quantize kept."
        ),
    ] = None,
    kv_cache: Annotated[
        str | None,
        typer.Option(
            "--kv-cache",
            help="Of compressed-tensors: fp8 measures scales for a cache of keys and values in FP8 on --calibration. "
            "By default those that eff quantize kept.",
        ),
    ] = None,
    weight_codes: Annotated[
        str,
        typer.Option(
            help="Of onnx: signed, the fastest with VNNI or AMX; unsigned, for x86 without, where products with signed "
            "ones saturate; auto: signed if onnxruntime sums them exactly here."
        ),
    ] = "auto",
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not load what was written in its runtime and compare.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Write a model for another runtime, quantised layers as codes, and check what was written.

    A folder that training with qat saved has its ranges beside the weights. A function builds the plain model, and
    --weights loads these; without --weights it returns a model that is quantised already, or stays in float.
    """
    if kind not in _SUFFIX:
        raise ConfigError("eff export", f"--format must be one of {', '.join(_SUFFIX)}, got {kind!r}")
    given = {
        "--dynamic-length": dynamic_length, "--opset": opset != 21, "--weight-codes": weight_codes != "auto",
        "--static-batch": static_batch, "--calibration": calibration is not None, "--kv-cache": kv_cache is not None,
    }  # fmt: skip
    for name, is_given in given.items():
        formats = _FORMATS.get(name, ("onnx",))
        if is_given and kind not in formats:
            raise ConfigError(
                "eff export", f"{name} must come with --format {' or '.join(formats)}, got {kind}", "leave it out"
            )
    if kv_cache is not None and calibration is None:
        raise ConfigError("eff export", "--kv-cache must come with --calibration, got it alone", "name a function")
    target = _checked_out(out, kind)
    traced = kind in ("onnx", "executorch")
    network, example = model_and_inputs(
        model, weights, length, None if kind == "executorch" else _EXAMPLE_LENGTH, traced=traced
    )
    if kind == "onnx" and Path(model).is_dir():
        reads_tokens = "input_ids" in example
        if dynamic_length and not reads_tokens:
            raise ConfigError("eff export", f"--dynamic-length must come with a model that reads tokens, got {model}")
        dynamic_length = dynamic_length or (reads_tokens and length is None)
    batches = None if calibration is None else list(user_batches(calibration, "eff export: --calibration"))
    if kv_cache is not None:
        from shared_core.quantization import calibrate_kv_cache

        with bar("calibration of the cache") as advance:
            cache = calibrate_kv_cache(network, batches or (), kv_cache, progress=advance)
    report: Any
    with bar("exporting"):
        if kind == "onnx":
            from shared_core.tools.export.onnx import export_onnx

            report = export_onnx(
                network, example, target,
                opset=opset, dynamic_batch=not static_batch, dynamic_length=dynamic_length, verify=not no_verify,
                calibration=saved_codes(model, weights) if batches is None else batches, weight_codes=weight_codes,  # type: ignore[arg-type]
            )  # fmt: skip
        elif kind == "executorch":
            from shared_core.tools.export.executorch import export_executorch

            report = export_executorch(network, example, target, verify=not no_verify, calibration=batches)
        else:
            name = kind.replace("-", "_")
            write = getattr(importlib.import_module(f"shared_core.tools.export.{name}"), f"export_{name}")
            folder = Path(model)
            extra: dict[str, Any] = {}
            if kind == "gguf" and (folder / "tokenizer.json").exists():
                extra["tokenizer"] = folder
            if kind == "compressed-tensors":
                extra["calibration"] = batches
            report = write(network, target, example_inputs=example, verify=not no_verify, **extra)
            if folder.is_dir() and target.is_dir():
                copy_beside(folder, target)
    values = dataclasses.asdict(report)
    if kv_cache is not None:
        values["calibrated_kv_cache"] = dataclasses.asdict(cache)
    keep_report(target if _SUFFIX[kind] else target / "model.safetensors", values)
    if as_json:
        echo(json_text(values))
        return
    for line in export_lines(kind, report):
        echo(line)
    if kv_cache is not None:
        echo(cache_line(values["calibrated_kv_cache"]))


def _checked_out(out: Path | None, kind: str) -> Path:
    if out is None:
        raise ConfigError("eff export", "--out must be given, got none", "name what to write")
    suffix = _SUFFIX[kind]
    if not suffix:
        check_new(out, "eff export")
        return out
    if out.is_dir():
        raise ConfigError("eff export", f"--out must be a file, got the folder {out}", "name a file in it")
    if not out.parent.is_dir():
        raise ConfigError("eff export", f"--out must lie in a folder that exists, got {out}", "make it first")
    if out.exists() and out.suffix != suffix:  # such as the weights that are to be exported
        raise ConfigError(
            "eff export",
            f"--out must be a new file, or a {suffix} file to write anew, got {out}, which exists",
            "name another",
        )
    check_writable(out, "eff export: --out")
    return out
