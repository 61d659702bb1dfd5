"""Every recipe in a session: three narrow products, learning, resume, accumulation, and the rounding of HFP8."""

import copy
import math
from functools import partial

import pytest
import torch
from fp8_runs import ALL, LOSS_SCALE, Quiet, data, net
from fp8_runs import start as start_fp8
from plain_loop import backward, update
from sklearn.datasets import load_digits
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared_core import Session
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.errors import ConfigError
from shared_core.fp8 import Fp8Config, convert_to_fp8
from shared_core.fp8.arithmetic import cast_for
from shared_core.fp8.recipes import SharedExponentBank, cast_16bit, s2fp8_cast

start = partial(start_fp8, optimizer=torch.optim.AdamW)
CASTS = ["s2fp8", "hfp8", "mxfp4", "nvfp4", "int16"]


def step(session, optimizer, model, micro_batches):
    for x in micro_batches:
        backward(session, session.loss(model(x).square().mean() / len(micro_batches)))
    update(session, optimizer)


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "efftrain" or func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ALL)
def test_three_narrow_products_a_layer_and_step_and_no_other(recipe):
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])
    session, optimizer = start(model, recipe)
    with Products() as products:
        for _ in range(2):
            step(session, optimizer, model, [torch.randn(6, 32)])
    entries = session.receipt()["techniques"]["fp8"]["per_layer"]
    narrow = [entry for entry in entries if not entry.get("sixteen_bit")]
    # the first and last layer: 16 bits with HFP8, as narrow as the others with S2FP8, else in high precision
    every = recipe in ("hfp8", "s2fp8")
    assert [entry["name"] for entry in narrow] == (["0", "1", "2", "3", "4"] if recipe == "s2fp8" else ["1", "2", "3"])
    assert [entry["name"] for entry in entries if entry.get("sixteen_bit")] == (["0", "4"] if recipe == "hfp8" else [])
    for entry in narrow:
        # the first layer needs no gradient of its input
        assert entry["emulated"] == {"forward": 2, "grad_input": 2 * (entry["name"] != "0"), "grad_weight": 2}
        assert not any(entry["scaled_mm"].values())
    ours = [name for name in products.seen if name.startswith("efftrain")]
    of_backward = sum("fp8_grads" in name for name in ours)  # two products each
    assert len(ours) + of_backward == ((3 * 4 + 2) * 2 if every else 3 * 3 * 2)
    assert len(products.seen) - len(ours) == (0 if every else (2 + 3) * 2)  # torch's, of the ends


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", CASTS)
def test_products_are_those_of_the_cast_operands_in_their_roles(recipe, dtype):
    torch.manual_seed(0)
    model = net().to(dtype) if recipe != "hfp8" else net()
    if recipe == "hfp8":
        dtype = torch.float32
    start(model, recipe)
    layer = model[2]
    x = (torch.randn(9, 32) * torch.logspace(-2, 1, 32)).to(dtype).requires_grad_()
    g = (torch.randn(9, 32) * torch.logspace(-3, 0, 9)[:, None]).to(dtype)
    y = layer(x) - layer.bias
    y.backward(g)
    cast = cast_for(recipe, 0, SharedExponentBank(1))

    def value(matrix, role):
        return cast(matrix.detach().contiguous(), role, False).double()

    w = layer.weight
    padded_g, padded_x = (torch.nn.functional.pad(m.detach(), (0, 0, 0, 7)).t() for m in (g, x))
    wanted = (
        value(x, "input") @ value(w, "weight").t() if dtype != torch.bfloat16 else None,
        value(g, "gradient") @ value(w.t(), "weight").t(),
        value(padded_g, "gradient") @ value(padded_x, "input").t(),
    )
    for got, reference in zip((y.detach(), x.grad, w.grad), wanted, strict=True):
        if reference is None:  # the bias is added and taken away again, in bf16
            continue
        assert got.dtype == dtype
        tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert (got.double() - reference).abs().max() <= tolerance * reference.abs().max()
    exact = g.double() @ w.detach().double()
    assert (wanted[1] - exact).norm() > 1e-6 * exact.norm()


def test_the_first_and_last_layer_of_hfp8_run_in_16_bits_and_odd_sizes_may():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 32), nn.Linear(32, 32), nn.Linear(32, 3))
    session, _ = start(model, "hfp8")
    x = torch.randn(4, 5)
    wanted = cast_16bit(x, "input").double() @ cast_16bit(model[0].weight.detach(), "weight").double().t()
    torch.testing.assert_close((model[0](x) - model[0].bias).double(), wanted, rtol=1e-5, atol=1e-6)
    assert session.receipt()["techniques"]["fp8"]["left_out"] == {}
    session.finish()
    assert all(type(layer) is nn.Linear for layer in model)
    named = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32))
    session = Session({"fp8": {"recipe": "hfp8", "include": ["0"]}, **LOSS_SCALE}, services=Quiet())
    session.attach(named)
    assert not session.techniques["fp8"].sixteen_bit  # by name: in 8 bits


def test_s2fp8_leaves_no_linear_layer_out():
    model = nn.Sequential(nn.Linear(5, 32), nn.Linear(32, 3))
    session, _ = start(model, "s2fp8")
    values = s2fp8_cast(x := torch.randn(4, 5), "input", False), s2fp8_cast(model[0].weight.detach(), "weight", False)
    wanted = values[0].double() @ values[1].double().t()
    torch.testing.assert_close((model[0](x) - model[0].bias).double(), wanted, rtol=1e-5, atol=1e-6)
    assert session.receipt()["techniques"]["fp8"]["left_out"] == {}


def on_fp16_grid(weight):
    return torch.equal(weight, weight.half().float())


def test_weights_of_hfp8_are_on_the_grid_after_every_step_and_small_updates_survive_on_average():
    model = net()
    session, _ = start(model, "hfp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session.begin([optimizer], total_steps=None)
    assert on_fp16_grid(model[2].weight)
    model[2].weight.data.fill_(1.0)
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model[2].weight.grad.fill_(-(2.0**-14) * 256)  # a sixteenth of what lies between 1 and the next value
        session.techniques["loss_scale"].scaler.scale(torch.ones(()))
        update(session, optimizer)
        assert on_fp16_grid(model[2].weight)
    # mean 1 + 200/16 ulp; one weight's deviation is below sqrt(200/16·15/16) ulp, the mean's 32 times less
    moved = (model[2].weight.detach().mean().item() - 1) * 2**10
    assert moved == pytest.approx(200 / 16, abs=5 * math.sqrt(200 / 16) / 32)


def test_hfp8_refuses_weights_that_have_lost_their_update_already():
    with pytest.raises(ConfigError, match=r"weights must be float32 or float64, got torch\.bfloat16"):
        start(net().bfloat16(), "hfp8")


@pytest.mark.parametrize("recipe", ["delayed", "int16", "hfp8", "s2fp8", "nvfp4"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_resume_is_bit_exact_also_inside_a_step(recipe, stop, tmp_path):
    batches = data()
    model = net()
    session, optimizer = start(model, recipe)
    for x in batches[:stop]:
        step(session, optimizer, model, x.chunk(2))
    backward(session, session.loss(model(batches[stop][:6]).square().mean() / 2))
    save_state(tmp_path, session.state_dict())
    again = net(seed=5)
    again.load_state_dict(model.state_dict())
    resumed, other = start(again, recipe, load_state(tmp_path))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, peer in zip(again.parameters(), model.parameters(), strict=True):
        parameter.grad = peer.grad.clone()
    for mine, its, one in ((session, optimizer, model), (resumed, other, again)):
        step(mine, its, one, [batches[stop][6:]])
        for x in batches[stop + 1 :]:
            step(mine, its, one, x.chunk(2))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    ends = [mine.state_dict()["techniques"]["fp8"].get("bank", {}) for mine in (session, resumed)]
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(ends[1][name])) for name, value in ends[0].items())


def test_exponents_of_int16_follow_their_layer_when_the_order_changes():
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    session, optimizer = start(model, "int16")
    model[1].weight.data.mul_(1000)
    step(session, optimizer, model, [torch.randn(6, 32)])
    state = session.state_dict()
    exponents = state["techniques"]["fp8"]["bank"]["exponents"]
    assert not torch.equal(exponents[:3], exponents[3:])
    state["techniques"]["fp8"]["layers"].reverse()
    swapped, _ = start(nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]), "int16", state)
    assert torch.equal(
        swapped.state_dict()["techniques"]["fp8"]["bank"]["exponents"], torch.cat([exponents[3:], exponents[:3]])
    )


@pytest.mark.parametrize("recipe", ALL)
def test_accumulation_moves_a_history_once_and_comes_near_the_whole_batch(recipe):
    whole, parts = net(), net()
    ends = []
    for model, chunks in ((whole, 1), (parts, 3)):
        session, _ = start(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.begin([optimizer], total_steps=None)
        before = copy.deepcopy(model[2].weight.detach())
        for x in data(3):
            step(session, optimizer, model, x.chunk(chunks))
        ends.append(model[2].weight.detach() - before)
        bank = session.state_dict()["techniques"]["fp8"].get("bank")
        assert bank is None or bank["num_updates"] == 3
    # coarse formats round each part otherwise
    assert (ends[0] - ends[1]).norm() < {"mxfp4": 0.5, "nvfp4": 0.5}.get(recipe, 0.2) * ends[0].norm()


def digits():
    found = load_digits()
    x = torch.tensor(found.data, dtype=torch.float32) / 16
    y = torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]


def accuracy(recipe, steps=60):
    x, y, test_x, test_y = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    others = LOSS_SCALE if recipe == "hfp8" else {}
    session = Session(
        {"fp8": {"recipe": recipe}, **others, "allow_partial": True} if recipe else {},
        services=Quiet(),
    )
    session.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    session.begin([optimizer], total_steps=steps)
    for index in range(steps):
        rows = slice(280 * (index % 5), 280 * (index % 5 + 1))
        backward(session, session.loss(nn.functional.cross_entropy(model(x[rows]), y[rows])))
        update(session, optimizer)
    session.finish()
    with torch.no_grad():
        return (model(test_x).argmax(1) == test_y).float().mean().item(), session


@pytest.fixture(scope="module")
def exact():
    return accuracy(None)[0]


@pytest.mark.parametrize("recipe", ALL)
def test_digits_are_learnt_as_in_float32(recipe, exact):
    got, session = accuracy(recipe)
    told = session.receipt()
    assert exact > 0.93
    assert got > exact - {"mxfp4": 0.05, "nvfp4": 0.05}.get(recipe, 0.02), (recipe, got, exact)
    assert told["steps"]["applied"] == 60
    assert sum(entry["emulated"]["grad_weight"] for entry in told["techniques"]["fp8"]["per_layer"]) >= 60


def test_what_the_formats_ask_of_a_run():
    narrow = {recipe: Fp8Config(recipe=recipe).backward_is_narrow for recipe in ALL}
    assert {recipe for recipe, is_narrow in narrow.items() if is_narrow} == {"tensorwise", "delayed", "hfp8"}
    assert not Fp8Config(recipe="tensorwise", format="e4m3").backward_is_narrow
    assert [recipe for recipe in ALL if Fp8Config(recipe=recipe).needs_loss_scaling] == ["hfp8"]
    assert Fp8Config(recipe="tensorwise", format="e4m3").gradient_dtype == torch.float8_e4m3fn


NOT_IN = {
    "backend=scaled_mm": {*CASTS, "blockwise", "mx"},
    "backend=torchao": {*ALL} - {"tensorwise", "rowwise"},
    "format=e4m3": {*CASTS},
    "format=hybrid": {*ALL} - {"tensorwise", "delayed"},
}


@pytest.mark.parametrize(("option", "recipe"), [(option, recipe) for option in NOT_IN for recipe in ALL])
def test_options_go_with_their_recipes(option, recipe):
    name, value = option.split("=")
    if recipe not in NOT_IN[option]:
        Fp8Config(recipe=recipe, **{name: value})
        return
    with pytest.raises(ConfigError, match=f"{option} .*, got recipe={recipe}"):
        Fp8Config(recipe=recipe, **{name: value})


@pytest.mark.parametrize("recipe", ["delayed", "hfp8", "int16"])
def test_recipes_with_history_need_a_session(recipe):
    with pytest.raises(ConfigError, match=f"recipe '{recipe}' needs"):
        convert_to_fp8(net(), Fp8Config(recipe=recipe))
