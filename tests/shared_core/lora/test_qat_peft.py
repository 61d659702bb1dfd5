"""A model that its user wrapped with peft: qat quantizes the layers beneath the adapters and leaves those in float."""

import pytest
import torch
from lora_runs import X, net
from plain_loop import plain_step
from torch import nn

from shared_core import Session
from shared_core.errors import CompatibilityError, MatchError
from shared_core.quantization import apply_ranges, convert

peft = pytest.importorskip("peft")
PREFIX = "base_model.model."


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def wrapped(**options):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return peft.get_peft_model(net(), peft.LoraConfig(**{"target_modules": ["0", "2"], "r": 2, **options}))


def session(**options):
    return Session({"qat": {"scheme": "int8", **options}})


def run(model, steps=4, **options):
    ours = session(**options)
    ours.attach(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    ours.begin([optimizer], total_steps=steps)
    for _ in range(steps):
        model(X).square().mean().backward()
        plain_step(ours, optimizer)
    return ours


def attached(model=None, **options):
    ours = session(**options)
    ours.attach(wrapped() if model is None else model)
    return ours.techniques["qat"]


def quantized(technique):
    return [name.removeprefix(PREFIX) for name in technique.layers]


def test_bases_are_quantized_and_adapters_left_in_float_with_a_note():
    technique = attached()
    assert quantized(technique) == ["0.base_layer", "2.base_layer", "4"]
    left_out = technique.report()["left_out"]
    assert set(left_out) == {f"{PREFIX}{layer}.lora_{side}.default" for layer in (0, 2) for side in "AB"}
    assert {"LoRA adapter" in reason for reason in left_out.values()} == {True}


@pytest.mark.parametrize(("model", "told"), [(wrapped, True), (net, False)])
def test_it_is_told_that_saved_adapters_come_without_their_rounded_base(model, told):
    ours = session()
    ours.attach(model())
    assert any("PEFT saves" in note for note in ours.notes) is told


def test_forward_and_gradients_are_those_of_the_rounded_base_and_the_adapters():
    model, reference = wrapped(), wrapped().double()
    ours = run(model, scheme="int8_weight", weight_bits=4)
    adapters = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    reference.load_state_dict(adapters, strict=False)
    for name, module in reference.named_modules():
        if name.endswith(".base_layer") or name == PREFIX + "4":
            scale = module.weight.data.abs().amax(1, keepdim=True) / 7
            module.weight.data = (module.weight.data / scale).round() * scale
    y, wanted = model(X), reference(X.double())
    torch.testing.assert_close(y.double(), wanted, atol=1e-5, rtol=1e-5)
    y.square().mean().backward()
    wanted.square().mean().backward()
    exact = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    found = {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}
    assert set(found) == set(exact) == set(adapters)
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    ours.finish()
    for name, module in model.named_modules():
        if name.endswith(".base_layer"):
            torch.testing.assert_close(module.weight.double(), reference.get_submodule(name).weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{}, {"range": "lsq"}])
def test_learned_scales_alone_move_beside_the_adapters(options):
    model = wrapped()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ours = run(model, **options)
    assert list(model.state_dict()) == list(before)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    base = model.get_submodule(PREFIX + "0.base_layer")
    if options:
        start = base.weight.abs().mean(1)
        assert not torch.allclose(base.weight_magnitude, start, rtol=1e-3)
    adapted = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    ours.finish()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in adapted.items())
    assert type(base) is nn.Linear
    assert not base.weight.requires_grad


def test_saved_adapters_load_in_peft_and_with_the_base_and_ranges_compute_what_was_trained(tmp_path):
    model = wrapped()
    ours = run(model)
    with torch.no_grad():
        trained = model.eval()(X)
    model.train()
    ours.finish()
    model.save_pretrained(tmp_path)
    base = net()
    base.load_state_dict(model.unload().state_dict())  # what is left has no adapters, and a baked base
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    ranges = ours.files.deployment()["qat"]["ranges"]
    integer = convert(again, ranges)
    with torch.no_grad():
        ranged = apply_ranges(again, ranges).eval()(X)
        torch.testing.assert_close(integer(X), ranged, atol=1e-5, rtol=1e-5)
    assert torch.equal(ranged, trained)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": ["*.0"]}, ["0.base_layer"]),
        ({"include": ["*.base_layer"]}, ["0.base_layer", "2.base_layer"]),
        ({"include": ["first", "last"]}, ["0.base_layer", "4"]),
        ({"include": ["Linear"]}, ["0.base_layer", "2.base_layer", "4"]),
        ({"skip": ["*.2"]}, ["0.base_layer", "4"]),
        ({"skip": ["*lora_*"]}, ["0.base_layer", "2.base_layer", "4"]),
        ({"include": ["*.0", "*.lora_B.*"]}, ["0.base_layer", "0.lora_B.default", "2.lora_B.default"]),
    ],
)
def test_names_of_adapted_layers_mean_the_layer_beneath(options, names):
    assert quantized(attached(**options)) == names


def test_adapters_are_no_last_layer_and_alone_nothing_to_quantize():
    assert quantized(attached(wrapped(target_modules=["0", "4"]), skip=["last"])) == ["0.base_layer", "2"]
    with pytest.raises(MatchError, match="must match at least one module"):
        attached(skip=["*.0", "*.2", "*.4"])


def test_what_reads_the_float_weight_or_is_never_called_stays_in_float():
    model = wrapped(target_modules=["0"], use_dora=True, modules_to_save=["4"])
    partly = Session({"qat": {"scheme": "int8"}, "allow_partial": True})  # most is DoRA's
    partly.attach(model)
    technique = partly.techniques["qat"]
    assert quantized(technique) == ["2", "4.modules_to_save.default"]
    left_out = {name.removeprefix(PREFIX): reason for name, reason in technique.report()["left_out"].items()}
    assert "DoRA" in left_out["0.base_layer"]
    assert "modules_to_save" in left_out["4.original_module"]
    with pytest.raises(CompatibilityError, match=r"base_model\.model\.0\.base_layer.*: DoRA"):
        attached(wrapped(target_modules=["0"], use_dora=True), include=[PREFIX + "0"])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_that_holds_codes_already_is_refused_and_what_works_is_named(bits):
    bnb = pytest.importorskip("bitsandbytes")
    model = net()
    made = (
        bnb.nn.Linear4bit(40, 24, quant_type="nf4")
        if bits == 4
        else bnb.nn.Linear8bitLt(40, 24, has_fp16_weights=False)
    )
    made.load_state_dict(model[0].state_dict())
    model[0] = made
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0", "2"], r=2))
    with pytest.raises(CompatibilityError, match=r"bitsandbytes .*0\.base_layer.*"
                       "without quantization_config.*int4_weight.* skip"):  # fmt: skip
        attached(model)
    assert type(model.get_submodule(PREFIX + "4")) is nn.Linear
    assert quantized(attached(model, skip=["*.0"])) == ["2.base_layer", "4"]
