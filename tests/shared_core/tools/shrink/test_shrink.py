"""`shrink`: the smaller model computes what the masked one does, and what cannot be cut is told."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zeroed import zero_every, zero_units

from shared_core.channel_graph import find_groups
from shared_core.errors import CompatibilityError, ConfigError
from shared_core.tools.shrink import shrink


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


zero = partial(zero_every, 3)


def assert_same(model, result, inputs, tolerance=1e-10):
    with torch.no_grad():
        expected, found = model.eval()(*inputs), result.model.eval()(*inputs)
    assert (expected - found).abs().max() <= tolerance * max(1.0, float(expected.abs().max()))
    assert result.largest_difference <= tolerance


class ConvNet(nn.Module):
    """Residual, batch norm, concatenation, depthwise and grouped convolutions, group norm, flattening."""

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.a, self.a_norm = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.b, self.b_norm = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depth, self.point = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 12, 1)
        self.grouped, self.group_norm = nn.Conv2d(12, 12, 3, padding=1, groups=3), nn.GroupNorm(3, 12)
        self.side = nn.Conv2d(12, 4, 1)
        self.head = nn.Linear(16 * 4 * 4, 5)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)

    def forward(self, x):
        x = F.relu(self.stem_norm(self.stem(x)))
        x = F.relu(x + self.b_norm(self.b(F.gelu(self.a_norm(self.a(x))))))
        x = F.relu(self.point(F.relu(self.depth(x))))
        x = F.relu(self.group_norm(self.grouped(x)))
        x = torch.cat([x, F.relu(self.side(x))], 1)
        return self.head(F.max_pool2d(x, 2).flatten(1))


def test_a_convolutional_net_shrinks_and_computes_the_same():
    model, inputs = ConvNet().double(), torch.randn(2, 3, 8, 8, dtype=torch.double)
    before = copy.deepcopy(model.state_dict())
    groups = zero(model, inputs)
    masked = copy.deepcopy(model)
    result = shrink(model, inputs)
    assert result.removed == {"stem": 3, "a": 2, "point": 1, "side": 1}
    assert set(result.removed) == {group.name for group in groups}
    assert_same(masked, result, (inputs,))
    assert_same(masked, result, (torch.randn(3, 3, 8, 8, dtype=torch.double),))  # not only on the example
    assert result.bytes[1] < result.bytes[0]
    assert result.flops[1] < result.flops[0]
    assert min(result.milliseconds) > 0
    small = result.model
    assert (small.stem.out_channels, small.depth.groups, small.depth.in_channels) == (5, 5, 5)
    assert (small.grouped.groups, small.group_norm.num_groups, small.group_norm.num_channels) == (2, 2, 8)
    assert (small.b_norm.num_features, small.head.in_features) == (5, 11 * 16)
    assert result.tensors["a.weight"] == ((6, 8, 3, 3), (4, 5, 3, 3))
    assert result.bytes[1] == sum(value.numel() * value.element_size() for value in small.state_dict().values())
    assert before["stem.weight"].shape == model.stem.weight.shape  # the original is whole
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), masked.state_dict().values(), strict=True)
    )


def test_the_result_trains():
    model, inputs = ConvNet(), torch.randn(4, 3, 8, 8)
    model.stem.weight.requires_grad_(False)
    zero(model, inputs)
    small = shrink(model.train(), inputs, latency_repeats=0).model
    assert small.training
    assert small.stem_norm.training
    assert not small.stem.weight.requires_grad
    assert small.a.weight.requires_grad
    small(inputs).square().mean().backward()
    assert small.a.weight.grad.shape == small.a.weight.shape


@pytest.mark.parametrize("padding", [0, 1])
def test_what_a_batch_norm_makes_of_zero_is_folded_where_it_arrives_everywhere(padding):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Conv2d(4, 3, 3, padding=padding))
    model, inputs = model.double(), torch.randn(2, 2, 8, 8, dtype=torch.double)
    model[1].running_mean.normal_()
    zero(model, inputs)
    result = shrink(model, inputs)
    assert result.removed == ({} if padding else {"0": 1})
    assert_same(model, result, (inputs,))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Softplus, nn.Tanh], ids=lambda kind: kind.__name__)
def test_what_an_activation_makes_of_zero_goes_into_the_next_bias(activation, bias):
    model = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 3, bias=bias)).double()
    inputs = torch.randn(5, 4, dtype=torch.double)
    zero(model, inputs)
    result = shrink(model, inputs)
    assert result.removed == {"0": 2}
    assert_same(model, result, (inputs,))
    gone = model[2].weight[:, 1::3].sum(1)
    expected = activation()(torch.zeros((), dtype=torch.double)) * gone
    if bias:
        assert torch.allclose(result.model[2].bias, model[2].bias + expected)
    elif activation is not nn.Tanh:
        assert torch.allclose(result.model[2].bias, expected)
    else:
        assert result.model[2].bias is None


def test_a_constant_left_by_a_bias_alone_is_folded_too():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)).double()
    inputs = torch.randn(2, 2, 8, 8, dtype=torch.double)
    with torch.no_grad():
        model[0].weight[2] = 0
        model[0].bias[2] = 0.7
    result = shrink(model, inputs)
    assert result.removed == {"0": 1}
    assert_same(model, result, (inputs,))
    assert torch.allclose(result.model[2].bias, model[2].bias + 0.7 * model[2].weight[:, 2].sum((1, 2)))


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 3, 3, padding=1), nn.ConvTranspose2d(4, 3, 3)], ids=["padded", "transposed"]
)
def test_a_constant_that_does_not_arrive_everywhere_is_not_folded(layer):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Sigmoid(), layer).double()
    inputs = torch.randn(2, 2, 8, 8, dtype=torch.double)
    zero(model, inputs)
    refused = shrink(model, inputs)
    assert refused.removed == {}
    assert refused.kept == {}  # known before anything was tried
    model[1] = nn.Tanh()  # zero at zero
    result = shrink(model, inputs)
    assert result.removed == {"0": 1}
    assert_same(model, result, (inputs,))


def test_a_dead_unit_that_is_not_zero_in_its_weights_stays():
    model, inputs = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(5, 4)
    with torch.no_grad():
        model[0].bias[0] = -100.0  # zero on every example here, not for every input
    result = shrink(model, inputs)
    assert result.removed == {}
    assert str(result).startswith("Nothing was removed")


def test_half_of_a_gate_is_enough():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3, bias=False)

        def forward(self, x):
            return self.down(torch.sigmoid(self.gate(x)) * self.up(x))

    model, inputs = Gated().double(), torch.randn(5, 4, dtype=torch.double)
    with torch.no_grad():
        model.up.weight[:2] = 0
        model.up.bias[:2] = 0
        model.gate.weight[4] = 0  # the gate alone leaves sigmoid(bias) times something
    result = shrink(model, inputs)
    assert result.removed == {"gate": 2}
    assert_same(model, result, (inputs,))


class Block(nn.Module):
    """Attention with two key-value heads for four query heads, and a gated MLP, after root-mean-square norms."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-3), nn.RMSNorm(width, eps=1e-3)
        self.q, self.kv = nn.Linear(width, 16), nn.Linear(width, 16)
        self.o = nn.Linear(16, width)
        self.gate, self.up, self.down = nn.Linear(width, 12), nn.Linear(width, 12), nn.Linear(12, width)
        self.n_heads, self.n_kv_heads, self.head_dim = 4, 2, 4

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(batch, length, self.n_heads, self.head_dim).transpose(1, 2)
        kv = self.kv(y).view(batch, length, 2, self.n_kv_heads, self.head_dim)
        k, v = (item.transpose(1, 2) for item in kv.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).reshape(batch, length, -1))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def decoder():
    return nn.Sequential(nn.Embedding(11, 16), Block(), Block(), nn.RMSNorm(16, eps=1e-3), nn.Linear(16, 11)).double()


def test_attention_heads_go_and_the_module_is_told_how_many_are_left():
    model, inputs = decoder(), torch.randint(0, 11, (2, 5))
    zero(model, inputs)
    result = shrink(model, inputs)
    assert result.removed == {"1.q": 1, "1.gate": 4, "2.q": 1, "2.gate": 4}
    assert_same(model, result, (inputs,))
    block = result.model[1]
    assert (block.n_heads, block.n_kv_heads, block.head_dim) == (2, 1, 4)
    assert (block.q.out_features, block.kv.out_features, block.o.in_features) == (8, 8, 8)


def test_a_narrower_root_mean_square_norm_is_exact():
    model, inputs = decoder(), torch.randint(0, 11, (2, 5))
    zero(model, inputs, kinds=("width",), roles=("out",))
    result = shrink(model, inputs)
    assert result.removed == {"0#2": 5}
    assert_same(model, result, (inputs,))
    norm = result.model[1].norm
    assert norm.normalized_shape == (11,)
    assert norm.eps == pytest.approx(1e-3 * 16 / 11)
    kept = [index for index in range(16) if index % 3 != 1]
    assert torch.allclose(norm.weight, model[1].norm.weight[kept] * (16 / 11) ** 0.5)


class Residual(nn.Module):
    def __init__(self, dtype=torch.double):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.to(dtype)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(F.relu(self.up(self.norm(x)))))


def test_a_layer_norm_is_narrowed_only_if_that_is_allowed():
    model, inputs = Residual(), torch.randint(0, 11, (2, 5))
    zero(model, inputs, kinds=("width",))
    refused = shrink(model, inputs)
    assert refused.removed == {}
    assert "allow_inexact" in refused.kept["embed#2"]
    result = shrink(model, inputs, allow_inexact=True)
    assert result.removed == {"embed#2": 5}
    assert "masked model" in result.notes[0]
    assert 0 < result.largest_difference < 1
    assert result.model.norm.normalized_shape == (11,)


def test_units_can_be_given_instead_of_found():
    model, inputs = decoder(), torch.randint(0, 11, (2, 5))
    groups = {group.name: group for group in find_groups(model, inputs)}
    keep = {"1.gate": torch.arange(12) < 7, "2.q": torch.tensor([False, True])}
    result = shrink(model, inputs, keep=keep)
    assert result.removed == {"1.gate": 5, "2.q": 1}
    masked = copy.deepcopy(model)
    for name, mask in keep.items():
        zero_units(masked, groups[name], ~mask.numpy(), ("out",))
    assert_same(masked, result, (inputs,))


def test_a_multiple_is_left():
    model, inputs = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2)), torch.randn(3, 4)
    zero(model, inputs)
    assert shrink(model, inputs).model[0].out_features == 16
    assert shrink(model, inputs, multiple_of=5).model[0].out_features == 20


def test_a_layer_that_is_all_zero_keeps_one_unit_and_says_so():
    model, inputs = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(3, 4)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    result = shrink(model, inputs)
    assert result.removed == {"0": 5}
    assert result.model[0].out_features == 1
    assert "one is kept" in result.kept["0"]
    assert_same(model, result, (inputs,), 1e-6)


def test_nothing_to_remove_is_a_plain_result():
    model, inputs = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(3, 4)
    result = shrink(model, inputs)
    assert (result.removed, result.kept, result.tensors, result.notes) == ({}, {}, {}, ["no unit is zero"])
    assert result.bytes[0] == result.bytes[1]
    assert result.flops[0] == result.flops[1]
    assert result.model is not model
    assert torch.equal(result.model(inputs), model(inputs))


def test_what_the_code_does_not_let_go_is_taken_back_alone():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).view(-1, 2, 3).flatten(1).relu())

    model, inputs = Fixed(), torch.randn(3, 4)
    zero(model, inputs)
    result = shrink(model, inputs)
    assert result.removed == {"a": 2}
    assert "does not run" in result.kept["b"]
    assert_same(model, result, (inputs,), 1e-6)


def test_tied_and_shared_layers_shrink_together():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 6)
            self.again = nn.Linear(6, 6)
            self.embed, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x, tokens):
            x = self.again(torch.relu(self.again(torch.relu(self.first(x))))) + self.embed(tokens)
            return self.head(x)

    model = Shared().double()
    inputs = (torch.randn(3, 4, dtype=torch.double), torch.randint(0, 5, (3,)))
    zero(model, inputs)
    result = shrink(model, inputs)
    assert list(result.removed.values()) == [2]
    assert result.model.head.weight is result.model.embed.weight
    assert result.model.head.weight.shape == (5, 4)
    assert result.model.again.weight.shape == (4, 4)
    assert_same(model, result, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_shrink_too(dtype):
    model, inputs = ConvNet().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    zero(model, inputs)
    result = shrink(model, inputs)
    assert result.removed == {"stem": 3, "a": 2, "point": 1, "side": 1}
    assert result.model.stem.weight.dtype == dtype
    assert_same(model, result, (inputs,), 1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (torch.ones(3, 4), {"multiple_of": 0}, "multiple_of must be"),
        (torch.ones(3, 4), {"multiple_of": True}, "multiple_of must be"),
        (torch.ones(3, 4), {"latency_repeats": -1}, "latency_repeats must be"),
        (torch.ones(3, 4), {"keep": {"nowhere": torch.ones(3, dtype=torch.bool)}}, "must name groups"),
        (torch.ones(3, 4), {"keep": {"0": torch.ones(3, dtype=torch.bool)}}, r"bool of shape \(6,\)"),
        (torch.ones(3, 4), {"keep": {"0": torch.zeros(6, dtype=torch.bool)}}, "at least one"),
        *(
            (inputs, {}, "example_inputs must be what the model takes, got")
            for inputs in (None, "text", {"nowhere": torch.ones(3, 4)}, torch.ones(3, 7), torch.ones(3, 4).int())
        ),
    ],
)
def test_wrong_options_and_inputs_are_refused(inputs, options, message):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match=message):
        shrink(model, inputs, **options)
    with pytest.raises(CompatibilityError, match="built from its config"):
        shrink(model, torch.ones(3, 4), from_config=True)
