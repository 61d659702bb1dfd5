"""Cross-layer equalization and bias correction: the function they keep, the ranges and means they reach."""

import copy

import pytest
import torch
import torch.nn.functional as F
from eff_kernels.quantization.affine import fake_quantize_symmetric
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, TrainingError
from shared_core.quantization import convert
from shared_core.quantization.post_training.equalization import correct_bias, equalize

ACTIVATIONS = [nn.ReLU(), nn.LeakyReLU(0.2), nn.PReLU(6), nn.Identity(), nn.Dropout(0.5)]


def unequal(net):
    """Give the channels of every layer ranges that differ by orders of magnitude."""
    torch.manual_seed(1)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
                axis = 1 if module.weight.dim() > 2 and getattr(module, "transposed", False) else 0
                shape = [-1 if dim == axis else 1 for dim in range(module.weight.dim())]
                module.weight.mul_(10 ** torch.empty(module.weight.shape[axis]).uniform_(-2, 2).reshape(shape))
    return net.eval()


def output_ranges(module):
    """Return max|w| of each output channel, read off by one-hot inputs for a transposed convolution's groups."""
    return module.weight.detach().abs().flatten(1).amax(1)


def input_ranges(module):
    return module.weight.detach().abs().transpose(0, 1).flatten(1).amax(1)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda module: type(module).__name__)
def test_linear_pair_has_equal_ranges_and_the_same_function(activation):
    net = unequal(nn.Sequential(nn.Linear(4, 6), copy.deepcopy(activation), nn.Linear(6, 3)).double())
    x = torch.randn(7, 4).double()
    expected, first, second = net(x), output_ranges(net[0]), input_ranges(net[2])
    report = equalize(net)
    torch.testing.assert_close(net(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output_ranges(net[0]), input_ranges(net[2]))
    torch.testing.assert_close(output_ranges(net[0]), (first * second).sqrt())
    assert report.chains == (("0", "2"),)
    assert report.converged
    assert report.iterations <= 2


CONV_NETS = {
    "conv": (lambda: [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 2)], (2, 3, 9, 9)),
    "grouped": (lambda: [nn.Conv1d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv1d(6, 4, 2, groups=2)], (2, 4, 9)),
    "transposed": (
        lambda: [
            nn.ConvTranspose2d(4, 6, 3, groups=2), nn.ReLU(), nn.ConvTranspose2d(6, 9, 2, groups=3, bias=False),
            nn.LeakyReLU(), nn.Conv2d(9, 2, 1, bias=False),
        ],
        (2, 4, 5, 5),
    ),
    "depthwise": (
        lambda: [
            nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)
        ],
        (2, 3, 5, 5),
    ),
    "flatten": (
        lambda: [nn.Conv2d(1, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 3)],
        (2, 1, 8, 8),
    ),
    "long": (lambda: [layer for _ in range(5) for layer in (nn.Conv3d(4, 4, 1), nn.ReLU())], (2, 4, 2, 2, 2)),
    "channels_last": (lambda: [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 2)], (2, 3, 9, 9)),
}  # fmt: skip


def conv_net(name):
    torch.manual_seed(0)
    net = nn.Sequential(*CONV_NETS[name][0]()).double()
    return unequal(net.to(memory_format=torch.channels_last) if name == "channels_last" else net)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("name", CONV_NETS)
def test_convolutions_keep_their_function(name, observed):
    net, x = conv_net(name), torch.randn(CONV_NETS[name][1]).double()
    expected, before = net(x), [parameter.clone() for parameter in net.parameters()]
    report = equalize(net, x if observed else None)
    torch.testing.assert_close(net(x), expected, rtol=1e-11, atol=1e-11 * expected.abs().max().item())
    assert not all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    assert report.converged
    assert not report.refused
    if name in ("conv", "channels_last"):
        second = net[-1]
        torch.testing.assert_close(output_ranges(net[0]), input_ranges(second), rtol=1e-3, atol=0)


def test_depthwise_chain_shares_ranges_by_cube_roots():
    net = conv_net("depthwise")
    product = output_ranges(net[0]) * output_ranges(net[2]) * input_ranges(net[4])
    report = equalize(net)
    assert report.chains == (("0", "2", "4"),)
    for ranges in (output_ranges(net[0]), output_ranges(net[2]), input_ranges(net[4])):
        torch.testing.assert_close(ranges, product ** (1 / 3))


def test_flattened_channels_share_one_scale():
    net = conv_net("flatten")
    equalize(net)
    grouped = net[4].weight.detach().reshape(3, 5, 4).abs().amax((0, 2))
    torch.testing.assert_close(grouped, output_ranges(net[0]))


def test_every_link_of_a_long_chain_is_equal_at_convergence():
    net = unequal(nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.ReLU())]).double())
    report = equalize(net, max_iterations=1000, tolerance=1e-10)
    assert report.converged
    for first, second in ((0, 2), (2, 4), (4, 6)):
        torch.testing.assert_close(output_ranges(net[first]), input_ranges(net[second]), rtol=1e-8, atol=0)
    assert not equalize(unequal(net), max_iterations=1, tolerance=1e-10).converged


def test_dead_channels_are_left_alone():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with torch.no_grad():
        net[0].weight[0] = 0.0
        net[2].weight[:, 1] = 0.0
    kept = net[0].bias[:2].clone(), net[0].weight[1].clone(), net[2].weight[:, 0].clone()
    equalize(net)
    assert torch.equal(net[0].bias[:2], kept[0])
    assert torch.equal(net[0].weight[1], kept[1])
    assert torch.equal(net[2].weight[:, 0], kept[2])


def test_it_repairs_per_tensor_quantization():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    scale = 10 ** torch.empty(64).uniform_(-2, 2)
    with torch.no_grad():
        net[0].weight.mul_(scale[:, None])
        net[0].bias.mul_(scale)
        net[2].weight.div_(scale)
    x = torch.randn(256, 16)
    expected = net(x)

    def error(model):
        model = copy.deepcopy(model)
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.copy_(fake_quantize_symmetric(layer.weight[None], 0, 127)[0])
        return ((model(x) - expected).norm() / expected.norm()).item()

    before = error(net)
    equalize(net)
    assert error(net) < 0.05 * before


@pytest.mark.parametrize(
    ("between", "name"),
    [(nn.ReLU6(), "ReLU6"), (nn.Hardtanh(), "Hardtanh"), (nn.Hardswish(), "Hardswish"), (nn.GELU(), "GELU"),
     (nn.Sigmoid(), "Sigmoid"), (nn.BatchNorm1d(3), "fuse batch norm first"), (nn.MaxPool1d(1), "MaxPool1d")],
)  # fmt: skip
def test_other_functions_are_refused_by_name(between, name):
    net = nn.Sequential(nn.Linear(3, 3), between, nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)).eval()
    report = equalize(net)
    assert report.chains == (("2", "4"),)
    assert name in report.refused["0"]
    with pytest.raises(CompatibilityError, match=name):
        equalize(net, pairs=[("0", "2")])
    with pytest.raises(MatchError, match=name):
        equalize(net[:3])


class Taps(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        x = self.a(x)
        x = x + self.b(F.relu(x))
        return self.d(F.gelu(self.c(F.hardtanh(x))))


@pytest.mark.parametrize("observed", [False, True])
def test_residual_taps_are_refused_by_name(observed):
    with pytest.raises(MatchError, match=r"a: .*residual.*b: add follows it.*c: gelu"):
        equalize(Taps(), torch.randn(2, 4) if observed else None)


def test_layers_whose_channels_do_not_meet_are_refused():
    # the Linear layer reads positions, not channels, though there are as many
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(MatchError, match="4 channels are not those"):
        equalize(net)
    net = nn.Sequential(nn.Conv1d(2, 4, 1), nn.Flatten(0), nn.Linear(8, 3))
    with pytest.raises(MatchError, match="Flatten"):
        equalize(net)
    shared = nn.Linear(3, 3)
    with pytest.raises(MatchError, match="called 2 times"):
        equalize(nn.Sequential(shared, nn.ReLU(), shared))


def pair(fill=None):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    if fill is not None:
        net[0].weight.data[0, 0] = fill
    return net


ONE = torch.ones(3, 2)


def corrected(batches=(ONE,), net=None, **options):
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()) if net is None else net
    return correct_bias(net, net, batches, **options)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: equalize(pair(), max_iterations=0), ConfigError, "max_iterations"),
    (lambda: equalize(pair(), tolerance=float("nan")), ConfigError, "tolerance"),
    (lambda: equalize(pair(), pairs=[("0", "9")]), CompatibilityError, r"'0', '9'.*'2' follows it"),
    (lambda: equalize(pair(float("nan"))), CompatibilityError, "'0' must be finite"),
    (lambda: equalize(nn.Sequential(nn.Linear(2, 2))), MatchError, "none found"),
    (lambda: corrected(iter([ONE])), ConfigError, "several times"),
    (lambda: corrected([]), ConfigError, "at least one batch"),
    (lambda: corrected(layers=["9"]), MatchError, "'9' is not a Linear"),
    (lambda: corrected(net=nn.ReLU()), MatchError, "at least one Linear"),
    (lambda: corrected([ONE * float("nan")]), TrainingError, "'0' must be finite"),
    (lambda: corrected(net=nn.Sequential(*[nn.Linear(2, 2)] * 2)), CompatibilityError, "once in a forward"),
])  # fmt: skip
def test_bad_options_models_and_batches_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def quantized(net, bits=3):
    other = copy.deepcopy(net)
    with torch.no_grad():
        for module in other.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.weight.copy_(fake_quantize_symmetric(module.weight, 0, 2 ** (bits - 1) - 1))
    return other


def test_corrected_layers_have_the_means_of_the_float_model():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()
    batches = [torch.rand(16, 2, 5, 5).double() + 0.5, torch.rand(5, 2, 5, 5).double()]
    model = quantized(net)
    x = torch.cat(batches)
    before = (model(x) - net(x)).mean(0).abs().max()
    report = correct_bias(model, net, batches)
    assert list(report.corrected) == ["0", "3", "5"]
    assert before > 1e-3
    # every layer's pre-activation, each after those before it were corrected
    for depth, axes in ((1, (0, 2, 3)), (4, 0), (6, 0)):
        torch.testing.assert_close(model[:depth](x).mean(axes), net[:depth](x).mean(axes), rtol=1e-10, atol=1e-10)


def test_first_layer_gets_the_closed_form():
    torch.manual_seed(0)
    net = nn.Linear(6, 3).double()
    model, x = quantized(net), torch.randn(50, 4, 6).double() + 1
    expected = net.bias - (model.weight - net.weight) @ x.mean((0, 1))
    correct_bias(model, net, [(x,)])
    torch.testing.assert_close(model.bias, expected)


def test_a_layer_without_bias_gets_one_only_on_request():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    x = torch.rand(32, 4) + 1
    model = quantized(net)
    report = correct_bias(model, net, [x])
    assert report.without_bias == ("0",)
    assert model[0].bias is None
    assert list(report.corrected) == ["2"]
    model = quantized(net)
    report = correct_bias(model, net, [{"input": x}], add_missing=True)
    assert report.new_keys == ("0.bias",)
    torch.testing.assert_close(model[0](x).mean(0), net[0](x).mean(0))
    model = quantized(net)
    assert list(correct_bias(model, net, [x], layers=["2"]).corrected) == ["2"]


def test_an_integer_model_is_corrected_too():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.rand(64, 4)
    integer = convert(net, {name: {"min": 0.0, "max": 2.0, "weight_bits": 3} for name in ("0", "2")})
    assert (integer(x) - net(x)).mean(0).abs().max() > 0.01
    correct_bias(integer, net, [x])
    torch.testing.assert_close(integer(x).mean(0), net(x).mean(0))
