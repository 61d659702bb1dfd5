"""`shrink_to` on decoders of transformers: what is cut, what it computes, what its folder says, what is refused."""

import functools
import json
import math

import pytest
import torch
from commands import eff
from transformers import AutoConfig, AutoModelForCausalLM
from zeroed import zero_units

from shared_core.channel_graph import find_groups
from shared_core.cli.smaller_models import SHRINK_FILE
from shared_core.errors import CompatibilityError, ConfigError, TrainingError
from shared_core.tools.shrink import shrink_to
from shared_core.tools.shrink import sizes as by_sizes

NUMBERS = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WITHOUT_KEYS = {name: value for name, value in NUMBERS.items() if name != "num_key_value_heads"}
IDS = torch.randint(3, 40, (4, 9), generator=torch.Generator().manual_seed(0))
BATCHES = [{"input_ids": rows, "labels": rows} for rows in IDS.split(2)]
INPUTS = {"input_ids": IDS[:2]}
WIDTHS = {"hidden_size": 24, "intermediate_size": 32, "attention_heads": 6, "key_value_heads": 3}


def decoder(kind="llama", numbers=NUMBERS, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**numbers, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def cut(model, sizes, **options):
    return shrink_to(model, sizes, BATCHES, INPUTS, latency_repeats=0, **options)


@torch.no_grad()
def logits(model, inputs=INPUTS):
    return model.eval()(**inputs).logits


def clear(model, name, units, roles):
    zero_units(model, next(group for group in find_groups(model, INPUTS) if group.name == name), units, roles)


@pytest.mark.slow
def test_the_units_that_do_nothing_go_and_the_logits_stay():
    for tied in (False, True):
        model = decoder(tie_word_embeddings=tied, rms_norm_eps=1e-2).double()
        width = next(group.name for group in find_groups(model, INPUTS) if group.kind == "width")
        clear(model, width, slice(1, None, 4), ("out",))
        for layer in range(3):  # each layer others
            clear(model, f"model.layers.{layer}.mlp.gate_proj", slice(layer, None, 3), ("out",))
            clear(model, f"model.layers.{layer}.self_attn.q_proj", slice(layer, layer + 1), ("out",))
        before = logits(model)
        result = cut(model, WIDTHS)
        torch.testing.assert_close(logits(result.model), before, rtol=0, atol=2e-6)  # Llama's norm is in float32
        torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
        assert result.chosen[width] == [unit for unit in range(32) if unit % 4 != 1]
        for layer in range(3):
            assert result.chosen[f"model.layers.{layer}.mlp.gate_proj"] == [u for u in range(48) if (u - layer) % 3]
            assert result.chosen[f"model.layers.{layer}.self_attn.q_proj"] == [u for u in range(4) if u != layer]
        assert result.loss[0] == pytest.approx(result.loss[1], abs=1e-6)
        assert result.model.config.rms_norm_eps == pytest.approx(1e-2 * 32 / 24)
        assert (result.model.lm_head.weight is result.model.model.embed_tokens.weight) == tied


def test_a_layer_that_does_nothing_goes_and_lists_with_an_entry_a_layer_follow():
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = decoder("qwen2", num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=3).double()
    for layer in (0, 3):
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    before = logits(model)
    result = cut(model, {"layers": 2})
    assert result.chosen == {"layers": [1, 2]}
    assert result.removed == {"layers": 2}
    assert result.model.config.layer_types == ["full_attention", "sliding_attention"]
    torch.testing.assert_close(logits(result.model), before, rtol=0, atol=1e-10)
    assert result.model.generate(IDS[:1], max_new_tokens=3, do_sample=False).shape == (1, 12)


def test_a_layer_can_be_judged_by_the_loss_without_it():
    model = decoder()
    losses = []
    for number in range(3):
        others = [layer for layer in range(3) if layer != number]
        small = decoder()
        small.model.layers = torch.nn.ModuleList(small.model.layers[layer] for layer in others)
        losses.append(sum(float(small(**batch, use_cache=False).loss) for batch in BATCHES) / 2)
    result = cut(model, {"layers": 2}, layer_criterion="loss")
    assert result.chosen["layers"] == [layer for layer in range(3) if layer != losses.index(min(losses))]
    assert result.loss[1] == pytest.approx(min(losses), abs=1e-5)


@torch.no_grad()
def test_query_heads_go_alone_as_many_of_each_key_value_head():
    model = decoder().double()
    for layer in model.model.layers:  # of heads 0 and 1, 2 and 3, ... that share keys: 1, 2, 5, 6 do nothing
        for head in (1, 2, 5, 6):
            layer.self_attn.o_proj.weight[:, 4 * head : 4 * head + 4] = 0
    result = cut(model, {"attention_heads": 4}, criterion="magnitude")
    assert result.chosen["model.layers.0.self_attn.q_proj"] == [0, 3, 4, 7]
    assert (result.model.config.num_attention_heads, result.model.config.num_key_value_heads) == (4, 4)
    torch.testing.assert_close(logits(result.model), logits(model), rtol=0, atol=1e-10)
    assert result.units["model.layers.0.self_attn.q_proj"] == 8


def heads_by_hand(model, layer, units=8):
    """Return the score of each head by the paper: L2 over examples, mean over tokens, norm of its output."""
    seen = []
    projection = model.model.layers[layer].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for batch in BATCHES:
        logits(model, {"input_ids": batch["input_ids"]})
    handle.remove()
    heads = torch.cat(seen).unflatten(-1, (units, -1)).norm(dim=-1)
    return heads.mean(1).square().sum(0).sqrt()


@pytest.mark.parametrize("kind", ["llama", "phi3"])  # separate projections and a fused one
def test_the_heads_that_stay_are_those_of_the_highest_scores(kind):
    model = decoder(kind).double()
    alone = cut(model, {"attention_heads": 4}).chosen
    groups = cut(model, {"attention_heads": 4, "key_value_heads": 2}).chosen
    for layer in range(3):
        heads = heads_by_hand(model, layer)
        name = f"model.layers.{layer}.self_attn.{'qkv_proj' if kind == 'phi3' else 'q_proj'}"
        assert alone[name] == [2 * key + int(pair[1] > pair[0]) for key, pair in enumerate(heads.view(4, 2))]
        joint = heads_by_hand(model, layer, 4)  # a group is scored by all that it gives
        assert groups[name] == sorted(joint.topk(2).indices.tolist())


def test_query_heads_that_all_share_their_keys_go_too():
    model = decoder(num_key_value_heads=1).double()
    result = cut(model, {"attention_heads": 5, "hidden_size": 20})
    for layer in range(3):
        kept = result.chosen[f"model.layers.{layer}.self_attn.q_proj"]
        assert kept == sorted(heads_by_hand(model, layer).topk(5).indices.tolist())
    assert result.largest_difference <= 1e-6


FAMILIES = {
    "llama": (NUMBERS, {}), "mistral": (NUMBERS, {}), "qwen2": (NUMBERS, {}), "qwen3": (NUMBERS, {"head_dim": 4}),
    "phi3": (NUMBERS, {}), "phi": (NUMBERS, {}), "smollm3": (NUMBERS, {}), "granite": (NUMBERS, {}),
    "olmo": (NUMBERS, {}), "olmo2": (NUMBERS, {}), "glm": (NUMBERS, {"head_dim": 4}), "nemotron": (NUMBERS, {}),
    "starcoder2": (NUMBERS, {}), "exaone4": (NUMBERS, {}), "seed_oss": (NUMBERS, {"head_dim": 4}),
    "gpt2": (WITHOUT_KEYS, {}), "gpt_neox": (WITHOUT_KEYS, {}), "gptj": (WITHOUT_KEYS, {"rotary_dim": 4}),
    "opt": (WITHOUT_KEYS, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neo": (WITHOUT_KEYS, {"attention_types": [[["global"], 3]]}), "gpt_bigcode": (WITHOUT_KEYS, {}),
}  # fmt: skip
IN_MAKE_TEST = ("llama", "qwen3", "gpt2")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in IN_MAKE_TEST)) for k in FAMILIES]
)
def test_the_folder_of_a_family_says_the_sizes_and_loads_as_the_stock_class(kind, tmp_path):
    numbers, settings = FAMILIES[kind]
    sizes = {"layers": 2, **WIDTHS}
    if numbers is WITHOUT_KEYS:
        del sizes["key_value_heads"]
    model = decoder(kind, numbers, **settings)
    result = cut(model, sizes)
    result.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    for name, value in sizes.items():
        path = by_sizes.path_of(loaded.config, name)
        assert by_sizes.configured.read(loaded.config, path) == value
    torch.testing.assert_close(logits(loaded), logits(result.model), rtol=0, atol=1e-6)
    assert result.largest_difference <= 1e-5
    assert result.parameters == (model.num_parameters(), loaded.num_parameters())
    assert result.loss[0] == pytest.approx(sum(float(model(**batch).loss) for batch in BATCHES) / 2, abs=1e-5)
    assert result.loss[1] == pytest.approx(sum(float(loaded(**batch).loss) for batch in BATCHES) / 2, abs=1e-5)
    assert any("layer norms" in note for note in result.notes) == ("LayerNorm" in repr(loaded))
    assert any("epsilon" in note for note in result.notes) == (kind in ("qwen3", "exaone4", "opt"))


@torch.no_grad()
def test_the_logits_are_those_of_the_model_whose_other_channels_neurons_and_heads_are_zero():
    model = decoder(rms_norm_eps=1e-2).double()
    result = cut(model, WIDTHS)
    for group in find_groups(model, INPUTS):
        if group.name in result.chosen:
            gone = [unit for unit in range(group.units) if unit not in result.chosen[group.name]]
            clear(model, group.name, gone, ("out",))
    torch.testing.assert_close(logits(result.model), logits(model), rtol=0, atol=2e-6)  # Llama's norm is in float32


@torch.no_grad()
def test_a_layer_norm_is_taken_over_what_is_left():
    model = decoder("gpt2", WITHOUT_KEYS).double()
    result = cut(model, {"hidden_size": 24, "attention_heads": 6, "intermediate_size": 32})
    kept = result.chosen["transformer.wte#2"]
    embedded = (model.transformer.wte(IDS) + model.transformer.wpe.weight[:9])[..., kept]
    wide, narrow = model.transformer.h[0].ln_1, result.model.transformer.h[0].ln_1
    centered = embedded - embedded.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + narrow.eps).sqrt()
    torch.testing.assert_close(narrow(embedded), normed * wide.weight[kept] * math.sqrt(32 / 24) + wide.bias[kept])


@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_other_criteria_choose_by_weights_or_by_a_seed(criterion):
    model = decoder()
    chosen = [cut(model, WIDTHS, criterion=criterion, seed=seed).chosen for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1]
    assert (chosen[0] == chosen[2]) == (criterion == "magnitude")
    if criterion == "magnitude":
        mlp = model.model.layers[0].mlp
        weights = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T], 1)
        assert chosen[0]["model.layers.0.mlp.gate_proj"] == sorted(weights.norm(dim=1).topk(32).indices.tolist())
    layers = [cut(model, {"layers": 1}, layer_criterion="random", seed=seed).chosen["layers"] for seed in range(8)]
    assert {layer for (layer,) in layers} == {0, 1, 2}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "sizes must be some of layers, .* got none"),
        ({"width": 8}, "sizes must be numbers of LlamaConfig, got 'width'"),
        ({"layers": 0}, r"layers must be in \[1, 3\], got 0"),
        ({"layers": 4}, r"layers must be in \[1, 3\], got 4"),
        ({"layers": 3}, "smaller than the model's, got {'layers': 3}"),
        ({"attention_heads": 6}, "attention_heads must be a multiple of key_value_heads, got 6 and 4"),
        ({"attention_heads": 3, "key_value_heads": 3}, "attention_heads must be 2 x key_value_heads, as they are"),
        ({"hidden_size": 25}, "LlamaConfig .*multiple of the number of attention"),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_one_line(sizes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        cut(decoder(), sizes)
    assert "\n" not in str(caught.value)


def test_models_and_options_that_do_not_fit_are_refused_in_one_line():
    with pytest.raises(CompatibilityError, match=r"its code depends on a size in another way"):  # times √hidden_size
        cut(decoder("gemma2", head_dim=4), {"hidden_size": 24})
    with pytest.raises(CompatibilityError, match="cannot lose units"):
        cut(decoder("bloom", WITHOUT_KEYS), {"hidden_size": 24, "attention_heads": 6})
    with pytest.raises(CompatibilityError, match=r"n_head must only remove .* change both"):
        cut(decoder("gpt2", WITHOUT_KEYS), {"attention_heads": 4})
    with pytest.raises(CompatibilityError, match=r"must be read by a linear layer"):
        cut(decoder("mixtral", num_local_experts=2), {"intermediate_size": 32})
    mixed = decoder(
        "qwen3_moe", head_dim=4, mlp_only_layers=[0], moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1
    )
    mixed.model.layers[0].self_attn.o_proj.weight.data.zero_()  # the dense one is to go, which no list tells
    mixed.model.layers[0].mlp.down_proj.weight.data.zero_()
    with pytest.raises(CompatibilityError, match=r"layers must be alike"):
        cut(mixed, {"layers": 2})
    with pytest.raises(CompatibilityError, match=r"with a config, got Linear"):
        cut(torch.nn.Linear(2, 2), {"layers": 1})
    with pytest.raises(ConfigError, match=r"sizes must be numbers of GPT2Config, got 'key_value_heads'"):
        cut(decoder("gpt2", WITHOUT_KEYS), {"key_value_heads": 4})
    with pytest.raises(ConfigError, match=r"criterion must be one of .* got 'activation'; did you mean 'activations'"):
        cut(decoder(), {"layers": 2}, criterion="activation")
    with pytest.raises(ConfigError, match=r"calibration must hold batches, got none"):
        shrink_to(decoder(), {"layers": 2}, [], INPUTS)
    with pytest.raises(ConfigError, match=r"layer_criterion loss must have batches with a loss, got none"):
        shrink_to(decoder(), {"layers": 2}, [INPUTS], INPUTS, layer_criterion="loss")
    diverged = decoder()
    diverged.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    for sizes in ({"layers": 2}, {"intermediate_size": 32}):
        with pytest.raises(TrainingError, match=r"activations of .* must be finite, got NaN or infinity"):
            cut(diverged, sizes)


def test_an_output_that_is_not_the_masked_models_is_refused(monkeypatch):
    built = by_sizes.configured.built

    def broken(model, config, state):
        smaller = built(model, config, state)
        smaller.model.layers[0].mlp.down_proj.weight.data[:, 0] *= 1.5
        return smaller

    monkeypatch.setattr(by_sizes.configured, "built", broken)
    with pytest.raises(CompatibilityError, match=r"must compute what the masked one does"):
        cut(decoder(), {"hidden_size": 24})


def test_padding_does_not_count():
    model = decoder()
    padded = torch.nn.functional.pad(IDS, (0, 3))
    mask = (padded > 0).long()
    batch = {"input_ids": padded, "attention_mask": mask, "labels": padded.masked_fill(mask == 0, -100)}
    plain = shrink_to(model, WIDTHS, [{"input_ids": IDS, "labels": IDS}], INPUTS, latency_repeats=0)
    found = shrink_to(model, WIDTHS, [batch], INPUTS, latency_repeats=0)
    assert found.chosen == plain.chosen
    assert found.loss == pytest.approx(plain.loss, abs=1e-5)


TASK = """
import torch

def batches():
    ids = torch.randint(3, 40, (4, 9), generator=torch.Generator().manual_seed(0))
    for rows in ids.split(2):
        yield {"input_ids": rows, "labels": rows}
"""


def test_the_command_cuts_a_folder_and_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shrink_to_task.py").write_text(TASK)
    model = decoder()
    model.save_pretrained(tmp_path / "big")
    (tmp_path / "big" / "tokenizer.json").write_text("{}")
    run = functools.partial(eff, "shrink", "big")
    given = ["--calibration", "shrink_to_task:batches", "--layers", "2", "--hidden-size", "24"]
    given += ["--intermediate-size", "32", "--attention-heads", "6", "--key-value-heads", "3", "--out", "small"]
    told = run(*given)
    assert told.exit_code == 0
    assert "Loss on the calibration batches" in told.stdout
    report = json.loads((tmp_path / "small" / SHRINK_FILE).read_text())
    expected = cut(model, {"layers": 2, **WIDTHS})
    assert report["chosen"] == expected.chosen
    assert report["parameters"] == {"before": model.num_parameters(), "after": expected.model.num_parameters()}
    assert report["loss"]["after"] == pytest.approx(expected.loss[1], abs=1e-6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    torch.testing.assert_close(logits(loaded), logits(expected.model), rtol=0, atol=1e-6)
    assert (tmp_path / "small" / "tokenizer.json").exists()

    for wrong, message in (
        (given[2:-1], "--layers .*--calibration"),
        ([*given[:2], "--out"], "--calibration .*size"),
        (["--multiple-of", "8", *given[:-1]], "--multiple-of .*--layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*wrong, "other")
    assert not (tmp_path / "other").exists()
