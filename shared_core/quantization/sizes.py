"""How large a quantised model is once its weights are stored as codes."""

from __future__ import annotations

from torch import nn

from shared_core.numerics.block_formats import NVFP4_GROUP
from shared_core.quantization.layers import as_rows, weights_of
from shared_core.quantization.modules import layer_entry
from shared_core.quantization.ranges import saved_scheme
from shared_core.quantization.schemes import LayerScheme

_MX_GROUP = 32


def code_bytes(channels: int, width: int, scheme: LayerScheme) -> int:
    """Return the bytes of one weight's codes and scales, codes packed without gaps.

    float32 scales for channels and groups (with a byte of zero point where groups are affine), one byte a block for MX
    and NVFP4 and four for the whole tensor of the latter.

    Args:
        channels: Rows, each an output channel or an embedding vector.
        width: Weights of a row.
        scheme: How they are quantised.

    Example:
        >>> code_bytes(10, 64, LayerScheme(weight_bits=8)), code_bytes(10, 64, LayerScheme("group", 4, group_size=32))
        (680, 400)
    """
    codes = -(-channels * width * scheme.weight_bits // 8)
    if scheme.weight == "group":
        return codes + channels * (width // scheme.group_size) * (5 if scheme.affine else 4)
    if scheme.weight == "mxfp4":
        return codes + channels * -(-width // _MX_GROUP)
    if scheme.weight == "nvfp4":
        return codes + channels * -(-width // NVFP4_GROUP) + 4
    return codes + 4 * channels


def quantized_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's state dict with the weights of its quantised layers as codes.

    Args:
        model: What `quantize` returned, or a model in or after quantization-aware training.

    Example:
        >>> from shared_core.quantization import quantize
        >>> quantized_bytes(quantize(nn.Linear(64, 10), "int8_weight"))  # 640 codes, 10 scales, 10 biases
        720
    """
    tensors = {value.data_ptr(): value.numel() * value.element_size() for value in model.state_dict().values()}
    for module in model.modules():
        entry = layer_entry(module)
        if entry is None:
            continue
        scheme = saved_scheme(entry, "quantized_bytes")
        for weight in weights_of(module).values():
            rows = as_rows(module, weight.detach())
            tensors[weight.data_ptr()] = code_bytes(rows.shape[0], rows.shape[1], scheme)
    return sum(tensors.values())
