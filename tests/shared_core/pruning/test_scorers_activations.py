"""Wanda and neuron Taylor against float64 references on all data at once: layouts, micro-batches, modes, resume."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from shared_core.errors import TrainingError
from shared_core.modules.weight_views import from_output_rows, output_rows
from shared_core.pruning.scorers import make_scorer

LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "sequence": (lambda: nn.Linear(6, 4), (5, 6)),
    "transformers_conv1d": (lambda: Conv1D(4, 6), (5, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3), (6, 7)),
    "conv2d_groups": (lambda: nn.Conv2d(6, 4, 3, groups=2), (6, 5, 4)),
    "conv3d": (lambda: nn.Conv3d(6, 4, 2), (6, 3, 2, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, 2), (6, 3, 3)),
    "transposed_groups": (lambda: nn.ConvTranspose1d(6, 4, 2, groups=2), (6, 3)),
}


def channels_last(kind):
    return kind in ("linear", "sequence", "transformers_conv1d")


def layer_and_batch(kind, size=8):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer = make()
    nn.init.normal_(layer.weight)
    return layer, torch.randn(size, *shape)


def channel_pairs(kind, layer):
    """Return for each element of the weight which input and output channel it joins, from single-channel probes."""
    weight = layer.weight
    pairs = torch.zeros(*weight.shape, 2, dtype=torch.int64)
    _, batch = layer_and_batch(kind, 1)
    axis = -1 if channels_last(kind) else 1
    for c in range(6):
        x = torch.zeros_like(batch)
        x.transpose(axis, -1)[..., c] = 1.0
        for k in range(4):
            (gradient,) = torch.autograd.grad(layer(x).transpose(axis, -1)[..., k].sum(), weight)
            pairs[gradient != 0] = torch.tensor([c, k])
    return pairs


@pytest.mark.parametrize("kind", LAYERS)
def test_wanda_is_magnitude_times_the_norm_of_the_input_over_all_data(kind):
    layer, batch = layer_and_batch(kind)
    scorer = make_scorer("wanda", {"weight": layer})
    scorer.attach()
    for part in batch.split([2, 3, 3]):
        layer(part)
    scorer.observe_step({"weight": layer.weight}, {})
    inputs = batch.double().reshape(-1, 6) if channels_last(kind) else batch.double().transpose(0, 1).reshape(6, -1).t()
    norms = inputs.norm(dim=0)
    expected = layer.weight.detach().double().abs() * norms[channel_pairs(kind, layer)[..., 0]]
    scores = scorer.scores("weight", layer.weight)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(scorer.part("weight", layer.weight, slice(3, 9)), scores.flatten()[3:9])


@pytest.mark.parametrize("kind", LAYERS)
def test_output_rows_hold_the_weights_of_one_output_and_lead_back(kind):
    layer, _ = layer_and_batch(kind)
    outputs = output_rows(layer, channel_pairs(kind, layer)[..., 1])
    assert outputs.shape == (4, layer.weight.numel() // 4)
    assert torch.equal(outputs, torch.arange(4)[:, None].expand_as(outputs))
    back = from_output_rows(layer, output_rows(layer, layer.weight), layer.weight.shape)
    assert torch.equal(back, layer.weight)
    assert back.is_contiguous()


class Net(nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu, self.head = nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Linear(16, 3)
        self.reentrant = reentrant

    def body(self, x):
        return self.relu(self.conv(x)).flatten(1)

    def forward(self, x):
        if self.reentrant is not None:
            return self.head(checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=self.reentrant))
        return self.head(self.body(x))

    def modules_by_weight(self):
        return {"conv.weight": self.conv, "head.weight": self.head}


def images(seed=0, size=8):
    return torch.randn(size, 2, 4, 4, generator=torch.Generator().manual_seed(seed))


def weights_of(scorer):
    return {name: module.weight for name, module in scorer.modules.items()}


def wanda_reference(net, batch):
    net = copy.deepcopy(net).double()
    batch = batch.double()
    with torch.no_grad():
        hidden = net.body(batch)
    conv = net.conv.weight.abs() * batch.transpose(0, 1).reshape(2, -1).norm(dim=1)[None, :, None, None]
    return {"conv.weight": conv.detach(), "head.weight": (net.head.weight.abs() * hidden.norm(dim=0)).detach()}


def assert_scores(scorer, expected):
    for name, wanted in expected.items():
        scores = scorer.scores(name, scorer.modules[name].weight)
        torch.testing.assert_close(scores.double(), wanted, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("criterion", ["wanda", "neuron_taylor"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_what_counts_is_training_and_counts_once(criterion, reentrant):
    net, batch = Net(reentrant), images()
    scorer = make_scorer(criterion, net.modules_by_weight())
    scorer.attach()
    net(batch[:4]).logsumexp(1).mean().div(2).backward()
    net.eval()
    with torch.no_grad():
        net(images(1))
    net(images(2)).sum().backward()
    net.train()
    copy.deepcopy(net)(images(3)).sum().backward()  # an average's copy brings the hooks with it
    net(batch[4:]).logsumexp(1).mean().div(2).backward()
    scorer.observe_step(weights_of(scorer), {})
    assert_scores(scorer, (wanda_reference if criterion == "wanda" else neuron_reference)(Net(), batch))
    assert scorer.num_examples["head.weight"] == 8
    scorer.detach()
    net(images(4)).sum().backward()
    scorer.reduce()
    assert scorer.num_examples["head.weight"] == 8


@pytest.mark.parametrize("training", [False, True])
def test_wanda_calibrates_without_steps(training):
    net = Net().train(training)
    scorer = make_scorer("wanda", net.modules_by_weight())
    net(images(1))
    with scorer.calibrating(), torch.no_grad():
        for part in images().split(3):
            net(part)
    net(images(2))
    assert not scorer.ready
    scorer.reduce()
    scorer.reduce()
    assert_scores(scorer, wanda_reference(net, images()))


def test_wanda_counts_a_calibration_in_train_mode_without_gradients():
    net = Net()
    scorer = make_scorer("wanda", net.modules_by_weight())
    scorer.attach()
    with torch.no_grad():
        net(images())
    scorer.reduce()
    assert_scores(scorer, wanda_reference(net, images()))


def test_wanda_of_bf16_inputs_does_not_stop_growing():
    layer = nn.Linear(3, 2, dtype=torch.bfloat16)
    scorer = make_scorer("wanda", {"weight": layer})
    with scorer.calibrating():
        for _ in range(600):
            layer(torch.ones(1, 3, dtype=torch.bfloat16))
    scorer.reduce()
    expected = layer.weight.detach().double().abs() * 600**0.5
    scores = scorer.scores("weight", layer.weight)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), expected, rtol=1e-6, atol=0)


def test_wanda_of_a_layer_that_saw_nothing_or_nan_is_refused():
    net, other = Net(), nn.Linear(2, 2)
    scorer = make_scorer("wanda", {**net.modules_by_weight(), "other.weight": other})
    with scorer.calibrating():
        net(images())
    scorer.reduce()
    with pytest.raises(TrainingError, match=r"prune wanda: other.weight got no input"):
        scorer.scores("other.weight", other.weight)
    with scorer.calibrating():
        net(images() * float("nan"))
    scorer.reduce()
    with pytest.raises(TrainingError, match=r"scores must .* got NaN in conv.weight"):
        scorer.scores("conv.weight", net.conv.weight)


def test_wanda_forgets_a_step_that_was_not_finite():
    net = Net()
    scorer = make_scorer("wanda", net.modules_by_weight())
    scorer.attach()
    net(images() * float("inf"))
    scorer.observe_step(weights_of(scorer), {"head.weight": torch.full((3, 16), torch.nan)})
    net(images())
    scorer.observe_step(weights_of(scorer), {"head.weight": torch.ones(3, 16)})
    assert_scores(scorer, wanda_reference(net, images()))


def neuron_reference(net, batch):
    """Return, spread over the weights, the mean over examples of |mean over places of a·∂ℓ/∂a|, in float64."""
    net = copy.deepcopy(net).double()
    sums = {"conv.weight": torch.zeros(4), "head.weight": torch.zeros(3)}
    for example in batch.double():
        conv = net.conv(example[None]).detach().requires_grad_()
        head = net.head(conv.relu().flatten(1))
        (of_conv, of_head) = torch.autograd.grad(head.logsumexp(1).sum(), (conv, head))
        sums["conv.weight"] = sums["conv.weight"] + (conv * of_conv).detach().mean((0, 2, 3)).abs()
        sums["head.weight"] = sums["head.weight"] + (head * of_head).detach().mean(0).abs()
    return {
        name: (units / len(batch)).view(-1, *[1] * (weight.dim() - 1)).expand_as(weight)
        for name, units, weight in [
            ("conv.weight", sums["conv.weight"], net.conv.weight),
            ("head.weight", sums["head.weight"], net.head.weight),
        ]
    }


@pytest.mark.parametrize(("accumulate", "loss_scale"), [(1, 1.0), (4, 1.0), (2, 2.0**14)])
def test_neuron_taylor_against_a_loop_over_examples(accumulate, loss_scale):
    net, batch = Net(), images()
    scorer = make_scorer("neuron_taylor", net.modules_by_weight())
    scorer.attach()
    for part in batch.chunk(accumulate):
        (net(part).logsumexp(1).mean() * loss_scale / accumulate).backward()
    scorer.observe_step(weights_of(scorer), {}, loss_scale=loss_scale)
    expected = neuron_reference(net, batch)
    assert_scores(scorer, expected)
    units = scorer.unit_scores("conv.weight", net.conv.weight)
    assert units.shape == (4,)
    torch.testing.assert_close(units.double(), expected["conv.weight"][:, 0, 0, 0], rtol=2e-5, atol=1e-8)
    scorer.costs = {"conv.weight": 2.0, "head.weight": 1.0}
    assert torch.equal(scorer.unit_scores("conv.weight", net.conv.weight), units / 2)


@pytest.mark.parametrize("kind", LAYERS)
def test_neuron_taylor_spreads_units_over_their_weights(kind):
    layer, batch = layer_and_batch(kind)
    scorer = make_scorer("neuron_taylor", {"weight": layer})
    scorer.attach()
    layer(batch).square().flatten(1).sum(1).mean().backward()
    scorer.observe_step({"weight": layer.weight}, {"weight": layer.weight.grad})
    units = scorer.unit_scores("weight", layer.weight)
    outputs = channel_pairs(kind, copy.deepcopy(layer))[..., 1]
    assert torch.equal(scorer.scores("weight", layer.weight), units[outputs])
    with torch.no_grad():
        out = layer(batch)
    out = out.reshape(8, -1, 4) if channels_last(kind) else out.reshape(8, 4, -1).transpose(1, 2)
    torch.testing.assert_close(units, (2 * out * out).mean(1).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("criterion", ["wanda", "neuron_taylor"])
def test_resume_and_reset(criterion):
    net = Net()
    straight, first, second = (make_scorer(criterion, net.modules_by_weight()) for _ in range(3))

    def steps(scorer, seeds):
        scorer.attach()
        for seed in seeds:
            net(images(seed)).logsumexp(1).mean().backward()
            scorer.observe_step(weights_of(scorer), {})
        scorer.detach()

    steps(straight, range(4))
    steps(first, range(2))
    second.load_state_dict(first.state_dict())
    steps(first, range(5, 6))  # what was saved is a copy
    steps(second, range(2, 4))
    for name, weight in weights_of(straight).items():
        assert torch.equal(straight.scores(name, weight), second.scores(name, weight))
    second.reset()
    assert not second.ready
    steps(second, range(1))
    assert_scores(second, (wanda_reference if criterion == "wanda" else neuron_reference)(net, images(0)))


@pytest.mark.slow
def test_compiled_models_are_observed():
    net, batch = Net(), images()
    scorers = [make_scorer(criterion, net.modules_by_weight()) for criterion in ("wanda", "neuron_taylor")]
    for scorer in scorers:
        scorer.attach()
    compiled = torch.compile(net, backend="aot_eager")
    for part in batch.split(4):
        compiled(part).logsumexp(1).mean().div(2).backward()
    for scorer in scorers:
        scorer.observe_step(weights_of(scorer), {})
    assert_scores(scorers[0], wanda_reference(net, batch))
    assert_scores(scorers[1], neuron_reference(net, batch))
    torch.compiler.reset()
