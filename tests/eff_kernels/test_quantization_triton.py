"""Fake quantization in Triton: through the functions that training calls, in the interpreter and on a GPU."""

import numpy as np
import pytest
import torch
from eff_kernels._triton import quantization as in_triton
from eff_kernels._triton import quantization as launch
from eff_kernels.quantization import affine as quantization
from eff_kernels.quantization import affine as quantization_dispatch
from eff_kernels.quantization import group as quantization_group
from eff_kernels.quantization.affine import fake_quantize, fake_quantize_symmetric
from eff_kernels.quantization.group import fake_quantize_groups
from eff_kernels.quantization.learned import lsq_fake_quantize, pact, range_fake_quantize

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch and with the dev extra on Linux")

# a kernel finds what it calls among its module's globals
tl, quotient = triton.language, in_triton.quotient
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(rows, columns):
    """Yield a function, what it quantizes, what else gets a gradient and what does not."""
    generator = torch.Generator().manual_seed(columns)
    x = 2 * torch.randn(rows, columns, generator=generator)
    # ties, on the grid of the first row
    x[0] = (x[0] * 4).round() / 4
    noise = torch.rand(rows, columns, generator=generator)
    scales = torch.rand(rows, generator=generator) / 4 + 0.1
    scales[0] = 0.5
    zeros = torch.randint(-8, 8, (rows,), generator=generator, dtype=torch.int32)
    real_zeros = zeros + 0.3
    wild = x.clone()
    wild[0, 1], wild[1, 2], wild[2, 0] = torch.nan, torch.inf, -torch.inf
    tiny = x.clone()
    tiny[0], tiny[1], tiny[2] = 0.0, x[1] * 1e-43, x[2] * 1e38
    step, zero = scales[1].clone(), zeros[1].clone()

    def fixed(x, scale, zero_point, noise=None, rounded_gate=False):
        return fake_quantize(x, scale, zero_point, -8, 7, rounded_gate, noise)

    yield fixed, wild, (), (step, zero)
    yield fixed, wild, (), (scales[:, None], zero, noise, True)
    yield fixed, wild.t(), (), (scales, zeros, noise.t(), True)
    yield fixed, wild[:, : columns - 1].expand(2, -1, -1), (), (scales[None, :, None], zeros[None, :, None])
    yield fixed, x.view(1, rows, 1, columns).contiguous(memory_format=torch.channels_last), (), (step, zero)
    for rounded_gate in (False, True):
        yield lsq(rounded_gate, False), wild.expand(2, -1, -1), (scales[None, :, None],), ()
        yield lsq(rounded_gate, True), x, (scales[:, None], real_zeros[:, None]), ()
        yield lsq(rounded_gate, True), x.t().contiguous(), (scales[None], real_zeros[None]), ()
    yield fixed, wild.t(), (), (scales[None], zeros[None], noise.t(), True)
    yield lsq(False, True), x, (step, real_zeros[1]), ()
    yield lsq(False, False), x, (torch.tensor(-1.0),), ()
    for rounded_gate, bound in ((False, step), (True, scales[:, None])):
        yield ranged(rounded_gate), x, (-bound, 3 * bound), ()
    # 16 and 4: by other numbers CUDA multiplies with the reciprocal
    yield lambda x, alpha: pact(x, alpha, 16), x, (torch.tensor(2.5),), ()
    yield lambda x, alpha: pact(x, alpha, 4), wild, (4 * scales[:, None],), ()
    for weight in (wild, tiny):
        yield lambda x: fake_quantize_symmetric(x, 0, 7), weight, (), ()
        for symmetric in (True, False):
            yield groups(columns, symmetric), weight, (), ()
    yield groups(columns // 10, False), x[:, : columns // 10 * 10], (), (noise[:, : columns // 10 * 10],)
    yield groups(columns // 10, True), x[:, : columns // 10 * 10], (), (noise[:, : columns // 10 * 10],)


def lsq(rounded_gate, offset):
    if offset:
        return lambda x, scale, zero: lsq_fake_quantize(x, scale, zero, -8, 7, 0.1, rounded_gate)
    return lambda x, scale: lsq_fake_quantize(x, scale, None, -8, 7, 0.1, rounded_gate)


def ranged(rounded_gate):
    return lambda x, low, high: range_fake_quantize(x, low, high, 0, 15, rounded_gate)


def groups(size, symmetric):
    return lambda x, noise=None: fake_quantize_groups(x, size, 4, symmetric, noise)


def differentiated(function, device, x, learned, rest):
    """Return the result and all gradients, on the CPU."""
    leaves = [values.detach().to(device).requires_grad_() for values in (x, *learned)]
    y = function(*leaves, *(value.to(device) if isinstance(value, torch.Tensor) else value for value in rest))
    seed = torch.Generator().manual_seed(0)
    y.backward(torch.randn(y.shape, generator=seed).to(y))
    return [value.detach().cpu() for value in (y, *(leaf.grad for leaf in leaves))]


def check(rows, columns, device, switch, thinned=1):
    for number, dtype in enumerate(DTYPES):
        for index, (function, x, learned, rest) in enumerate(cases(rows, columns)):
            if number and index % thinned != number - 1:
                continue
            case = f"case {index}, {dtype}"
            switch(False)
            expected = differentiated(function, "cpu", x.to(dtype), learned, rest)
            switch(True)
            y, x_grad, *sums = differentiated(function, device, x.to(dtype), learned, rest)
            # the interpreter cuts bfloat16 off instead of rounding it (Triton 3.6 to 3.9)
            exact = device == "cuda" or dtype != torch.bfloat16
            rounding = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2**-7, "atol": 1e-30}
            torch.testing.assert_close(y, expected[0], equal_nan=True, msg=lambda m, c=case: f"{c}: {m}", **rounding)
            # what torch lets pass at NaN depends on the device
            known = ~expected[0].isnan()
            assert torch.equal(x_grad[known], expected[1][known]), case
            near = {"rtol": 1e-4, "atol": 1e-5 * x.numel() ** 0.5}
            for value, wanted in zip(sums, expected[2:], strict=True):
                torch.testing.assert_close(value, wanted, equal_nan=True, msg=lambda m, c=case: f"{c}: {m}", **near)


@pytest.fixture
def interpreted(monkeypatch):
    """Send what is on the CPU to the interpreter, or not."""
    calls = []

    def switch(on):
        def taken(x, *others):
            calls.append(on)
            return on

        for module in (quantization, quantization_group, quantization_dispatch):
            monkeypatch.setattr(module, "on_eager_cuda", taken)

    switch.calls = calls
    return switch


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def test_equals_the_cpu_in_the_interpreter(interpreted):
    check(5, 401, "cpu", interpreted, thinned=5)
    assert set(interpreted.calls) == {True, False}


def test_tiles_of_any_size_give_the_same():
    x = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    grad, scale, zero_point = x.flip(1).contiguous(), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.0, 3.0, -2.0])
    grid = scale, zero_point, None, (3, 100), -8, 7, 0.0
    wide, narrow = ((launch.grid_forward_triton(x, *grid, block=block)) for block in (1024, 32))
    assert torch.equal(wide, narrow)
    wide, narrow = (launch.grid_backward_triton(x, grad, *grid, False, "lsq", 1.0, block=block) for block in (1024, 32))
    assert torch.equal(wide[0], narrow[0])
    torch.testing.assert_close(wide[1], narrow[1])
    # scales along the last axis, more than a tile has
    grid = torch.linspace(0.1, 1, 75), torch.arange(75.0) - 40, None, (300, 1), -8, 7, 0.0
    wide, narrow = ((launch.grid_forward_triton(x, *grid, block=block)) for block in (1024, 32))
    assert torch.equal(wide, narrow)
    wide, narrow = (launch.grid_backward_triton(x, grad, *grid, False, "lsq", 1.0, block=block) for block in (1024, 32))
    assert torch.equal(wide[0], narrow[0])
    torch.testing.assert_close(wide[1], narrow[1])
    for symmetric in (True, False):
        expected = launch.rows_forward_triton(x, None, 100, -7, 7, symmetric)
        for row_block in (32, 128):
            assert torch.equal(launch.rows_forward_triton(x, None, 100, -7, 7, symmetric, 32, row_block), expected)


def test_the_ops_keep_their_contracts():
    x, scale = torch.randn(2, 3, 2, 2), torch.tensor(0.1)
    per_channel = torch.full((1, 3, 1, 1), 0.1)
    strided = x.contiguous(memory_format=torch.channels_last)
    zero_point = torch.ones_like(per_channel)
    ops = quantization_dispatch
    for op, arguments in (
        (ops.round_to_grid, (strided, per_channel, zero_point, torch.rand_like(x), -8, 7)),
        (ops.grid_gradients, (x, strided, scale, None, None, -8, 7)),
        (ops.grid_gradients, (x, strided, per_channel, zero_point, None, -8, 7, True, "lsq")),
        (ops.round_rows, (strided, None, 12, -7, 7, True)),
    ):
        torch.library.opcheck(op, arguments)


@triton.jit
def divide(x, scale, y, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(y + at, quotient(tl.load(x + at), tl.load(scale + at)))


def test_quotients_are_rounded_correctly():
    generator = torch.Generator().manual_seed(0)
    # positive floats of all magnitudes; codes, ties between them, and anything
    scale = torch.randint(1, 0x7F800000, (2**15,), generator=generator, dtype=torch.int32).view(torch.float32)
    quotients = torch.randint(-300, 300, scale.shape, generator=generator) / 2
    quotients[::2] = 1e4 * torch.randn(2**14, generator=generator) ** 3
    x = quotients * scale
    y = torch.empty_like(x)
    divide[(1,)](x, scale, y, block=x.numel())
    expected = x / scale
    near = expected.abs() < 2**22
    assert 30_000 < near.sum() < x.numel()
    assert torch.equal(y[near], expected[near])
    assert torch.equal(y[~near] < 0, expected[~near] < 0)


def test_second_derivatives_take_torch_operations(interpreted):
    interpreted(True)
    x = torch.tensor([0.3, 9.0], requires_grad=True)
    y = fake_quantize(x * x, torch.tensor(0.5), torch.tensor(0), -8, 7)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.autograd.grad(slope.sum(), x)[0].tolist() == [2.0, 0.0]


@pytest.mark.gpu
def test_equals_the_cpu_on_a_gpu():
    def switch(on):
        pass

    check(3, 37, "cuda", switch)
    check(1031, 4099, "cuda", switch)
    check(6, 40_001, "cuda", switch)
    x, scale = torch.ones(2, device="cuda"), torch.ones((), device="cuda")
    assert quantization_dispatch.grid_on_triton(x, scale, None)
    assert not quantization_dispatch.grid_on_triton(x.double(), scale.double(), None)
