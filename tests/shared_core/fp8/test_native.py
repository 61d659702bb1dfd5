"""Block-scaled products of hardware: where scales lie, the call that torch wants, and the measurement that guards it.

No device here multiplies blocks, so torch's function is replaced by one that checks what it is given as torch does,
looks scales up where cuBLAS's documentation says that they are, and multiplies in float64.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from eff_kernels import fp8 as kernels
from eff_kernels.fp8 import swizzled_e8m0
from fp8_runs import data, net, start
from fp8_values import E4M3, memory, quantized
from plain_loop import update
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from shared_core.fp8 import Fp8Config, convert_to_fp8, native
from shared_core.fp8 import native as probe
from shared_core.fp8.native import BLOCKS, native_mm
from shared_core.fp8.scaling import inner_major, outer_major, whole_blocks

E5M2, E8M0 = torch.float8_e5m2, torch.float8_e8m0fnu
CPU = torch.device("cpu")
NATIVE = ["blockwise", "mx"]
ONE_PER_128, TILES, ONE_PER_32 = (
    F.ScalingType.BlockWise1x128,
    F.ScalingType.BlockWise128x128,
    F.ScalingType.BlockWise1x32,
)
scaled_mm_of_torch = F.scaled_mm


def torch_checks(*tensors, **options):
    """Have torch judge sizes and strides as it would on a GPU: its checks run without one."""
    with FakeTensorMode():
        like = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in tensors]
        a, b, scale_a, scale_b = like
        return scaled_mm_of_torch(a, b, scale_a=scale_a, scale_b=scale_b, **options)


def scale_of_every_value(scale, recipe, rows, columns):
    """What cuBLAS reads for value (r, k): one look-up each, in memory, by its documented index."""
    r, k = torch.arange(rows)[:, None], torch.arange(columns)
    flat, blocks = memory(scale), -(-columns // 128)
    if recipe is ONE_PER_128:  # strides (1, rows)
        return flat[r + k // 128 * rows].double()
    if recipe is TILES:  # strides (1, blocks along K, rounded up to 4)
        return flat[k // 128 + r // 128 * (-(-blocks // 4) * 4)].double()
    c = k // 32  # 128x4 tiles, each of 512 bytes, row after row of tiles
    tile = r // 128 * -(-columns // 128) + c // 4
    codes = flat.view(torch.uint8)[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
    return torch.where(codes == 255, math.nan, torch.exp2(codes.double() - 127))


class ScaledMatmul:
    """Stands in for `torch.nn.functional.scaled_mm`; `spoil` may change the scales that are read, or the result."""

    def __init__(self, spoil_scale=None, spoil_product=None):
        self.calls = []
        self.spoil_scale = spoil_scale or (lambda values, side: values)
        self.spoil_product = spoil_product or (lambda product: product)

    def __call__(
        self, a, b, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, output_dtype,
        use_fast_accum,
    ):  # fmt: skip
        recipes = scale_recipe_a, scale_recipe_b
        self.calls.append(recipes)
        torch_checks(
            a, b, scale_a, scale_b, scale_recipe_a=scale_recipe_a, scale_recipe_b=scale_recipe_b,
            swizzle_a=swizzle_a, swizzle_b=swizzle_b, output_dtype=output_dtype, use_fast_accum=use_fast_accum,
        )  # fmt: skip
        assert recipes in [(ONE_PER_128, TILES), (ONE_PER_128, ONE_PER_128), (ONE_PER_32, ONE_PER_32)]
        assert a.dtype == b.dtype == E4M3  # these recipes have no other
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert not use_fast_accum
        assert output_dtype in (torch.float32, torch.bfloat16, torch.float16)
        if recipes[0] is ONE_PER_32:
            assert swizzle_a is swizzle_b is F.SwizzleType.SWIZZLE_32_4_4
            assert scale_a.is_contiguous()
            assert scale_b.is_contiguous()
            assert not any(size % 32 for size in (*a.shape, b.shape[1]))
        else:
            assert swizzle_a is swizzle_b is None
            assert not any(size % 128 for size in (*a.shape, b.shape[1]))
        values = []
        for side, (codes, scale, recipe) in enumerate(((a, scale_a, scale_recipe_a), (b.t(), scale_b, scale_recipe_b))):
            assert scale.dtype == (E8M0 if recipe is ONE_PER_32 else torch.float32)
            # torch's check of e8m0 counts elements alone
            rows, blocks = codes.shape[0], -(-codes.shape[1] // 32)
            assert recipe is not ONE_PER_32 or scale.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
            found = self.spoil_scale(scale_of_every_value(scale, recipe, *codes.shape), side)
            values.append(codes.double() * found)
        return self.spoil_product(values[0] @ values[1].t()).to(output_dtype)


@pytest.fixture
def scaled_matmul(monkeypatch):
    """Torch's function replaced, and a CPU that counts as a device that has it."""
    stand_in = ScaledMatmul()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    monkeypatch.setattr(probe, "why_not_native", lambda *_: None)
    return stand_in


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_bias_is_added_before_the_one_rounding(recipe, dtype):
    block, weight_block, rounding = BLOCKS[recipe]
    a, b = quantized(21, 160, block, rounding), quantized(48, 160, weight_block, rounding, 1)
    a = a._replace(scale=a.scale / 64)  # within the range of float16
    values, others = kernels.dequantize(a).double(), kernels.dequantize(b).double()
    product, size = values @ others.t(), values.abs() @ others.abs().t()
    bias = -product[3].to(dtype)  # the sums of this row are as small as the rounding of its products
    wanted = product + bias.double()
    for multiply in (kernels.scaled_mm, kernels.emulated_mm):
        found = multiply(a, b, dtype, bias=bias)
        assert ((found.double() - wanted).abs() <= torch.finfo(dtype).eps / 2 * wanted.abs() + 1e-6 * size).all()
    layer = convert_to_fp8(nn.Linear(32, 16).to(dtype), Fp8Config(recipe=recipe, include=["first"]))
    x, gradient = torch.randn(5, 32, dtype=dtype), torch.randn(5, 16, dtype=dtype)
    layer(x).backward(gradient)
    assert torch.equal(layer.bias.grad, gradient.sum(0))
    layer.bias.data.add_(64.0)
    assert (layer(x) > 32).all()


@pytest.mark.parametrize("recipe", NATIVE)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(128, 128, 128), (1, 16, 16), (21, 144, 160), (256, 384, 640), (130, 16, 528)]
)
def test_native_products_are_the_emulations(recipe, m, n, k, scaled_matmul):
    block, weight_block, rounding = BLOCKS[recipe]
    for other in (weight_block, block):
        a, b = quantized(m, k, block, rounding), quantized(n, k, other, rounding, 1)
        wanted = kernels.dequantize(a).double() @ kernels.dequantize(b).double().t()
        size = (kernels.dequantize(a).abs().double() @ kernels.dequantize(b).abs().double().t()).clamp_min(1e-30)
        for dtype in (torch.float32, torch.bfloat16):
            found, emulated = native_mm(a, b, dtype), kernels.emulated_mm(a, b, dtype)
            assert found.dtype == dtype
            assert found.shape == (m, n)
            assert found.is_contiguous()
            # the result is rounded once; with exact scales, values that are dequantized in float32 are rounded too
            once = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}[dtype] * wanted.abs()
            values = 2.0**-23 * size if recipe == "blockwise" else 0.0
            assert ((found.double() - wanted).abs() <= once + values).all()
            assert ((found.double() - emulated.double()).abs() <= 2 * once + 1e-6 * size).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", NATIVE)
def test_a_run_counts_what_was_called_and_trains_as_emulated(recipe, compiled, monkeypatch):
    ends = []
    torch._dynamo.reset()
    for is_native in (True, False):
        stand_in = ScaledMatmul()
        with monkeypatch.context() as patch:
            if is_native:
                patch.setattr(F, "scaled_mm", stand_in)
                patch.setattr(probe, "why_not_native", lambda *_: None)
            model = net()
            session, optimizer = start(model, recipe=recipe)
            forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            for x in data(3):
                session.loss(forward(x).square().mean()).backward()
                update(session, optimizer)
            session.finish()
            told = session.receipt()["techniques"]["fp8"]
            counts = {"forward": 3, "grad_input": 3, "grad_weight": 3}
            none = dict.fromkeys(counts, 0)
            (entry,) = told["per_layer"]
            assert entry["scaled_mm"] == (counts if is_native else none)
            assert entry["emulated"] == (none if is_native else counts)
            assert len(stand_in.calls) == (9 if is_native else 0)
            assert ("emulated_because" in told) is (not is_native)
            assert len(session._services.of_fp8()) == (0 if is_native else 1)
            assert not entry["native"]  # called, but by a CPU
            ends.append(model[2].weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["auto", "torchao"])
def test_a_device_that_fails_the_measurement_emulates_and_says_why_once(backend, monkeypatch):
    reason = "cuda:0 refuses the forward product of rowwise in float32 (RuntimeError: no such kernel)"
    monkeypatch.setattr(probe, "why_not_native", lambda *_: reason)
    model = net()
    session, optimizer = start(model, recipe="rowwise", backend=backend)
    for x in data(2):
        session.loss(model(x).square().mean()).backward()
        update(session, optimizer)
    (line,) = session._services.of_fp8()
    assert f"EMULATED, as {reason}: products" in line
    told = session.receipt()["techniques"]["fp8"]
    assert told["emulated_because"] == reason
    assert told["native_layers"] == 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("recipe", NATIVE)
def test_what_is_not_finite_comes_out_as_nan(recipe, bad, scaled_matmul):
    block, weight_block, rounding = BLOCKS[recipe]
    x = torch.randn(20, 160)
    x[3, 5] = bad
    a = kernels.cast(x, kernels.block_scale(kernels.block_amax(x, block), E4M3, rounding), E4M3, block)
    y = native_mm(a, quantized(32, 160, weight_block, rounding), torch.float32)
    assert y[3].isnan().all()
    assert torch.isfinite(y[torch.arange(20) != 3]).all()


@pytest.mark.parametrize("recipe", NATIVE)
def test_a_right_product_passes_the_measurement(recipe, monkeypatch):
    stand_in = ScaledMatmul()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    assert probe.disagreement(recipe, E4M3, CPU) is None
    assert len(stand_in.calls) == 9  # three products in three types
    # what Hopper's tensor cores leave of a sum, and a result rounded to bfloat16, are no disagreement
    coarse = ScaledMatmul(spoil_product=lambda product: (product * (1 + 2.0**-10)).bfloat16())
    monkeypatch.setattr(F, "scaled_mm", coarse)
    assert probe.disagreement(recipe, E4M3, CPU) is None


WRONG = {
    "no scales": lambda values, side: torch.ones_like(values),
    "scales of the next row": lambda values, side: values.roll(1, 0) if side == 0 else values,
    "scales of the next block along K": lambda values, side: values.roll(128, 1) if side == 1 else values,
    "scales along K reversed": lambda values, side: values.flip(1),
    "scales of the first block for all": lambda values, side: values[:, :1].expand_as(values),
    "scales divided by": lambda values, side: 1 / values,
    "no scales of the last rows": lambda values, side: torch.where(torch.arange(len(values))[:, None] < 128, values, 1),
}


@pytest.mark.parametrize("recipe", NATIVE)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_layout_fails_the_measurement(recipe, wrong, monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", ScaledMatmul(spoil_scale=WRONG[wrong]))
    assert "cpu computes the forward product of" in probe.disagreement(recipe, E4M3, CPU)


LAYOUTS = {
    "blockwise": [("outer_major", torch.clone), ("inner_major", lambda scale: scale.t().contiguous())],
    "mx": [("swizzled_e8m0", lambda scale: F.pad(scale, (0, -scale.shape[1] % 4, 0, -len(scale) % 128)).to(E8M0))],
}


@pytest.mark.parametrize(("recipe", "layout"), [(recipe, i) for recipe in LAYOUTS for i in range(len(LAYOUTS[recipe]))])
def test_scales_in_plain_order_do_not_pass_unseen(recipe, layout, monkeypatch):
    """Were a layout of ours wrong, either torch refuses the call or the measurement sees the numbers."""
    name, plain = LAYOUTS[recipe][layout]
    for block, function in list(native._LAYOUTS.items()):
        if function.__name__ == name:
            monkeypatch.setitem(native._LAYOUTS, block, plain)
    monkeypatch.setattr(F, "scaled_mm", ScaledMatmul())
    reason = probe.disagreement(recipe, E4M3, CPU)
    assert reason is not None
    assert f"product of {recipe} in float32" in reason


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda product: product * math.nan, "computes the forward product of mx in float32 wrongly (off by nan"),
        (lambda product: product * 1.02, "computes the forward product of mx in float32 wrongly (off by 0.0"),
        (lambda product: product.index_fill(1, torch.tensor(271), 0.0), "wrongly (off by"),
        (lambda product: product * math.inf, "wrongly (off by"),
        (lambda product: product.roll(1, 0), "wrongly (off by"),
    ],
)
def test_wrong_numbers_are_told(spoil, reason, monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", ScaledMatmul(spoil_product=spoil))
    assert reason in probe.disagreement("mx", E4M3, CPU)


def test_errors_are_told_in_one_short_line_and_a_full_device_is_none(monkeypatch):
    def refuse(*args, **options):
        raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling only supported for SM90" + "!" * 500 + "\n2")

    monkeypatch.setattr(F, "scaled_mm", refuse)
    reason = probe.disagreement("blockwise", E4M3, CPU)
    assert reason.startswith(
        "cpu refuses the forward product of blockwise in float32 (NotImplementedError: DeepSeek style (1x128, 128x128)"
    )
    assert len(reason) < 250
    assert "\n" not in reason
    monkeypatch.delattr(F, "scaled_mm")  # an older torch
    assert "AttributeError: module 'torch.nn.functional' has no attribute 'scaled_mm'" in probe.disagreement(
        "blockwise", E4M3, CPU
    )

    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(F, "scaled_mm", full, raising=False)
    with pytest.raises(torch.OutOfMemoryError):
        probe.disagreement("blockwise", E4M3, CPU)


@pytest.mark.parametrize(
    ("recipe", "gradient"), [("tensorwise", E5M2), ("tensorwise", E4M3), ("delayed", E5M2), ("rowwise", E4M3)]
)
def test_the_other_recipes_are_measured_too(recipe, gradient, monkeypatch):
    for name, size in (("_M", 48), ("_N", 80), ("_K", 208)):  # torch's product of e4m3 takes seconds on a CPU
        monkeypatch.setattr(probe, name, size)
    assert probe.disagreement(recipe, gradient, CPU) is None  # torch's own reference of it
    right, dtypes = torch._scaled_mm, []

    def without_scales(a, b, scale_a, scale_b, **options):
        return right(a, b, scale_a=torch.ones_like(scale_a), scale_b=scale_b, **options)

    def spy(a, b, **options):
        dtypes.append((a.dtype, b.dtype, options["out_dtype"]))
        return right(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    probe.disagreement(recipe, gradient, CPU)
    assert {(gradient, E4M3), (E4M3, E4M3)} == {pair[:2] for pair in dtypes}
    assert {torch.float32, torch.bfloat16, torch.float16} == {pair[2] for pair in dtypes}
    monkeypatch.setattr(torch, "_scaled_mm", without_scales)
    assert "wrongly" in probe.disagreement(recipe, gradient, CPU)


def test_a_device_is_measured_once_for_each_recipe_and_a_cpu_never(monkeypatch):
    measured = []
    monkeypatch.setattr(probe, "disagreement", lambda *asked: measured.append(asked))
    probe.why_not_native.cache_clear()
    try:
        for device in (torch.device("cuda", 0), torch.device("cuda", 1)):
            for _ in range(3):
                assert probe.why_not_native("mx", E4M3, device) is None
        assert probe.why_not_native("blockwise", E4M3, torch.device("cuda", 0)) is None
        assert len(measured) == 3
        assert probe.why_not_native("mx", E4M3, CPU) == "cpu does not multiply FP8"
        assert len(measured) == 3
    finally:
        probe.why_not_native.cache_clear()


def test_measuring_draws_no_random_number_and_ignores_autocast(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", ScaledMatmul())
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert probe.disagreement("mx", E4M3, CPU) is None
    assert torch.equal(torch.get_rng_state(), before)


E8M0 = torch.float8_e8m0fnu
SHAPES = [(1, 1), (32, 4), (128, 4), (129, 5), (300, 9), (127, 3), (256, 16)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_swizzled_scales_are_torchaos_and_lie_where_the_formula_says(rows, columns):
    exponents = torch.randint(-126, 128, (rows, columns), generator=torch.Generator().manual_seed(rows))
    scale = torch.exp2(exponents.double()).float()
    scale[rows // 2, columns // 2] = math.nan
    ours = swizzled_e8m0(scale)
    assert ours.dtype == E8M0
    wide = -(-columns // 4)
    assert ours.shape == (512 * -(-rows // 128) * wide,)
    codes = torch.where(scale.isnan(), 255, exponents + 127).to(torch.uint8)
    assert torch.equal(ours.view(torch.uint8), to_blocked(codes))
    assert torch.equal(from_blocked(ours.view(torch.uint8), rows, columns), codes)
    for r in range(rows):
        for c in range(columns):
            place = (r // 128 * wide + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert ours.view(torch.uint8)[place] == codes[r, c]
    # what CPUs and torch convert it to is the same number
    assert torch.equal(scale.to(E8M0).view(torch.uint8), codes)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_scales_of_128_lie_where_the_formula_says(rows, columns, transposed):
    scale = torch.arange(rows * columns).float().view(rows, columns) + 1
    given = scale.t().contiguous().t() if transposed else scale
    outer, inner, padded = outer_major(given), inner_major(given), -(-columns // 4) * 4
    assert (outer.shape, outer.stride()) == ((rows, columns), (1, rows))
    assert (inner.shape, inner.stride()) == ((padded, rows), (1, padded))
    for r in range(rows):
        for c in range(columns):
            assert memory(outer)[r + c * rows] == memory(inner)[c + r * padded] == scale[r, c]
    assert torch.isfinite(memory(inner)).all()
    assert outer_major(scale[:, :1]).stride() == (1, rows)  # one block along K, of whatever stride


@pytest.mark.parametrize("recipe", ["blockwise", "mx"])
def test_whole_blocks_append_zeros_and_keep_every_value(recipe):
    for side, block in enumerate(BLOCKS[recipe][:2]):
        matrix = quantized(144, 160, block, BLOCKS[recipe][2], side)
        padded = whole_blocks(matrix, block[1])
        assert not any(size % block[1] for size in padded.codes.shape)
        wanted = torch.zeros(padded.codes.shape)
        wanted[:144, :160] = kernels.dequantize(matrix)
        assert torch.equal(kernels.dequantize(padded), wanted)
        assert whole_blocks(padded, block[1]) is padded
