"""Layers of users' own classes: which multiply by the weight that they store, and what techniques make of them."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from shared_core import Session, training
from shared_core.engine.checks.optimizer_parameters import attach_with
from shared_core.errors import CompatibilityError, MatchError
from shared_core.modules.like_stock import look_alikes_taken, stock_kind
from shared_core.modules.own_forward import COMPUTED, UNKNOWN, why_computed
from shared_core.quantization import convert


class Standardized(nn.Conv2d):
    """As BiT and NFNet have it."""

    def kernel(self):
        return (self.weight - self.weight.mean((1, 2, 3), keepdim=True)) / self.weight.std((1, 2, 3), keepdim=True)

    def forward(self, x):
        return self._conv_forward(x, self.kernel(), self.bias)


class Changed(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight.softmax(0), bias)


class Masked(nn.Linear):
    """As MADE has it."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones_like(self.weight).tril())

    def forward(self, x):
        return F.linear(x, self.mask * self.weight, self.bias)


class Padded(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias)


class Matmul(nn.Linear):
    def forward(self, x):
        return x @ self.weight.mT + self.bias


class Einsum(nn.Linear):
    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Counting(nn.Linear):
    """Draws random numbers, and counts in a buffer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + torch.rand(())


class Gated(nn.Linear):
    def forward(self, x, gate):
        return super().forward(x) * gate


class Orthogonal(nn.Linear):
    def reset_parameters(self):
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)


class Named(nn.Conv2d):
    pass


class Wrapped(nn.Linear):
    """As timm and others have it."""

    def forward(self, x):
        if torch.jit.is_scripting():
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        return F.linear(x, self.weight, self.bias)


class WrappedConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x)


class Casting(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Adapted(nn.Linear):
    """Adds what it holds later."""

    def forward(self, x):
        return super().forward(x) + self.added if hasattr(self, "added") else super().forward(x)


class Same(nn.Conv2d):
    """Pads by the size of its input, as timm has it: nothing where a stride of 1 fits."""

    def forward(self, x):
        missing = [max((-(-x.shape[-1] // self.stride[0]) - 1) * self.stride[0] + 3 - x.shape[-1], 0)] * 2
        x = F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Zeros(nn.Conv2d):
    """Forgets its padding mode."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Dropping(nn.Linear):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Rounding(nn.Linear):
    def forward(self, x):
        return super().forward(x) if self.training else super().forward(x).round()


class Released(nn.Linear):
    """Multiplies by scales once its weight is in eight bits, as transformers' FP8Linear does."""

    def forward(self, x):
        if self.weight.element_size() > 1:
            return super().forward(x)
        return F.linear(x, self.weight.float() * self.weight_scale_inv, self.bias)


class Speaking(nn.Linear):
    def forward(self, x):
        warnings.warn("called", stacklevel=1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (Wrapped, nn.Linear),
        (Speaking, nn.Linear),
        (WrappedConv, nn.Conv2d),
        (Orthogonal, nn.Linear),
        *((kind, None) for kind in (Casting, Adapted, Same, Zeros, Dropping, Rounding, Released)),
        *((kind, None) for kind in (Masked, Matmul, Gated, Standardized)),
    ],
)
def test_a_class_is_taken_for_what_it_computes(kind, base):
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # to look at a class says nothing
        assert stock_kind(kind) is base
    assert torch.equal(torch.get_rng_state(), state)


class Words(nn.Embedding):
    pass


class Channels(nn.Module):
    """A linear layer of its own, as torch_geometric has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.in_channels, self.out_channels, self.initializer = inputs, outputs, None
        self.weight, self.bias = (
            nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)

    def __deepcopy__(self, memo):
        other = Channels(self.in_channels, self.out_channels)
        other.weight, other.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        return other


class Dense(nn.Linear):
    """Has an activation, or none."""

    def __init__(self, *sizes, activation=None):
        super().__init__(*sizes)
        self.activation = activation

    def forward(self, x):
        return super().forward(x) if self.activation is None else self.activation(super().forward(x))


class Point(nn.Conv2d):
    """Pads as TensorFlow does, where a kernel needs it."""

    side = 1

    def forward(self, x):
        missing = max((-(-x.shape[-1] // self.stride[0]) - 1) * self.stride[0] + self.kernel_size[0] - x.shape[-1], 0)
        x = F.pad(x, (0, missing, 0, missing)) if missing and self.side else x
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Table(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, width))

    def forward(self, indices):
        return F.embedding(indices, self.weight)


class Doubled(Channels):
    def forward(self, x):
        return 2 * super().forward(x)


class Told(Channels):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Sideways(Channels):
    def forward(self, x):
        return x @ self.weight + self.bias


class Delicate(Channels):
    """Must not be called."""

    def forward(self, x):
        raise RuntimeError("called")


def hooked(layer):
    layer.register_forward_pre_hook(lambda *_: pytest.fail("hook called"))
    return layer


def replaced(layer):
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("layer", "base"),
    [
        (Channels(3, 4), nn.Linear),
        (hooked(Channels(3, 3)), nn.Linear),
        (Channels(3, 4).bfloat16(), nn.Linear),
        (Channels(3, 4).eval().to("meta"), nn.Linear),
        (Dense(3, 4), nn.Linear),
        (Point(3, 4, 1), nn.Conv2d),
        (Table(5, 3), nn.Embedding),
        (Dense(3, 4, activation=torch.relu), None),
        (Dense(3, 4, activation=nn.ReLU()), None),
        (Point(3, 4, 3), None),
        *((kind(3, 3), None) for kind in (Doubled, Told, Sideways, Delicate, Matmul, Counting)),
        (replaced(Channels(3, 4)), None),
        (spectral_norm(Channels(3, 4)), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_is_taken_for_what_it_computes_without_being_called(layer, base):
    kind, state = type(layer), torch.get_rng_state()
    before = {name: id(value) for name, value in vars(layer).items()}
    with look_alikes_taken(layer):
        assert stock_kind(type(layer)) is base
        if base is not None:
            assert isinstance(layer, base)
            assert type(layer).__name__ == kind.__name__
            for copied in (copy.deepcopy(layer), *(() if layer._forward_pre_hooks else [pickled(layer)])):
                assert type(copied) is type(layer)
                assert copied.state_dict().keys() == layer.state_dict().keys()
    assert type(layer) is kind
    assert {name: id(value) for name, value in vars(layer).items()} == before
    assert torch.equal(state, torch.get_rng_state())


def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Standardized(3, 4, 3), COMPUTED),
        (Changed(4, 4, 3), COMPUTED),
        (Masked(5, 5), COMPUTED),
        (Padded(3, 4, 3), None),
        (Matmul(3, 4), None),
        (Einsum(3, 4), None),
        (Counting(3, 4), None),
        (Gated(3, 4), UNKNOWN),
        (Orthogonal(3, 4), None),
        (nn.ConvTranspose2d(3, 4, 3), None),
        (nn.GRU(3, 4), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layer_multiplies_by_what_it_stores_or_is_told_apart(layer, reason, device):
    layer = copy.deepcopy(layer).to(device)
    before, buffers, random = (
        layer.weight if hasattr(layer, "weight") else None,
        list(layer.buffers()),
        torch.get_rng_state(),
    )
    values = [buffer.clone() for buffer in buffers]
    assert why_computed(layer) == reason
    assert layer.training
    assert torch.equal(random, torch.get_rng_state())
    assert getattr(layer, "weight", None) is before
    if device == "cpu":
        assert all(torch.equal(buffer, value) for buffer, value in zip(layer.buffers(), values, strict=True))


def trained(model, recipe, *inputs, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with training(recipe, model, optimizer, total_steps=steps) as loop:
        for _ in range(steps):
            with loop.forward():
                loss = model(*inputs).square().mean()
            loop.backward(loss)
            loop.step()
            optimizer.zero_grad()
    return loop.session


def standardized():
    torch.manual_seed(0)
    return nn.Sequential(Standardized(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 2))


@pytest.mark.parametrize(
    "recipe",
    [
        {"prune": {"sparsity": 0.5, "begin": 1, "end": 2, "every": 1}},
        {"cluster": {"bits": 2, "begin": 1, "min_size": 0}},
        {"low_rank": {"rank": 2, "min_size": 0, "skip": [], "merge": True}},
        {"qat": {"scheme": "int8_weight", "begin": 1}},
        {"lora": {"rank": 2, "base": "none", "include": ["4"]}},
    ],
    ids=lambda recipe: next(iter(recipe)),
)
def test_a_weight_that_forward_computes_is_left_as_it_is_and_named(recipe):
    model = standardized()
    session = trained(model, {**recipe, "allow_partial": True}, torch.randn(2, 3, 8, 8))
    (key,) = recipe
    plain = standardized()
    trained(plain, {}, torch.randn(2, 3, 8, 8))
    assert len(model[0].weight.unique()) == model[0].weight.numel()
    assert int((model[0].weight == 0).sum()) == 0
    if key != "lora":  # include chose another layer
        left = session.receipt().values["techniques"][key]["left_out"]
        assert any(name in ("0", "0.weight") and "Standardized" in reason for name, reason in left.items())


def test_what_include_names_and_forward_computes_is_refused():
    with pytest.raises(CompatibilityError, match=r"got 0: Standardized: its forward multiplies by a weight that it"):
        Session({"prune": {"sparsity": 0.5, "include": ["0"]}}).attach(standardized())


def test_zeros_under_a_mask_of_the_layer_are_zeros_of_its_product():
    torch.manual_seed(0)
    model = nn.Sequential(Masked(16, 16), nn.ReLU(), nn.Linear(16, 4))
    session = trained(model, {"prune": {"sparsity": 0.5, "begin": 1, "end": 2, "every": 1}}, torch.randn(4, 16))
    assert session.coverage["prune"].share == 1
    stored = model[0].weight == 0
    assert stored.any()
    assert (model[0].mask * model[0].weight)[stored].eq(0).all()


class Mine(nn.Module):
    def __init__(self, linear=Orthogonal, conv=Named, words=Words):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.conv = words(10, 64), conv(1, 16, 3)
        self.hidden, self.middle, self.head = linear(16 * 36, 32), linear(32, 32), linear(32, 4)

    def forward(self, x):
        x = torch.relu(self.conv(self.words(x).view(-1, 1, 8, 8))).flatten(1)
        return self.head(torch.relu(self.middle(torch.relu(self.hidden(x)))))


@pytest.mark.parametrize(
    "recipe",
    [
        {"prune": {"sparsity": 0.5, "begin": 1, "end": 2, "every": 1}},
        {"cluster": {"bits": 2, "begin": 1}},
        {"low_rank": {"rank": 2, "min_size": 0, "merge": True}},
        {"qat": {"scheme": "int8", "begin": 1}},
        {"fp8": {"recipe": "rowwise", "include": ["middle", "hidden"]}},
        {"lora": {"rank": 2, "base": "none", "save": "merged"}},
    ],
    ids=lambda recipe: next(iter(recipe)),
)
@pytest.mark.parametrize(
    ("linear", "conv", "words"),
    [(Orthogonal, Named, Words), (Wrapped, WrappedConv, Words), (Channels, Named, Table), (Dense, Named, Words)],
)
def test_a_class_that_computes_as_torchs_is_trained_as_torchs(recipe, linear, conv, words):
    x = torch.arange(8)
    mine, stock = Mine(linear, conv, words), Mine(nn.Linear, nn.Conv2d, nn.Embedding)
    stock.load_state_dict(mine.state_dict())
    own, torchs = (trained(model, {**recipe, "allow_partial": True}, x) for model in (mine, stock))
    (key,) = recipe
    assert own.coverage[key].within == torchs.coverage[key].within > 0
    for name, value in mine.state_dict().items():
        assert torch.equal(value, stock.state_dict()[name]), name
    assert [type(module) for module in mine.children()] == [words, conv, linear, linear, linear]
    if key == "qat":
        ranges = own.files.deployment()["qat"]["ranges"]
        assert torch.equal(convert(mine, ranges)(x), convert(stock, ranges)(x))


def test_adapters_that_peft_cannot_load_are_refused():
    with pytest.raises(CompatibilityError, match=r"Channels does not derive from nn.Linear.*--lora_save merged"):
        Session({"lora": {"rank": 2}}).attach(Mine(Channels))


def test_adapters_that_torchs_attention_would_not_call_are_not_written_as_files():
    net = nn.ModuleDict({"look": nn.MultiheadAttention(64, 2), "head": nn.Linear(64, 64), "out": nn.Linear(64, 4)})
    for save, why in (("adapters", "torch's attention would not call adapters that PEFT loads"), ("merged", None)):
        session = Session({"lora": {"rank": 2, "save": save}, "allow_partial": True})
        session.attach(net)
        left = session.techniques["lora"].left_out
        for name in ("look.out_proj", "look.in_proj_weight"):
            assert (left.get(name) or "").startswith(why or "")
            assert (name in left) == (why is not None)
        session.detach()


@pytest.mark.parametrize("recipe", [
    {"prune": {"sparsity": 0.5}}, {"prune": {"sparsity": 0.5, "granularity": "neuron"}}, {"qat": {"scheme": "int8"}},
    {"cluster": {"bits": 4}}, {"low_rank": {"rank": 2, "min_size": 1}}, {"lora": {"rank": 2, "base": "none"}},
    {"fp8": {"recipe": "tensorwise"}}, {"average": {"kind": "ema"}},
])  # fmt: skip
def test_to_look_at_a_layer_does_not_move_its_spectral_norm(recipe):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), spectral_norm(nn.Linear(64, 64)), nn.Linear(64, 64), nn.Linear(64, 4))
    before = {name: value.clone() for name, value in model[1].named_buffers()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session({**recipe, "allow_partial": True})
    attach_with(session, model, [optimizer])
    session.begin([optimizer], total_steps=4)
    assert before.keys() == dict(model[1].named_buffers()).keys()
    assert all(torch.equal(value, before[name]) for name, value in model[1].named_buffers())
    session.detach()


def test_torchs_attention_is_named_and_refused_where_it_is_asked_for():
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64), nn.Linear(32, 32))
    options = {"rank": 2, "min_size": 0}
    session = Session({"low_rank": options, "allow_partial": True})
    session.attach(model)
    assert any(label.startswith("MultiheadAttention (") for label in session.coverage["low_rank"].left)
    session.detach()
    with pytest.raises(MatchError, match="matches only MultiheadAttention"):
        Session({"low_rank": {**options, "include": ["0.self_attn"]}}).attach(model)
