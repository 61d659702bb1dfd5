"""Adapters over a frozen base: against W = dequant(Q(W0)) + scale*BA in float64, exact resume, plain weights."""

import copy
import importlib
import math
import sys

import pytest
import torch
from torch import nn

from shared_core import Recipe, Session
from shared_core.errors import (
    CheckpointError,
    CompatibilityError,
    ConfigError,
    MatchError,
    MissingExtraError,
    TrainingError,
)
from shared_core.quantization import LoraConfig
from shared_core.quantization.lora_base import float_weight, freeze, frozen_tensors, on_grid, sqnr
from shared_core.quantization.lora_layers import adapters
from shared_core.state_file import load_state, save_state

# QuantState.code of NF4: the quantiles of a normal distribution in appendix E of arXiv:2305.14314.
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    dtype=torch.float64,
)  # fmt: skip
BASES = ("nf4", "fp4", "int8", "none")
X = torch.randn(6, 40, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def net(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 18, bias=False), nn.Tanh(), nn.Linear(18, 3)
        return nn.Sequential(*layers).to(dtype)


def session(**options):
    return Session(Recipe.from_dict({"lora": {"rank": 2, "alpha": 6.0, **options}}), seed=1)


def run(model, steps=3, state=None, optimizer_state=None, stop=None, **options):
    """A run, the states with which it could be resumed, and its optimizer."""
    ours = session(**options)
    ours.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if state is not None:
        ours.load_state_dict(state)
        optimizer.load_state_dict(optimizer_state)
    ours.begin([optimizer], total_steps=steps)
    for _ in range(ours.step, steps if stop is None else stop):
        ours.loss(model(X.to(model[4].weight.dtype)).square().mean()).backward()
        ours.before_optimizer_step()
        optimizer.step()
        ours.after_optimizer_step()
        optimizer.zero_grad()
    return ours, optimizer


def block_round(weight, block=64):
    """NF4 without double quantisation, from the paper: nearest code of each block divided by its largest magnitude."""
    flat = weight.double().flatten()
    rounded = []
    for part in flat.split(block):
        amax = part.abs().max()
        nearest = (part[:, None] / amax - NF4).abs().argmin(1)
        rounded.append(NF4[nearest] * amax)
    return torch.cat(rounded).reshape(weight.shape)


def test_nf4_is_the_nearest_code_of_a_block():
    linear = net()[0]
    frozen = freeze(linear, LoraConfig(rank=1, double_quant=False))
    torch.testing.assert_close(float_weight(frozen).double(), block_round(linear.weight.detach()), atol=1e-6, rtol=0)
    assert frozen_tensors(frozen)["codes"].numel() == linear.weight.numel() / 2


def test_int8_is_absmax_rounding_of_rows():
    weight = net()[0].weight.detach()
    half = weight.half().double()  # LLM.int8() quantises float16
    scale = half.abs().amax(1, keepdim=True) / 127
    grid = (half / scale).round() * scale
    torch.testing.assert_close(on_grid(weight, LoraConfig(rank=1, base="int8")).double(), grid, atol=2e-4, rtol=0)


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("base", ["nf4", "fp4"])
def test_double_quantisation_costs_less_memory_and_little_accuracy(base, double_quant):
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
    saved, adapted = ours.bake(model.state_dict()), model.eval()(X)
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
def test_requantised_weights_lie_on_the_grid_and_the_error_is_told(base):
    model = net()
    ours, _ = run(model, base=base, double_quant=False, requantize=True)
    merged, baked = model.state_dict(), ours.bake(model.state_dict())
    ours.finish()
    config = LoraConfig(rank=2, base=base, double_quant=False)
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


@pytest.mark.parametrize("stop", [0, 1, 3])
@pytest.mark.parametrize("base", BASES)
def test_a_resumed_run_is_the_run_that_was_never_stopped(base, stop, tmp_path):
    whole = net()
    ours, optimizer = run(whole, 5, base=base, dropout=0.0)
    stopped = net()
    first, halfway = run(stopped, 5, base=base, stop=stop)
    save_state(tmp_path, first.state_dict())
    weights = {name: value.clone() for name, value in stopped.state_dict().items()}
    resumed = nn.Sequential(*(type(m)(m.in_features, m.out_features, m.bias is not None)
                              if isinstance(m, nn.Linear) else m for m in net()))  # fmt: skip
    # a trainer builds the model, attaches, loads the weights, then the states
    again = session(base=base)
    again.attach(resumed)
    resumed.load_state_dict(weights)
    second = torch.optim.AdamW(resumed.parameters(), lr=0.02)
    second.load_state_dict(halfway.state_dict())
    again.load_state_dict(load_state(tmp_path))
    again.begin([second], total_steps=5)
    for name, tensor in frozen_tensors(resumed[0].base_layer).items():
        assert torch.equal(tensor, frozen_tensors(stopped[0].base_layer)[name]), name
    for _ in range(stop, 5):
        again.loss(resumed(X).square().mean()).backward()
        again.before_optimizer_step()
        second.step()
        again.after_optimizer_step()
        second.zero_grad()
    ours.finish()
    again.finish()
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    for one, other in zip(optimizer.state_dict()["state"].values(), second.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert again.state_dict()["techniques"]["lora"]["layers"]  # a run that trains on needs it after the end too


def test_weights_loaded_alone_become_the_base():
    model, other = net(), net()
    nn.init.normal_(other[0].weight)
    run(model)
    model.load_state_dict(other.state_dict())
    config = LoraConfig(rank=2)
    assert torch.equal(model.state_dict()["0.weight"], on_grid(other[0].weight, config))
    assert (adapters(model[0])[1] == 0).all()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"0.weight"'):
        model.load_state_dict({name: value for name, value in other.state_dict().items() if name != "0.weight"})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"2.bias"'):
        model.load_state_dict({**other.state_dict(), "2.bias": torch.zeros(18)})


@pytest.mark.parametrize("base", BASES)
def test_detached_after_loading_the_model_has_what_was_loaded(base):
    model, other = net(), net()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    ours = session(base=base)
    ours.attach(model)
    model.load_state_dict(other.state_dict())
    ours.detach()
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("base", BASES)
def test_detached_before_training_everything_is_as_it_was(base):
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model[0].bias.requires_grad_(False)
    ids = [id(parameter) for parameter in model.parameters()]
    rng = torch.get_rng_state()
    ours = session(base=base)
    ours.attach(model)
    ours.detach()
    assert torch.equal(torch.get_rng_state(), rng)
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True, True, True]
    assert {type(module) for module in model.modules()} == {nn.Sequential, nn.Linear, nn.Tanh}
    assert not hasattr(model, "peft_config")
    assert not any(module._state_dict_hooks or module._forward_pre_hooks for module in model.modules())


def test_cut_short_the_model_computes_what_it_did():
    model = net()
    ours, _ = run(model)
    adapted = model(X)
    ours.detach()
    ours.detach()
    torch.testing.assert_close(model(X), adapted, atol=1e-6, rtol=0)
    assert type(model[0]) is nn.Linear


def test_the_float_weight_is_dropped_when_training_begins():
    model = net()
    linear = model[0]
    ours = session()
    ours.attach(model)
    assert linear.weight.numel() == 40 * 24
    ours.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=1)
    assert linear.weight.numel() == 0
    report = ours.receipt()["techniques"]["lora"]
    assert report["bytes_after"] < report["bytes_before"] / 5
    assert report["adapter_parameters"] == 2 * (40 + 24 + 24 + 18)
    assert report["trained_parameters"] == report["adapter_parameters"] + 3 * 18 + 3
    assert report["frozen_parameters"] == 40 * 24 + 24 + 24 * 18
    assert report["trained_whole"] == ["4"]
    assert "bitsandbytes" in report["backend"]


@pytest.mark.parametrize("base", ["nf4", "int8", "none"])
def test_bf16_models_have_float32_adapters_and_stay_bf16(base):
    model = net(torch.bfloat16)
    ours, _ = run(model, base=base)
    assert {matrix.dtype for layer in ours.techniques["lora"].layers.values() for matrix in adapters(layer)} == {
        torch.float32
    }
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    ours.finish()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model(X.bfloat16()).isfinite().all()


def test_a_model_that_is_cast_after_attach_comes_back_cast():
    model = net()
    ours = session()
    ours.attach(model)
    model.bfloat16()
    ours.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=1)
    assert {value.dtype for value in model.state_dict().values()} == {torch.bfloat16}
    ours.finish()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_draws_come_from_the_runs_own_generator():
    a = [adapters(run(net(), stop=0)[0].techniques["lora"].layers["0"])[0] for _ in range(2)]
    assert torch.equal(*a)
    bound = math.sqrt(6 / ((1 + 5) * 40))  # He's uniform bound with a = √5
    assert bound * 0.8 < a[0].abs().max().item() <= bound


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


def test_int8_codes_that_moved_with_the_model_are_the_ones_that_multiply():
    model = net()
    session(base="int8").attach(model)
    model(X)
    layer = model[0].base_layer
    layer.weight.data = torch.zeros_like(layer.weight.data)  # a move to another device gives the parameter new data
    torch.testing.assert_close(model[0](X), model[0].base_layer.bias.expand(6, -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("base", BASES)
def test_autocast_leaves_what_is_frozen_alone(base):
    model = net()
    bias = model[0].bias.detach().clone()
    ours = session(base=base)
    ours.attach(model)
    ours.begin([torch.optim.SGD(model.parameters(), lr=0.1)], total_steps=1)
    with torch.autocast("cpu", torch.bfloat16):
        model(X.bfloat16()).square().mean().backward()
    assert all(matrix.grad.dtype == torch.float32 for matrix in adapters(model[0]))
    assert torch.equal(model.state_dict()["0.bias"], bias)
    ours.finish()
    assert torch.equal(model[0].bias, bias)


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


def test_a_receipt_can_be_written_as_json(tmp_path):
    for base in ("none", "nf4"):
        ours, _ = run(net(), 1, base=base)
        ours.finish()
        ours.receipt().write(tmp_path)
        assert not any(word in path.read_text() for path in tmp_path.iterdir() for word in ("Infinity", "NaN"))


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
        ({"base": "none", "requantize": True}, "requantize must be false with base=none"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**{"rank": 4, **options})


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (nn.Sequential(nn.Conv1d(4, 4, 1)), {}, "has no Linear"),
        (nn.Sequential(nn.Linear(4, 2)), {}, "0: it is trained whole"),
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
    with pytest.raises(TrainingError, match=r"within float16 for base=int8, got up to 1e\+06"):
        session(base="int8").attach(model)


def test_an_optimizer_without_the_adapters_is_refused():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = session()
    ours.attach(model)
    with pytest.raises(CompatibilityError, match="optimizer must hold the adapters of 0"):
        ours.begin([optimizer], total_steps=1)


def test_a_model_with_adapters_is_refused():
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    model = get_peft_model(net(), PeftConfig(target_modules=["0"], r=2))
    with pytest.raises(CompatibilityError, match="must have no adapters yet"):
        session().attach(model)


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


@pytest.mark.parametrize("options", [{"rank": 3}, {"base": "int8"}, {"skip": ["first"]}, {"double_quant": False}])
def test_a_state_of_other_options_is_refused(options):
    state = run(net(), 1)[0].state_dict()
    other = session(**options)
    other.attach(net())
    with pytest.raises(CheckpointError, match="resume with the options of the saved run"):
        other.load_state_dict(state)
