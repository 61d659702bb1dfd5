"""Fisher's per-example squared gradients against a loop over examples in float64, however the step is cut up."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from shared_core.errors import TrainingError
from shared_core.pruning.scorers import make_scorer

IMAGE = (4, 7, 6)
LAYERS = {
    "linear": (lambda: nn.Linear(5, 4), (5,)),
    "no_bias": (lambda: nn.Linear(5, 4, bias=False), (5,)),
    "sequence": (lambda: nn.Linear(5, 4), (6, 5)),
    "two_position_axes": (lambda: nn.Linear(5, 4), (3, 2, 5)),
    "transformers_conv1d": (lambda: Conv1D(4, 5), (6, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (4, 9)),
    "conv1d_causal": (lambda: nn.Conv1d(4, 4, 3, padding=2, dilation=2, groups=4), (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), IMAGE),
    "conv2d_1x1": (lambda: nn.Conv2d(4, 6, 1), IMAGE),
    "conv2d_one_place": (lambda: nn.Conv2d(4, 6, (7, 6)), IMAGE),
    "conv2d_stride": (lambda: nn.Conv2d(4, 6, 3, stride=2), IMAGE),
    "conv2d_mixed": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), IMAGE),
    "conv2d_groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding="same"), IMAGE),
    "conv2d_depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), IMAGE),
    "conv2d_circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv2d_reflect": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="reflect"), IMAGE),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (2, 3, 4, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), (4, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), groups=2, dilation=(2, 1)), (4, 3, 4)),
    "transposed_wide_output_padding": (
        lambda: nn.ConvTranspose1d(4, 6, 2, stride=1, dilation=3, output_padding=2), (4, 5)
    ),
}  # fmt: skip


class Loss(nn.Module):
    """A layer and a loss of each example that is not linear in its output."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).sin().square().flatten(1).sum(1)


def fisher_by_loop(model, batch, names):
    """Return the mean of squared gradients over examples, in float64, one example at a time."""
    model = copy.deepcopy(model).double()
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameters[name]) for name in names}
    for example in batch.double():
        gradients = grad(lambda p, x=example: functional_call(model, p, (x[None],)).sum())(parameters)
        for name in names:
            total[name] += gradients[name].detach() ** 2
    return {name: value / len(batch) for name, value in total.items()}


def batch_of(shape, size=8, seed=0):
    return torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed))


def observed(model, modules, micro_batches, *, reduction="mean", accumulate=1, loss_scale=1.0, **options):
    """Train on micro-batches, `accumulate` of them a step, and return the scorer."""
    scorer = make_scorer("fisher", modules, **options)
    scorer.attach()
    for i, batch in enumerate(micro_batches):
        loss = getattr(model(batch), reduction)()
        (loss * loss_scale / accumulate).backward()
        if (i + 1) % accumulate == 0:
            weights = {name: module.weight for name, module in modules.items()}
            gradients = {name: weight.grad / loss_scale for name, weight in weights.items()}
            scorer.observe_step(weights, gradients, loss_scale=loss_scale)
            model.zero_grad()
    scorer.detach()
    return scorer


def assert_fisher(scorer, model, batch, rtol=1e-4, atol=1e-9):
    expected = fisher_by_loop(model, batch, list(scorer.modules))
    for name, module in scorer.modules.items():
        F = scorer.fisher(name, module.weight)
        torch.testing.assert_close(F.double(), expected[name], rtol=rtol, atol=atol)
        scores = scorer.scores(name, module.weight)
        wanted = 0.5 * module.weight.detach().double() ** 2 * expected[name]
        torch.testing.assert_close(scores.double(), wanted, rtol=rtol, atol=atol)
        assert torch.equal(scorer.part(name, module.weight, slice(1, None, 2)), scores.flatten()[1::2])


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("max_elements", [1 << 24, 1000, 1])
def test_layers_against_a_loop_over_examples(kind, max_elements):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    model, batch = Loss(make()), batch_of(shape)
    if kind == "transformers_conv1d":
        nn.init.normal_(model.layer.weight)
    scorer = observed(model, {"layer.weight": model.layer}, [batch], max_elements=max_elements)
    assert_fisher(scorer, model, batch)
    assert scorer.num_examples == {"layer.weight": 8}


@pytest.mark.parametrize("kind", ["linear", "sequence", "conv2d_groups", "transposed2d"])
def test_float64_is_exact(kind):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    model, batch = Loss(make()).double(), batch_of(shape).double()
    scorer = observed(model, {"layer.weight": model.layer}, [batch])
    assert scorer.scores("layer.weight", model.layer.weight).dtype == torch.float64
    assert_fisher(scorer, model, batch, rtol=1e-10, atol=1e-14)


class Net(nn.Module):
    """Convolution, in-place ReLU, linear layers, one of them called twice; optionally checkpointed or autocast."""

    def __init__(self, reentrant=None, twice=True):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.relu = nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True)
        self.hidden, self.head = nn.Linear(16, 16), nn.Linear(16, 3)
        self.reentrant, self.twice = reentrant, twice

    def body(self, x):
        x = self.relu(self.conv(x)).flatten(1).tanh()
        x = self.relu(self.hidden(x))
        return self.hidden(x) if self.twice else x

    def forward(self, x):
        if self.reentrant is None:
            x = self.body(x)
        else:
            # reentrant checkpointing wants an input that requires a gradient
            x = checkpoint(self.body, x.clone().requires_grad_(), use_reentrant=self.reentrant)
        return self.head(x).logsumexp(1)

    def modules_by_weight(self):
        return {"conv.weight": self.conv, "hidden.weight": self.hidden, "head.weight": self.head}


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("twice", [False, True])
def test_a_net_with_in_place_activations_a_layer_called_twice_and_checkpointing(reentrant, twice):
    net, batch = Net(reentrant, twice), batch_of((2, 4, 4))
    scorer = observed(net, net.modules_by_weight(), [batch])
    assert_fisher(scorer, Net(None, twice), batch)
    assert set(scorer.num_examples.values()) == {8}


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_of_their_own_checkpoint_that_are_called_twice(reentrant):
    class Twice(Net):
        def body(self, x):
            x = self.relu(self.conv(x)).flatten(1).tanh()
            for _ in range(2):
                x = x if self.reentrant is None else x.requires_grad_() if x.is_leaf else x
                run = self.hidden if self.reentrant is None else self.checkpointed
                x = run(x).tanh()
            return x

        def checkpointed(self, x):
            return checkpoint(self.hidden, x, use_reentrant=self.reentrant)

        def forward(self, x):
            return self.head(self.body(x)).logsumexp(1)

    net, batch = Twice(reentrant), batch_of((2, 4, 4))
    scorer = observed(net, net.modules_by_weight(), [batch])
    assert_fisher(scorer, Twice(), batch)


@pytest.mark.parametrize(
    ("sizes", "accumulate", "reduction", "loss_scale"),
    [
        ([8], 1, "mean", 1.0),
        ([4, 4], 2, "mean", 1.0),
        ([2, 2, 2, 2], 4, "mean", 1.0),
        ([8], 1, "mean", 1024.0),
        ([4, 4], 2, "mean", 2.0**16),
    ],
)
def test_accumulation_and_loss_scale_cancel(sizes, accumulate, reduction, loss_scale):
    net, batch = Net(), batch_of((2, 4, 4))
    parts = batch.split(sizes)
    scorer = observed(
        net, net.modules_by_weight(), parts, reduction=reduction, accumulate=accumulate, loss_scale=loss_scale
    )
    assert_fisher(scorer, net, batch)
    assert scorer.num_observed == 1


def test_steps_are_averaged_over_examples_with_changing_loss_scales():
    net, batch = Net(), batch_of((2, 4, 4), 12)
    scorer = make_scorer("fisher", net.modules_by_weight())
    scorer.attach()
    for part, scale in zip(batch.split([2, 6, 4]), (1.0, 64.0, 4.0), strict=True):
        (net(part).mean() * scale).backward()
        scorer.observe_step({name: m.weight for name, m in scorer.modules.items()}, {}, loss_scale=scale)
    assert_fisher(scorer, net, batch)


def test_a_sum_over_examples_scores_n_squared_times_as_much():
    net, batch = Net(), batch_of((2, 4, 4))
    scorers = [observed(net, net.modules_by_weight(), [batch], reduction=reduction) for reduction in ("mean", "sum")]
    mean, total = (scorer.scores("conv.weight", net.conv.weight) for scorer in scorers)
    torch.testing.assert_close(total, 64 * mean, rtol=1e-4, atol=0)


def test_validation_and_forwards_without_a_backward_do_not_count():
    net, batch = Net(), batch_of((2, 4, 4))
    scorer = make_scorer("fisher", net.modules_by_weight())
    scorer.attach()
    weights = {name: module.weight for name, module in scorer.modules.items()}
    net.eval()
    net(batch_of((2, 4, 4), seed=1)).sum().backward()
    net.train()
    with torch.no_grad():
        net(batch_of((2, 4, 4), seed=2))
    net(batch_of((2, 4, 4), seed=3))
    net(batch[:4]).mean().div(2).backward()
    net(batch[4:]).mean().div(2).backward()
    with torch.no_grad():
        net(batch_of((2, 4, 4), seed=4))
    scorer.observe_step(weights, {})
    assert_fisher(scorer, net, batch)
    late = net(batch_of((2, 4, 4), seed=5)).mean()
    scorer.detach()
    late.backward()
    net(batch_of((2, 4, 4), seed=6)).mean().backward()
    scorer.observe_step(weights, {})
    assert_fisher(scorer, net, batch)


def test_a_skipped_step_is_forgotten():
    net, batch = Net(), batch_of((2, 4, 4))
    scorer = make_scorer("fisher", net.modules_by_weight())
    scorer.attach()
    weights = {name: module.weight for name, module in scorer.modules.items()}
    net(batch * 7).mean().backward()
    late = net(batch * 3).mean()
    scorer.discard_step()
    late.backward()
    net(batch * 9).mean().backward()
    bad = {name: torch.full_like(weight, torch.inf) for name, weight in weights.items()}
    scorer.observe_step(weights, bad)
    net(batch).mean().backward()
    scorer.observe_step(weights, {name: weight.grad for name, weight in weights.items()})
    assert (scorer.num_observed, scorer.num_left_out) == (1, 1)
    assert_fisher(scorer, net, batch)


def test_training_is_as_without_a_scorer():
    batch = batch_of((2, 4, 4))
    for reentrant in (None, False, True):
        plain, watched = Net(reentrant), Net(reentrant)
        plain(batch).mean().backward()
        observing = make_scorer("fisher", watched.modules_by_weight())
        observing.attach()
        watched(batch).mean().backward()
        for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


class Box:
    """Holds one tensor that autograd saved; a weak set of them says which are alive."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize(("reentrant", "inputs_held"), [(None, 4), (False, 1)])
def test_inputs_are_saved_as_autograd_saves_and_let_go_of_by_backward(reentrant, inputs_held):
    alive = {}
    for watched in (False, True):
        net, boxes = Net(reentrant), weakref.WeakSet()
        scorer = make_scorer("fisher", net.modules_by_weight())
        if watched:
            scorer.attach()

        def pack(tensor, boxes=boxes):
            box = Box(tensor)
            boxes.add(box)
            return box

        with saved_tensors_hooks(pack, lambda box: box.tensor):
            loss = net(batch_of((2, 4, 4))).mean()
        alive[watched] = len(boxes)
        loss.backward()
        assert not boxes  # though `loss` still holds the graph
    # checkpointing drops what lies inside its segment: of the layers only the head keeps an input
    assert alive[True] - alive[False] == inputs_held


def test_bf16_and_autocast_are_summed_in_float32():
    batch = batch_of((6, 5))
    torch.manual_seed(0)
    exact = Loss(nn.Linear(5, 4))
    half = copy.deepcopy(exact).bfloat16()
    scorer = observed(half, {"layer.weight": half.layer}, [batch.bfloat16()])
    scores = scorer.scores("layer.weight", half.layer.weight)
    assert scores.dtype == torch.float32
    expected = fisher_by_loop(exact, batch, ["layer.weight"])["layer.weight"]
    torch.testing.assert_close(scorer.fisher("layer.weight", half.layer.weight).double(), expected, rtol=0.1, atol=0.02)
    scorer = make_scorer("fisher", {"layer.weight": exact.layer})
    scorer.attach()
    with torch.autocast("cpu", torch.bfloat16):
        exact(batch).mean().backward()
    scorer.observe_step({"layer.weight": exact.layer.weight}, {})
    torch.testing.assert_close(
        scorer.fisher("layer.weight", exact.layer.weight).double(), expected, rtol=0.1, atol=0.02
    )


def test_zero_gradients_and_unused_layers_score_zero():
    net = Net()
    unused = nn.Linear(3, 3)
    modules = {**net.modules_by_weight(), "unused.weight": unused}
    scorer = make_scorer("fisher", modules)
    scorer.attach()
    (net(batch_of((2, 4, 4))) * 0).mean().backward()
    scorer.observe_step({name: module.weight for name, module in modules.items()}, {})
    for name, module in modules.items():
        assert not scorer.scores(name, module.weight).any()
        assert not scorer.part(name, module.weight, slice(0, 3)).any()


def test_an_example_without_a_batch_axis_is_one():
    torch.manual_seed(0)
    layer, x = nn.Linear(5, 4), torch.randn(5)
    scorer = make_scorer("fisher", {"weight": layer})
    scorer.attach()
    layer(x).square().sum().backward()
    scorer.observe_step({"weight": layer.weight}, {"weight": layer.weight.grad})
    assert scorer.num_examples == {"weight": 1}
    torch.testing.assert_close(scorer.fisher("weight", layer.weight), layer.weight.grad**2)


def test_a_second_backward_is_refused():
    net = Net()
    scorer = make_scorer("fisher", net.modules_by_weight())
    scorer.attach()
    loss = net(batch_of((2, 4, 4))).mean()
    loss.backward(retain_graph=True)
    with pytest.raises(TrainingError, match=r"prune fisher: .* head.weight must .* one backward"):
        loss.backward()


def test_resume_and_reset():
    batches = [batch_of((2, 4, 4), seed=seed) for seed in range(4)]
    net = Net()
    straight = observed(net, net.modules_by_weight(), batches)
    resumed = observed(net, net.modules_by_weight(), batches[:2])
    state = resumed.state_dict()
    resumed = make_scorer("fisher", net.modules_by_weight())
    resumed.load_state_dict(state)
    resumed.attach()
    for batch in batches[2:]:
        net(batch).mean().backward()
        resumed.observe_step({name: module.weight for name, module in resumed.modules.items()}, {})
    for name, module in resumed.modules.items():
        assert torch.equal(resumed.scores(name, module.weight), straight.scores(name, module.weight))
    resumed.reset()
    assert not resumed.ready
    net(batches[0]).mean().backward()
    resumed.observe_step({name: module.weight for name, module in resumed.modules.items()}, {})
    assert_fisher(resumed, net, batches[0])


@pytest.mark.slow
def test_compiled_models_are_observed():
    net, batch = Net(), batch_of((2, 4, 4))
    scorer = make_scorer("fisher", net.modules_by_weight())
    scorer.attach()
    compiled = torch.compile(net, backend="aot_eager")
    for part in batch.split(4):
        compiled(part).mean().div(2).backward()
    scorer.observe_step({name: module.weight for name, module in scorer.modules.items()}, {})
    assert_fisher(scorer, net, batch)
    torch.compiler.reset()
