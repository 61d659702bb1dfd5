"""`eff export`: write a model as a file or folder for another runtime. Also loads quantized models for commands."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shared_core.cli.arguments import ModelOptions, bar, print_report, takes
from shared_core.cli.loading import (
    check_new,
    copy_beside,
    keep_report,
    load_weights,
    made_up_inputs,
    open_model,
    user_batches,
)
from shared_core.config.options import option
from shared_core.errors import CheckpointError, require
from shared_core.files.atomic import check_writable, is_free
from shared_core.files.json_yaml import json_text
from shared_core.printing import counted, echo, listed, share_text, size_text
from shared_core.reports.quantization_page import cache_line

if TYPE_CHECKING:
    from torch import nn  # `eff --help` must not wait for torch


_SUFFIX = {
    "onnx": ".onnx", "executorch": ".pte", "compressed-tensors": "", "torchao": "", "gguf": ".gguf", "released": ""
}  # fmt: skip
_ONNX = {"kind": ("onnx",)}
_TRACED = ("onnx", "executorch")
_EXAMPLE_LENGTH = 16  # for inputs whose length is dynamic


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions):
    """Options of `eff export`."""

    key: ClassVar[str] = "eff export"
    needs: ClassVar = {"kv_cache": ("calibration",)}

    model: str = option(
        help="A Hugging Face folder, or module:function that returns (model, inputs): a tensor, tuple or dict.",
        argument=True,
        reads="model",
    )
    out: Path = option(help="The file to write; for compressed-tensors, torchao and released, a folder.")
    weights: Path | None = option(
        None,
        "Trained weights: a folder, a .safetensors file, or a Lightning .ckpt. Integers need the eff_deployment.json "
        "that qat saved in the same folder.",
        reads="path",
    )
    length: int | None = option(
        None,
        "Tokens per input, for a Hugging Face folder. Pad shorter inputs. Default for onnx: any length.",
        low=1,
    )
    dynamic_length: bool = option(False, "Also make the inputs' second axis dynamic.", only_with=_ONNX)
    kind: Literal["onnx", "executorch", "compressed-tensors", "torchao", "gguf", "released"] = option(
        "onnx",
        "Format of the file: onnx; executorch for phones and boards; compressed-tensors for vLLM and transformers; "
        "torchao for transformers; gguf for llama.cpp; released for the quantized format of --base.",
        flag="--format",
    )
    base: str | None = option(
        None,
        "The quantized release that MODEL was trained from: a folder, or a name in the Hub's local cache. Its files, "
        "names and scales are kept. Default: MODEL.",
        only_with={"kind": ("released",)},
    )
    opset: int = option(21, "ONNX opset version.", low=21, high=23, only_with=_ONNX)
    static_batch: bool = option(
        False,
        "Fix the batch size to the example's. executorch always does.",
        only_with={"kind": _TRACED},
    )
    calibration: str | None = option(
        None,
        "module:function that returns batches of inputs. They set the integers between convolutions or, with "
        "compressed-tensors, the scales of --kv-cache and NVFP4 inputs. Default for onnx: what qat or eff quantize "
        "saved.",
        only_with={"kind": (*_TRACED, "compressed-tensors")},
        reads="function",
    )
    kv_cache: str | None = option(
        None,
        "fp8: measure scales for an FP8 key-value cache on --calibration. Default: what eff quantize saved.",
        only_with={"kind": ("compressed-tensors",)},
    )
    weight_codes: str = option(
        "auto",
        "Integers of weights: signed (fastest with VNNI or AMX), unsigned (exact on x86 CPUs without them), or auto "
        "(tests this machine).",
        only_with=_ONNX,
    )
    target: Literal["onnxruntime", "tensorrt", "openvino"] | None = option(
        None,
        "Engine that will run the file. Its rules are checked node by node. tensorrt gets signed integers and "
        "needs qat with symmetric. Default: written for onnxruntime, without a check.",
        only_with=_ONNX,
    )
    no_verify: bool = option(False, "Skip loading the file in its runtime and comparing the outputs.")


@takes(ExportOptions)
def export(asked: ExportOptions) -> None:
    """Write a model for another runtime, with integer weights if it was quantized.

    The file is loaded and compared with the model. A folder from qat contains the ranges. A module:function builds the
    plain model, and --weights loads trained weights into it. Without --weights, the model is exported as the function
    returns it.
    """
    kind, model, weights, verify = asked.kind, asked.model, asked.weights, not asked.no_verify
    target = asked.out
    _check_out(asked)
    default_length = None if kind == "executorch" else _EXAMPLE_LENGTH
    network, example = model_and_inputs(asked, default_length, traced=kind in _TRACED)
    dynamic_length = asked.dynamic_length
    if kind == "onnx" and Path(model).is_dir():
        reads_tokens = "input_ids" in example
        rule = f"--dynamic-length needs a model that reads tokens, got {model}"
        asked.require(reads_tokens or not dynamic_length, rule)
        dynamic_length = dynamic_length or (reads_tokens and asked.length is None)
    batches = None if asked.calibration is None else list(user_batches(asked.calibration, "eff export: --calibration"))
    if asked.kv_cache is not None:
        from shared_core.quantization import calibrate_kv_cache

        with bar("calibration of the cache") as advance:
            cache = calibrate_kv_cache(network, batches or (), asked.kv_cache, progress=advance)
    report: Any
    times: tuple[float, float] | None = None
    with bar("exporting"):
        if kind == "onnx":
            from shared_core.tools.export.onnx import export_onnx
            from shared_core.tools.export.onnx_speed import milliseconds

            report = export_onnx(
                network, example, target,
                opset=asked.opset, dynamic_batch=not asked.static_batch, dynamic_length=dynamic_length, verify=verify,
                calibration=saved_codes(model, weights) if batches is None else batches,
                weight_codes=asked.weight_codes,  # type: ignore[arg-type]
                target=asked.target,
            )  # fmt: skip
            # Of the example inputs, in integers and in float.
            times = milliseconds(target, example) if verify and report.integer_nodes else None
        elif kind == "executorch":
            from shared_core.tools.export.executorch import export_executorch

            report = export_executorch(network, example, target, verify=verify, calibration=batches)
        elif kind == "released":
            from shared_core.tools.export.released import export_released

            report = export_released(network, target, base=asked.base, example_inputs=example, verify=verify)
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
    values = dataclasses.asdict(report) | ({"milliseconds": times} if kind == "onnx" else {})
    if asked.kv_cache is not None:
        values["calibrated_kv_cache"] = dataclasses.asdict(cache)
    keep_report(target if _SUFFIX[kind] else target / "model.safetensors", values)
    if asked.as_json:
        echo(json_text(values))
        return
    of_cache = [] if asked.kv_cache is None else [cache_line(values["calibrated_kv_cache"])]
    print_report(values, [*_lines(kind, report), *_times(times), *of_cache], as_json=False)


def _check_out(asked: ExportOptions) -> None:
    out, suffix = asked.out, _SUFFIX[asked.kind]
    if asked.kind == "released":
        from shared_core.checkpoint_formats.released import released_config

        asked.require(asked.base or Path(asked.model).is_dir(), f"--base must be given with {asked.model}, got none")
        try:
            released_config(asked.base or asked.model)
        except CheckpointError as error:
            rule = f"--base must be the quantized release that {asked.model} was trained from: {error.rule}"
            raise CheckpointError(asked.key, rule, "" if asked.base else "add --base FOLDER") from error
    if not suffix:
        check_new(out, asked.key)
        return
    asked.require(not out.is_dir(), f"--out must be a file, got the folder {out}", "name a file in it")
    asked.require(out.parent.is_dir(), f"--out must be in an existing folder, got {out}", "create it first")
    rule = f"--out must be a new file, or a {suffix} file to overwrite, got {out}, which exists"
    # a file of another kind may be the weights to export
    asked.require(out.suffix == suffix or is_free(out), rule, "choose another name")
    check_writable(out, "eff export: --out")


BETWEEN = "between_layers"
"""Qat's part of ``eff_deployment.json`` with scales and zero points of tensors between layers."""


def model_and_inputs(asked: ExportOptions, default_length: int | None, *, traced: bool) -> tuple[nn.Module, Any]:
    """Return the model for `eff export`, quantizing as in training, and example inputs."""
    from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE
    from shared_core.quantization import apply_ranges

    length, is_folder = asked.length, Path(asked.model).is_dir()
    rule = f"--length needs a folder, got {asked.model}"
    asked.require(is_folder or length is None, rule, "its function returns the inputs")
    _check_final(Path(asked.model) if is_folder else asked.weights)
    has_ranges = asked.weights is not None and _has_ranges(asked.weights)
    network: Any
    network, example, folder = open_model(
        asked.model, asked.weights, asked.key, load_quantized if has_ranges else load_weights,
        dequantize=asked.kind == "released",
    )  # fmt: skip
    if folder is None:
        asked.require_inputs(example is not None)
        return network, example
    network = network.float()
    for module in network.modules() if traced else ():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False  # the exporters don't support a cache in the outputs (torch 2.13)
    if traced:
        network.set_experts_implementation("batched_mm")  # ONNX has no grouped_mm, the default (transformers 5.23)
    if (folder / DEPLOYMENT_FILE).exists() and (ranges := _saved_ranges(folder)):
        apply_ranges(network, ranges)
    inputs = _inputs(network, default_length if length is None else length)
    rule = f"got {type(network).__name__}, which reads {', '.join(inputs)}"
    reads_tokens = {"input_ids", "decoder_input_ids"} & inputs.keys()
    rule = f"--length needs a model that reads tokens, {rule}"
    asked.require(reads_tokens or length is None, rule, "leave it out")
    return network, inputs


def _inputs(network: nn.Module, length: int | None) -> dict[str, Any]:
    import torch

    inputs = made_up_inputs(network, "eff export", length or 8)
    if (tokens := inputs.get("input_ids")) is None:
        return inputs
    rule = "--length must be given, because a program for ExecuTorch reads inputs of one size"
    require(length is not None, "eff export", rule, "add --length 128, the number of tokens per input")
    require((length or 0) >= 2, "eff export", f"--length must be at least 2, got {length}", "add --length 128")
    if "attention_mask" in inspect.signature(network.forward).parameters:
        inputs["attention_mask"] = torch.ones_like(tokens)
        inputs["attention_mask"][1, -1] = 0  # the comparison with the model then includes padding
    return inputs


def _check_final(path: Path | None) -> None:
    """Refuse the Trainer's checkpoint from before qat finished: it would be written in float."""
    from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE
    from shared_core.engine.saving.state_file import STATE_FILE, load_state

    if path is None or not (path / STATE_FILE).is_file() or (path / DEPLOYMENT_FILE).exists():
        return
    state = load_state(path)
    rule = f"{path} is a checkpoint of step {state.get('step')}, from before qat rounded the weights"
    remedy = "give the folder that trainer.save_model() wrote after training; to finish the run, resume it"
    require("qat" not in state.get("recipe", {}), "eff export", rule, remedy, CheckpointError)


def _has_ranges(weights: Path) -> bool:
    """Return True if qat saved a file or folder, or may have. Weights without qat's files are in float."""
    from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE, LIGHTNING_META

    folder = weights if weights.is_dir() else weights.parent
    return weights.suffix == ".ckpt" or any((folder / name).exists() for name in (DEPLOYMENT_FILE, LIGHTNING_META))


def _saved_ranges(folder: Path) -> dict[str, Any]:
    return _of_qat(folder, "ranges")


def _of_qat(folder: Path, key: str) -> dict[str, Any]:
    from shared_core.checkpoint_formats.plain import read_deployment

    values: dict[str, Any] = read_deployment(folder).get("qat", {}).get(key, {})
    return values


def saved_codes(model: str, weights: Path | None) -> dict[str, tuple[float, int]] | None:
    """Return the codes between layers that `eff quantize` saved with the weights, None if there are none."""
    from shared_core.checkpoint_formats.plain import DEPLOYMENT_FILE

    path = Path(model) if weights is None else weights
    folder = path.parent if path.suffix == ".safetensors" else path
    found = _of_qat(folder, BETWEEN) if (folder / DEPLOYMENT_FILE).exists() else {}
    return {name: (scale, zero_point) for name, (scale, zero_point) in found.items()} or None


def load_quantized(model: nn.Module, path: Path, where: str = "eff export") -> None:
    """Load the baked weights and ranges that qat saved into a plain model."""
    from shared_core.quantization import apply_ranges

    beside = path if path.is_dir() or path.suffix == ".ckpt" or not path.exists() else path.parent
    ranges = _saved_ranges(beside)
    prefix = load_weights(model, path, where)
    apply_ranges(model, {name.removeprefix(prefix): value for name, value in ranges.items() if name.startswith(prefix)})


def _lines(kind: str, report: Any) -> Iterator[str]:
    """Yield lines about the written file."""
    if kind == "released":
        yield from _released(report)
        return
    layers = f"{counted(len(report.quantized), 'layer')} quantized" if report.quantized else "all layers in float"
    yield f"Wrote {report.path}: {size_text(report.bytes)}, {layers}."
    if report.quantized and report.float_layers:
        yield f"Left in float: {listed(report.float_layers)}."
    if report.cache_scales_left_out:
        scales = counted(len(report.cache_scales_left_out), "attention layer")
        yield f"Left out the cache scales of {scales}. Only compressed-tensors holds them."
    yield from {
        "onnx": _onnx,
        "executorch": _program,
        "compressed-tensors": _served,
        "torchao": _served,
        "gguf": _llama,
    }[kind](report)


def _released(report: Any) -> Iterator[str]:
    weights = counted(len(report.quantized), "weight")
    yield f"Wrote {report.path}: {size_text(report.bytes)}, {report.format}, {weights} with codes."
    yield f"Released scales kept in {counted(report.kept_scales, 'weight')}, all released bytes in {report.unchanged}."
    yield (
        f"Codes that changed: {report.changed_codes:,} of {report.codes:,}; scales: {report.changed_scales:,} of "
        f"{report.scales:,}."
    )
    if errors := report.rounding_error:
        worst = max(errors, key=errors.__getitem__)
        mean = sum(errors.values()) / len(errors)
        yield (
            f"Rounded {counted(len(errors), 'weight')} off the released grid, with a relative error of {mean:.2%} on "
            f"average and {errors[worst]:.2%} at most ({worst})."
        )
        yield f"Clipped to the largest code: {share_text(report.clipped_codes / report.codes)} of the values."
    if report.copied:
        yield f"Copied from the release, because the model lacks them: {listed(report.copied)}."
    if report.equal_layers is None:
        yield _NOT_COMPARED
        return
    yield "Every tensor was decoded from the files and compared with the model."
    if report.largest_difference is not None:
        yield f"Largest difference in transformers from the rounded model: {report.largest_difference:.2g}."


_MUCH = 0.25
_NOT_COMPARED = "The file was not compared with the model."


def _onnx(report: Any) -> Iterator[str]:
    if report.target is not None:
        run = "" if report.target == "onnxruntime" else f" {report.target} did not run here."
        yield f"Every node keeps the rules of {report.target}.{run}"
    taken = (f"{name} ({', '.join(map(str, shape))})" for name, shape in report.inputs.items())
    yield f"Inputs: {', '.join(taken)}."
    if report.largest_difference is None:
        yield _NOT_COMPARED
    else:
        plainly = ", without integer kernels" if report.integer_nodes else ""
        yield f"Largest difference from the model's outputs: {report.largest_difference:.2g}{plainly}."
    if report.relative_change is not None:
        how = "With codes on the shortcuts of sums" if report.target == "tensorrt" else "With integer kernels"
        yield f"{how}, the largest difference is {report.relative_change:.2%} of the largest output."
        if report.relative_change > _MUCH:
            yield "That is a lot. Compare the file's accuracy with the model's before you deploy it."
    if report.float_activations:
        yield (
            f"{counted(len(report.float_activations), 'tensor')} between convolutions stay in float, and so do the "
            "operations before them. That is slower than the float model. --calibration makes them integers."
            if len(report.float_activations) > 1
            else "One tensor between convolutions stays in float, and so does the operation before it. That is "
            "slower than the float model. --calibration makes it an integer tensor."
        )
    if report.target == "tensorrt":
        return
    nodes = ", ".join(f"{count} {name}" for name, count in report.integer_nodes.items())
    yield f"Integer kernels that onnxruntime uses here: {nodes or 'none'}."
    if report.unsigned_weights and nodes:
        yield (
            "Weights are unsigned integers, which every processor multiplies exactly. Signed ones are faster: use "
            "--weight-codes signed for processors with VNNI, or train with --qat_weight_bits 7, exact and fast "
            "on all."
        )


def _times(milliseconds: tuple[float, float] | None) -> Iterator[str]:
    if milliseconds is None:
        return
    integers, floats = milliseconds
    yield f"The example inputs take {integers:.3g} ms on this machine, and {floats:.3g} ms in float."
    if integers > 1.05 * floats:  # less is noise
        yield "So the float model is faster here."


def _program(report: Any) -> Iterator[str]:
    yield f"Integer kernels of XNNPACK: {', '.join(report.integer) or 'none'}."
    others = ", ".join(f"{count} {name}" for name, count in report.other_operators.items())
    yield f"Portable kernels: {others or 'none'}."
    change = report.relative_change
    yield _NOT_COMPARED if change is None else f"The outputs change by {change:.2%} of the largest."


def _served(report: Any) -> Iterator[str]:
    yield f"Format: {report.format}."
    in_blocks = ("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized")
    if report.format in in_blocks and "fp8" not in report.format:
        yield "vLLM runs it on GPUs only."
    if report.format in in_blocks:
        yield "All other weights are bfloat16. Load the model in that dtype."
    if report.kv_cache:
        yield f"{counted(len(report.kv_cache), 'attention layer')} with cache scales: vLLM keeps their cache in FP8."
    if report.values:
        yield f"Stored as float, already rounded to the grid: {listed(report.values)}."
    if report.unrounded_inputs:
        yield f"Inputs that training rounded, but engines don't: {listed(report.unrounded_inputs)}."
    if report.equal_layers is None:
        yield _NOT_COMPARED
        return
    yield f"Dequantized weights equal the model's, bit for bit, in {counted(report.equal_layers, 'layer')}."
    if report.largest_difference is None:
        yield (
            "Outputs were not compared, because transformers cannot load this model: it reads no float experts, no "
            "experts in W8A8, MXFP8 or with zero points, and no mix of schemes with other zero points."
        )
        return
    yield f"Largest difference in transformers, with float inputs: {report.largest_difference:.2g}."
    what = "Rounding the inputs as transformers does" if report.rounds_inputs else "The dtype of the other weights"
    yield f"{what} changes the outputs by {report.relative_change:.2%}."


def _llama(report: Any) -> Iterator[str]:
    yield f"Types: {report.format}."
    if report.equal_layers is None:
        yield _NOT_COMPARED
        return
    layers = counted(report.equal_layers, "layer")
    yield f"The integers of {layers} equal the model's. Float16 scales change values by {report.scale_error:.2g}."
    if report.largest_difference is not None:
        yield f"Largest difference in transformers, in float: {report.largest_difference:.2g}."
