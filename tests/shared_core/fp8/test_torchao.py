"""torchao's float8 training as a backend: its layer, our keys, our numbers, and stock layers at the end."""

import copy
import math
import sys
from functools import partial

import pytest
import torch
from eff_kernels import fp8 as kernels
from fp8_runs import Quiet
from fp8_runs import start as start_fp8
from plain_loop import plain_step
from torch import nn
from torchao.float8.float8_linear import Float8Linear

from shared_core import Session
from shared_core.errors import CompatibilityError, MissingExtraError
from shared_core.fp8 import Fp8Config, Fp8Linear, convert_to_fp8
from shared_core.fp8 import native as probe

SETTINGS = [("tensorwise", "auto"), ("tensorwise", "e4m3"), ("rowwise", "auto")]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


start = partial(start_fp8, recipe="rowwise", backend="torchao")


def step(session, optimizer, model, x):
    return plain_step(session, optimizer, model(x).square().mean())


def three_products(backend, recipe, fmt, dtype=torch.float32, tokens=21):
    torch.manual_seed(0)
    layer = nn.Linear(160, 144, bias=False)
    x = (torch.randn(tokens, 160) * torch.logspace(-2, 1, 160)).to(dtype).requires_grad_()
    g = (torch.randn(tokens, 144) * 1e-3).to(dtype)
    layer.to(dtype)
    convert_to_fp8(layer, Fp8Config(recipe=recipe, format=fmt, backend=backend, include=["first"]))
    y = layer(x)
    y.backward(g)
    return layer, (y.detach(), x.grad, layer.weight.grad)


@pytest.mark.parametrize(("recipe", "fmt"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_three_products_are_those_of_our_layer(recipe, fmt, dtype):
    theirs, peer = three_products("torchao", recipe, fmt, dtype)
    ours, mine = three_products("emulated", recipe, fmt, dtype)
    assert type(theirs) is Float8Linear
    assert type(ours) is Fp8Linear
    for a, b in zip(mine, peer, strict=True):
        assert a.dtype == b.dtype == dtype
        # powers of two: the same codes, another order of adding up. Else scales half an ulp apart flip a tie at times.
        tolerance = {"rowwise": 1e-6, "tensorwise": 5e-3}[recipe] + (2**-8 if dtype == torch.bfloat16 else 0)
        assert (a.float() - b.float()).norm() <= tolerance * b.float().norm()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rowwise_casts_have_the_same_codes(dtype):
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    from torchao.float8.float8_utils import ScalingGranularity

    emulated = ScaledMMConfig(emulate=True)
    x = torch.randn(64, 96) * torch.logspace(-6, 6, 64)[:, None]
    theirs = hp_tensor_to_float8_dynamic(
        x,
        dtype,
        LinearMMConfig(emulated, emulated, emulated),
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    scale = kernels.block_scale(kernels.block_amax(x, (1, 0)), dtype, "power_of_two")
    ours = kernels.cast(x, scale, dtype, (1, 0))
    assert torch.equal(ours.codes.view(torch.uint8), theirs._data.view(torch.uint8))
    assert torch.equal(1 / ours.scale, theirs._scale)


def test_keys_parameters_and_modules_stay_and_stock_layers_come_back():
    model = net()
    parameters, keys, modules = list(model.parameters()), list(model.state_dict()), list(model.modules())
    attributes = set(vars(model[2]))
    session, optimizer = start(model)
    assert type(model[2]) is Float8Linear
    assert type(model[0]) is type(model[4]) is nn.Linear
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    x = torch.randn(5, 16)
    assert torch.equal(twin(x), model(x))
    with pytest.raises(CompatibilityError, match="already has FP8 layers"):
        convert_to_fp8(model, Fp8Config(recipe="rowwise"))
    assert step(session, optimizer, model, x)
    session.finish()
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.GELU}
    assert set(vars(model[2])) == attributes
    assert model(x).shape == (5, 16)


def test_the_receipt_says_torchao_and_the_run_that_it_emulates():
    session, optimizer = start(net())
    step(session, optimizer, session.context.model, torch.randn(5, 16))
    session.finish()
    told = session.receipt()["techniques"]["fp8"]
    assert told["backend"] == "torchao"
    assert told["native_layers"] == 0
    assert told["per_layer"] == [{"name": "2", "weights": 32 * 48, "by": "torchao", "native": False}]
    (line,) = session._services.of_fp8()
    assert "EMULATED, as cpu does not multiply FP8" in line


def test_what_torchao_multiplies_by_follows_the_device_at_the_start_of_training(monkeypatch):
    model = net()
    session = Session({"fp8": {"recipe": "rowwise", "backend": "torchao"}}, services=Quiet())
    session.attach(model)
    assert model[2].config.emulate
    monkeypatch.setattr(probe, "why_not_native", lambda *_: None)  # as if the trainer had moved it to a GPU
    session.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=1)
    assert not model[2].config.emulate
    assert model[2].config.pad_inner_dim
    assert session._services.of_fp8() == []


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_with_nan_or_infinity_is_discarded(bad):
    model = net()
    session, optimizer = start(model)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 16)
    x[1, 1] = bad
    assert step(session, optimizer, model, x) is False
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert step(session, optimizer, model, torch.randn(4, 16))
    assert session.receipt()["techniques"]["fp8"]["discarded_steps"] == 1


def test_a_compiled_model_is_one_graph():
    torch._dynamo.reset()
    models = net(), net()
    for model in models:
        convert_to_fp8(model, Fp8Config(recipe="rowwise", backend="torchao"))
    x = torch.randn(8, 16)
    compiled = torch.compile(models[1], backend="aot_eager", fullgraph=True)
    outputs = [models[0](x), compiled(x)]
    torch.testing.assert_close(*outputs)
    for y in outputs:
        y.square().sum().backward()
    torch.testing.assert_close(models[0][2].weight.grad, models[1][2].weight.grad)
    torch._dynamo.reset()


def test_a_missing_torchao_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = net()
    with pytest.raises(MissingExtraError, match=r"backend=torchao: needs torchao.*efftrain\[torchao\]"):
        start(model)
    assert type(model[2]) is nn.Linear
