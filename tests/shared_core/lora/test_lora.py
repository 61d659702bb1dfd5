"""Adapters over a frozen base: W = dequant(Q(W0)) + scale*BA in float64, gradients, merging, layers, refusals."""

import copy
import importlib
import math
import sys

import pytest
import torch
from lora_runs import BASES, X, net, run, session
from torch import nn

from shared_core.errors import CompatibilityError, ConfigError, MatchError, MissingExtraError, TrainingError
from shared_core.lora import LoraConfig
from shared_core.lora import quantized_base as lora_base
from shared_core.lora.adapters import adapters, select_layers
from shared_core.lora.quantized_base import float_weight, freeze, frozen_tensors, on_grid
from shared_core.numerics.rounding import sqnr

# QuantState.code of NF4: the quantiles of a normal distribution in appendix E of arXiv:2305.14314.
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=torch.float64,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def block_round(weight, block=64):
    """NF4 without double quantization, from the paper: nearest code of each block divided by its largest magnitude."""
    flat = weight.double().flatten()
    rounded = []
    for part in flat.split(block):
        amax = part.abs().max()
        nearest = (part[:, None] / amax - NF4).abs().argmin(1)
        rounded.append(NF4[nearest] * amax)
    return torch.cat(rounded).reshape(weight.shape)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24, 64), (64, 16), (10, 10), (3, 96), (33, 312), (3, 33)], ids=str)
def test_nf4_is_the_nearest_code_of_a_block(shape, bias):
    # rows of part blocks too, of which bitsandbytes' AVX-512 kernel takes other blocks' scales
    torch.manual_seed(0)
    linear = nn.Linear(*shape[::-1], bias=bias)
    linear.weight.data *= torch.logspace(-2, 0, len(linear.weight))[:, None]  # blocks of other scales
    frozen = freeze(linear, LoraConfig(rank=1, base="nf4", double_quant=False))
    expected = block_round(linear.weight.detach())
    torch.testing.assert_close(float_weight(frozen).double(), expected, atol=1e-6, rtol=0)
    assert frozen_tensors(frozen)["codes"].numel() == math.ceil(linear.weight.numel() / 2)
    x = torch.randn(5, shape[1], requires_grad=True)
    product = x.double() @ expected.T + (linear.bias.double() if bias else 0)
    torch.testing.assert_close(frozen(x).double(), product, atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(frozen(x).square().sum(), x)
    torch.testing.assert_close(gradient.double(), 2 * product @ expected, atol=1e-4, rtol=1e-4)


def test_int8_is_refused_where_its_sums_saturate(monkeypatch):
    lora_base.optional("bitsandbytes", "bnb", "lora")
    lora_base.int8_sums_exactly.cache_clear()
    saturated = torch.full((17, 32), 2**15 - 1, dtype=torch.int32)
    monkeypatch.setattr(torch.ops.bitsandbytes, "int8_linear_matmul", lambda *codes: saturated)
    with pytest.raises(CompatibilityError, match=r"int8 must be multiplied exactly.* use --lora_base nf4"):
        session(base="int8").attach(net())
    lora_base.int8_sums_exactly.cache_clear()


def test_int8_is_absmax_rounding_of_rows():
    weight = net()[0].weight.detach()
    half = weight.half().double()  # LLM.int8() quantizes float16
    scale = half.abs().amax(1, keepdim=True) / 127
    grid = (half / scale).round() * scale
    torch.testing.assert_close(on_grid(weight, LoraConfig(rank=1, base="int8")).double(), grid, atol=2e-4, rtol=0)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8), (2, 3, 5, 8), (2, 1, 3, 5, 8), (0, 3, 5, 8)])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_inputs_have_any_number_of_dimensions(base, is_training, shape):
    frozen = freeze(nn.Linear(8, 4), LoraConfig(rank=1, base=base)).train(is_training)
    x = torch.randn(shape, requires_grad=True)
    y = frozen(x)
    torch.testing.assert_close(y.reshape(-1, 4), frozen(x.reshape(-1, 8)))
    assert y.shape == (*shape[:-1], 4)
    y.sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("base", ["nf4", "fp4"])
def test_double_quantization_costs_less_memory_and_little_accuracy(base, double_quant):
    linear = nn.Linear(256, 256)
    plain, twice = (freeze(linear, LoraConfig(rank=1, base=base, double_quant=twice)) for twice in (False, True))
    memory = [sum(tensor.nbytes for tensor in frozen_tensors(layer).values()) for layer in (plain, twice)]
    assert memory[1] < memory[0] < linear.weight.nbytes / 6
    signal = [sqnr(linear.weight.detach(), float_weight(layer)) for layer in (plain, twice)]
    assert signal[0] > 17
    assert abs(signal[0] - signal[1]) < 0.3


@pytest.mark.parametrize("base", BASES)
def test_forward_is_the_frozen_weight_and_the_adapters(base):
    model = net()
    reference = copy.deepcopy(model).double()
    ours = session(base=base)
    ours.attach(model)
    for name, layer in ours.techniques["lora"].layers.items():
        a, b = adapters(layer)
        nn.init.normal_(b, generator=torch.Generator().manual_seed(3))
        wanted = float_weight(layer.base_layer).double() + 3.0 * (b.detach().double() @ a.detach().double())
        reference.get_submodule(name).weight.data = wanted
    torch.testing.assert_close(model(X).double(), reference(X.double()), atol=2e-6, rtol=2e-6)
    assert not torch.allclose(model(X), net()(X), atol=1e-2)


@pytest.mark.parametrize("base", BASES)
def test_adapters_and_the_head_alone_are_trained(base):
    model = net()
    ours = session(base=base)
    ours.attach(model)
    before = {name: tensor.clone() for name, tensor in frozen_tensors(model[0].base_layer).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    ours.begin([optimizer], total_steps=1)
    bias = model.state_dict()["0.bias"].clone()
    model(X).square().mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    ends = ("lora_A.default.weight", "lora_B.default.weight")
    assert trained == {f"{layer}.{end}" for layer in (0, 2) for end in ends} | {"4.weight", "4.bias"}
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen_tensors(model[0].base_layer).items())
    assert torch.equal(model.state_dict()["0.bias"], bias)


def test_gradients_of_the_adapters_are_those_of_the_merged_weight():
    model = net()
    ours = session()
    ours.attach(model)
    layer = ours.techniques["lora"].layers["0"]
    a, b = adapters(layer)
    nn.init.normal_(b, generator=torch.Generator().manual_seed(3))
    reference = net().double()
    reference.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    model(X).square().sum().backward()
    reference(X.double()).square().sum().backward()
    gradient = reference[0].weight.grad  # dL/dA = scale·Bᵀ·dL/dW, dL/dB = scale·dL/dW·Aᵀ
    torch.testing.assert_close(a.grad.double(), 3.0 * b.double().T @ gradient, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(b.grad.double(), 3.0 * gradient @ a.double().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("base", BASES)
def test_merged_it_computes_what_it_did_with_adapters(base):
    model = net()
    layers = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    ours, _ = run(model, base=base)
    assert list(model.state_dict()) == keys
    saved, adapted = ours.files.bake(model.state_dict()), model.eval()(X)
    model.train()
    ours.finish()
    assert list(model.state_dict()) == keys
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    assert dict(model.named_modules()) == layers
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert all(parameter.requires_grad for parameter in model.parameters())
    # in evaluation, unlike training, LLM.int8() rounds activations to 8 bits too
    torch.testing.assert_close(model(X), adapted, atol=5e-3 if base == "int8" else 1e-6, rtol=0)
    plain = net()
    plain.load_state_dict(saved, strict=True)
    assert torch.equal(plain(X), model(X))


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_requantized_weights_lie_on_the_grid_and_the_error_is_told(base):
    model = net()
    options = {"base": base, **({"double_quant": False} if base == "nf4" else {})}
    ours, _ = run(model, **options, requantize=True)
    merged, baked = model.state_dict(), ours.files.bake(model.state_dict())
    ours.finish()
    config = LoraConfig(rank=2, **options)
    for name in ("0.weight", "2.weight"):
        assert torch.equal(model.state_dict()[name], baked[name])
        assert torch.equal(baked[name], on_grid(merged[name], config))
        assert not torch.equal(baked[name], merged[name])
        # ... and a grid: rounding again changes nothing
        torch.testing.assert_close(on_grid(baked[name], config), baked[name], atol=2e-4, rtol=0)
    told = ours.receipt()["techniques"]["lora"]["per_layer"][0]
    error = ((baked["0.weight"] - merged["0.weight"]).double().norm() / merged["0.weight"].double().norm()).item()
    assert told["requantized_error"] == pytest.approx(error, rel=1e-4)
    assert told["merge_error"] < 1e-6 < told["requantized_error"]
    assert told["adapter_size"] > 0


@pytest.mark.parametrize("base", ["nf4", "none"])
def test_fused_evaluation_of_transformer_layers_sees_the_adapters(base):
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.Sequential(block, nn.Linear(16, 3))
    ours = session(include=["*.linear?"], base=base)
    ours.attach(model)
    nn.init.ones_(adapters(ours.techniques["lora"].layers["0.linear1"])[1])
    x = torch.randn(2, 5, 16)
    trained = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), trained, atol=1e-5, rtol=0)
    assert "0.self_attn.out_proj" not in ours.techniques["lora"].layers
    ours.detach()
    assert block.activation_relu_or_gelu == 1


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(3, 5), (64, 64), (1, 130)])
def test_odd_sizes_and_weights_of_zeros(base, shape):
    for weight in (torch.zeros(shape), torch.randn(shape, generator=torch.Generator().manual_seed(0))):
        model = nn.Sequential(nn.Linear(*shape[::-1]), nn.Linear(shape[0], 2))
        model[0].weight.data = weight.clone()
        ours = session(base=base, include=["0"], rank=8)
        ours.attach(model)
        frozen = float_weight(model[0].base_layer)
        assert frozen.shape == shape
        assert torch.allclose(frozen, weight, atol=0.2 * weight.abs().max().item())
        assert torch.equal(model.state_dict()["0.weight"], frozen)
        assert model(torch.ones(2, shape[1])).isfinite().all()
        ours.receipt()


# -- which layers


class Tied(nn.Module):
    """A language model: the output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.body = nn.Linear(8, 8)
        self.output = nn.Linear(8, 30, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.body(self.embedding(x)))


@pytest.mark.parametrize(
    ("options", "adapted", "whole"),
    [
        ({}, ["0", "2"], ["4"]),
        ({"train": "none"}, ["0", "2"], []),
        ({"train": "last"}, ["0", "2"], ["4"]),
        ({"include": "Linear"}, ["0", "2", "4"], []),
        ({"include": "last"}, ["4"], []),
        ({"include": "0"}, ["0"], ["4"]),
        ({"skip": "first"}, ["2"], ["4"]),
        ({"train": "2,last"}, ["0"], ["2", "4"]),
    ],
)
def test_what_is_adapted_and_what_is_trained_whole(options, adapted, whole):
    ours = session(base="none", **options)
    ours.attach(net())
    technique = ours.techniques["lora"]
    assert list(technique.layers) == adapted
    assert technique.whole == whole


def test_an_output_layer_tied_to_the_embedding_is_frozen():
    model = Tied()
    ours = session(base="none")
    ours.attach(model)
    assert list(ours.techniques["lora"].layers) == ["body"]
    assert not model.embedding.weight.requires_grad
    with pytest.raises(CompatibilityError, match="output: its weight is shared"):
        session(include=["output"]).attach(Tied())


def test_a_layer_under_two_names_is_left_alone():
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.Linear(6, 6), shared, nn.Linear(6, 2))
    ours = session(base="none")
    ours.attach(model)
    assert list(ours.techniques["lora"].layers) == ["1"]
    assert ours.techniques["lora"].left_out["0"] == "its weight is shared with another module"


# -- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"rank must be in \[1"),
        ({"alpha": 0}, r"alpha must be in \(0"),
        ({"alpha": float("nan")}, "alpha must be a finite number"),
        ({"dropout": 1.0}, r"dropout must be in \[0.0, 1.0\)"),
        ({"base": "nf5"}, "base must be one of .* did you mean 'nf4'"),
        ({"train": ["none", "last"]}, "train must be none alone"),
        ({"base": "none", "requantize": True}, "requantize cannot be combined with base=none"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**{"rank": 4, **options})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Conv1d(4, 4, 1)), {}, r"has none \(1 convolution"),
        (nn.Sequential(nn.Linear(4, 2)), {}, "only 0, .*--lora_include '0'"),
        (nn.Linear(4, 2), {"include": ["Linear"]}, "it is the model itself"),
        (net(), {"include": ["decoder.*"]}, r"include pattern 'decoder\.\*' matches no module"),
        (net(), {"train": ["had"]}, "train pattern 'had' matches no module"),
        (net().double(), {}, "0: its weight is torch.float64"),
    ],
)
def test_matching_nothing_is_an_error(model, options, message):
    before = list(model.state_dict())
    with pytest.raises(MatchError, match=message):
        session(**options).attach(model)
    assert list(model.state_dict()) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_weights_that_are_not_finite_are_refused_and_the_model_stays():
    model = net()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match="weights must be finite"):
        session().attach(model)
    assert type(model[0]) is nn.Linear
    with torch.no_grad():
        model[2].weight[0, 0] = 1e6
    with pytest.raises(TrainingError, match=r"float16.* for base=int8, got up to 1e\+06"):
        session(base="int8").attach(model)


@pytest.mark.parametrize(("library", "extra"), [("peft", "lora"), ("bitsandbytes", "bnb")])
def test_a_missing_library_names_its_extra(library, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    model = net()
    with pytest.raises(MissingExtraError, match=rf"lora: needs {library}, .*efftrain\[{extra}\]"):
        session().attach(model)
    assert type(model[0]) is nn.Linear
    if library == "bitsandbytes":
        session(base="none").attach(model)


def test_a_device_without_bitsandbytes_is_named(monkeypatch):
    functional = importlib.import_module("bitsandbytes.functional")

    def fail(*args, **kwargs):
        raise NotImplementedError("no kernel for this device")

    monkeypatch.setattr(functional, "quantize_4bit", fail)
    with pytest.raises(
        CompatibilityError, match=r"base nf4 must run on cpu, but bitsandbytes .* no kernel .* --lora_base none"
    ):
        session().attach(net())


class Looked(nn.Module):
    """Reads weights as a LightningModule does, and one to compute with."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.third(nn.functional.linear(self.first(x), self.second.weight))

    def training_step(self, batch):
        return self.first.weight.square().mean()

    def configure_optimizers(self):
        return [self.first.weight, self.third.weight]

    def plot_weights(self, axes):
        axes.imshow(self.first.weight)

    def largest(self):
        return self.third.weight.max(), self.third.weight.cpu().numpy()


def test_layers_that_are_looked_at_are_adapted_and_those_whose_weights_are_used_are_not():
    layers, _, _ = select_layers(Looked(), LoraConfig(rank=2, base="none", include=("first", "third")))
    assert [*layers] == ["first", "third"]
    _, _, left_out = select_layers(Looked(), LoraConfig(rank=2, base="none"))
    assert left_out["second"] == "Looked computes with its weight itself, bypassing any adapter"
    assert "first" not in left_out
