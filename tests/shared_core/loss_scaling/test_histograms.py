"""Histograms of log2|x| and counts of magnitudes against float64; one micro-batch, nothing changed, resume."""

import json
import math

import numpy as np
import pytest
import torch
from eff_kernels import loss_scaling as kernels
from eff_kernels.loss_scaling import count_magnitudes
from loss_scaling_runs import INF, NAN, SessionLoop, batch
from torch import nn
from torch.utils.checkpoint import checkpoint
from two_ranks import be_a_rank, saved_by_two_ranks

from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.loss_scaling import HistogramProbe, Log2Histogram, log2_histogram
from shared_core.loss_scaling.histograms import read_counts, smallest_exponents, update_counts

KINDS = ["weights", "activations", "activation_gradients", "gradients", "updates"]


def recount(*tensors):
    """Zeros, infinities, NaN and exponents from values alone, one Python float at a time."""
    found = Log2Histogram()
    for value in (abs(v) for tensor in tensors for v in tensor.detach().double().reshape(-1).tolist()):
        if math.isnan(value):
            found.nan += 1
        elif math.isinf(value):
            found.infinite += 1
        elif value == 0:
            found.zeros += 1
        else:
            exponent = math.frexp(value)[1] - 1
            found.exponents[exponent] = found.exponents.get(exponent, 0) + 1
    return found


def wide(dtype, count=3000):
    generator = torch.Generator().manual_seed(1)
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal * info.eps), math.log2(info.max)
    powers = torch.rand(count, generator=generator, dtype=torch.float64) * (high - low + 2) + low - 1
    signs = torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0)
    values = (torch.exp2(powers) * signs).to(dtype)  # too large becomes Inf, too small 0
    edge = torch.tensor([0.0, -0.0, INF, -INF, NAN, info.max, info.tiny, info.tiny / 2], dtype=torch.float64).to(dtype)
    smallest = torch.nextafter(
        torch.zeros(1, dtype=torch.float64 if dtype is torch.float64 else torch.float32).to(dtype),
        torch.ones(1).to(dtype),
    )
    return torch.cat((values, edge, smallest, -info.tiny * (1 - info.eps) * torch.ones(1, dtype=dtype)))


@pytest.mark.parametrize("path", ["cpu", "device"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_count_equals_the_recount(dtype, path, monkeypatch):
    if path == "device":
        monkeypatch.setattr(kernels, "_exponents_on_cpu", kernels._exponents_on_device)
    monkeypatch.setattr(kernels, "_CPU_PIECE", 1000)
    x = wide(dtype)
    found = log2_histogram([x])
    assert found == recount(x)
    assert found.nan == 1
    assert found.infinite > 2
    assert found.zeros >= 2
    normal = math.frexp(torch.finfo(dtype).smallest_normal)[1] - 1
    assert any(exponent < normal for exponent in found.exponents)
    assert found.elements == len(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_pattern(dtype):
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    assert log2_histogram([patterns]) == recount(patterns)


def test_shapes_and_other_dtypes():
    x = wide(torch.float32)[:1200]
    views = [x.view(30, 40).T, x[::3], x[:1].reshape(()), torch.zeros(0, 3)]
    assert log2_histogram(views) == recount(*views)
    eight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2)
    assert log2_histogram([eight]) == recount(eight.float())
    assert log2_histogram([]) == Log2Histogram()
    assert Log2Histogram().median is None
    with pytest.raises(TypeError, match="dtype must be one of"):
        kernels.count_exponents(torch.ones(2, dtype=torch.int32))


def test_shares_and_median():
    found = log2_histogram([torch.tensor([0.0, 2.0**-25, 2.0**-24, 2.0**-15, 2.0**-14, 1.0, 3.0, INF])])
    told = found.summary("fp16")
    assert (told["below_normal"], told["below_subnormal"], told["zero"]) == (3 / 8, 1 / 8, 1 / 8)
    assert (told["log2_lowest"], told["log2_median"], told["log2_highest"]) == (-25, -15, 1)
    assert (told["elements"], told["infinite"], told["nan"]) == (8, 1, 0)
    assert found.summary("fp8_e5m2")["below_subnormal"] == 2 / 8
    assert smallest_exponents("fp16") == (math.log2(torch.finfo(torch.float16).tiny), -24)
    assert Log2Histogram.from_state(json.loads(json.dumps(found.state_dict()))) == found


class Net(nn.Module):
    """Three leaf modules; the middle one is optionally computed again in the backward."""

    def __init__(self, reentrant=None, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.act, self.last = nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)
        self.reentrant = reentrant

    def inner(self, x):
        return self.act(self.first(x))

    def forward(self, x):
        x = x.clone().requires_grad_()  # reentrant checkpointing wants an input that does
        hidden = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return self.last(hidden)


class Loop(SessionLoop):
    def __init__(self, state=None, model=None, every=1, **options):
        options = {"init_scale": 1024.0, "telemetry_every": 0, "histogram_every": every, **options}
        super().__init__(model or Net(), state, kind="static", **options)
        self.probe = self.technique.histograms

    def hooks(self):
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model.modules())


def test_every_kind_equals_a_recount_of_what_the_step_did():
    loop, twin = Loop(), Net()
    outputs, gradients = {}, {}

    def note(name, module, args, output):
        outputs[name] = output.detach().clone()
        output.register_hook(lambda gradient: gradients.__setitem__(name, gradient.clone()))

    for name in ("first", "act", "last"):
        getattr(twin, name).register_forward_hook(lambda *a, name=name: note(name, *a))
    (twin(batch(0)).square().mean() * 1024).backward()
    before = [parameter.detach().clone() for parameter in twin.parameters()]
    loop.step(0)
    probe = loop.probe
    assert probe.total("weights") == recount(*before)
    assert probe.total("gradients") == recount(*(parameter.grad / 1024 for parameter in twin.parameters()))
    after = [parameter.detach().double() for parameter in loop.model.parameters()]
    assert probe.total("updates") == recount(*(a - b.double() for a, b in zip(after, before, strict=True)))
    for name in outputs:
        assert probe.layers["activations", name] == recount(outputs[name])
        assert probe.layers["activation_gradients", name] == recount(gradients[name])
    told = loop.technique.report()["histograms"]
    assert list(told)[-5:] == KINDS
    assert told["snapshot_bytes"] == 4 * sum(parameter.numel() for parameter in before)
    assert (told["measured_step"], told["measured_scale"], told["format"]) == (0, 1024.0, "fp16")
    assert told["gradients"]["layers"].keys() == told["updates"]["layers"].keys() == {"first", "last"}
    assert told["activations"]["layers"]["act"]["elements"] == 32
    assert sum(told["activations"]["log2_histogram"].values()) + 32 * told["activations"]["zero"] == 76
    json.dumps(told)
    figures = loop.session.figures()
    small = [(parameter.grad.abs() / 1024 < 2.0**-14).double() for parameter in twin.parameters()]
    exact = torch.cat([part.reshape(-1) for part in small]).mean().item()
    assert figures["loss_scale/grad_below_normal"] == pytest.approx(exact)
    assert figures["loss_scale/grad_below_subnormal"] == 0.0
    assert figures["loss_scale/update_to_weight"] == (
        told["updates"]["log2_median"] - told["weights"]["log2_median"]
    )  # AdamW's first step: lr 0.01 beside weights of some 0.3
    assert loop.session.receipt()["techniques"]["loss_scale"]["histograms"] == told


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_counted_once(reentrant):
    plain, again = Loop(), Loop(model=Net(reentrant))
    plain.step(0)
    again.step(0)
    assert again.probe.layers == plain.probe.layers
    assert {kind for kind, _ in plain.probe.layers} == set(KINDS)


def test_the_first_micro_batch_alone_and_never_an_evaluation():
    loop, reference = Loop(), Loop()
    with loop.session.swapped("evaluate"):
        loop.model.eval()
        loop.model(batch(9, size=50))
        loop.model.train()
        with torch.no_grad():
            loop.model(batch(9, size=50))
    loop.backward(0)
    loop.backward(1)
    loop.step()
    reference.step(0)
    for kind in ("activations", "activation_gradients"):
        assert loop.probe.total(kind) == reference.probe.total(kind)
    assert loop.probe.total("gradients") != reference.probe.total("gradients")  # those of both


def test_it_works_beside_the_flush_count_and_under_fp16():
    loop = Loop(flush_every=1)
    with torch.autocast("cpu", torch.float16):
        loop.backward(0)
    loop.step()
    assert loop.probe.layers["activations", "last"].elements == 12  # the second forward was not counted
    assert loop.probe.total("activation_gradients").elements == 76
    assert loop.technique.flush.step == 0


def test_it_measures_every_kth_applied_step_and_waits_for_a_good_one():
    loop, measured = Loop(every=3), []
    for index in range(10):
        assert bool(loop.hooks()) == (index in (0, 3, 4, 5, 8))
        loop.step(index, bad=index in (3, 4))
        measured.append(loop.probe.step)
    assert measured == [0, 0, 0, 0, 0, 3, 3, 3, 6, 6]
    assert loop.probe.total("gradients").infinite == 0


def test_it_changes_no_bit_and_leaves_no_hook():
    off, on = Loop(every=0), Loop(every=1)
    assert off.hooks() == 0
    for index in range(4):
        off.step(index)
        on.step(index)
    for one, other in zip(off.model.parameters(), on.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert "histograms" not in off.technique.report()
    assert on.hooks() > 0
    on.session.finish()
    assert on.hooks() == 0
    assert not on.probe._before


@pytest.mark.parametrize("within_a_step", [False, True])
def test_resume_is_exact(tmp_path, within_a_step):
    whole, cut = Loop(every=2), Loop(every=2)
    for loop in (whole, cut):
        loop.step(0)
        loop.step(1)
        if within_a_step:
            loop.backward(2)
    save_state(tmp_path, cut.session.state_dict())
    cut.session.detach()
    resumed = Loop(load_state(tmp_path), cut.model, every=2)
    resumed.optimizer.load_state_dict(cut.optimizer.state_dict())
    assert resumed.technique.report() == whole.technique.report()
    for loop in (whole, resumed):
        loop.backward(3)
        loop.step()
    assert whole.probe.step == resumed.probe.step == 2
    assert resumed.probe.layers == whole.probe.layers
    assert resumed.probe.state_dict() == whole.probe.state_dict()


def test_hooks_do_not_stay_in_a_compiled_graph():
    torch._dynamo.reset()
    model, probe = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), HistogramProbe()
    compiled = torch.compile(model, backend="eager")
    probe.watch(model)
    for _ in range(2):
        probe.arm()
        compiled(torch.ones(3, 4)).sum().backward()
        probe.before_step(1.0, 0)
        assert probe.after_step()
        assert {kind for kind, _ in probe.layers} == {"weights", "gradients", "updates"}
    assert not probe._calls
    torch._dynamo.reset()


def test_updates_of_many_pieces():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randn(70_001, generator=generator) for _ in range(2))
    assert read_counts(update_counts(new, old)) == recount(new.double() - old.double())
    assert read_counts(update_counts(new[:0], old[:0])) == Log2Histogram()


def test_degenerate_models():
    probe = HistogramProbe()
    assert probe.report() == probe.figures() == {}
    lone = nn.Linear(2, 2, bias=False)
    probe.watch(lone)
    probe.arm()
    probe.before_step(1.0, 0)
    assert not probe.after_step()  # no gradients
    assert probe.step is None
    probe.arm()
    lone(torch.ones(1, 2)).sum().backward()
    probe.before_step(1.0, 4)
    assert probe.after_step()  # nothing moved
    assert probe.total("updates") == Log2Histogram(zeros=4)
    assert "loss_scale/update_to_weight" not in probe.figures()
    assert probe.layers["activations", "(model)"].elements == 2
    table = nn.Embedding(5, 2, sparse=True)
    probe.watch(table)
    probe.arm()
    table(torch.tensor([1, 1, 2])).sum().backward()
    probe.before_step(1.0, 5)
    assert probe.after_step()
    assert probe.total("gradients").exponents == {0: 2, 1: 2}  # rows with one and two uses


def recount_magnitudes(tensor, threshold):
    """Counts in float64, from magnitudes: np.frexp for the exponent, comparisons for the rest."""
    x = np.abs(tensor.detach().to(torch.float32).double().numpy().reshape(-1))
    histogram = np.zeros(256, dtype=np.int64)
    finite = x[np.isfinite(x)]
    exponent = np.frexp(finite)[1] - 1
    for power in range(-126, 128):
        histogram[power + 127] = int(((exponent == power) & (finite > 0)).sum())
    histogram[255] = len(x) - len(finite)
    histogram[0] = len(x) - histogram.sum()
    zeros = int((x == 0).sum())
    small = int(((x < np.float64(np.float32(threshold))) & (x > 0)).sum())
    return histogram.tolist(), zeros, small, float(finite.max()) if len(finite) else 0.0


def magnitudes():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(70_001, generator=generator) * torch.exp2(torch.randn(70_001, generator=generator) * 20)
    wide[::7] = 0
    special = torch.tensor(
        [0.0, -0.0, 2.0**-14, -(2.0**-14), 2.0**-24, 65504.0, 1e-45, -1e-40, 3.4e38, 1.5, INF, -INF, NAN]
    )
    return {
        "wide": wide,
        "special": special,
        "finite": torch.tensor([[2.0**-14 * (1 - 2.0**-24), 0.1], [-7.0, 3.0]]),
        "bfloat16": wide.bfloat16(),
        "float16": (wide[:1000]).half(),
        "float64": wide[:1000].double(),
        "transposed": wide[:1200].view(30, 40).T,
        "strided": wide[::3],
        "empty": torch.zeros(0, 3),
        "zeros": torch.zeros(5),
        "scalar": torch.tensor(-0.3),
        "nan": torch.full((3,), NAN),
    }


@pytest.mark.parametrize("path", ["cpu", "device"])
@pytest.mark.parametrize("threshold", [2.0**-14, 1e-3, 2.0**-126, 7.7e-12])
def test_every_count_of_magnitudes_equals_the_recount(path, threshold, monkeypatch):
    if path == "device":
        monkeypatch.setattr(kernels, "_count_on_cpu", kernels._count_on_device)
    named = magnitudes()
    counts = count_magnitudes(list(named.values()), threshold)
    for index, (name, tensor) in enumerate(named.items()):
        histogram, zeros, small, amax = recount_magnitudes(tensor, threshold)
        assert counts.histogram[index].tolist() == histogram, name
        assert (counts.zeros[index].item(), counts.small[index].item()) == (zeros, small), name
        assert counts.amax[index].item() == amax, name
        assert counts.histogram[index].sum() == tensor.numel()


def test_pieces_of_magnitudes_add_up(monkeypatch):
    whole = count_magnitudes([magnitudes()["wide"]], 1e-3)
    monkeypatch.setattr(kernels, "_CPU_PIECE", 7)
    for one, other in zip(
        whole, count_magnitudes([magnitudes()["wide"][:5000], magnitudes()["wide"][5000:]], 1e-3), strict=True
    ):
        assert torch.equal(one.sum(0) if one.dtype == torch.int64 else one.amax(0),
                           other.sum(0) if other.dtype == torch.int64 else other.amax(0))  # fmt: skip


def test_nothing_is_changed_and_nothing_counts_as_nothing():
    weight = torch.nn.Parameter(torch.ones(3))
    before = weight.detach().clone()
    count_magnitudes([weight], 1.0)
    assert torch.equal(weight, before)
    assert [list(part.shape) for part in count_magnitudes([], 1.0)] == [[0, 256], [0], [0], [0]]


@pytest.mark.parametrize("threshold", [0.0, -1.0, INF, NAN, 2.0**-127, 1e-60])
def test_a_threshold_that_float32_does_not_hold_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold must be a normal float32 above 0"):
        count_magnitudes([torch.ones(1)], threshold)


def joined(rank, folder):
    """One step of DDP on half a batch each."""
    loop = Loop()
    net = nn.parallel.DistributedDataParallel(loop.model)
    loop.technique.scaler.scale(net(batch(0, size=8)[rank::2]).square().mean()).backward()
    loop.step()
    return {" ".join(key): found.state_dict() for key, found in loop.probe.layers.items()}


def test_two_processes_add_up_activations_and_count_the_rest_once(tmp_path):
    first, second = saved_by_two_ranks(__file__, tmp_path)
    assert first == second
    model = Net()
    assert Log2Histogram.from_state(first["weights first"]) == recount(model.first.weight, model.first.bias)
    assert Log2Histogram.from_state(first["activations first"]) == recount(model.first(batch(0, size=8)))
    assert sum(first["gradients last"]["exponents"].values()) <= 8 * 3 + 3


if __name__ == "__main__":
    be_a_rank(joined)
