"""`quantize` in Triton against the plain torch of `eff_kernels.fp8`, bit for bit, in the interpreter and on a GPU."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = [((0, 0), "exact"), ((1, 0), "power_of_two"), ((1, 128), "exact"), ((128, 128), "exact"), ((1, 32), "mx")]


def values(rows, columns, dtype):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 4, columns)[torch.randperm(columns)]
    x[rows // 2] = 0.0
    return x.to(dtype)


def bits(matrix):
    # the sign of NaN is not a number's: hardware drops it
    codes = matrix.codes.cpu().view(torch.uint8)
    nan = matrix.codes.cpu().float().isnan()
    return torch.where(nan, 0x7F, codes), torch.nan_to_num(matrix.scale.cpu(), nan=-1.0), matrix.block


def same(ours, theirs):
    for a, b in zip(bits(ours), bits(theirs), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def check(quantize_, x, dtype, block, rounding, past=None, layouts=(False, True)):
    from eff_kernels.fp8 import quantize

    for both in layouts:
        start = (torch.tensor(0, dtype=torch.int32), *([torch.tensor(-1.0)] if block == (0, 0) else []))
        for before in start:
            seen, wanted = before.to(x.device, copy=True), before.clone()
            ours = quantize_(x, dtype, block, rounding, past, both, seen)
            theirs = quantize(x.cpu(), dtype, block, rounding, None if past is None else past.cpu(), both, wanted)
            same(ours.matrix, theirs.matrix)
            if both:
                same(ours.transposed, theirs.transposed)
            assert torch.equal(seen.cpu().nan_to_num(-2.0), wanted.nan_to_num(-2.0))


@pytest.fixture
def quantize_in_triton(monkeypatch):
    """The public function with its CUDA branch taken, by the interpreter."""
    from eff_kernels import fp8

    def quantize_(*args):
        with monkeypatch.context() as here:
            here.setattr(fp8, "on_eager_cuda", lambda x: True)
            return fp8.quantize(*args)

    return quantize_


@pytest.mark.parametrize(("block", "rounding"), RECIPES)
def test_every_kind_of_block(block, rounding, quantize_in_triton):
    for dtype, kind in ((torch.float32, E4M3), (torch.bfloat16, E5M2), (torch.float16, E4M3)):
        x = values(41, 401, dtype)
        check(quantize_in_triton, x, kind, block, rounding, layouts=(dtype == torch.bfloat16,))
    check(quantize_in_triton, x.t(), kind, block, rounding, layouts=(False,))


def test_a_scale_of_past_steps(quantize_in_triton):
    x = values(20, 300, torch.bfloat16)
    for past, worst in itertools.product((0.0, 3.0), (None, torch.inf, torch.nan)):
        if worst is not None:
            x[3, 7] = worst
        check(quantize_in_triton, x, E4M3, (0, 0), "exact", torch.tensor(past), layouts=(True,))


@pytest.mark.parametrize(("block", "rounding"), RECIPES)
def test_what_is_not_finite_stays_so(block, rounding, quantize_in_triton):
    x = torch.ones(3, 130)
    x[0, 0], x[1, 129], x[2, 5] = torch.inf, -torch.nan, 2.0**-140
    check(quantize_in_triton, x, E4M3, block, rounding, layouts=(True,))


def test_all_sixteen_bit_values_and_scales(quantize_in_triton):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype, kind in itertools.product((torch.bfloat16, torch.float16), (E4M3, E5M2)):
        x = every.view(dtype)
        x = x[x.isfinite()].view(-1, 256)
        # under a scale of 1, what torch itself casts
        past = torch.tensor(torch.finfo(kind).max)
        check(quantize_in_triton, x, kind, (0, 0), "exact", past, layouts=(False,))
    for rounding in ("exact", "power_of_two", "mx"):
        amax = torch.cat([values(1, 200, torch.float32)[0].abs(), torch.tensor([448.0, 449.0, 2.0**-149, 3e38])])
        check(quantize_in_triton, amax[:, None].expand(-1, 2), E4M3, (1, 0), rounding, layouts=(False,))


def test_ties_fall_as_after_a_division(quantize_in_triton):
    exponents = torch.linspace(-126, 118, 64)[:, None]
    mantissas = torch.randint(0, 2**23, (64, 1), generator=torch.Generator().manual_seed(0))
    # nearest to ties lie the quotients by these
    mantissas[:30, 0] = torch.tensor([0x0FFFFF, 0x2FFFFF, 0x3FFFFF, 0x5FFFFD, 0x5FFFFE, 0x7FFFFF]).repeat(5)
    scales = exponents.exp2() * (1 + mantissas * 2.0**-23)
    # values of e4m3 and what lies between them, times a scale: half an ulp of a quotient decides
    ties = torch.arange(16, 32) * torch.arange(-14, 4).float().exp2()[:, None]
    x = ties.flatten() * scales
    x = torch.cat([448 * scales, x, x.nextafter(x * 2), x.nextafter(x * 0), -x * 0], 1)
    check(quantize_in_triton, x, E4M3, (1, 0), "exact", layouts=(False,))


def test_rows_too_long_for_registers(quantize_in_triton, monkeypatch):
    from eff_kernels._triton import fp8 as fp8_triton

    monkeypatch.setattr(fp8_triton, "_IN_REGISTERS", 128)
    check(quantize_in_triton, values(3, 4100, torch.float32), E4M3, (1, 0), "power_of_two", layouts=(False,))


@pytest.mark.slow
@pytest.mark.parametrize("programs", [2, 1024])
def test_two_matrices_share_their_sweeps(programs, monkeypatch):
    from eff_kernels import fp8
    from eff_kernels._triton import fp8 as fp8_triton

    monkeypatch.setattr(fp8_triton, "_PROGRAMS", programs)
    x, w = values(300, 270, torch.bfloat16), values(41, 401, torch.float32).t()
    for past, worst in itertools.product((None, 0.0, 3.0), (1.0, torch.inf)):
        x[7, 5] = worst
        runs = []
        for taken in (False, True):
            monkeypatch.setattr(fp8, "on_eager_cuda", lambda x, taken=taken: taken)
            seen = torch.full((2,), -1.0)
            at = None if past is None else torch.tensor(past)
            sources = [fp8.Source(x, at, False, seen[0]), fp8.Source(w, at, True, seen[1])]
            runs.append((fp8.quantize_all(sources, E4M3, (0, 0), "exact"), seen))
        (theirs, wanted), (ours, seen) = runs
        assert torch.equal(seen, wanted)
        for one, other in zip(ours, theirs, strict=True):
            same(one.matrix, other.matrix)
        assert ours[0].transposed is None
        same(ours[1].transposed, theirs[1].transposed)


@pytest.mark.slow
def test_tiles_of_large_matrices_and_their_transposes(quantize_in_triton, monkeypatch):
    from eff_kernels._triton import fp8 as fp8_triton

    monkeypatch.setattr(fp8_triton, "_IN_ONE_LAUNCH", 0)
    for shape, dtype in (((141, 401), torch.bfloat16), ((3, 130), torch.float32), ((270, 16), torch.float16)):
        x = values(*shape, dtype)
        x[1, 3], x[2, 5], x[2, 7] = 2.0**-140, torch.inf, -torch.nan
        for matrix, block in itertools.product((x, x.t()), ((1, 0), (1, 128))):
            check(quantize_in_triton, matrix, E4M3, block, "exact", layouts=(True,))


SHAPES = [((5, 401), (None, 0, 1, -1)), ((3, 4, 5, 2), (None, 0, 1, 3)), ((70,), (None, 0)), ((), (None,))]


def check_fake_quantize(device, switch, shapes=SHAPES):
    from eff_kernels.quantization.group import fake_quantize_fp8

    for (shape, axes), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16, torch.float16)):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
        bad = x.clone()
        bad.view(-1)[-1] = torch.inf
        for values, kind, axis in itertools.product((x, bad, x * 0), (E4M3, E5M2), axes):
            runs = []
            for taken, where in ((False, "cpu"), (True, device)):
                switch(taken)
                leaf = values.to(where, copy=True).requires_grad_()
                y = fake_quantize_fp8(leaf, kind, axis)
                y.backward(torch.ones_like(y))
                runs.append((y.detach().cpu(), leaf.grad.cpu()))
            (wanted, _), (found, gradient) = runs
            assert found.dtype == dtype
            assert torch.equal(found.nan_to_num(-1.0), wanted.nan_to_num(-1.0)), (shape, dtype, kind, axis)
            assert torch.equal(gradient, torch.ones_like(values))


@pytest.mark.slow
def test_fake_quantization(monkeypatch):
    from eff_kernels.quantization import group

    asked = []
    check_fake_quantize("cpu", lambda on: monkeypatch.setattr(group, "on_eager_cuda", lambda x: asked.append(on) or on))
    assert set(asked) == {False, True}


@pytest.mark.gpu
def test_fake_quantization_on_a_gpu():
    check_fake_quantize("cuda", lambda on: None, [*SHAPES, ((2049, 4100), (None, 0, 1))])


@pytest.mark.gpu
@pytest.mark.parametrize(("block", "rounding"), RECIPES)
def test_on_a_gpu(block, rounding):
    from eff_kernels.fp8 import quantize

    for dtype, kind in itertools.product((torch.float32, torch.bfloat16, torch.float16), (E4M3, E5M2)):
        x = values(2049, 4100, dtype).cuda()
        check(quantize, x, kind, block, rounding)
        check(quantize, x.t(), kind, block, rounding)
    if block == (0, 0):
        for past in (0.0, 3.0):
            check(quantize, x, kind, block, rounding, torch.tensor(past).cuda())
    if block == (1, 0):
        for shape in ((5, 40_000), (300, 272)):  # small enough for one launch
            check(quantize, values(*shape, torch.bfloat16).cuda(), E4M3, block, rounding)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", itertools.product((torch.bfloat16, torch.float32), repeat=2), ids=str)
def test_two_matrices_on_a_gpu(dtypes):
    # a float32 weight beside 16-bit activations is what autocast gives
    from eff_kernels.fp8 import Source, quantize_all

    for first, second in (((256, 512), (512, 512)), ((8, 256), (16, 256)), ((300, 272), (400, 272))):
        pair = [values(*shape, dtype) for shape, dtype in zip((first, second), dtypes, strict=True)]
        for kind, both in itertools.product((E4M3, E5M2), ((True, True), (False, True), (False, False))):
            runs = []
            for device in ("cuda", "cpu"):
                flag = torch.tensor(0, dtype=torch.int32, device=device)
                given = [Source(x.to(device), None, turn, flag) for x, turn in zip(pair, both, strict=True)]
                runs.append((quantize_all(given, kind, (0, 0), "exact"), flag.item()))
            (ours, seen), (theirs, wanted) = runs
            assert seen == wanted
            for a, b in zip(ours, theirs, strict=True):
                same(a.matrix, b.matrix)
                if b.transposed is not None:
                    same(a.transposed, b.transposed)
