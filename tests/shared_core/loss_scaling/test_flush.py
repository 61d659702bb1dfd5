"""The true flush share against a float64 backward written out by hand, and that measuring changes nothing."""

import pytest
import torch
from plain_loop import backward, update
from torch import nn

from shared_core.engine.session import Session
from shared_core.engine.state_file import load_state, save_state
from shared_core.loss_scaling import FlushProbe


class Net(nn.Module):
    def __init__(self, dropout=0.0, inplace=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.second = nn.Linear(32, 48), nn.ReLU(inplace=inplace), nn.Linear(48, 8)
        self.drop, self.norm = nn.Dropout(dropout), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.second(self.drop(self.relu(self.first(x)))))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 32, generator=generator)


def loss_of(output, coefficient):
    return output.float().pow(3).mean() * coefficient


def plain(inplace=False):
    """Two linear layers and a ReLU, so that a float64 backward is two products and a mask."""
    model = Net(inplace=inplace)
    model.norm, model.drop = nn.Identity(), nn.Identity()
    return model


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("coefficient", "low", "high"), [(1.0, 0.0, 0.05), (1e-3, 0.05, 0.6), (1e-5, 0.5, 1.0)])
def test_the_share_equals_a_float64_recount(inplace, coefficient, low, high):
    model, probe = plain(inplace), FlushProbe()
    probe.watch(model)
    probe.arm()
    x, seen = data(), {}
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        hidden = model.first(x).double()  # as the forward below rounds it

    def note(name):
        def hook(module, inputs, output):
            output.register_hook(lambda grad: seen.__setitem__(name, grad.clone()))

        return hook

    for name in ("first", "relu", "second"):
        getattr(model, name).register_forward_hook(note(name))
    with torch.autocast("cpu", torch.float16):
        output = model(x)
    loss = loss_of(output, coefficient)
    loss.backward()
    got = dict(seen)  # the second pass would call the hooks again
    assert probe.measure(step=5)

    top = 3 * output.detach().double().pow(2) / output.numel() * coefficient
    grads = {"second": top}
    grads["relu"] = grads["second"] @ model.second.weight.detach().double()
    grads["first"] = grads["relu"] * (hidden > 0)
    expected = {
        name: (int(((got[name] == 0) & (exact != 0)).sum()), int((exact != 0).sum())) for name, exact in grads.items()
    }
    found = {name: probe.layers[name] for name in expected if name in probe.layers}
    assert found == {name: counts for name, counts in expected.items() if counts[1]}
    share = probe.figures()["loss_scale/flushed"]
    assert low <= share <= high
    assert probe.step == 5


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_measuring_changes_no_state(dropout):
    states = []
    for armed in (False, True):
        model, probe = Net(dropout), FlushProbe()
        probe.watch(model)
        torch.manual_seed(4)
        for step in range(3):
            model.zero_grad()
            if armed:
                probe.arm()
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model(data()), 1e-4)
            loss.backward()
            assert probe.measure(step) == armed
        probe.leave()
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert not model.first._forward_hooks
        states.append([*model.state_dict().values(), *(p.grad for p in model.parameters()), torch.get_rng_state()])
        share = probe.figures().get("loss_scale/flushed")
    assert 0 < share < 0.9
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


def test_with_the_right_scale_little_is_flushed_and_in_fp32_nothing():
    shares = {}
    for scale, half in ((1.0, True), (2.0**14, True), (1.0, False)):
        model, probe = plain(), FlushProbe()
        probe.watch(model)
        probe.arm()
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = loss_of(model(data()), 1e-5)
        (loss * scale).backward()
        assert probe.measure(0)
        shares[scale, half] = probe.figures()["loss_scale/flushed"]
    assert shares[1.0, True] > 0.5
    assert shares[2.0**14, True] < 0.05
    assert shares[1.0, False] == 0.0


def test_what_cannot_be_measured_is_left_out():
    model, probe = plain(), FlushProbe()
    assert not probe.measure(0)  # no model
    probe.watch(model)
    probe.arm()
    model.eval()
    model(data()).sum().backward()
    model.train()
    with torch.no_grad():
        model(data())
    assert not probe.measure(0)  # no training forward
    probe.arm()
    (model(data()).sum() * float("inf")).backward()
    assert not probe.measure(0)
    half = plain().bfloat16()
    probe.watch(half)
    probe.arm()
    half(data().bfloat16()).sum().backward()
    assert not probe.measure(0)
    assert not probe.is_watching
    assert probe.figures() == probe.report() == {}


def session(model, optimizer, state=None):
    made = Session({"loss_scale": {"kind": "dynamic", "flush_every": 2, "telemetry_every": 0}})
    made.attach(model)
    if state:
        made.load_state_dict(state)
    made.begin([optimizer], total_steps=10)
    return made


def step(model, optimizer, made, bad=False):
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model(data()), float("inf") if bad else 1e-6)
        backward(made, made.loss(loss))
    update(made, optimizer)


def test_a_session_measures_every_kth_applied_step_and_resumes(tmp_path):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    made, measured = session(model, optimizer), []
    for index in range(6):
        step(model, optimizer, made, bad=index == 2)
        measured.append(made.techniques["loss_scale"].flush.step)
    assert measured == [0, 0, 0, 2, 2, 4]
    technique = made.techniques["loss_scale"]
    assert technique.figures()["loss_scale/flushed"] == technique.report()["flushed"]
    assert set(technique.report()["flushed_layers"]) == {"first", "relu", "drop", "second", "norm"}
    save_state(tmp_path, made.state_dict())
    told = technique.report()
    made.finish()
    again = session(model, optimizer, load_state(tmp_path))
    assert again.techniques["loss_scale"].report() == told
    again.finish()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


class Wrapper(nn.Module):
    """Like a LightningModule: a method that is not `forward` calls a submodule."""

    def __init__(self):
        super().__init__()
        self.net = plain()

    def training_step(self):
        return loss_of(self.net(data()), 1e-5)


def test_the_first_module_called_is_measured_where_forward_of_the_whole_is_not():
    inner, outer = FlushProbe(), FlushProbe()
    for probe, model, run in ((inner, plain(), None), (outer, Wrapper(), "training_step")):
        probe.watch(model)
        probe.arm()
        with torch.autocast("cpu", torch.float16):
            loss = getattr(model, run)() if run else loss_of(model(data()), 1e-5)
        loss.backward()
        assert probe.measure(0)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert outer.layers == {f"net.{name}": counts for name, counts in inner.layers.items()}
