"""What the format loses: telemetry against a float64 recount, the flush share against a float64 backward by hand."""

import json
import math

import numpy as np
import pytest
import torch
from loss_scaling_runs import SessionLoop
from plain_loop import backward, update
from torch import nn

from shared_core import Session
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.loss_scaling import FlushProbe, UnderflowTelemetry

NORMAL, LARGEST = 2.0**-14, {"fp16": 65504.0, "fp8_e5m2": 57344.0}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def with_gradients(model, spread=4.0):
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        size = parameter.shape
        grad = torch.randn(size, generator=generator) * torch.exp2(torch.randn(size, generator=generator) * spread - 18)
        grad[torch.rand(size, generator=generator) < 0.2] = 0
        parameter.grad = grad
    return model


def recount(grads, scale, format):
    """Shares and head-room in float64, from what the format would be asked to hold."""
    scaled = np.concatenate([np.abs(grad.double().numpy().ravel()) for grad in grads]) * scale
    return {
        "underflow": ((scaled > 0) & (scaled < NORMAL)).mean(),
        "zero": (scaled == 0).mean(),
        "headroom": math.log2(LARGEST[format] / scaled.max()),
    }


@pytest.mark.parametrize("format", ["fp16", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**-3, 1000.0])
def test_figures_equal_the_recount_total_and_by_layer(format, scale):
    model = with_gradients(net())
    telemetry = UnderflowTelemetry(format)
    assert telemetry.measure(model.named_parameters(), scale, step=7)
    found = telemetry.figures()
    expected = recount([parameter.grad for parameter in model.parameters()], scale, format)
    assert found == {f"loss_scale/{name}": pytest.approx(value, rel=1e-12) for name, value in expected.items()}
    assert 0 < found["loss_scale/underflow"] < 1
    report = telemetry.report()
    assert list(report["layers"]) == ["0", "2"]
    for name, layer in report["layers"].items():
        module = model[int(name)]
        assert layer == pytest.approx(recount([module.weight.grad, module.bias.grad], scale, format), rel=1e-12)
    assert (report["measured_step"], report["measured_scale"], report["format"]) == (7, scale, format)
    json.dumps(report)


def test_the_histogram_is_that_of_log2_of_the_unscaled_gradients():
    model = with_gradients(net())
    telemetry = UnderflowTelemetry()
    telemetry.measure(model.named_parameters(), 4096.0)
    values = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]).abs().double().numpy()
    powers, counts = np.unique(np.floor(np.log2(values[values > 0])).astype(int), return_counts=True)
    assert telemetry.report()["log2_histogram"] == {str(p): c for p, c in zip(powers, counts, strict=True)}
    assert telemetry.histograms.sum() == len(values)


def test_autocast_gradients_below_fp16_are_seen_before_the_scale_and_gone_after_it():
    # what the figures are for: the same loss, unscaled, flushes; scaled, it does not
    zero = {}
    for scale in (1.0, 2.0**14):
        torch.manual_seed(0)
        model, telemetry = nn.Linear(64, 64), UnderflowTelemetry()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(16, 64)).float().square().mean() * 1e-4
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        telemetry.measure(model.named_parameters(), scale)
        zero[scale] = telemetry.figures()["loss_scale/zero"], telemetry.figures()["loss_scale/underflow"]
    assert zero[1.0][0] > 0.02
    assert zero[1.0][1] > 0.9
    assert zero[2.0**14][0] == 0.0
    assert zero[2.0**14][1] < 0.1


def test_degenerate_gradients():
    telemetry, model = UnderflowTelemetry(), net()
    assert not telemetry.measure(model.named_parameters(), 1.0)
    assert telemetry.figures() == telemetry.report() == {}
    model[0].weight.grad = torch.zeros(8, 6)
    assert telemetry.measure(model.named_parameters(), 1.0)
    assert telemetry.figures() == {"loss_scale/underflow": 0.0, "loss_scale/zero": 1.0}
    assert telemetry.report()["layers"] == {"0": {"underflow": 0.0, "zero": 1.0, "headroom": None}}
    model[2].bias.grad = torch.tensor([1.0, float("nan"), 0.0])
    assert not telemetry.measure(model.named_parameters(), 1.0, step=9)
    assert telemetry.step == 0  # the latest good one stays
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    telemetry.measure(table.named_parameters(), 1.0)
    assert telemetry.total.elements == 4  # two rows, added up
    assert telemetry.total.amax == 2.0
    lone = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    lone.grad = torch.full((1,), 2.0**-20, dtype=torch.bfloat16)
    for scale in (1.0, 2.0**120, 2.0**-130):
        assert telemetry.measure([("scale", lone)], scale)
        assert list(telemetry.layers) == ["scale"]


def watched(**options):
    return SessionLoop(net(), **{"growth_interval": 2, **options})


def test_it_measures_every_kth_applied_step_and_waits_for_a_good_one():
    loop, measured = watched(telemetry_every=3), []
    for index in range(10):
        loop.step(index, bad=index in (3, 4))
        measured.append(loop.technique.telemetry.step)
    assert measured == [0, 0, 0, 0, 0, 3, 3, 3, 6, 6]
    assert loop.technique.figures().keys() == {
        f"loss_scale/{name}" for name in ("scale", "skipped", "underflow", "zero", "headroom")
    }
    scale = loop.technique.report()["measured_scale"]
    assert loop.technique.figures()["loss_scale/headroom"] < 16
    assert scale == 2.0**16  # that of the measured step: up once, down twice, up once


def test_it_can_be_switched_off_and_changes_no_bit_of_training():
    loops = [watched(telemetry_every=every) for every in (0, 1)]
    for index in range(6):
        for loop in loops:
            loop.step(index)
    for one, other in zip(*(loop.model.parameters() for loop in loops), strict=True):
        assert torch.equal(one, other)
    off, on = (loop.technique for loop in loops)
    assert off.telemetry.step is None
    assert on.report()["layers"].keys() == {"0", "2"}
    assert off.report().items() <= on.report().items()
    assert "underflow" in loops[1].session.receipt().text(width=300)


def test_the_floor_is_reported():
    loop = watched(kind="enhanced", floor="0:64")
    loop.step(0)
    assert loop.technique.report()["floor"] == 64.0
    assert loop.session.state_dict()["recipe"]["loss_scale"]["floor"] == "0:64"


class Hidden(nn.Module):
    def __init__(self, dropout=0.0, inplace=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.second = nn.Linear(32, 48), nn.ReLU(inplace=inplace), nn.Linear(48, 8)
        self.drop, self.norm = nn.Dropout(dropout), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.second(self.drop(self.relu(self.first(x)))))


def data():
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


def loss_of(output, coefficient):
    return output.float().pow(3).mean() * coefficient


def plain(inplace=False):
    """Two linear layers and a ReLU, so that a float64 backward is two products and a mask."""
    model = Hidden(inplace=inplace)
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
        model, probe = Hidden(dropout), FlushProbe()
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
    model = Hidden()
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
