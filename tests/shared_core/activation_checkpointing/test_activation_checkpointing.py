"""Segments that are recomputed: gradients, random state and buffers equal to the bit, and what is refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from shared_core.activation_checkpointing import apply_segments
from shared_core.errors import CompatibilityError, MatchError, TrainingError


class Block(nn.Module):
    """What a block may do: keywords, a tuple of outputs, dropout, a norm with statistics, a mask handed on."""

    def __init__(self, width=8, inplace=False):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.drop, self.act = nn.BatchNorm1d(width), nn.Dropout(0.3), nn.ReLU(inplace)

    def forward(self, x, mask=None, *, scale=1.0):
        hidden = self.act(self.norm(self.first(x))) * mask
        return x + self.second(self.drop(hidden)) * scale, mask


class Net(nn.Module):
    def __init__(self, between=lambda x, place: x, inplace=False):
        super().__init__()
        self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Block(inplace=inplace) for _ in range(6))
        self.between = between

    def forward(self, x):
        x = self.stem(x)
        mask = torch.sigmoid(x.detach())
        for place, layer in enumerate(self.layers):
            x, mask = layer(x, mask=mask, scale=1 + place / 3)
            x = self.between(x, place)
        return self.head(x)


def names(*places):
    return [f"layers.{place}" for place in places]


SEGMENTS = {
    "block": [[name] for name in names(*range(6))],
    "two": [names(0, 1, 2), names(3, 4, 5)],
    "whole": [names(*range(6))],
    "some": [names(1, 2), names(4)],
}


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(net, segments=None, steps=2, backward=lambda loss: loss.backward(), **options):
    """Gradients, buffers and the next random number after some micro-batches, and the handle."""
    net = copy.deepcopy(net)
    handle = apply_segments(net, segments, **options) if segments else None
    torch.manual_seed(1)
    for _ in range(steps):
        loss = net(torch.randn(7, 5)).square().sum()
        torch.rand(3)  # the random state of backward is not that of forward
        backward(loss)
    found = {name: parameter.grad for name, parameter in net.named_parameters()} | dict(net.named_buffers())
    return found | {"random": torch.rand(2)}, handle


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def between_in_place(x, place):
    return x.mul_(1.5) if place == 1 else x


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "between",
    [lambda x, place: x, lambda x, place: torch.tanh(x) if place == 1 else x, between_in_place],
    ids=["nothing", "tanh", "in place"],
)
def test_gradients_buffers_and_random_state_are_equal_to_the_bit(segments, inplace, between):
    net = Net(between, inplace)
    plain, _ = trained(net)
    found, handle = trained(net, segments)
    assert equal(plain, found)
    assert dict(handle.tally.blocks) == dict.fromkeys(handle.names, 2)
    cuts = sum(names(1)[0] in segment[:-1] for segment in segments) if between(torch.ones(1), 1) != 1 else 0
    assert handle.tally.recomputations == 2 * (len(segments) + cuts)


def test_kept_memory_is_what_the_receipt_says():
    net, kept = Net(), []

    def run(segments):
        model = copy.deepcopy(net)
        handle = apply_segments(model, segments) if segments else None
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage()._cdata] = tensor
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(7, 5)).square().sum()
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        kept.append(sum(t.untyped_storage().nbytes() for key, t in storages.items() if key not in own))
        loss.backward()
        return handle

    run(None)
    handle = run(SEGMENTS["block"])
    x, mask = 7 * 8 * 8, 7 * 8 * 8
    # hooks of the test see nothing of what a region keeps: the inputs of six blocks, and the one mask
    assert handle.tally.saved_bytes == kept[0] - kept[1] - (6 * x + mask)
    assert handle.tally.saved_bytes > 0.6 * kept[0]


def test_evaluation_and_forwards_without_gradients_are_left_alone():
    net = Net()
    handle = apply_segments(net, SEGMENTS["two"])
    with torch.no_grad():
        net(torch.randn(4, 5))
    net.eval()
    net(torch.randn(4, 5)).sum().backward()
    assert handle.tally.recomputations == 0


def test_a_retained_graph_is_recomputed_for_each_backward():
    net = Net()

    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    plain, _ = trained(net, backward=twice)
    found, handle = trained(net, SEGMENTS["two"], backward=twice)
    assert equal(plain, found)
    assert handle.tally.recomputations == 8


def test_second_derivatives():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))
    x = torch.randn(2, 3, requires_grad=True)

    def penalty(model):
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), list(model.parameters()))

    plain = penalty(net)
    apply_segments(net, [["0", "1"], ["2", "3"]])
    assert all(torch.equal(a, b) for a, b in zip(plain, penalty(net), strict=True))


def test_autocast_is_as_it_was_in_forward():
    torch.set_default_dtype(torch.float32)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)))
    grads = []
    for segments in (None, [["0", "1"], ["2"]]):
        model = copy.deepcopy(net)
        if segments:
            apply_segments(model, segments)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(4, 8)).float().square().sum()
        loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert equal(*grads)


def test_buffers_that_steer_the_forward_are_rewound():
    class Steered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))  # moves its vectors in forward
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1  # a new tensor each time
            return torch.tanh(self.linear(x) * self.count)

    torch.manual_seed(0)
    net = nn.Sequential(Steered(), Steered())
    results = []
    for segments in (None, [["0", "1"]]):
        model = copy.deepcopy(net)
        if segments:
            apply_segments(model, segments)
        for _ in range(3):
            model(torch.ones(2, 6)).square().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers()))
    assert equal(*results)
    assert results[1]["0.count"] == 3


def test_a_block_that_is_called_many_times_and_tied_weights():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.other = Block(), Block()
            self.other.first.weight = self.block.first.weight

        def forward(self, x):
            mask = torch.ones(8)
            for _ in range(3):
                x, mask = self.other(*self.block(x, mask))
            return x

    net, results = Shared(), []
    for segments in (None, [["block", "other"]], [["block"], ["other"]]):
        model = copy.deepcopy(net)
        handle = apply_segments(model, segments) if segments else None
        torch.manual_seed(0)
        model(torch.randn(5, 8)).square().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters()} | dict(model.named_buffers()))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    assert handle.tally.recomputations == 6


def test_a_query_that_is_the_key_stays_it():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)  # asks whether query `is` key

        def forward(self, x):
            return self.attention(x, x, x)[0]

    net, grads = nn.Sequential(Attend(), Attend()), []
    for segments in (None, [["0.attention"], ["1.attention"]]):
        model = copy.deepcopy(net)
        if segments:
            apply_segments(model, segments)
        model(torch.ones(2, 3, 8)).square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert equal(*grads)


class Overwrites(nn.Module):
    def forward(self, x):
        y = torch.exp(x)
        return y.add_(1).square()  # exp needs what it returned


class Fickle(nn.Linear):
    """Computes something else the second time."""

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) if self.calls == 1 else torch.sigmoid(x[:1])


def change_input(net, x):
    x.add_(1)


def change_weights(net, x):
    with torch.no_grad():
        net[1][0].weight.mul_(2)


class TestRefusals:
    @pytest.mark.parametrize(
        ("block", "change", "words"),
        [
            (
                lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)),
                None,
                r"1: its input must not be changed in place inside it.*inplace=False",
            ),
            (lambda: nn.Linear(4, 4), change_input, "1: its input must not be changed in place before backward"),
            (
                lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
                change_weights,
                "1: its weights must not be changed between forward and backward",
            ),
            (Overwrites, None, "a tensor needed for its gradient must not be changed in place"),
            (lambda: Fickle(4, 4), None, "1: recomputing in backward"),
        ],
        ids=["input inside", "input", "weights", "saved tensor", "values"],
    )
    def test_changes_that_would_give_other_gradients(self, block, change, words):
        net = nn.Sequential(nn.Linear(4, 4), block())
        apply_segments(net, [["1"]])
        x = net[0](torch.ones(2, 4))
        with pytest.raises(TrainingError, match=words):
            loss = net[1](x).square().sum()
            if change:
                change(net, x.detach())
            loss.backward()

    def test_segments_must_name_modules_that_exist(self):
        net = Net()
        with pytest.raises(MatchError, match="at least one module, got none"):
            apply_segments(net, [])
        with pytest.raises(MatchError, match=r"'layers.9'; did you mean"):
            apply_segments(net, [["layers.9"]])
        with pytest.raises(CompatibilityError, match=r"inside another, got layers\.0\.first"):
            apply_segments(net, [["layers.0", "layers.0.first"]])
        with pytest.raises(CompatibilityError, match=r"inside another, got layers\.0;"):
            apply_segments(net, [["layers.0"], ["layers.0"]])
        assert not any("forward" in vars(module) for module in net.modules())

    def test_a_model_that_is_checkpointed_already(self):
        net = Net()
        handle = apply_segments(net, [["layers.0"]])
        with pytest.raises(CompatibilityError, match=r"layers\.0 is already checkpointed"):
            apply_segments(net, [["layers.1"]])
        handle.remove()
        apply_segments(net, [["layers.1"]]).remove()
        net.layers[2].gradient_checkpointing = True
        with pytest.raises(CompatibilityError, match=r"layers\.2 is already checkpointed"):
            apply_segments(net, [["layers.1"]])


def test_an_exception_in_forward_leaves_no_trace():
    def fail(x, place):
        if place == 1 and fail.now:
            raise ValueError("now")
        return x

    fail.now = True
    net = Net(fail)
    handle = apply_segments(net, SEGMENTS["whole"])
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match="now"):
        net(torch.ones(3, 5))
    fail.now = False
    net.load_state_dict(state)
    net(torch.ones(3, 5)).sum().backward()
    assert handle.tally.recomputations == 1


def test_copies_and_pickles_are_models_of_their_own():
    net = Net()
    plain, _ = trained(net)
    handle = apply_segments(net, SEGMENTS["two"])
    twin = copy.deepcopy(net)
    net.between = twin.between = None
    loaded = pickle.loads(pickle.dumps(net))
    for model in (twin, loaded):
        assert model.layers[0].forward.block is model.layers[0]
        model.between = Net().between
    handle.remove()
    handle.remove()
    assert not any("forward" in vars(module) for module in net.modules())
    torch.manual_seed(1)
    for _ in range(2):
        loss = twin(torch.randn(7, 5)).square().sum()
        torch.rand(3)
        loss.backward()
    assert all(torch.equal(parameter.grad, plain[name]) for name, parameter in twin.named_parameters())
    assert handle.tally.recomputations == 0


def test_nothing_outlives_the_graph():
    net, alive = Net(), []
    net.between = lambda x, place: alive.append(weakref.ref(x)) or x
    apply_segments(net, SEGMENTS["two"])
    gc.collect()
    gc.disable()  # what only the collector would free is held on a GPU for long
    try:
        loss = net(torch.randn(4, 5)).sum()
        loss.backward()
        del loss
        assert not any(reference() is not None for reference in alive)
    finally:
        gc.enable()


def test_a_compiled_model_is_recomputed_too():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(4)))
    plain = copy.deepcopy(net)
    plain(torch.ones(2, 8)).sum().backward()
    for segments in ([["0"], ["1"]], [["0", "1"], ["2", "3"]]):
        model = copy.deepcopy(net)
        handle = apply_segments(model, segments)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=len(segments[0]) == 1)
        for _ in range(2):
            model.zero_grad()
            compiled(torch.ones(2, 8)).sum().backward()
        assert (handle.tally.compiled, handle.tally.uncompiled) == (
            (True, False) if len(segments[0]) == 1 else (False, True)
        )
        assert handle.tally.compiled or handle.tally.recomputations == 4
        assert handle.tally.compiled == (not handle.tally.notes)
        for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, reference.grad, msg=name)
