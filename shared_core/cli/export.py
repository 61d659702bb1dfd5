"""`eff export`: a model as a file, or a folder, that another runtime reads."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared_core.cli.arguments import CommandOptions, bar, takes
from shared_core.cli.loading import check_new, copy_beside, keep_report, user_batches
from shared_core.cli.quantized_models import model_and_inputs, saved_codes
from shared_core.config.options import option
from shared_core.errors import ConfigError
from shared_core.files.atomic import check_writable
from shared_core.files.json_yaml import json_text
from shared_core.printing import echo
from shared_core.reports.export_lines import export_lines
from shared_core.reports.quantization_page import cache_line

_SUFFIX = {"onnx": ".onnx", "executorch": ".pte", "compressed-tensors": "", "torchao": "", "gguf": ".gguf"}
_ONNX = {"kind": ("onnx",)}
_TRACED = ("onnx", "executorch")
_EXAMPLE_LENGTH = 16  # of inputs whose length stays open


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommandOptions):
    """Options of `eff export`."""

    key: ClassVar[str] = "eff export"
    needs: ClassVar = {"kv_cache": ("calibration",)}

    model: str = option(
        help="A Hugging Face folder, or module:function that returns (model, inputs); inputs: tensor, tuple, dict.",
        argument=True,
    )
    out: Path | None = option(None, "The file, or of compressed-tensors and torchao the folder.")
    weights: Path | None = option(
        None,
        "What qat saved: a folder, a .safetensors beside eff_deployment.json, or a Lightning .ckpt. Without that "
        "file beside them weights are in float.",
    )
    length: int | None = option(
        None,
        "For a folder of a model that reads tokens: how many, with padding; of onnx: open without.",
        low=1,
    )
    dynamic_length: bool = option(False, "Leave the second axis of the inputs open too.", only_with=_ONNX)
    kind: Literal["onnx", "executorch", "compressed-tensors", "torchao", "gguf"] = option(
        "onnx",
        "onnx; executorch for phones and boards; compressed-tensors for vLLM and transformers; torchao for "
        "transformers; gguf for llama.cpp.",
        flag="--format",
    )
    opset: int = option(21, "21 to 23.", only_with=_ONNX)
    static_batch: bool = option(
        False,
        "Fix the batch to the example's; executorch always does.",
        only_with={"kind": _TRACED},
    )
    calibration: str | None = option(
        None,
        "module:function that returns batches of inputs: codes between convolutions too, or, of "
        "compressed-tensors, of --kv-cache and of inputs in NVFP4. By default, of onnx, those that eff quantize kept.",
        only_with={"kind": (*_TRACED, "compressed-tensors")},
    )
    kv_cache: str | None = option(
        None,
        "fp8 measures scales for a cache of keys and values in FP8 on --calibration. By "
        "default those that eff quantize kept.",
        only_with={"kind": ("compressed-tensors",)},
    )
    weight_codes: str = option(
        "auto",
        "signed, the fastest with VNNI or AMX; unsigned, for x86 without, where products with signed "
        "ones saturate; auto: signed if onnxruntime sums them exactly here.",
        only_with=_ONNX,
    )
    no_verify: bool = option(False, "Do not load what was written in its runtime and compare.")
    as_json: bool = option(False, "Print the report as JSON.", flag="--json")


@takes(ExportOptions)
def export(asked: ExportOptions) -> None:
    """Write a model for another runtime, quantised layers as codes, and check what was written.

    A folder that training with qat saved has its ranges beside the weights. A function builds the plain model, and
    --weights loads these; without --weights it returns a model that is quantised already, or stays in float.
    """
    kind, model, weights, verify = asked.kind, asked.model, asked.weights, not asked.no_verify
    target = _checked_out(asked.out, kind)
    default_length = None if kind == "executorch" else _EXAMPLE_LENGTH
    network, example = model_and_inputs(asked, default_length, traced=kind in _TRACED)
    dynamic_length = asked.dynamic_length
    if kind == "onnx" and Path(model).is_dir():
        reads_tokens = "input_ids" in example
        if dynamic_length and not reads_tokens:
            raise ConfigError(asked.key, f"--dynamic-length must come with a model that reads tokens, got {model}")
        dynamic_length = dynamic_length or (reads_tokens and asked.length is None)
    batches = None if asked.calibration is None else list(user_batches(asked.calibration, "eff export: --calibration"))
    if asked.kv_cache is not None:
        from shared_core.quantization import calibrate_kv_cache

        with bar("calibration of the cache") as advance:
            cache = calibrate_kv_cache(network, batches or (), asked.kv_cache, progress=advance)
    report: Any
    with bar("exporting"):
        if kind == "onnx":
            from shared_core.tools.export.onnx import export_onnx

            report = export_onnx(
                network, example, target,
                opset=asked.opset, dynamic_batch=not asked.static_batch, dynamic_length=dynamic_length, verify=verify,
                calibration=saved_codes(model, weights) if batches is None else batches,
                weight_codes=asked.weight_codes,  # type: ignore[arg-type]
            )  # fmt: skip
        elif kind == "executorch":
            from shared_core.tools.export.executorch import export_executorch

            report = export_executorch(network, example, target, verify=verify, calibration=batches)
        else:
            name = kind.replace("-", "_")
            write = getattr(importlib.import_module(f"shared_core.tools.export.{name}"), f"export_{name}")
            folder = Path(model)
            extra: dict[str, Any] = {}
            if kind == "gguf" and (folder / "tokenizer.json").exists():
                extra["tokenizer"] = folder
            if kind == "compressed-tensors":
                extra["calibration"] = batches
            report = write(network, target, example_inputs=example, verify=verify, **extra)
            if folder.is_dir() and target.is_dir():
                copy_beside(folder, target)
    values = dataclasses.asdict(report)
    if asked.kv_cache is not None:
        values["calibrated_kv_cache"] = dataclasses.asdict(cache)
    keep_report(target if _SUFFIX[kind] else target / "model.safetensors", values)
    if asked.as_json:
        echo(json_text(values))
        return
    for line in export_lines(kind, report):
        echo(line)
    if asked.kv_cache is not None:
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
