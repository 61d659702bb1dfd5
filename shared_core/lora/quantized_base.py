"""A linear layer's weight, frozen in 4 or 8 bits through bitsandbytes: made, read in float, saved and restored."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.distributed.sharded_tensors import cut, fill_, whole
from shared_core.errors import CompatibilityError, TrainingError
from shared_core.libraries import optional
from shared_core.lora.config import LoraConfig
from shared_core.modules.four_bits import dequantized, linear_of_four_bits
from shared_core.modules.weight_views import as_rows
from shared_core.quantization.fake_quant_layers import is_quantized

_OUTLIERS = 6.0
"""Input columns with larger values are multiplied in 16 bit (Dettmers et al., 2022, arXiv:2208.07339, section 3.2)."""
_INT8_MAX = 127.0


@contextlib.contextmanager
def on_device(device: torch.device, base: str) -> Iterator[None]:
    """Tell what fails inside as what it is: bitsandbytes lacks this device."""
    try:
        yield
    except Exception as error:  # its backends raise NotImplementedError, RuntimeError, OSError, ValueError
        version = importlib.metadata.version("bitsandbytes")
        rule = f"base {base} must run on {device}, but bitsandbytes {version} does not: {type(error).__name__}: {error}"
        remedy = "use CPU or CUDA, or --lora_base none, which does without it"
        raise CompatibilityError("lora", rule, remedy) from error


@cache
def int8_sums_exactly() -> bool:
    """Return True if bitsandbytes' product of int8 codes is exact on this CPU: one product that can saturate shows it.

    Where the processor has AVX-512 it is `torch._int_mm` (0.50), which leads to oneDNN: that obeys ONEDNN_MAX_CPU_ISA.
    """
    optional("bitsandbytes", "bnb", "lora")
    rows, inputs, outputs = 17, 64, 32
    # 127 * 127 * 64 = 1032256 exceeds what 16-bit pairs hold: kernels without VNNI saturate.
    codes = (torch.full((count, inputs), 127, dtype=torch.int8, device="cpu") for count in (rows, outputs))
    return bool((torch.ops.bitsandbytes.int8_linear_matmul(*codes) == 127 * 127 * inputs).all())


def freeze(linear: nn.Linear, config: LoraConfig) -> nn.Module:
    """Return a layer that computes with the quantized weight of `linear`, finite, which stays as it is.

    With ``base="none"`` this is `linear` itself.

    Source: NF4 and double quantization: Dettmers et al., 2023, arXiv:2305.14314, section 3.
    """
    # (outputs, inputs), whatever the layer's own layout; bitsandbytes quantizes in blocks along rows.
    weight = as_rows(linear, linear.weight.detach())
    if not torch.isfinite(weight).all():
        raise TrainingError("lora", "weights must be finite before they are quantized, got NaN or infinity")
    if config.base == "none":
        return linear
    bnb = optional("bitsandbytes", "bnb", "lora")
    weight = weight.contiguous()
    outputs, inputs = weight.shape
    layer: Any
    if config.base == "int8" and weight.device.type == "cpu" and not int8_sums_exactly():
        # it adds pairs of 8-bit products in 16 bits
        rule = "base int8 must be multiplied exactly, but bitsandbytes' product saturates here"
        raise CompatibilityError("lora", rule, "unset ONEDNN_MAX_CPU_ISA, or use --lora_base nf4")
    with on_device(weight.device, config.base):
        if config.base == "int8":
            # On meta: it would draw and allocate a weight only to lose it.
            layer = bnb.nn.Linear8bitLt(
                inputs, outputs, linear.bias is not None, has_fp16_weights=False, threshold=_OUTLIERS, device="meta"
            )
            # bitsandbytes quantizes only what comes from the CPU
            codes = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
            layer.weight = codes.to(weight.device)
            layer.init_8bit_state()
            layer.register_forward_pre_hook(_follow_codes)
            layer.register_forward_pre_hook(_in_rows)
            layer.register_forward_hook(_as_given)
        else:
            layer = linear_of_four_bits(
                weight, bias=linear.bias is not None, quant_type=config.base, double_quant=config.double_quant
            )
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    # An overflow of scales shows here: a row with one value near the dtype's largest number.
    if not torch.isfinite(float_weight(layer)).all():
        rule = f"weights must be in float16's range for base={config.base}, got up to {weight.abs().max().item():g}"
        raise TrainingError("lora", rule, "use nf4")
    frozen: nn.Module = layer.train(linear.training)
    return frozen


def _follow_codes(layer: Any, args: Any) -> None:
    # the codes are a parameter and move with the model; bitsandbytes (0.50) leaves the scales where they were
    layer.state.CB, layer.state.SCB = layer.weight.data, layer.state.SCB.to(layer.weight.device)


def _in_rows(layer: Any, args: tuple[Tensor]) -> tuple[Tensor] | None:
    # its 8-bit product (0.50) takes two or three dimensions, channels-last images have four
    (x,) = args
    layer.leading = x.shape[:-1] if x.dim() > 3 else None
    return None if layer.leading is None else (x.flatten(0, -2),)


def _as_given(layer: Any, args: Any, output: Tensor) -> Tensor:
    return output if layer.leading is None else output.reshape(*layer.leading, output.shape[-1])


def frozen_tensors(layer: Any) -> dict[str, Tensor]:
    """Return the live tensors that a frozen weight is made of: codes and scales, or the weight itself."""
    quant_state = getattr(layer.weight, "quant_state", None)
    if quant_state is not None:
        tensors = {"codes": layer.weight.data, "absmax": quant_state.absmax}
        # Double quantization: absmax itself is 8-bit codes, with an offset and scales of their own.
        if quant_state.nested:
            tensors |= {"offset": quant_state.offset, "absmax_of_absmax": quant_state.state2.absmax}
        return tensors
    if layer.weight.dtype == torch.int8:
        return {"codes": layer.weight.data, "absmax": layer.state.SCB}
    return {"weight": layer.weight.data}


def float_weight(layer: Any) -> Tensor:
    """Return the frozen weight that a layer of `freeze` computes with, in float; rounded, where qat does so by now."""
    weight = layer.weight
    if is_quantized(layer) and layer.quantizer.bank.quantizing:
        return on_qat_grid(layer, weight.detach())
    if getattr(weight, "quant_state", None) is not None:
        return dequantized(weight)
    if weight.dtype == torch.int8:
        codes: Tensor = weight.data
        # LLM.int8(): each row is scaled by its largest magnitude over 127.
        scale: Tensor = layer.state.SCB.to(codes.device)[:, None] / _INT8_MAX
        return codes.float() * scale
    plain: Tensor = weight.detach()
    return plain


def restore_(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Put saved tensors in the place of a frozen weight's, in place and exactly."""
    mine = frozen_tensors(layer)
    report = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if report != {name: tuple(tensor.shape) for name, tensor in mine.items()}:
        raise ValueError(f"base is made of {report}")
    for name, tensor in tensors.items():
        fill_(mine[name], tensor)


def on_grid(weight: Tensor, config: LoraConfig) -> Tensor:
    """Return `weight` rounded to the base's grid: dequantized after quantization, in its own dtype."""
    return float_weight(freeze(linear_of(weight), config)).to(weight.dtype)


def linear_of(weight: Tensor) -> nn.Linear:
    """Return a linear layer of a weight, (outputs, inputs), which stays where it is, without bias."""
    # On meta again, with the weight put in: nothing is copied.
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


def on_qat_grid(layer: Any, weight: Tensor) -> Tensor:
    """Return `weight` rounded as qat, which quantizes `layer`, bakes it; if it is sharded every process calls it."""
    # Whole, since a scale is of a row or a tensor; then each process keeps its part.
    return cut(layer.quantizer.baked_weight(layer, whole(weight)), weight)
