"""LossScaler against torch.amp.GradScaler: same scales, same weights, same state dict, same refusals."""

import copy
import inspect
import io
import pickle

import numpy as np
import pytest
import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState

from shared_core.loss_scaling import LossScaler


def make(fused=None, optimizer=torch.optim.AdamW, dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).to(dtype)
    kwargs = {"fused": fused} if fused is not None else {}
    return model, optimizer(model.parameters(), lr=0.1, **kwargs)


def one_step(model, optimizer, scaler, bad, *, unscale=False, clip=False):
    optimizer.zero_grad()
    x = torch.linspace(-1, 1, 8).view(2, 4)
    scaler.scale(model(x).pow(2).mean()).backward()
    if bad:
        model.weight.grad[0, 1] = bad
    if unscale:
        scaler.unscale_(optimizer)
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def expected_trace(pattern, scale, growth, backoff, interval):
    """The rule of the 2018 paper's dynamic scaling, in float32 as torch keeps it."""
    scale, good, trace = np.float32(scale), 0, []
    for bad in pattern:
        if bad:
            scale, good = np.float32(scale * np.float32(backoff)), 0
        else:
            good += 1
            if good == interval:
                grown = np.float64(scale) * growth
                scale = np.float32(grown) if grown <= np.finfo(np.float32).max else scale
                good = 0
        trace.append(float(scale))
    return trace


@pytest.mark.parametrize("count", [500, pytest.param(1_500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("interval", "share"), [(1, 0.48), (3, 0.15), (7, 0.08), (2000, 0.0004)])
def test_same_trace_as_torch_and_the_paper_over_random_steps(interval, share, count):
    pattern = np.random.default_rng(interval).random(count) < share
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([parameter], lr=1.0) for parameter in parameters]
    ours, theirs = (kind("cpu", growth_interval=interval) for kind in (LossScaler, GradScaler))
    ours.scale(torch.ones(())), theirs.scale(torch.ones(()))
    expected = expected_trace(pattern, 65536.0, 2.0, 0.5, interval)
    for step, bad in enumerate(pattern):
        for parameter, optimizer, scaler in zip(parameters, optimizers, (ours, theirs), strict=True):
            parameter.grad = torch.tensor([float("inf") if bad else 1.0]) * scaler._scale
            scaler.step(optimizer)
            scaler.update()
        assert ours.get_scale() == theirs.get_scale() == expected[step], step
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
    assert min(expected) >= 2**-14  # else the comparison would leave the range of the promise
    assert torch.equal(parameters[0], parameters[1])
    assert ours.skipped_steps == pattern.sum()
    assert ours.num_steps == len(pattern)


@pytest.mark.parametrize("count", [200, pytest.param(1_500, marks=pytest.mark.slow)])
def test_same_trace_as_torch_over_random_patterns(count):
    """Patterns of a dozen steps, each from another scale and with another interval; both ends of float32 are met."""
    random = np.random.default_rng(0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for number in range(count):
        options = {"init_scale": 2.0 ** int(random.integers(0, 127)), "growth_interval": int(random.integers(1, 5))}
        scalers = [LossScaler("cpu", **options), GradScaler("cpu", **options)]
        pattern = random.random(12) < random.random()
        trace = []
        for scaler in scalers:
            scaler.scale(torch.ones(()))
            for bad in pattern:
                parameter.grad = torch.tensor([float("inf") if bad else 1.0])
                scaler.step(optimizer)
                scaler.update()
                trace.append((scaler.get_scale(), scaler._get_growth_tracker()))
        ours, theirs = trace[:12], trace[12:]
        assert ours == theirs or min(theirs)[0] < 2**-14, (number, options, pattern)  # our floor


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("bad_value", [float("inf"), float("-inf"), float("nan")])
def test_same_weights_as_torch(fused, unscale, bad_value):
    runs = []
    for kind in (LossScaler, GradScaler):
        model, optimizer = make(fused)
        scaler = kind("cpu", growth_interval=3, growth_factor=3.0, backoff_factor=0.3)
        for step in range(20):
            bad = bad_value if step in (2, 3, 9, 15) else 0
            one_step(model, optimizer, scaler, bad, unscale=unscale, clip=unscale)
        runs.append((model.weight, model.bias, torch.tensor(scaler.get_scale())))
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours, theirs)


def test_fused_and_plain_optimizers_skip_alike():
    calls = {}
    for fused in (False, True):
        model, optimizer = make(fused)
        scaler = LossScaler(init_scale=8.0)
        count = [0]
        optimizer.register_step_post_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        flags = []
        for step in range(8):
            before = model.weight.detach().clone()
            one_step(model, optimizer, scaler, float("inf") if step in (1, 4) else 0)
            flags.append(scaler.was_skipped(optimizer))
            assert torch.equal(before, model.weight) == flags[-1] == scaler.last_step_skipped
        calls[fused] = (count[0], flags, scaler.skipped_steps, scaler.get_scale())
    assert calls[False] == calls[True]
    assert calls[True][0] == 6, "a fused optimizer was called on an overflow"
    assert calls[True][1] == [False, True, False, False, True, False, False, False]


def test_torch_calls_a_fused_optimizer_on_overflow():
    # why LossScaler has its own step: if torch ever stops doing this, the override can go
    model, optimizer = make(True)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))
    one_step(model, optimizer, GradScaler("cpu"), float("inf"))
    assert called


def test_several_optimizers_one_scale():
    results = []
    for kind in (LossScaler, GradScaler):
        torch.manual_seed(0)
        models = [torch.nn.Linear(3, 1) for _ in range(2)]
        optimizers = [
            torch.optim.SGD(models[0].parameters(), lr=0.1),
            torch.optim.AdamW(models[1].parameters(), fused=True),
        ]
        scaler = kind("cpu", init_scale=16.0, growth_interval=2)
        for step in range(12):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 3)).sum()).backward()
            if step in (3, 7):
                models[step % 2].weight.grad.fill_(float("nan"))
            scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            if step == 3 and kind is LossScaler:
                assert [scaler.was_skipped(optimizer) for optimizer in optimizers] == [False, True]
            scaler.update()
        results.append([p.detach() for model in models for p in model.parameters()] + [scaler.get_scale()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


@pytest.mark.parametrize(("source", "target"), [(LossScaler, GradScaler), (GradScaler, LossScaler)])
@pytest.mark.parametrize("used", [False, True])
def test_state_dict_goes_both_ways(source, target, used):
    options = {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 3}
    model, optimizer = make()
    first = source("cpu", **options)
    for step in range(5):
        one_step(model, optimizer, first, float("inf") if step == 1 else 0)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    second = target("cpu")
    if used:
        second.scale(torch.ones(()))
    second.load_state_dict(state)
    other, other_optimizer = copy.deepcopy((model, optimizer))
    for step in range(6):
        bad = float("nan") if step == 2 else 0
        one_step(model, optimizer, first, bad)
        one_step(other, other_optimizer, second, bad)
        assert first.get_scale() == second.get_scale()
    torch_keys = GradScaler("cpu").state_dict().keys()
    assert {k: first.state_dict()[k] for k in torch_keys} == {k: second.state_dict()[k] for k in torch_keys}
    assert torch.equal(model.weight, other.weight)


MISUSE = {
    "unscale twice": (
        lambda s, o: (s.unscale_(o), s.unscale_(o)),
        RuntimeError,
        "already been called on this optimizer",
    ),
    "step twice": (lambda s, o: (s.step(o), s.step(o)), RuntimeError, "already been called since the last update"),
    "unscale after step": (lambda s, o: (s.step(o), s.unscale_(o)), RuntimeError, "after step"),
    "closure": (lambda s, o: s.step(o, closure=lambda: 0.0), RuntimeError, "Closure use"),
    "nothing to step": (lambda s, o: (o.zero_grad(), s.step(o)), AssertionError, "were recorded for this optimizer"),
    "nothing checked": (lambda s, o: s.update(), AssertionError, "No inf checks were recorded prior to update"),
    "unscale first": (lambda s, o: type(s)("cpu").unscale_(o), AssertionError, "_scale is None"),
    "step first": (lambda s, o: type(s)("cpu").step(o), AssertionError, "_scale is None"),
    "update first": (lambda s, o: type(s)("cpu").update(), AssertionError, "_scale is None"),
    "empty state": (lambda s, o: s.load_state_dict({}), RuntimeError, "empty"),
}


@pytest.mark.parametrize("kind", [LossScaler, GradScaler])
class TestMisuse:
    @pytest.mark.parametrize(("call", "error", "words"), MISUSE.values(), ids=MISUSE)
    def test_is_refused_as_by_torch(self, kind, call, error, words):
        model, optimizer = make()
        scaler = kind("cpu")
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(error, match=words):
            call(scaler, optimizer)

    def test_fp16_parameters(self, kind):
        model, optimizer = make(False, dtype=torch.float16)
        scaler = kind("cpu", init_scale=2.0)
        scaler.scale(model(torch.ones(1, 4, dtype=torch.float16)).sum()).backward()
        with pytest.raises(ValueError, match=r"FP16 gradients|gradients to unscale .* float16"):
            scaler.step(optimizer)

    def test_a_disabled_scaler_changes_nothing(self, kind):
        model, optimizer = make()
        scaler = kind("cpu", enabled=False)
        loss = model(torch.ones(1, 4)).sum()
        assert scaler.scale(loss) is loss
        loss.backward()
        before = model.weight.detach().clone()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert not torch.equal(before, model.weight)
        assert scaler.state_dict() == {}
        assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("kind", [LossScaler, GradScaler])
def test_fused_fp16_parameters_are_stepped(kind):
    model, optimizer = make(True, dtype=torch.float16)
    scaler = kind("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.ones(1, 4, dtype=torch.float16)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.weight)
    assert not hasattr(optimizer, "grad_scale")
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients(bad):
    weights = []
    for kind in (LossScaler, GradScaler):
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
        if bad:
            table.weight.grad._values()[1].fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        weights.append((table.weight.detach(), scaler.get_scale()))
    assert torch.equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1] == (4.0 if bad else 8.0)


def test_it_is_a_grad_scaler_with_the_same_methods():
    assert isinstance(LossScaler(), GradScaler)
    for name, method in inspect.getmembers(GradScaler, inspect.isfunction):
        if not name.startswith("_"):
            theirs = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(LossScaler, name)).parameters) == theirs


def test_private_names_of_torch_that_the_step_relies_on():
    assert [stage.name for stage in OptState] == ["READY", "UNSCALED", "STEPPED"]
    scaler, (model, optimizer) = GradScaler("cpu"), make()
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    assert list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]) == [torch.device("cpu")]


def test_pickle_and_deepcopy_between_iterations():
    model, optimizer = make()
    scaler = LossScaler(max_skips=3, init_scale=64.0)
    for bad in (0, float("inf"), float("inf")):
        one_step(model, optimizer, scaler, bad)
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert twin.state_dict() == scaler.state_dict()
        assert twin.state_dict()["skips_in_a_row"] == [2]
        assert not twin.was_skipped(optimizer)


@pytest.mark.parametrize("bad", [None, complex(1, float("inf")), complex(float("nan"), 1)])
def test_complex_gradients_which_torchs_scaler_refuses(bad):
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), LossScaler("cpu", init_scale=1024.0)
    scaler.scale(weight.abs().square().sum() / 2).backward()
    if bad is not None:
        weight.grad[1] = bad
    scaler.unscale_(optimizer)
    if bad is None:
        torch.testing.assert_close(weight.grad, torch.ones(3, dtype=torch.complex64))
    scaler.step(optimizer)
    assert scaler.was_skipped(optimizer) is (bad is not None)
