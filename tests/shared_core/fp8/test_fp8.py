"""FP8 layers against the formulas in float64, against torch's scaled matmul, and against torchao's Float8Linear."""

import math

import numpy as np
import pytest
import torch
from eff_kernels import fp8 as kernels
from torch import nn
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from shared_core.errors import CompatibilityError, MatchError
from shared_core.fp8 import Fp8Config, Fp8Linear, convert_to_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
RECIPES = ["tensorwise", "rowwise", "blockwise", "mx"]


def values_of(dtype):
    """All finite values of a format, decoded by hand, even code first among neighbors."""
    mantissa_bits, bias = {E4M3: (3, 7), E5M2: (2, 15)}[dtype]
    found = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        value = 2.0 ** (1 - bias) * fraction if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)
        if value <= LARGEST[dtype]:
            found.append(value)
    return np.array(found)


def cast_reference(x, scale, dtype):
    """cast(clamp(x/s)): the nearest value, of two the one with an even code."""
    table = values_of(dtype)
    # the division is a float32 one: the format's ties must meet the same quotients
    quotient = (x.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)
    size = np.minimum(np.abs(quotient), LARGEST[dtype])
    above = np.searchsorted(table, size).clip(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    take_low = (size - low < high - size) | ((size - low == high - size) & ((above - 1) % 2 == 0))
    return np.copysign(np.where(take_low, low, high), quotient)


def scale_reference(amax, dtype, rounding):
    largest = LARGEST[dtype]
    amax = max(amax, 2.0**-126 * largest)
    if rounding == "exact":
        return float(np.float32(amax) / np.float32(largest))
    if rounding == "power_of_two":
        return 2.0 ** math.ceil(math.log2(amax / largest))
    return 2.0 ** (math.floor(math.log2(amax)) - {E4M3: 8, E5M2: 15}[dtype])


def value_reference(x, dtype, block, rounding):
    """Quantize block after block, with loops, and give back values in float64."""
    x = x.double().numpy()
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    out = np.zeros_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            part = x[i : i + rows, j : j + columns]
            scale = np.array(scale_reference(np.abs(part).max(), dtype, rounding))
            out[i : i + rows, j : j + columns] = cast_reference(part, scale, dtype) * scale
    return out


PLAN = {  # recipe: block of activations and gradients, of weights, rounding, format of gradients
    "tensorwise": ((0, 0), (0, 0), "exact", E5M2),
    "rowwise": ((1, 0), (1, 0), "power_of_two", E4M3),
    "blockwise": ((1, 128), (128, 128), "exact", E4M3),
    "mx": ((1, 32), (1, 32), "mx", E4M3),
}


def linear_reference(x, w, g, recipe):
    block, weight_block, rounding, gradient = PLAN[recipe]
    forward = (
        value_reference(x, E4M3, block, rounding) @ value_reference(w, E4M3, weight_block, rounding).T,
        value_reference(g, gradient, block, rounding) @ value_reference(w.T, E4M3, weight_block, rounding).T,
        value_reference(g.T, gradient, block, rounding) @ value_reference(x.T, E4M3, block, rounding).T,
    )
    return [torch.from_numpy(np.ascontiguousarray(part)) for part in forward]


def layer_and_data(recipe, tokens=21, k=160, n=144, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=generator) * torch.logspace(-3, 2, k)
    g = torch.randn(tokens, n, generator=generator) * 1e-3 * torch.logspace(-2, 1, tokens)[:, None]
    layer = nn.Linear(k, n, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(n, k, generator=generator) * 0.05)
    convert_to_fp8(layer, Fp8Config(recipe=recipe, include=["first"], **options))
    return layer, x.requires_grad_(), g


def run(layer, x, g):
    y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_three_products_are_those_of_the_formulas(recipe):
    layer, x, g = layer_and_data(recipe)
    for got, wanted in zip(
        run(layer, x, g), linear_reference(x.detach(), layer.weight.detach(), g, recipe), strict=True
    ):
        assert (got.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        # were anything left in high precision, it would be closer to the exact product than to this one
    exact = x.detach() @ layer.weight.detach().t()
    assert (layer(x).detach() - exact).norm() > 1e-3 * exact.norm()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_emulation_is_torchs_scaled_matmul(recipe, dtype):
    results, layers = [], []
    for backend in ("emulated", "scaled_mm"):
        layer, x, g = layer_and_data(recipe, backend=backend)
        layer.to(dtype)
        x = x.detach().to(dtype).requires_grad_()
        results.append(run(layer, x, g.to(dtype)))
        layers.append(layer)
    for emulated, scaled in zip(*results, strict=True):
        assert emulated.dtype == scaled.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2**-8
        assert (emulated - scaled).abs().max() <= tolerance * scaled.abs().max()
    assert sum(layers[1].fp8.scaled.values()) == 3
    assert not layers[1].fp8.emulated


def test_casts_are_torchs_for_every_half_precision_value():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[torch.isfinite(x)][None]
    for dtype in (E4M3, E5M2):
        codes = kernels.cast(x, torch.ones(1, 1), dtype, (0, 0)).codes
        wanted = cast_reference(x.float().numpy(), np.array(1.0), dtype)
        assert np.array_equal(codes.double().numpy(), wanted)


def test_mx_values_are_torchaos():
    x = torch.randn(8, 96) * torch.logspace(-4, 4, 96)
    amax = kernels.block_amax(x, (1, 32))
    ours = kernels.cast(x, kernels.block_scale(amax, E4M3, "mx"), E4M3, (1, 32))
    theirs = MXTensor.to_mx(x, E4M3, block_size=32)
    assert torch.equal(kernels.dequantize(ours), theirs.dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_power_of_two_scales_never_saturate_and_are_the_smallest(dtype):
    largest = LARGEST[dtype]
    edge = torch.tensor([largest * 2.0**e for e in range(-100, 100, 7)])
    for amax in (edge, torch.nextafter(edge, edge * 2), torch.nextafter(edge, edge * 0)):
        scale = kernels.block_scale(amax, dtype, "power_of_two").double()
        assert (torch.frexp(scale)[0] == 0.5).all()
        assert (amax.double() / scale <= largest).all()
        assert (amax.double() / (scale / 2) > largest).all()


def test_zeros_and_the_smallest_numbers_have_a_scale():
    for rounding in ("exact", "power_of_two", "mx"):
        for dtype in (E4M3, E5M2):
            scale = kernels.block_scale(torch.tensor([0.0, 1e-45, 2.0**-126]), dtype, rounding)
            assert (scale >= 2.0**-126).all()
            assert torch.isfinite(scale).all()
    layer, x, _ = layer_and_data("tensorwise")
    assert torch.equal(layer(torch.zeros_like(x)), torch.zeros(x.shape[0], 144))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_shows_and_does_not_saturate(recipe, bad):
    layer, x, g = layer_and_data(recipe)
    x = x.detach()
    x[3, 5] = bad
    y, _, grad_weight = run(layer, x.requires_grad_(), g)
    assert torch.isnan(y[3]).any()
    assert not torch.isfinite(grad_weight).all()
    g[2, 2] = bad
    assert not torch.isfinite(run(layer, x.detach().requires_grad_(), g)[1]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types_follow_the_input(dtype):
    layer, x, g = layer_and_data("tensorwise")
    layer.to(dtype)
    y, grad_input, grad_weight = run(layer, x.detach().to(dtype).requires_grad_(), g.to(dtype))
    assert y.dtype == grad_input.dtype == grad_weight.dtype == dtype


@pytest.mark.parametrize("recipe", RECIPES)
def test_autocast_gives_its_type_and_keeps_the_accumulation(recipe):
    layer, x, g = layer_and_data(recipe)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    wanted = linear_reference(x.detach().bfloat16().float(), layer.weight.detach(), g, recipe)[0]
    assert (y.double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()  # one rounding, at the end
    y.backward(g.bfloat16())
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_shapes_biases_and_empty_batches():
    torch.manual_seed(0)
    layer, stock = nn.Linear(32, 16), nn.Linear(32, 16)
    stock.load_state_dict(layer.state_dict())
    convert_to_fp8(layer, Fp8Config(recipe="rowwise", include=["first"]))
    assert type(layer) is Fp8Linear
    assert list(layer.state_dict()) == ["weight", "bias"]
    for shape in ((32,), (3, 32), (2, 3, 32), (0, 32), (2, 0, 32)):
        x = torch.randn(shape)
        assert layer(x).shape == stock(x).shape
        assert torch.allclose(layer(x), stock(x), atol=0.1)
    layer(torch.randn(2, 3, 32).transpose(0, 1)).sum().backward()  # a gradient without strides, an input with odd ones
    assert torch.equal(layer.bias.grad, torch.full((16,), 6.0))


def test_a_frozen_side_costs_no_product():
    layer, x, g = layer_and_data("tensorwise")
    layer(x.detach()).backward(g)
    assert layer.fp8.emulated == {"forward": 1, "grad_weight": 1}
    layer.requires_grad_(False)
    layer(x).backward(g)
    assert layer.fp8.emulated == {"forward": 2, "grad_weight": 1, "grad_input": 1}


def test_the_filter_leaves_the_ends_and_odd_sizes_and_refuses_them_by_name():
    def net():
        return nn.Sequential(
            nn.Linear(16, 32), nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        )

    def swapped(**options):
        model = convert_to_fp8(net(), Fp8Config(recipe="tensorwise", **options))
        return [index for index, layer in enumerate(model) if type(layer) is Fp8Linear]

    assert swapped() == [3]
    assert swapped(include=["[0-9]"]) == [3]
    assert swapped(include=["0", "3"]) == [0, 3]
    assert swapped(include=["last"]) == [4]
    with pytest.raises(
        CompatibilityError, match=r"include must name .* 1: out_features must be a multiple of 16 .* got 24"
    ):
        swapped(include=["1"])
    with pytest.raises(MatchError, match=r"0: the model's first linear layer.*1: out_features.*2: in_features"):
        swapped(skip=["3"])
    with pytest.raises(MatchError, match="matches no module"):
        swapped(include=["decoder"])
    model = convert_to_fp8(net(), Fp8Config(recipe="mx"))
    with pytest.raises(CompatibilityError, match="already has FP8 layers"):
        convert_to_fp8(model, Fp8Config(recipe="mx"))


def test_the_guard_refuses_what_tensor_cores_cannot_multiply():
    def operand(rows, columns, dtype=E4M3):
        return kernels.cast(torch.ones(rows, columns), torch.ones(1, 1), dtype, (0, 0))

    kernels.check_scaled_mm_constraints(operand(7, 32), operand(16, 32, E5M2))
    with pytest.raises(ValueError, match="same K, got 32 and 16"):
        kernels.check_scaled_mm_constraints(operand(7, 32), operand(16, 16))
    with pytest.raises(ValueError, match="N must be a multiple of 16, got 10"):
        kernels.check_scaled_mm_constraints(operand(7, 32), operand(10, 32))
    with pytest.raises(ValueError, match="at most one operand may be e5m2"):
        kernels.check_scaled_mm_constraints(operand(7, 32, E5M2), operand(16, 32, E5M2))
    transposed = operand(32, 16)
    with pytest.raises(ValueError, match="contiguous along K"):
        kernels.check_scaled_mm_constraints(operand(7, 32), transposed._replace(codes=transposed.codes.t()))
