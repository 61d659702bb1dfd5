"""Presets with a name of compressed-tensors mean the same there, and round as its own arithmetic does."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from torch import nn

from shared_core.numerics import nvfp4_encode
from shared_core.numerics.block_formats import mx_encode, nvfp4_binary_scale
from shared_core.numerics.rounding import decode
from shared_core.quantization import QatConfig
from shared_core.quantization.rounding import quantize_input, quantize_weight
from shared_core.quantization.schemes import INPUTS, MX, SCHEMES, WEIGHTS, LayerScheme
from shared_core.quantization.selection import layer_schemes
from shared_core.tools.export.compressed_tensors import _format_scheme

NAMES = [
    name for name in [*SCHEMES, *map(str.upper, SCHEMES)] if name in PRESET_SCHEMES and name not in ("FP8", "INT8")
]
GIVEN = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "dynamic", "scale_dtype")


def scheme_of(name, width=256):
    return layer_schemes(QatConfig(scheme=name), {"a": nn.Linear(width, 128, bias=False)})["a"]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_has_the_arguments_of_compressed_tensors(name):
    scheme, theirs = scheme_of(name), PRESET_SCHEMES[name]
    mine = _format_scheme(scheme, rounds_inputs=True)
    for half in ("weights", "input_activations"):
        found, expected = getattr(mine, half), theirs.get(half)
        assert (found is None) == (expected is None), half
        values = lambda args: {key: getattr(args, key) for key in GIVEN if args is not None}  # noqa: E731
        # W2A16 and others of bits that engines lack are stored in the next size, with the same codes
        bits = {} if half == "input_activations" or not scheme.has_integers else {"num_bits": scheme.weight_bits}
        assert {**values(found), **bits} == values(expected), half


def test_every_name_that_we_share_with_compressed_tensors_is_checked():
    names = "W4A16 W8A8 W4A8 W4AFP8 FP8_DYNAMIC FP8_BLOCK NVFP4 MXFP4XFP8 MXFP6A8 MXFP8"
    assert {*names.split()} <= {*NAMES}
    # these two mean something else in lower case here: the preset FP8 is a pair, INT8 is W8A8
    assert PRESET_SCHEMES["INT8"] == PRESET_SCHEMES["W8A8"]
    mine = _format_scheme(LayerScheme(*WEIGHTS["fp8_tensor"], *INPUTS["fp8_static"]), rounds_inputs=True)
    inputs = PRESET_SCHEMES["FP8"]["input_activations"]
    assert all(getattr(mine.input_activations, key) == getattr(inputs, key) for key in GIVEN)
    assert (mine.weights.strategy, PRESET_SCHEMES["FP8"]["weights"].strategy) == ("channel", "tensor")  # one repeated


def scales_of(rows, scheme):
    """Our scales in the shape of the format, and its zero points; MX and NVFP4 as their own encoders give them."""
    if scheme.block == 32:
        scale = mx_encode(rows, MX[scheme.weight]).scale
        return torch.exp2(scale.float() - 127), None, None
    if scheme.weight == "nvfp4":
        tensor = nvfp4_binary_scale(rows.abs().amax())
        return decode(nvfp4_encode(rows, per_tensor_scale=tensor).scale, "fp8_e4m3"), None, tensor.reciprocal().view(1)
    if scheme.weight == "fp8_block":
        peaks = rows.view(len(rows) // 128, 128, -1, 128).abs().amax((1, 3))
        return peaks / 448, None, None
    groups = rows.view(len(rows), -1, scheme.group_size or rows.shape[1])
    if scheme.affine:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / 15
        return scale, (-8 - low / scale).round().clamp(-8, 7).to(torch.int8), None
    largest = 448 if scheme.weight == "fp8" else scheme.weight_qmax
    return groups.abs().amax(-1) / largest, None, None


@pytest.mark.parametrize("name", NAMES)
def test_weights_round_as_in_compressed_tensors(name):
    torch.manual_seed(0)
    layer, scheme = nn.Linear(256, 128, bias=False), scheme_of(name)
    scale, zero, tensor = scales_of(layer.weight.detach(), scheme)
    args = PRESET_SCHEMES[name]["weights"]
    theirs = fake_quantize(layer.weight.detach(), scale, zero, args, global_scale=tensor)
    mine = quantize_weight(layer, layer.weight, scheme).detach()
    assert torch.equal(mine, theirs) if scheme.block == 32 else torch.allclose(mine, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("inputs", ["int8_token", "fp8_token", "fp8_group", "mxfp4", "mxfp8"])
def test_inputs_round_as_in_compressed_tensors(inputs):
    torch.manual_seed(0)
    x, layer = torch.randn(3, 256) * torch.logspace(-2, 2, 3).unsqueeze(1), nn.Linear(256, 8)
    scheme = LayerScheme(*WEIGHTS["int8"], *INPUTS[inputs])
    args = {
        "int8_token": QuantizationArgs(num_bits=8, strategy="token", dynamic=True),
        "fp8_token": QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True),
        "fp8_group": PRESET_SCHEMES["FP8_BLOCK"]["input_activations"],
        "mxfp4": PRESET_SCHEMES["MXFP4"]["input_activations"],
        "mxfp8": PRESET_SCHEMES["MXFP8"]["input_activations"],
    }[inputs]
    if inputs.startswith("mx"):
        scale = torch.exp2(mx_encode(x, "fp4_e2m1" if inputs == "mxfp4" else "fp8_e4m3").scale.float() - 127)
    else:
        width = 128 if inputs == "fp8_group" else 256
        scale = x.view(3, -1, width).abs().amax(-1) / (127 if inputs == "int8_token" else 448)
    theirs = fake_quantize(x, scale, None, args)
    mine = quantize_input(layer, x, scheme)
    assert torch.equal(mine, theirs) if inputs.startswith("mx") else torch.allclose(mine, theirs, rtol=1e-6, atol=0)
