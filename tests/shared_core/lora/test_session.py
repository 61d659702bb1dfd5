"""Runs with adapters: exact resume, loaded weights, detaching, casts and moves, receipts, refusals."""

import copy
import math

import pytest
import torch
from lora_runs import BASES, X, net, run, session
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.distillation.teachers import StudentAverage
from shared_core.engine.checks.compatibility import check
from shared_core.engine.recipe import Recipe
from shared_core.engine.saving.state_file import load_state, save_state
from shared_core.errors import CheckpointError, CompatibilityError, MatchError
from shared_core.lora import LoraConfig
from shared_core.lora.adapters import adapters
from shared_core.lora.quantized_base import frozen_tensors, on_grid


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


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
        plain_step(again, second, resumed(X).square().mean())
    ours.finish()
    again.finish()
    assert not [note for note in again.receipt().values["notes"] if "were loaded" in note]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    for one, other in zip(optimizer.state_dict()["state"].values(), second.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert again.state_dict()["techniques"]["lora"]["layers"]  # a run that trains on needs it after the end too


@pytest.mark.parametrize("base", ["nf4", "none"])
def test_weights_that_a_user_loads_into_rounded_layers_are_told(base):
    model = net()
    ours, _ = run(model, base=base)
    model.load_state_dict(net().state_dict())
    ours.finish()
    told = [note for note in ours.receipt().values["notes"] if "loaded into 2 layers before the end" in note]
    assert bool(told) == (base == "nf4")
    assert torch.equal(model[0].weight, net()[0].weight) == (base == "none")


@pytest.mark.parametrize("base", BASES)
def test_an_average_that_teaches_is_resumed_in_a_model_with_other_frozen_weights(base, tmp_path):
    def start(model):
        recipe = {"lora": {"rank": 2, "base": base}, "distill": {"teacher": "ema", "ema_decay": 0.5, "alpha": 0.5}}
        ours = Session(recipe, seed=1)
        ours.attach(model)
        return ours, torch.optim.AdamW(model.parameters(), lr=0.02)

    def train(ours, optimizer, model, stop):
        for _ in range(ours.step, stop):
            plain_step(ours, optimizer, model(X).square().mean())

    whole, fresh = net(), net()
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    ours, optimizer = start(whole)
    ours.begin([optimizer], total_steps=5)
    train(ours, optimizer, whole, 2)
    save_state(tmp_path, ours.state_dict())
    weights, halfway = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(ours, optimizer, whole, 5)
    again, second = start(fresh)
    fresh.load_state_dict(weights)
    second.load_state_dict(halfway)
    again.load_state_dict(load_state(tmp_path))
    again.begin([second], total_steps=5)
    train(again, second, fresh, 5)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name


@pytest.mark.parametrize("base", [base for base in BASES if base != "none"])
def test_an_average_that_teaches_shares_the_codes_of_the_base(base):
    student = net()
    ours = Session({"lora": {"rank": 2, "base": base}})
    ours.attach(student)
    average = StudentAverage(student, 0.5)
    for _ in range(2):
        pairs = [*zip(average.modules[0].parameters(), student.parameters(), strict=True)]
        codes = [mean is now for mean, now in pairs if not now.is_floating_point()]
        assert codes
        assert all(codes)
        assert not any(mean is now for mean, now in pairs if now.is_floating_point())
        average.load_state_dict(average.state_dict(), student)


def test_weights_loaded_alone_become_the_base():
    model, other = net(), net()
    nn.init.normal_(other[0].weight)
    run(model)
    model.load_state_dict(other.state_dict())
    config = LoraConfig(rank=2, base="nf4")
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


def test_int8_codes_that_moved_with_the_model_are_the_ones_that_multiply():
    model = net()
    session(base="int8").attach(model)
    model(X)
    layer = model[0].base_layer
    layer.weight.data = torch.zeros_like(layer.weight.data)  # a move to another device gives the parameter new data
    torch.testing.assert_close(model[0](X), model[0].base_layer.bias.expand(6, -1), atol=1e-6, rtol=0)


def test_draws_come_from_the_runs_own_generator():
    a = [adapters(run(net(), stop=0)[0].techniques["lora"].layers["0"])[0] for _ in range(2)]
    assert torch.equal(*a)
    bound = math.sqrt(6 / ((1 + 5) * 40))  # He's uniform bound with a = √5
    assert bound * 0.8 < a[0].abs().max().item() <= bound


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


def test_a_receipt_can_be_written_as_json(tmp_path):
    for base in ("none", "nf4"):
        ours, _ = run(net(), 1, base=base)
        ours.finish()
        ours.receipt().write(tmp_path)
        assert not any(word in path.read_text() for path in tmp_path.iterdir() for word in ("Infinity", "NaN"))


# -- refusals


@pytest.mark.parametrize("options", [{"rank": 3}, {"base": "int8"}, {"skip": ["first"]}, {"double_quant": False}])
def test_a_state_of_other_options_is_refused(options):
    state = run(net(), 1)[0].state_dict()
    other = session(**options)
    other.attach(net())
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match="resume with the options of the saved run"):
        other.begin([], total_steps=1)


def test_what_cannot_be_trained_is_refused():
    model, ours = net(), session()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours.attach(model)
    with pytest.raises(CompatibilityError, match=r"optimizer .* adapters of 0"):
        ours.begin([optimizer], total_steps=1)
    with pytest.raises(CompatibilityError, match="already has PEFT adapters"):
        session().attach(get_peft_model(net(), PeftConfig(target_modules=["0"], r=2)))
    with pytest.raises(CompatibilityError, match="lora with base nf4 cannot be combined with FSDP version 2"):
        check(Recipe.from_dict({"lora": {"rank": 2, "base": "nf4"}}), {"fsdp2"})


@pytest.mark.parametrize("train", [["*"], ["0", "2", "4"]])
def test_modules_to_train_whole_must_leave_a_layer_to_adapt(train):
    with pytest.raises(MatchError, match="name fewer modules in --lora_train"):
        session(train=train).attach(net())
