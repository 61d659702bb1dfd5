"""Units that are found by tracing, where layers compute something else than stock ones, and where batches differ."""

import copy

import pytest
import torch
from plain_loop import plain_step
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from shared_core import Session, training
from shared_core.channel_graph.groups import find_groups
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.engine.recipe import Recipe
from shared_core.errors import CheckpointError
from shared_core.pruning import prune

STEPS = 6
PRUNE = {"sparsity": 0.5, "granularity": "neuron", "begin": 1, "end": 5, "every": 2}


class Experts(nn.Module):
    """Two experts, of which each batch reaches one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, x, which):
        return self.head(self.experts[which](x) + x)


def run(recipe, stop=None, state=None):
    torch.manual_seed(0)
    model = Experts()
    session = Session(Recipe.from_dict(recipe))
    session.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        session.load_state_dict(state["session"])
    session.begin([optimizer], total_steps=STEPS)
    for step in range(session.step, STEPS):
        if step == stop:
            parts = {"model": model, "optimizer": optimizer, "session": session}
            state = copy.deepcopy({name: part.state_dict() for name, part in parts.items()})
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        plain_step(session, optimizer, model(x, step % 2).square().mean())
    report = session.receipt().values["techniques"]["prune"]
    session.finish()
    return state, dict(model.state_dict()), report


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_prunes_the_units_of_the_first_micro_batch_not_those_of_its_own(stop):
    state, whole, report = run({"prune": PRUNE}, stop)
    _, again, same = run({"prune": PRUNE}, state=state)
    assert report["units"]
    assert report == same
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_saved_units_are_left_where_options_have_changed_and_refused_where_they_are_none():
    state = run({"prune": PRUNE}, 3)[0]
    _, _, report = run({"prune": PRUNE | {"skip": ["experts.0.*"]}}, state=state)
    assert {unit["group"] for unit in report["units"]} == {"experts.1.0"}
    state["session"]["techniques"]["prune"]["units"]["groups"] = [{"name": "experts.0.0"}]
    with pytest.raises(CheckpointError, match="units that prune saved"):
        run({"prune": PRUNE}, state=state)


@pytest.mark.parametrize(
    "other",
    [
        {"qat": {"scheme": "int8"}},
        {"qat": {"scheme": "int8", "range": "lsq"}},
        {"qat": {"scheme": "nvfp4"}},
        {"fp8": {"recipe": "tensorwise", "include": ["experts.*"]}},
    ],
    ids=lambda other: "-".join(str(value) for value in next(iter(other.values())).values() if isinstance(value, str)),
)
def test_units_are_found_beneath_layers_that_round(other):
    _, plain, expected = run({"prune": PRUNE})
    _, model, report = run({"prune": PRUNE} | other)
    assert [unit["group"] for unit in report["units"]] == [unit["group"] for unit in expected["units"]]
    lost = model["experts.0.0.weight"].eq(0).all(1)
    assert 0 < lost.sum() < 32
    assert set(model) == set(plain)


def test_the_magnitude_of_a_channel_is_the_mean_over_what_makes_scales_and_reads_it():
    first, norm, last = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1, 1))
        last.weight.fill_(0.5)
        norm.weight.copy_(torch.tensor([5.0, -5.0, 0.5, 0.5]))  # without them the first two are the lowest
        norm.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 9.0]))  # a shift counts for nothing
    model = nn.Sequential(first, norm, last)
    report = prune(model, {"sparsity": 0.5, "granularity": "channel"}, [torch.zeros(2, 1, 3, 3)])
    assert [(unit["pruned"], unit["units"]) for unit in report.units] == [(2, 4)]
    assert [bool(row.any()) for row in first.weight] == [True, True, False, False]


@pytest.mark.parametrize("criterion", ["fisher", "neuron_taylor"])
def test_a_unit_is_divided_by_its_cost_once(criterion):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv1d(1, 6, 3, padding=1), nn.Flatten(), nn.Linear(24, 6)).double()
    x, wanted = torch.randn(5, 1, 4, dtype=torch.double), torch.randn(5, 6, dtype=torch.double)
    # Σ over weights of ½·w²·mean g², or the mean over examples of |mean over positions of a·∂L/∂a|
    scores = []
    for layer in (net[0], net[2]):
        per_example = []
        for example, target in zip(x, wanted, strict=True):
            seen = []
            handle = layer.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
            loss = (net(example[None]) - target).square().mean()
            handle.remove()
            weight_gradient, gradient = torch.autograd.grad(loss, [layer.weight, seen[0]])
            if criterion == "fisher":
                per_example.append((0.5 * layer.weight.detach() ** 2 * weight_gradient**2).flatten(1).sum(1))
            else:
                product = (seen[0] * gradient).detach()[0]
                per_example.append(product.reshape(6, -1).mean(1).abs())
        positions = 4 if layer is net[0] else 1
        cost = 2 * positions * layer.weight[0].numel()
        scores.append(torch.stack(per_example).mean(0) / cost)
    options = {"sparsity": 0.5, "granularity": "filter", "criterion": criterion, "scope": "global", "cost": "flops"}
    prune(net, options, [(x, wanted)], loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean())
    gone = torch.cat([(layer.weight == 0).flatten(1).all(1) for layer in (net[0], net[2])])
    lowest = torch.cat(scores).argsort()[:6]
    assert gone.nonzero().flatten().tolist() == sorted(lowest.tolist())


def test_a_run_that_never_found_its_units_says_so_at_the_end():
    # in evaluation mode no forward counts as one of training
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = {"prune": {"sparsity": 0.5, "granularity": "neuron", "begin": 1, "end": 3, "every": 1}}
    with training(recipe, model, optimizer, total_steps=4) as loop:
        for _ in range(4):
            loop.backward(model(torch.randn(3, 4)).square().mean())
            loop.step()
            optimizer.zero_grad()
            assert not loop.session.progress.may_be_best()
    receipt = loop.session.receipt()
    assert receipt["unreached"]["prune"].startswith("sparsity 0 of 0.5: no units were found")
    assert any(note.startswith("prune did not reach") for note in receipt["notes"])


class Stepped(nn.Module):
    """Its step calls the module itself, or its network."""

    def __init__(self, whole):
        super().__init__()
        self.net, self.whole = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), whole

    def forward(self, x):
        return self.net(x)

    def step(self, batch, index):
        return (self(batch) if self.whole else self.net(batch)).square().mean()


def through_forward(module, name, *args):
    """Call a method as Lightning and Fabric do under DDP: by a function in place of ``forward``."""
    forward = module.forward

    def redirected(*args):
        module.forward = forward
        return getattr(module, name)(*args)

    module.forward = redirected
    return module(*args)


@pytest.mark.parametrize("whole", [True, False])
def test_units_are_found_where_another_method_is_called_through_forward(whole):
    torch.manual_seed(0)
    model = Stepped(whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recipe = {"prune": {"sparsity": 0.5, "granularity": "neuron", "begin": 1, "end": 3, "every": 1}}
    with training(recipe, model, optimizer, total_steps=4) as loop:
        for _ in range(4):
            loop.backward(through_forward(model, "step", torch.randn(3, 4), 1))
            loop.step()
            optimizer.zero_grad()
    assert int((model.net[0].weight == 0).all(1).sum()) == 4


class Gated(nn.Module):
    """A gated layer, whose units have a row in each of two weights, behind a convolution and a transposed one."""

    def __init__(self):
        super().__init__()
        self.conv, self.back = nn.Conv1d(1, 6, 3, padding=1), nn.ConvTranspose1d(6, 1, 1)
        self.gate, self.up, self.down = nn.Linear(5, 7, bias=False), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.back(self.conv(x[:, None]))[:, 0]
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def rows(*weights, axis=0):
    """The weights of each output, in all of the tensors together."""
    return [torch.cat([weight.movedim(axis, 0).flatten(1) for weight in weights], 1)]


def tiles(weight, height, width):
    matrix = weight.flatten(1)
    return [tile.reshape(1, -1) for part in matrix.split(height) for tile in part.split(width, 1)]


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"granularity": "neuron"}, lambda net: rows(net.gate.weight, net.up.weight)),
        ({"granularity": "channel"}, lambda net: rows(net.conv.weight)),
        (
            {"granularity": "block", "block": "2x4", "include": ["conv", "down"]},
            lambda net: [*tiles(net.conv.weight, 2, 4), *tiles(net.down.weight, 2, 4)],
        ),
        (
            {"granularity": "layer", "include": ["gate", "down"]},
            lambda net: [net.gate.weight.reshape(1, -1), net.down.weight.reshape(1, -1)],
        ),
        (
            {"granularity": "filter", "include": ["back", "down"]},
            lambda net: [*rows(net.back.weight, axis=1), *rows(net.down.weight)],
        ),
    ],
    ids=lambda value: value["granularity"] if isinstance(value, dict) else "",
)
def test_group_lasso_groups_as_the_granularity_does(options, groups):
    torch.manual_seed(0)
    net, x = Gated().double(), torch.randn(4, 5, dtype=torch.double)
    twin = copy.deepcopy(net)
    penalty = sum((0.3 * group.shape[1] ** 0.5 * group.norm(dim=1)).sum() for group in groups(twin))
    (twin(x).square().mean() + penalty).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recipe = {"sparsity": 0.5, "begin": 3, "end": 3, "regularizer": "group_lasso", "regularizer_strength": 0.3}
    session = Session({"prune": {**recipe, **options}, "allow_partial": True})
    attach_with(session, net, [optimizer])
    session.begin([optimizer], total_steps=4)
    with session.forward():
        session.loss(net(x).square().mean()).backward()
    session.before_step()
    for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("computed", [spectral_norm, weight_norm, orthogonal])
@pytest.mark.parametrize("kind", ["channel", "neuron"])
def test_a_layer_that_computes_its_weight_keeps_only_its_own_units(kind, computed):
    torch.manual_seed(0)
    if kind == "channel":
        own = computed(nn.Conv2d(8, 12, 3, padding=1))
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), own, nn.ReLU(), nn.Conv2d(12, 6, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(6 * 36, 4),
        )  # fmt: skip
        x, before, after, last = torch.randn(2, 3, 8, 8), net[0], net[5], net[8]
    else:
        own = computed(nn.Linear(8, 12))
        net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), own, nn.ReLU(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 4))
        x, before, after, last = torch.randn(2, 5), net[0], net[4], net[6]
    kept = {name: value.clone() for name, value in own.state_dict().items()}
    prune(net, {"sparsity": 0.5, "granularity": kind}, [x], allow_partial=True)
    zero = [int((layer.weight == 0).flatten(1).all(1).sum()) for layer in (before, after, last)]
    assert zero == [4, 3, 0]
    assert all(torch.equal(value, kept[name]) for name, value in own.state_dict().items())
    # a cut would change the norm: what `eff shrink` removes leaves these units
    reasons = {group.name: group.reason_kept for group in find_groups(net, x)}
    assert reasons["0"]
    assert not reasons["5" if kind == "channel" else "4"]
