"""Describe an export in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def export_lines(kind: str, report: Any) -> Iterator[str]:
    """Yield lines on what was written."""
    how = f"{len(report.quantized)} layers quantised" if report.quantized else "all of it in float"
    yield f"wrote {report.path}: {report.bytes} bytes, {how}"
    if report.quantized and report.float_layers:
        yield f"left in float: {', '.join(report.float_layers)}"
    if report.cache_scales_left_out:
        count = len(report.cache_scales_left_out)
        yield f"left out: scales of the cache of {count} attention layers, which only compressed-tensors holds"
    yield from {
        "onnx": _onnx,
        "executorch": _program,
        "compressed-tensors": _served,
        "torchao": _served,
        "gguf": _llama,
    }[kind](report)


def _onnx(report: Any) -> Iterator[str]:
    taken = (f"{name} ({', '.join(map(str, shape))})" for name, shape in report.inputs.items())
    yield f"it takes {', '.join(taken)}"
    if report.largest_difference is None:
        yield "not compared with the model"
    else:
        yield f"largest difference to the model: {report.largest_difference:.2g}"
    if report.relative_change is not None:
        yield f"codes between layers change the outputs by {report.relative_change:.2%}"
    if report.float_activations:
        yield (
            f"{len(report.float_activations)} outputs and sums of convolutions stay in float, with the convolutions "
            "before them: slower than the float model; --calibration gives them codes"
        )
    nodes = ", ".join(f"{count} {name}" for name, count in report.integer_nodes.items())
    yield f"integer kernels of onnxruntime here: {nodes or 'none'}"
    if report.unsigned_weights and nodes:
        yield "weights as unsigned codes: exact without VNNI; --weight-codes signed is faster with it"


def _program(report: Any) -> Iterator[str]:
    yield f"integer kernels of XNNPACK: {', '.join(report.integer) or 'none'}"
    others = ", ".join(f"{count} {name}" for name, count in report.other_operators.items())
    yield f"portable kernels: {others or 'none'}"
    change = report.relative_change
    yield "not compared with the model" if change is None else f"outputs change by {change:.2%} of the largest"


def _served(report: Any) -> Iterator[str]:
    yield f"format: {report.format}"
    if report.format in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
        yield "vLLM runs it on GPUs alone; all other weights are bfloat16"
    if report.kv_cache:
        yield f"keys and values of {len(report.kv_cache)} attention layers have scales: vLLM keeps its cache in FP8"
    if report.values:
        yield f"values of their codes, in float: {', '.join(report.values)}"
    if report.unrounded_inputs:
        yield f"inputs that training rounded and engines do not: {', '.join(report.unrounded_inputs)}"
    if report.equal_layers is None:
        yield "not compared with the model"
        return
    yield f"dequantised, the weights of {report.equal_layers} layers are the model's, to the bit"
    if report.largest_difference is None:
        yield (
            "outputs not compared: transformers loads neither float experts, nor those in W8A8 or with zero points, "
            "nor other zero points beside other schemes"
        )
        return
    yield f"largest difference in transformers, with inputs of layers in float: {report.largest_difference:.2g}"
    yield f"inputs as transformers rounds them change the outputs by {report.relative_change:.2%}"


def _llama(report: Any) -> Iterator[str]:
    yield f"types: {report.format}"
    if report.equal_layers is None:
        yield "not compared with the model"
        return
    yield f"the codes of {report.equal_layers} layers are the model's; float16 scales change {report.scale_error:.2g}"
    if report.largest_difference is not None:
        yield f"largest difference in transformers, in float: {report.largest_difference:.2g}"
