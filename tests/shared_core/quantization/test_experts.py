"""The weights of stacked experts are quantized with scales for each expert and channel, or groups along its inputs."""

import json

import pytest
import torch
from mixtures import KINDS, fit, losses, mixture, rows, stacks
from peft import LoraConfig, get_peft_model
from plain_loop import begun_session
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from shared_core.errors import CompatibilityError, ConfigError
from shared_core.quantization import apply_ranges, convert, quantize, quantize_with_report
from shared_core.quantization.post_training.quality import quantized_bytes
from shared_core.quantization.rounding import quantize_input, quantize_weight
from shared_core.quantization.schemes import SCHEMES

EXPERTS = "model.layers.0.mlp.experts"
IDS = torch.stack([row["input_ids"] for row in rows(2)])


def logits(net):
    with torch.no_grad():
        return net.eval()(IDS).logits


@pytest.mark.parametrize("scheme", {one: key for key, one in SCHEMES.items() if not one.has_range}.values())
@pytest.mark.parametrize("kind", KINDS)
def test_each_expert_is_quantized_as_a_linear_layer_of_its_own(kind, scheme):
    net = mixture(kind).eval()
    quantized, report = quantize_with_report(net, scheme)
    found = next(entry for entry in report.layers if entry["name"] == EXPERTS)
    assert found["input"] == SCHEMES[scheme].input
    assert not any("weights alone" in note for note in report.notes)
    saved = report.ranges[EXPERTS]
    for name, weight in stacks(quantized).items():
        for expert, exact in zip(weight, stacks(net)[name], strict=True):
            layer = nn.Linear(*exact.T.shape, bias=False)
            asked = SCHEMES[scheme].__class__(**{key: saved[key] for key in vars(SCHEMES[scheme])})
            assert torch.equal(expert, quantize_weight(layer, exact.contiguous(), asked))
    assert not torch.equal(logits(quantized), logits(net))
    found, expected = logits(convert(quantized)), logits(quantized)
    # the last bit of a sum may decide the sign of an input near 0
    near = {"atol": 1e-2 * float(expected.abs().max()), "rtol": 0.0} if SCHEMES[scheme].has_binary_inputs else {}
    torch.testing.assert_close(found, expected, **near)
    assert quantized_bytes(quantized) < quantized_bytes(net)


@pytest.mark.parametrize(
    "scheme", ["int8_dynamic", "fp8", "fp8_block", "mxfp4", "int8_dynamic_int4_weight"]
)  # token by token
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_products_of_each_token_have_quantized_inputs(kind, implementation, scheme):
    net = mixture(kind)
    net.set_experts_implementation(implementation)
    quantized = quantize(net, scheme)
    stock, experts = net.get_submodule(EXPERTS), quantized.get_submodule(EXPERTS)
    up, down = stacks(quantized).values() if kind == "gpt_oss" else (experts.gate_up_proj, experts.down_proj)
    biases = [getattr(stock, f"{name}_proj_bias", None) for name in ("gate_up", "down")]
    own = experts.quantizer.scheme
    tokens, weights = torch.randn(5, 16), torch.rand(5, 2)
    index = torch.tensor([[0, 2], [1, 3], [2, 3], [0, 1], [3, 0]])

    def product(x, matrices, bias, expert):
        made = quantize_input(stock, x, own) @ matrices[expert].T
        return made if bias is None else made + bias[expert]

    rows = []
    for token, chosen, shares in zip(tokens, index, weights, strict=True):
        hidden = [stock._apply_gate(product(token[None], up, biases[0], expert)) for expert in chosen]
        made = [product(one, down, biases[1], expert)[0] for one, expert in zip(hidden, chosen, strict=True)]
        rows.append(sum(share * one for share, one in zip(shares, made, strict=True)))
    with torch.no_grad():
        torch.testing.assert_close(experts(tokens, index, weights), torch.stack(rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic"])
def test_inputs_that_are_not_seen_stay_in_float_and_are_told(scheme):
    net = mixture("mixtral")
    net.set_experts_implementation("eager")
    _, report = quantize_with_report(net, scheme, [{"input_ids": IDS}])
    assert next(entry for entry in report.layers if entry["name"] == EXPERTS)["input"] == "none"
    assert f"only the weights of {EXPERTS}" in report.notes[0]
    quantized = quantize(mixture("mixtral"), "int8_dynamic")
    quantized.set_experts_implementation("eager")
    with pytest.raises(CompatibilityError, match="experts implementation must stay batched_mm or grouped_mm"):
        quantized(IDS)


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "int4_weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_on_the_grid_saves_it_and_resumes_exactly(kind, scheme, tmp_path):
    recipe = {"qat": {"scheme": scheme, "begin": 2}, "prune": {"sparsity": 0.5, "begin": 1, "end": 5, "every": 2}}
    whole = fit(kind, recipe, tmp_path / "whole")
    assert losses(whole)[-1] < losses(whole)[0]
    again = fit(kind, recipe, tmp_path / "again", tmp_path / "whole" / "checkpoint-4")
    state = whole.model.state_dict()
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in state.items())
    levels = 16 if scheme == "int4_weight" else 256
    for weight in stacks(whole.model).values():
        assert max(len(row.unique()) for row in weight.flatten(0, 1).unflatten(1, (-1, 8)).flatten(0, 1)) <= levels
        assert (weight == 0).any()
    receipt = json.loads((tmp_path / "whole" / "eff_receipt.json").read_text())
    assert receipt["techniques"]["qat"]["float_inputs"] == ([EXPERTS] if scheme == "int8" else [])
    whole.save_model(str(tmp_path / "saved"))
    assert load_file(tmp_path / "saved" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    deployed = json.loads((tmp_path / "saved" / "eff_deployment.json").read_text())
    ranges = deployed["qat"]["ranges"]
    assert EXPERTS in ranges
    assert torch.equal(logits(apply_ranges(loaded, ranges)), logits(apply_ranges(whole.model, ranges)))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_sees_the_quantized_stacks_however_they_are_multiplied(kind, implementation):
    net, baked = mixture(kind), mixture(kind)
    for model in (net, baked):
        model.set_experts_implementation(implementation)
    session, _ = begun_session({"qat": {"scheme": "int8_weight"}}, net, 2, lr=1e-3)
    session.techniques["qat"].bank.quantizing = True
    found = net(IDS, labels=IDS)
    baked.load_state_dict(session.techniques["qat"].bake(net.state_dict()))
    torch.testing.assert_close(found.loss, baked(IDS, labels=IDS).loss, rtol=1e-6, atol=0)
    found.loss.backward()
    assert all(weight.grad.any() for weight in net.parameters() if weight.ndim == 3)
    assert set(vars(net.get_submodule(EXPERTS))).isdisjoint(("gate_up_proj", "down_proj"))
    session.finish()
    assert type(net.get_submodule(EXPERTS)) is type(baked.get_submodule(EXPERTS))


@pytest.mark.parametrize(
    "scheme", [{"scheme": "int8", "range": "lsq"}, {"scheme": "int8_weight", "rounding": "stochastic"}]
)
def test_learned_ranges_and_stochastic_rounding_leave_experts_on_their_own_scales(scheme, tmp_path):
    trained = fit("mixtral", {"qat": {**scheme, "begin": 1}}, tmp_path, steps=3)
    found = quantize(trained.model, {"scheme": "int8_weight", "include": [EXPERTS]})
    for name, weight in stacks(trained.model).items():
        torch.testing.assert_close(weight, stacks(found)[name], rtol=1e-6, atol=0)


def test_what_cannot_be_is_refused_or_told():
    with pytest.raises(ConfigError, match=r"activation_bits .* stacked experts"):
        quantize(mixture("mixtral"), {"scheme": "int8", "overrides": {"*.experts": {"activation_bits": 8}}})
    adapted = get_peft_model(mixture("mixtral"), LoraConfig(target_parameters=["mlp.experts.down_proj"]))
    with pytest.raises(CompatibilityError, match=r"peft's adapters"):
        quantize(adapted, {"scheme": "int8_weight", "include": ["MixtralExperts"]})
