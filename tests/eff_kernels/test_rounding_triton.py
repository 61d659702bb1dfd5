"""`round_float_` in Triton against `shared_core.numerics` bit for bit, and its random numbers."""

import itertools

import pytest
import torch

from shared_core.numerics import rounding
from shared_core.numerics.formats import FORMATS
from shared_core.numerics.rounding import round_to, stochastic_round_

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

NAMES = [name for name, row in FORMATS.items() if row.kind == "float" and row.mantissa_bits < 23]
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149, -(2.0**-133), 2.0**-126, 65504.0, 65520.0, 3.4e38]


def values(dtype, row, count=1000):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    low = max(-160, row.min_exponent - row.mantissa_bits - 30)
    high = min(128, 2 + torch.tensor(row.largest, dtype=torch.float64).log2().int().item())
    x = x * torch.randint(low, high, (count,), generator=generator).double().exp2()
    return torch.cat(
        [x.to(dtype), torch.tensor(SPECIAL).to(dtype), torch.tensor([row.largest, -row.largest]).to(dtype)]
    )


def same(a, b):
    assert a.dtype == b.dtype
    a, b = (x.cpu().float() for x in (a, b))
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(1.0).view(torch.int32), b.nan_to_num(1.0).view(torch.int32))


@pytest.fixture
def in_triton(monkeypatch):
    """Calls with the CUDA branch taken, by the interpreter."""

    def call(function, *args, **options):
        with monkeypatch.context() as here:
            here.setattr(rounding, "on_eager_cuda", lambda x: True)
            return function(*args, **options)

    return call


@pytest.mark.parametrize("mode", ["nearest_even", "toward_zero"])
def test_every_float_format(mode, in_triton):
    for name, saturate in itertools.product(NAMES, (False, True)):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[len(name) % 3]
        for x in (values(torch.float32, FORMATS[name]), values(dtype, FORMATS[name])):
            ours = in_triton(round_to, x, name, mode=mode, saturate=saturate)
            same(ours, round_to(x, name, mode=mode, saturate=saturate))


def test_given_random_bits(monkeypatch, in_triton):
    from eff_kernels.rounding import round_float_

    # multiples of 2^25 count in every format, and float64 carries them: the fraction of 1 that torch's path compares
    noise = torch.randint(1, 2**37, (1013,), generator=torch.Generator().manual_seed(1)) << 25
    noise[::5] = 1 << 25
    monkeypatch.setattr(rounding, "_uniform", lambda x, generator: noise.double() * 2.0**-62)
    monkeypatch.setattr(rounding, "round_float_", lambda *args: round_float_(*args[:8], None, noise), raising=True)
    for name, saturate in itertools.product(NAMES, (False, True)):
        x = values(torch.float32, FORMATS[name])
        ours = in_triton(round_to, x, name, mode="stochastic", saturate=saturate)
        same(ours, round_to(x, name, mode="stochastic", saturate=saturate))


def test_into_narrow_targets():
    from eff_kernels.rounding import round_float_

    for dtype, name in rounding.STORAGE.items():
        row = FORMATS[name]
        if row.mantissa_bits < 23:
            x = values(torch.float32, row)
            for beyond in (row.largest, torch.inf if row.overflow == "inf" else torch.nan):
                out = torch.empty(x.shape, dtype=dtype)
                round_float_(out, x, "nearest_even", row.mantissa_bits, row.bias, row.largest, beyond, beyond)
                expected = round_to(x, name, saturate=beyond == row.largest)
                expected = torch.where(x.isinf(), beyond * x.sign(), expected)
                same(out, expected.to(dtype))


def test_drawn_numbers_are_unbiased_repeat_and_differ(in_triton):
    x = torch.full((4096,), 1 + 2**-9)
    for name, fraction in (("bf16", 1 / 4), ("fp8_e4m3", 1 / 64)):
        draws = [
            in_triton(round_to, x, name, mode="stochastic", generator=torch.Generator().manual_seed(seed))
            for seed in (0, 0, 1)
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        ups = (draws[0] > 1).double()
        assert abs(ups.mean().item() - fraction) < 5 * (fraction * (1 - fraction) / 4096) ** 0.5
        # neighbors share words of the generator, and must not know of each other
        for apart in (1, 2, 3, 1024):
            both = (ups[apart:] * ups[:-apart]).mean().item()
            assert abs(both - fraction**2) < 5 * (fraction**2 / (4096 - apart)) ** 0.5
    tiny = torch.full((4096,), 2.0**-40)
    assert not in_triton(round_to, tiny, "fp8_e4m3", mode="stochastic").any()


def test_targets_in_place(in_triton):
    source = values(torch.float32, FORMATS["fp16"])
    source = source[source.abs() < 6e4]
    parameter = torch.nn.Parameter(torch.zeros(len(source), dtype=torch.bfloat16))
    for target, name in ((parameter, None), (torch.zeros(len(source)).to(torch.float8_e5m2), None), (None, "fp16")):
        target = source.clone() if target is None else target
        row = FORMATS[name or rounding.STORAGE[target.dtype]]
        x = target if name else source
        assert in_triton(stochastic_round_, target, x, format=name) is target
        down = round_to(source, row.name, mode="toward_zero").abs()
        steps = (target.detach().float().abs() - down) / (rounding.binade(down.clone(), row) * 2.0**-row.mantissa_bits)
        assert set(steps.tolist()) == {0.0, 1.0}
    assert parameter._version == 1
    strided = torch.zeros(len(source), 2, dtype=torch.bfloat16)[:, 0]
    in_triton(stochastic_round_, strided, source.bfloat16())
    assert torch.equal(strided, source.bfloat16())


def test_the_operator_is_what_it_says():
    from eff_kernels.rounding import round_float_

    arguments = (torch.empty(9, dtype=torch.bfloat16), torch.randn(9), "stochastic", 7, 127, 3e38, 3e38, torch.inf)
    torch.library.opcheck(round_float_, (*arguments, torch.tensor(3)))


@pytest.mark.gpu
def test_on_a_gpu():
    for name, saturate, mode in itertools.product(NAMES, (False, True), ("nearest_even", "toward_zero")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = values(dtype, FORMATS[name], 1_000_001)
            ours = round_to(x.cuda(), name, mode=mode, saturate=saturate)
            same(ours, round_to(x, name, mode=mode, saturate=saturate))
    source = torch.full((1_000_003,), 1 + 2**-9, device="cuda")
    for dtype, fraction in ((torch.bfloat16, 1 / 4), (torch.float8_e4m3fn, 1 / 64)):
        target = torch.empty_like(source, dtype=dtype)
        stochastic_round_(target, source, generator=torch.Generator("cuda").manual_seed(0))
        assert (target.float() > 1).double().mean().item() == pytest.approx(fraction, rel=0.02)
