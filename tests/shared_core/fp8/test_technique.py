"""FP8 training in a session: histories move once a step, resume is exact, stock layers come back."""

import copy
import math
import pickle
import sys
from collections import deque

import pytest
import torch
from fp8_runs import ALL, Quiet, data, net, start
from plain_loop import begun_session, plain_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_core.errors import CheckpointError, CompatibilityError, TrainingError
from shared_core.fp8 import Fp8Linear
from shared_core.fp8.scaling import ROLES


def step(session, optimizer, forward, micro_batches, *, skip=False):
    for x in micro_batches:
        session.loss(forward(x).square().mean() / len(micro_batches)).backward()
    if skip:
        session.before_step()
        session.after_step(applied=False)
        optimizer.zero_grad()
    else:
        plain_step(session, optimizer)


def amaxes(session):
    state = session.state_dict()["techniques"]["fp8"]
    return state["bank"]["history"].clone()


def test_the_next_scale_is_of_the_largest_of_the_last_steps():
    model = net()
    session, optimizer = start(model, amax_history=3, include=["2"])
    bank = session.techniques["fp8"]._bank
    seen = {role: deque(maxlen=3) for role in ROLES}
    layer = model[2]
    now = {}
    layer.register_forward_pre_hook(lambda module, inputs: now.update(input=inputs[0].abs().max().item()))
    layer.register_full_backward_hook(lambda module, _, out: now.update(gradient=out[0].abs().max().item()))
    for x in data():
        now["weight"] = layer.weight.abs().max().item()
        step(session, optimizer, model, [x])
        for role in ROLES:
            seen[role].append(now[role])
            assert bank.past(0, role, torch.device("cpu")).item() == pytest.approx(max(seen[role]), rel=1e-6)
    entry = session.receipt()["techniques"]["fp8"]["per_layer"][0]
    assert entry["amax"]["gradient"] == pytest.approx(max(seen["gradient"]), rel=1e-6)
    assert entry["emulated"] == {"forward": 8, "grad_input": 8, "grad_weight": 8}


def test_a_past_scale_saturates_and_a_first_step_does_not():
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    session, optimizer = start(model, include=["0"])
    nn.init.eye_(model[0].weight)
    x = torch.full((2, 16), 1.0)

    def far_outside():
        nn.init.eye_(model[0].weight)
        with torch.no_grad():  # such a forward leaves no trace
            return model(100 * x)

    torch.testing.assert_close(far_outside(), 100 * x)  # no history yet: the current magnitude
    step(session, optimizer, model, [x])
    torch.testing.assert_close(far_outside(), x)  # 100 lies outside the scale of 1
    session.context.report_weights_replaced()
    torch.testing.assert_close(far_outside(), 100 * x)


def test_micro_batches_recomputation_evaluation_and_skips_leave_one_entry_a_step():
    batches = data()
    whole, parts, recomputed = net(), net(), net()

    def again(x):
        return checkpoint(recomputed, x, use_reentrant=False)

    runs = [start(model) for model in (whole, parts, recomputed)]
    for x in batches[:3]:
        step(*runs[0], whole, [x])
        step(*runs[1], parts, x.chunk(3))
        step(*runs[2], again, [x])
        session = runs[1][0]
        with session.swapped("evaluate"):
            parts(1e6 * x).sum().backward()  # a metric that differentiates must not count either
            parts.zero_grad()
        with torch.no_grad():
            parts(1e6 * x)
        runs[1][1].zero_grad()
    histories = [amaxes(session) for session, _ in runs]
    assert torch.equal(histories[0], histories[2])
    for a, b in zip(whole.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a, b)
    # not equal: a first micro-batch has a scale of its own, as there is no history yet
    torch.testing.assert_close(histories[1], histories[0], rtol=0.05, atol=0)
    assert (histories[1] > 0).sum() == (histories[0] > 0).sum() == 3 * 3  # three steps, three roles, one layer

    step(*runs[0], whole, [100 * batches[3]], skip=True)
    assert torch.equal(amaxes(runs[0][0]), histories[0])
    step(*runs[0], whole, [batches[4]])
    assert amaxes(runs[0][0])[0, 0] < 50  # of the applied step alone


# without hfp8, which always has a loss scaler
UNSCALED = [recipe for recipe in ALL if recipe != "hfp8"]


def everything(session, model, optimizer):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for index, moments in enumerate(optimizer.state.values()):
        state |= {f"{index}.{name}": value.clone() for name, value in moments.items()}
    bank = session.state_dict()["techniques"]["fp8"].get("bank", {})
    return state | {name: torch.as_tensor(value) for name, value in bank.items()}


@pytest.mark.parametrize("recipe", UNSCALED)
@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_with_nan_or_infinity_moves_nothing_and_training_goes_on(recipe, where, bad):
    model = net()
    session, _ = start(model, recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session.begin([optimizer], total_steps=None)
    batches = data()
    step(session, optimizer, model, [batches[0]])
    before = everything(session, model, optimizer)
    x = batches[1].clone()
    if where == "input":
        x[0, 0] = bad
    y = model(x)
    y.backward(torch.full_like(y, bad if where == "gradient" else 0.1))
    assert plain_step(session, optimizer) is False
    after = everything(session, model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    told = session.receipt()
    assert told["techniques"]["fp8"]["discarded_steps"] == told["steps"]["skipped"] == 1
    assert told["steps"]["applied"] == 1
    step(session, optimizer, model, [batches[2]])
    assert session.step == 2
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_training_stops_when_every_step_is_discarded():
    model = net()
    session, optimizer = start(model, recipe="rowwise", max_skips=3)
    bad = [math.nan * x for x in data()]
    step(session, optimizer, model, [bad[0]])
    step(session, optimizer, model, [bad[1]])
    step(session, optimizer, model, [data()[0]])  # an applied step starts the count anew
    step(session, optimizer, model, [bad[2]])
    state = session.state_dict()
    step(session, optimizer, model, [bad[3]])
    with pytest.raises(TrainingError, match=r"3 steps in a row \(max_skips\)"):
        step(session, optimizer, model, [bad[4]])
    session, optimizer = start(net(), state=state, recipe="rowwise", max_skips=3)  # and a resume does not
    step(session, optimizer, session.context.model, [bad[5]])
    with pytest.raises(TrainingError, match="max_skips"):
        step(session, optimizer, session.context.model, [bad[6]])


@pytest.mark.parametrize("recipe", ["delayed", "hfp8"])
def test_a_scaler_skips_the_step_that_overflowed(recipe):
    model = net()
    loss_scale = {"kind": "dynamic", "init_scale": 8.0, "format": "fp8_e5m2"}
    session, optimizer = begun_session(
        {"fp8": {"recipe": recipe}, "loss_scale": loss_scale}, model, 10, lr=0.05, services=Quiet()
    )
    scaler = session.techniques["loss_scale"].scaler
    weights = copy.deepcopy(model.state_dict())
    scaler.scale(session.loss(model(data()[0] * math.inf).square().mean())).backward()
    scaler.unscale_(optimizer)
    session.before_step()
    scaler.step(optimizer)
    scaler.update()
    session.after_step(applied=False)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert scaler.get_scale() < 8.0
    assert session.skipped == 1
    assert not session.context.discard_step
    if recipe == "delayed":
        assert not amaxes(session).any()


def test_states_of_other_runs_are_refused():
    session, _ = start(net())
    state = session.state_dict()
    with pytest.raises(CheckpointError, match=r"differ in 0, 2"):
        start(net(), state=state, include=["0"])
    with pytest.raises(CheckpointError, match="amax_history must be the saved 16 steps, got 4"):
        start(net(), state=state, amax_history=4)
    del state["techniques"]["fp8"]["bank"]["window"]
    with pytest.raises(CheckpointError, match="cannot read the checkpoint's state of fp8"):
        start(net(), state=state)


def test_the_run_says_once_and_aloud_that_it_emulates():
    for options, reason in (
        ({}, "cpu does not multiply FP8"),
        ({"recipe": "mx"}, "cpu does not multiply FP8"),
        ({"recipe": "rowwise", "backend": "emulated"}, "backend=emulated asks"),
        ({"recipe": "mxfp4"}, "this recipe has no scaled matmul"),
        ({"recipe": "int16"}, "on int16 values"),
        ({"recipe": "rowwise", "backend": "torchao"}, "cpu does not multiply FP8"),
    ):
        session, optimizer = start(net(), **options)
        model = session.context.model
        for x in data(3):
            step(session, optimizer, model, [x])
        (line,) = session._services.of_fp8()
        assert "EMULATED" in line
        assert reason in line
        session.finish()
        told = session.receipt()["techniques"]["fp8"]
        assert f"EMULATED, as {told['emulated_because']}: products" in line
        assert told["native_layers"] == 0
        assert told["per_layer"][0].get("emulated", {"forward": 3})["forward"] == 3
    session, _ = start(net(), backend="scaled_mm")
    assert not any("EMULATED" in said for said in session._services.said)


def test_scaled_matmul_on_a_cpu_is_counted_but_not_called_native():
    model = net()
    session, optimizer = start(model, backend="scaled_mm")
    step(session, optimizer, model, [data()[0]])
    session.finish()
    entry = session.receipt()["techniques"]["fp8"]["per_layer"][0]
    assert entry["scaled_mm"] == {"forward": 1, "grad_input": 1, "grad_weight": 1}
    assert not any(entry["emulated"].values())
    assert not entry["native"]


def written(model, session, optimizer):
    with torch.no_grad():
        model[2].weight.mul_(2)


def replaced(model, session, optimizer):
    model[2].weight = nn.Parameter(2 * model[2].weight.detach())


def moved(model, session, optimizer):
    model[2].weight.data = 2 * model[2].weight.detach()


def loaded(model, session, optimizer):
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})


def stepped(model, session, optimizer):
    plain_step(session, optimizer)


def replaced_unseen(model, session, optimizer):
    model[2].weight.data.mul_(2)
    session.context.report_weights_replaced()


def evaluated_with_others(model, session, optimizer):
    with session.swapped("evaluate"):
        model[2].weight.data.mul_(2)
        model(data()[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "rowwise", "blockwise", "mx"])
@pytest.mark.parametrize("change", [written, replaced, moved, loaded, stepped, replaced_unseen, evaluated_with_others])
def test_codes_of_a_weight_are_kept_for_a_window_and_never_outlive_a_change(recipe, change, compiled):
    torch._dynamo.reset()
    x, model = data()[0], net()
    session, optimizer = start(model, recipe=recipe)
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    layer = model[2].fp8
    forward(x).square().mean().backward()
    kept = layer.kept
    forward(x).square().mean().backward()
    assert layer.kept is kept is not None
    change(model, session, optimizer)
    after = model[2].weight.detach().clone()
    runs = []
    for _ in range(2):  # as it is, and with no codes at hand
        given = x.clone().requires_grad_()
        y = forward(given)
        runs.append([y.detach(), *torch.autograd.grad(y.square().mean(), (given, *model.parameters()))])
        layer.forget_codes()
    assert torch.equal(model[2].weight, after)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    torch._dynamo.reset()


def test_no_verb_of_a_step_walks_over_layers():
    calls = []
    for depth in (6, 30):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))
        session, _ = start(model, recipe="tensorwise")
        session.loss(model(data()[0]).square().mean()).backward()
        seen = []
        sys.setprofile(lambda frame, event, _, seen=seen: seen.append(frame.f_code) if event == "call" else None)
        session.before_step()
        session.after_step()
        sys.setprofile(None)
        calls.append(sum("fp8" in code.co_filename for code in seen))
    assert calls[0] == calls[1]


def test_stock_layers_with_the_same_parameters_come_back():
    model = net()
    parameters, keys = list(model.parameters()), list(model.state_dict())
    session, optimizer = start(model)
    assert type(model[2]) is Fp8Linear
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == keys
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in copies:
        assert other[2].fp8.kept is None
        assert torch.equal(other(data()[0]), model(data()[0]))
    step(session, optimizer, model, [data()[0]])
    before = session.files.bake(model.state_dict())
    session.finish()
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.GELU}
    assert "fp8" not in vars(model[2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_fused_encoder_layer_does_not_bypass_fp8():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        exact = model(x)
        session, _ = start(model, recipe="tensorwise", include=["layers.1.linear1", "layers.1.linear2"])
        assert (model(x) - exact).norm() > 1e-3 * exact.norm()
        session.finish()
        assert torch.equal(model(x), exact)


def test_a_model_whose_attention_multiplies_in_fp8_can_be_pickled():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2).eval()
    session, _ = start(model, recipe="tensorwise")
    assert session.techniques["fp8"].layers.keys() >= {"layers.1.self_attn", "layers.0.self_attn.out_proj"}
    x = torch.randn(2, 5, 32)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


@pytest.mark.parametrize("other", ["deepspeed", "fsdp1", "tensor_parallel", "lbfgs", "data_parallel", "tpu"])
def test_run_environments_that_are_not_proven_are_refused(other):
    with pytest.raises(CompatibilityError, match="fp8 cannot be combined with"):
        start(net(), run_environment=[other])
