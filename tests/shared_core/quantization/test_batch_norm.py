"""The flow through a model; batch norm folded in and after training, frozen, saved plain and put back bit for bit."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError, MatchError, TrainingError
from shared_core.quantization import apply_ranges, convert
from shared_core.quantization.batch_norm import FOLDED, find_folds, fold_pair_, fuse_batch_norm, unfold_pair_
from shared_core.quantization.layer_graph import trace


class Activated(nn.BatchNorm2d):
    """As timm has it: its own code of a batch norm, and then two of its submodules."""

    def __init__(self, channels, act=nn.PReLU, **options):
        super().__init__(channels, **options)
        self.drop, self.act = nn.Identity(), act()

    def forward(self, x):
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        is_batch = self.training or (self.running_mean is None and self.running_var is None)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, is_batch, momentum, self.eps
        )  # fmt: skip
        return self.act(self.drop(x))


class Inherited(nn.BatchNorm1d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.Hardswish()

    def forward(self, x):
        return self.act(super().forward(x))


class Wrapped(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, self.weight, self.bias)


class Clamped(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).clamp(min=0)


class Moody(Activated):
    """Takes another way in training."""

    def forward(self, x):
        y = nn.BatchNorm2d.forward(self, x)
        return y if self.training else self.act(y)


class Branched(Activated):
    """Uses the result of its norm twice."""

    def forward(self, x):
        y = nn.BatchNorm2d.forward(self, x)
        self.drop(y)
        return self.act(y)


class Switched(Activated):
    """Depends on a setting of its own."""

    scale = 1.0

    def forward(self, x):
        y = nn.BatchNorm2d.forward(self, x)
        return y if self.scale == 1 else y * self.scale


PAIRS = {
    "conv2d with steps": (lambda: (Wrapped(4, 6, 3, bias=False), Activated(6)), (4, 4, 5, 6)),
    "linear with a step": (lambda: (nn.Linear(5, 6), Inherited(6)), (9, 5)),
    "linear": (lambda: (nn.Linear(5, 6), nn.BatchNorm1d(6)), (9, 5)),
    "conv1d": (lambda: (nn.Conv1d(3, 6, 3, bias=False), nn.BatchNorm1d(6)), (4, 3, 8)),
    "conv2d grouped": (lambda: (nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.BatchNorm2d(6)), (4, 4, 5, 6)),
    "conv2d depthwise": (lambda: (nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4, affine=False)), (4, 4, 5, 6)),
    "conv2d circular": (
        lambda: (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(3, momentum=None)),
        (4, 2, 5, 6),
    ),
    "conv3d": (lambda: (nn.Conv3d(2, 3, 2, stride=2), nn.BatchNorm3d(3, eps=1e-2)), (3, 2, 4, 5, 6)),
    "transposed 1d": (lambda: (nn.ConvTranspose1d(4, 6, 3, groups=2), nn.BatchNorm1d(6)), (4, 4, 5)),
    "transposed 2d": (
        lambda: (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2, bias=False), nn.BatchNorm2d(6)),
        (3, 4, 4, 5),
    ),
    "transposed 3d": (lambda: (nn.ConvTranspose3d(2, 3, 2), nn.BatchNorm3d(3)), (3, 2, 3, 4, 3)),
}


def pair(name, dtype=torch.float64):
    torch.manual_seed(0)
    make, shape = PAIRS[name]
    net = nn.Sequential(*make()).to(dtype)
    norm = net[1]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.3, 3)
    if norm.affine:
        nn.init.normal_(norm.weight)  # negative too
        nn.init.normal_(norm.bias)
    return net, torch.randn(shape, dtype=dtype)


class Net(nn.Module):
    """Convolutions with a residual tap, a functional activation and a shared layer."""

    def __init__(self):
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.second_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.shared, self.shared_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = torch.relu(self.first_norm(self.first(x)))
        y = self.second(x)
        x = self.second_norm(y) + y
        x = self.shared_norm(self.shared(self.shared(x)))
        return self.head(x.mean((2, 3)))


class NeedsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x, scale=None):
        x = self.layer(x)
        if x.sum() > 0:
            x = self.norm(x)
        return x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", PAIRS)
def test_fused_pair_computes_the_same(name, dtype):
    net, x = pair(name, dtype)
    net.eval()
    expected, keys = net(x), set(net.state_dict())
    report = fuse_batch_norm(net, x if dtype == torch.float32 else None)
    torch.testing.assert_close(net(x), expected)
    assert type(net[0]) is type(PAIRS[name][0]()[0])
    assert [type(part) for part in net[1].children()] == [type(part) for part in PAIRS[name][0]()[1].children()]
    assert not isinstance(net[1], nn.modules.batchnorm._BatchNorm)
    assert [entry.layer for entry in report.fused] == ["0"]
    assert keys - set(report.vanished_keys) | set(report.new_keys) == set(net.state_dict())
    assert report.new_keys == (() if "0.bias" in keys else ("0.bias",))


def test_fused_weights_are_those_of_the_formula():
    net, _ = pair("conv1d")
    conv, norm = copy.deepcopy(net.eval())
    fuse_batch_norm(net)
    for channel in range(6):
        factor = norm.weight[channel].item() / (norm.running_var[channel].item() + norm.eps) ** 0.5
        torch.testing.assert_close(net[0].weight[channel], conv.weight[channel] * factor)
        bias = norm.bias[channel].item() - norm.running_mean[channel].item() * factor
        assert net[0].bias[channel].item() == pytest.approx(bias)


@pytest.mark.parametrize("observed", [False, True])
def test_only_what_may_be_fused_is_fused(observed):
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 3, 5, 5)
    expected = net(x)
    report = fuse_batch_norm(net, x if observed else None)
    assert [(entry.layer, entry.batch_norm, entry.activation) for entry in report.fused] == [
        ("first", "first_norm", "relu")
    ]
    assert "residual" in report.refused["second_norm"]
    assert "add" in report.refused["second_norm"]
    assert "called 2 times" in report.refused["shared_norm"]
    torch.testing.assert_close(net(x), expected)


def test_refusals_say_why():
    tied = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    assert "tied" in fuse_batch_norm(tied.eval()).refused["1"]
    pruned = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    nn.utils.parametrize.register_parametrization(pruned[0], "weight", nn.Identity())
    assert fuse_batch_norm(pruned).refused
    alone = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)).eval()
    assert "not a Linear or Conv" in fuse_batch_norm(alone).refused["1"]
    free = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    assert "running statistics" in fuse_batch_norm(free).refused["1"]
    sequence = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    assert "axis 1" in fuse_batch_norm(sequence, torch.randn(2, 4, 3)).refused["1"]
    with pytest.raises(CompatibilityError, match=r"evaluation mode.*model\.eval"):
        fuse_batch_norm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    report = fuse_batch_norm(nn.Linear(2, 2))
    assert (report.fused, report.refused, report.vanished_keys) == ((), {}, ())


def test_a_model_that_fx_cannot_trace_needs_inputs():
    torch.manual_seed(0)
    net = NeedsValues().eval()
    with pytest.raises(CompatibilityError, match=r"NeedsValues.*example_inputs"):
        fuse_batch_norm(net)
    with pytest.raises(CompatibilityError, match=r"example_inputs.*RuntimeError"):
        fuse_batch_norm(net, torch.randn(2, 9))
    with torch.no_grad():
        net.layer.bias.fill_(20.0)
    # the sum is read as well as the norm: another branch takes the value without it
    assert "residual" in fuse_batch_norm(net, {"x": torch.randn(4, 3)}).refused["norm"]


def test_observed_and_symbolic_flow_agree():
    net, x = Net().eval(), torch.randn(2, 3, 5, 5)
    flows = [[(str(node), [str(source) for source in node.inputs]) for node in trace(net, inputs).nodes]
             for inputs in (None, x)]  # fmt: skip
    assert flows[0] == flows[1]
    assert trace(net, x).calls["head"][0].shape == (2, 2)


class Exact:
    """Quantizes nothing."""

    def input(self, module, x):
        return x

    def weight(self, module, weight):
        return weight

    def output(self, module, y):
        return y


class Coarse(Exact):
    """Rounds weights to quarters and remembers them; the gradient passes straight."""

    def weight(self, module, weight):
        self.seen = (weight * 4).round() / 4
        return weight + (self.seen - weight).detach()


@pytest.mark.parametrize("name", PAIRS)
def test_folded_training_equals_layer_and_batch_norm(name):
    plain, x = pair(name)
    folded = copy.deepcopy(plain)
    fold_pair_(folded[0], folded[1], Exact())
    assert list(folded.state_dict()) == list(plain.state_dict())
    for _ in range(3):
        inputs = [(x * 1.3).requires_grad_(), (x * 1.3).requires_grad_()]
        outputs = [net(values) for net, values in zip((plain, folded), inputs, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0])
        target = torch.randn_like(outputs[0])
        for output in outputs:
            (output * target).sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        for ours, theirs in zip(folded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(folded.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    plain.eval(), folded.eval()
    torch.testing.assert_close(folded(x), plain(x))


def test_frozen_statistics_stay_and_normalize():
    plain, x = pair("conv2d grouped")
    folded = copy.deepcopy(plain)
    fold_pair_(folded[0], folded[1], Exact()).frozen = True
    before = folded[1].running_mean.clone()
    output, expected = folded(x), plain.eval()(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    for ours, theirs in zip(folded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert torch.equal(folded[1].running_mean, before)


def test_the_folded_weight_is_what_is_quantized():
    net, x = pair("conv1d")
    conv, norm = copy.deepcopy(net)
    quantizer = Coarse()
    fold_pair_(net[0], net[1], quantizer)
    y = net(x)
    # after the batch, running statistics hold its share: what inference would fold, and codes are of that
    statistics = conv(x).transpose(0, 1).flatten(1)
    variance = 0.9 * norm.running_var + 0.1 * statistics.var(1)
    factor = norm.weight / (variance + norm.eps).sqrt()
    expected = ((conv.weight * factor[:, None, None]) * 4).round() / 4
    torch.testing.assert_close(quantizer.seen, expected)
    batch = (statistics.var(1, correction=0) + norm.eps).sqrt()
    raw = F.conv1d(x, expected) * ((variance + norm.eps).sqrt() / batch)[None, :, None]
    shift = norm.bias - norm.weight * statistics.mean(1) / batch
    torch.testing.assert_close(y, raw + shift[None, :, None])
    # frozen training, evaluation and the fused model use the same codes
    net[0].fold.frozen = True
    trained = net(x)
    torch.testing.assert_close(net.eval()(x), trained)
    unfold_pair_(net[0])
    fuse_batch_norm(net)
    torch.testing.assert_close(F.conv1d(x, (net[0].weight * 4).round() / 4, net[0].bias), trained)


@pytest.mark.parametrize("name", ["conv2d circular", "conv2d with steps"])
def test_folded_pairs_survive_copies_and_unfolding(name):
    net, x = pair(name)
    kinds = [type(module) for module in net]
    fold_pair_(net[0], net[1])
    assert type(net[0]) is FOLDED[kinds[0]]
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(x)
        assert other[0].fold.batch_norm is other[1]
        assert other[1].num_batches_tracked == 1
    unfold_pair_(net[0])
    unfold_pair_(net[0])
    assert [type(module) for module in net] == kinds
    assert vars(net[1]).keys() == vars(PAIRS[name][0]()[1]).keys()
    assert net[1].num_batches_tracked == 0


def test_bfloat16_and_autocast_keep_the_type():
    net, x = pair("conv2d grouped", torch.float32)
    plain = copy.deepcopy(net)
    fold_pair_(net[0], net[1], Exact())
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = net(x), plain(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)
    half = net.bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_nan_is_not_swallowed():
    net, x = pair("linear")
    fold_pair_(net[0], net[1], Exact())
    x[0, 0] = float("nan")
    assert net(x).isnan().all()
    assert net[1].running_mean.isnan().all()


@pytest.mark.parametrize(("layer", "norm", "message"), [
    (nn.ReLU(), nn.BatchNorm1d(2), "layer must compute a Linear"),
    (nn.Linear(2, 2), nn.SyncBatchNorm(2), r"batch_norm must compute.*SyncBatchNorm"),
    *((nn.Conv2d(2, 2, 1), kind(2), rf"batch_norm must compute.*{kind.__name__}")
      for kind in (Clamped, Moody, Branched, Switched)),
    (nn.Linear(2, 2), nn.BatchNorm1d(3), "2 channels, got 3"),
    (nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False), "running statistics"),
])  # fmt: skip
def test_folding_refuses(layer, norm, message):
    with pytest.raises(CompatibilityError, match=message):
        fold_pair_(layer, norm)


def test_batches_without_statistics_are_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    fold_pair_(net[0], net[1])
    for shape, message in (((1, 2), "more than 1 value per channel"), ((3, 2, 2), "2 dimensions")):
        with pytest.raises(TrainingError, match=message):
            net(torch.ones(shape))


def test_a_model_whose_outputs_would_change_is_left_as_it_was():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(), torch.randn(4, 3)
    before, norm = copy.deepcopy(net.state_dict()), net[1]
    norm.forward = lambda value: 2 * nn.BatchNorm1d.forward(norm, value)  # as wrappers of other libraries do
    with pytest.raises(CompatibilityError, match=r"outputs on example_inputs"):
        fuse_batch_norm(net, x)
    assert net[1] is norm
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_weights_read_by_other_code_and_hooked_modules_are_refused():
    class Reader(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + F.linear(x, self[0].weight)

    net = Reader(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    for inputs in (None, torch.randn(4, 3)):
        assert "linear reads its parameters" in fuse_batch_norm(net, inputs).refused["1"]
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    net[1].register_forward_hook(lambda module, args, output: output + 1)
    assert "hook" in fuse_batch_norm(net).refused["1"]


class Block(nn.Module):
    def __init__(self, inputs, outputs, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=inputs == 1)
        self.norm = norm(outputs)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


class Blocks(nn.Module):
    """Its forward looks at values, so that only its blocks can be traced."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.first, self.second = Block(1, 4, norm), Block(4, 4, norm)
        self.alone = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        x = self.second(self.first(x))
        if x.sum() < 0:
            raise ValueError
        return self.head(self.alone(x.flatten(1)))


def make_net(norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    return Blocks(norm)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return 1 + torch.randn(16, 1, 4, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def start(model, **options):
    session = Session({"qat": {"scheme": "int8", **options}})
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session.begin([optimizer], total_steps=20)
    return session, optimizer


def train(session, optimizer, model, steps):
    model.train()
    for step in steps:
        x, labels = batch(step)
        plain_step(session, optimizer, nn.functional.cross_entropy(model(x), labels))


def test_blocks_of_an_untraceable_model_are_found():
    folds, left = find_folds(make_net(), "qat")
    assert folds == {"first.conv": "first.norm", "second.conv": "second.norm"}
    assert set(left) == {"alone"}


@pytest.mark.parametrize(
    ("options", "norm"),
    [
        ({}, nn.BatchNorm2d),
        ({"range": "lsq"}, nn.BatchNorm2d),
        ({"weight_bits": 4}, nn.BatchNorm2d),
        ({"freeze_bn": 3}, nn.BatchNorm2d),
        ({"freeze_bn": 3}, Activated),
    ],
    ids=str,
)
def test_plain_weights_put_back_are_the_trained_model_bit_for_bit(options, norm):
    model = make_net(norm)
    keys = list(model.state_dict())
    session, optimizer = start(model, **options)
    train(session, optimizer, model, range(6))
    assert list(model.state_dict()) == keys
    x, _ = batch(99)
    with session.swapped("evaluate"), torch.no_grad():
        trained = model.eval()(x)
        twin = copy.deepcopy(model)
    integer, twin_codes = convert(twin)(x), convert(twin).first.conv.weight_codes
    session.finish()
    assert {type(module) for module in model.modules()} <= {
        Blocks,
        Block,
        nn.Conv2d,
        nn.BatchNorm1d,
        nn.Linear,
        norm,
        *map(type, norm(1).children()),
    }
    assert list(model.state_dict()) == keys
    plain = make_net(norm)
    plain.load_state_dict(model.state_dict())
    ranges = session.files.deployment()["qat"]["ranges"]
    assert ranges["first.conv"]["batch_norm"] == "..norm"
    with torch.no_grad():
        assert torch.equal(apply_ranges(copy.deepcopy(plain), ranges).eval()(x), trained)
        for converted in (convert(model), convert(plain, ranges)):
            assert torch.allclose(converted(x), integer, atol=1e-5)
            assert torch.equal(converted.first.conv.weight_codes, twin_codes)
            assert not [name for name, module in converted.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert torch.allclose(integer, trained, atol=1e-4)
    receipt = session.receipt()["techniques"]["qat"]
    assert [entry.get("batch_norm") for entry in receipt["per_layer"]] == ["..norm", "..norm", None]
    assert set(receipt["batch_norms_beside"]) == {"alone"}


def test_weight_codes_are_those_of_the_folded_weight():
    model = make_net()
    session, optimizer = start(model)
    train(session, optimizer, model, range(3))
    conv, norm = model.first.conv, model.first.norm
    factor = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).detach().double()
    folded = conv.weight.detach().double() * factor.view(-1, 1, 1, 1)
    scale = folded.abs().amax((1, 2, 3), keepdim=True) / 127
    session.finish()
    baked = conv.weight.detach().double() * factor.view(-1, 1, 1, 1) / scale
    assert torch.allclose(baked, (folded / scale).round(), atol=1e-3)


def test_frozen_statistics_stay():
    model = make_net()
    session, optimizer = start(model, freeze_bn=2)
    train(session, optimizer, model, range(2))
    before = model.first.norm.running_mean.clone()
    train(session, optimizer, model, range(2, 4))
    assert torch.equal(model.first.norm.running_mean, before)
    assert not torch.equal(model.alone.running_mean, torch.zeros(64))


def test_without_quantization_a_folded_model_trains_like_the_plain_one():
    plain, folded = make_net(), make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    session, other = start(folded, begin=1.0)
    for step in range(4):
        x, labels = batch(step)
        plain.train()
        nn.functional.cross_entropy(plain(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(session, other, folded, range(4))
    for (name, one), (_, two) in zip(plain.state_dict().items(), folded.state_dict().items(), strict=True):
        assert torch.allclose(one, two, atol=1e-5), name


def test_a_dead_channel_keeps_its_weight():
    model = make_net()
    model.first.norm.weight.data[1] = 0
    session, _ = start(model)
    weight = model.first.conv.weight.detach().clone()
    session.finish()
    assert torch.equal(model.first.conv.weight[1], weight[1])
    assert torch.isfinite(model.first.conv.weight).all()


def test_it_can_be_switched_off_and_a_wrong_name_is_refused():
    model = make_net()
    session, optimizer = start(model, fold_batch_norm=False)
    assert type(model.first.norm) is nn.BatchNorm2d
    train(session, optimizer, model, range(1))
    session.finish()
    entry = session.files.deployment()["qat"]["ranges"]["first.conv"]
    with pytest.raises(MatchError, match=r"batch_norm of first.conv is 'first.nrm'"):
        apply_ranges(make_net(), {"first.conv": {**entry, "batch_norm": "..nrm", "weight_scale": [1.0] * 4}})
