"""`shrink` on models of transformers: uneven layers, the residual width, types, and `eff shrink` on a folder."""

import functools
import json

import pytest
import torch
from commands import eff
from transformers import (
    AutoModelForCausalLM,
    BertModel,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from zeroed import zero_units

from shared_core.channel_graph import find_groups
from shared_core.cli.loading import made_up_inputs
from shared_core.cli.smaller_models import SHRINK_FILE
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError
from shared_core.tools.shrink import shrink

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(model_class=LlamaForCausalLM, config_class=LlamaConfig, **settings):
    torch.manual_seed(0)
    model = model_class(config_class(**{**SIZES, **settings})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


INPUTS = {"input_ids": torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])}


def zero(model, name, units, roles=("out", "norm")):
    zero_units(model, next(group for group in find_groups(model, INPUTS) if group.name == name), units, roles)


def logits(model, inputs=INPUTS):
    with torch.no_grad():
        return model(**inputs).logits.float()


def test_every_layer_loses_as_many_as_the_one_with_the_fewest():
    model = llama()
    zero(model, "model.layers.0.mlp.gate_proj", slice(0, 9))
    zero(model, "model.layers.1.mlp.gate_proj", slice(5, 9))
    zero(model, "model.layers.0.self_attn.q_proj", slice(0, 1))  # of one layer alone
    result = shrink(model, INPUTS)
    assert result.removed == {"model.layers.0.mlp.gate_proj": 4, "model.layers.1.mlp.gate_proj": 4}
    assert result.config == {"intermediate_size": (20, 16)}
    assert "5 more units are zero" in result.kept["model.layers.0.mlp.gate_proj"]
    assert "none to lose" in result.kept["model.layers.0.self_attn.q_proj"]
    assert torch.allclose(logits(model), logits(result.model), atol=1e-5)
    assert model.config.intermediate_size == 20


def test_a_layer_that_is_all_zero_keeps_one_neuron():
    model = llama()
    for layer in (0, 1):
        zero(model, f"model.layers.{layer}.mlp.gate_proj", slice(None))
    result = shrink(model, INPUTS)
    assert result.model.config.intermediate_size == 1
    assert "one is kept" in result.kept["model.layers.0.mlp.gate_proj"]
    assert torch.allclose(logits(model), logits(result.model), atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_the_residual_width_shrinks_exactly_under_root_mean_square_norms(tied, tmp_path):
    model = llama(tie_word_embeddings=tied, rms_norm_eps=1e-2)
    name = next(group.name for group in find_groups(model, INPUTS) if group.kind == "width")
    zero(model, name, slice(0, 4), roles=("out",))
    result = shrink(model, INPUTS)
    assert result.removed == {name: 4}
    assert result.config["hidden_size"] == (16, 12)
    assert result.model.config.rms_norm_eps == pytest.approx(1e-2 * 16 / 12)
    assert result.model.config.head_dim == 4
    result.model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.allclose(logits(model), logits(loaded), atol=1e-5)


def test_one_epsilon_for_two_widths_is_refused():
    model = llama(Qwen3ForCausalLM, Qwen3Config, head_dim=4)
    name = next(group.name for group in find_groups(model, INPUTS) if group.kind == "width")
    zero(model, name, slice(0, 4), roles=("out",))
    result = shrink(model, INPUTS)
    assert result.removed == {}
    assert "one epsilon for norms of different widths" in result.kept[name]


def test_the_result_generates_trains_and_keeps_its_type():
    model = llama().to(torch.bfloat16)
    model.generation_config.max_new_tokens = 6
    zero(model, "model.layers.0.mlp.gate_proj", slice(0, 4))
    zero(model, "model.layers.1.mlp.gate_proj", slice(3, 7))
    model.lm_head.weight.requires_grad_(False)
    result = shrink(model.train(), INPUTS, latency_repeats=0)
    small = result.model
    assert {parameter.dtype for parameter in small.parameters()} == {torch.bfloat16}
    assert small.training
    assert not small.lm_head.weight.requires_grad
    assert small.generation_config.max_new_tokens == 6
    small(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    assert small.model.layers[0].mlp.gate_proj.weight.grad.shape == (16, 16)
    assert torch.allclose(logits(model.eval()), logits(small.eval()), atol=3e-2)


def test_units_can_be_given_and_must_fit_the_configuration():
    model = llama()
    neurons = torch.arange(20) % 5 > 0
    result = shrink(
        model, INPUTS, latency_repeats=0,
        keep={"model.layers.0.mlp.gate_proj": neurons, "model.layers.1.mlp.gate_proj": neurons.flip(0)},
    )  # fmt: skip
    assert result.config == {"intermediate_size": (20, 16)}
    for layer, kept in ((0, neurons), (1, neurons.flip(0))):
        zero(model, f"model.layers.{layer}.mlp.gate_proj", (~kept).nonzero().view(-1).numpy())
    assert torch.allclose(logits(model), logits(result.model), atol=1e-5)


def test_numbers_of_heads_that_the_configuration_refuses_are_not_taken():
    model = llama(hidden_size=48, num_attention_heads=12, num_key_value_heads=12)
    for layer in (0, 1):
        zero(model, f"model.layers.{layer}.self_attn.q_proj", slice(0, 5))
    result = shrink(model, INPUTS, latency_repeats=0)
    assert result.config["num_attention_heads"] == (12, 8)  # 7 does not divide the hidden size
    assert "1 more units are zero" in result.kept["model.layers.0.self_attn.q_proj"]
    assert torch.allclose(logits(model), logits(result.model), atol=1e-5)
    model = llama(hidden_size=48, num_attention_heads=12, num_key_value_heads=4)
    for layer in (0, 1):
        zero(model, f"model.layers.{layer}.self_attn.q_proj", slice(0, 1))
    assert "not a multiple" in shrink(model, INPUTS).kept["model.layers.0.self_attn.q_proj"]


def test_a_model_without_a_head_shrinks(make):
    base = make.classifier().bert
    assert isinstance(base, BertModel)
    zero(base, "encoder.layer.0.intermediate.dense", slice(0, 4))
    zero(base, "encoder.layer.1.intermediate.dense", slice(0, 4))
    result = shrink(base, INPUTS)
    assert result.config == {"intermediate_size": (32, 28)}
    with torch.no_grad():
        wanted, found = base.eval()(**INPUTS), result.model.eval()(**INPUTS)
    assert torch.allclose(wanted.last_hidden_state, found.last_hidden_state, atol=1e-5)


def test_random_numbers_are_left_as_they_were():
    model = llama()
    zero(model, "model.layers.0.mlp.gate_proj", slice(0, 4))
    zero(model, "model.layers.1.mlp.gate_proj", slice(0, 4))
    state = torch.random.get_rng_state()
    shrink(model, INPUTS, latency_repeats=0)
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_model_that_its_config_does_not_describe_is_refused():
    model = llama()
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(16, 20, bias=True)
    with pytest.raises(CompatibilityError, match="from_config=False"):
        shrink(model, INPUTS)
    zero(model, "model.layers.0.mlp.gate_proj", slice(0, 4))
    result = shrink(model, INPUTS, from_config=False)
    assert result.removed == {"model.layers.0.mlp.gate_proj": 4}
    assert torch.allclose(logits(model), logits(result.model), atol=1e-5)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return functools.partial(eff, "shrink")


def test_the_command_writes_a_folder_that_loads(run, tmp_path):
    model = llama()
    for layer in (0, 1):
        zero(model, f"model.layers.{layer}.mlp.gate_proj", slice(0, 8))
        zero(model, f"model.layers.{layer}.self_attn.q_proj", slice(1, 2))
    model.save_pretrained(tmp_path / "pruned")
    (tmp_path / "pruned" / "tokenizer_config.json").write_text("{}")
    for name in ("trainer_state.json", "eval_results.json"):
        (tmp_path / "pruned" / name).write_text("{}")
    result = run("pruned", "--out", "small")
    assert result.exit_code == 0
    assert "intermediate_size is 12, was 20" in result.stdout
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    assert loaded.config.num_key_value_heads == 1
    assert torch.allclose(logits(model), logits(loaded), atol=1e-5)
    assert {file.name for file in (tmp_path / "small").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", SHRINK_FILE,
    }  # fmt: skip
    report = json.loads((tmp_path / "small" / SHRINK_FILE).read_text())
    assert report["config"]["num_attention_heads"] == [4, 2]
    small, large = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "pruned"))
    assert small < large


def test_the_command_refuses_what_is_no_model(run, tmp_path):
    (tmp_path / "empty").mkdir()
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "empty" / "model.safetensors").write_bytes((tmp_path / "model" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"eff shrink: empty .* no config.json"):
        run("empty", "--out", "small")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"cannot load empty.* must name a class of .*, got None"):
        run("empty", "--out", "small")
    with pytest.raises(ConfigError, match=r"or an existing model folder, got 'models/nobody'"):
        run("models/nobody", "--out", "small")
    with pytest.raises(ConfigError, match="--weights must be left out"):
        run("model", "--out", "small", "--weights", "model")
    assert not (tmp_path / "small").exists()


def test_example_inputs_are_made_up_from_the_configuration():
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sight, size = {**tower, "image_size": 8, "patch_size": 4}, {"vocab_size": 24, "pad_token_id": 0, "bos_token_id": 1}
    size["eos_token_id"] = 2
    layers = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    widths = {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "d_model": 8, "num_mel_bins": 4, "max_source_positions": 6}
    waves = {"conv_dim": (4, 4), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4}
    text = {**tower, "vocab_size": 24, "max_position_embeddings": 16, "eos_token_id": 2}
    for model, output, shape in (
        (llama(), "logits", (2, 8, 24)),
        (ViTForImageClassification(ViTConfig(**sight)), "logits", (2, 2)),
        (CLIPModel(CLIPConfig(text_config=text, vision_config=sight)), "logits_per_image", (2, 2)),  # of pairs
        (WhisperForConditionalGeneration(WhisperConfig(**size, **layers, **widths, decoder_start_token_id=1)), "logits",
         (2, 8, 24)),
        (Wav2Vec2ForCTC(Wav2Vec2Config(**size, **tower, **waves, num_conv_pos_embedding_groups=2)), "logits",
         (2, 1599, 24)),
    ):  # fmt: skip
        assert model(**made_up_inputs(model))[output].shape == shape


def test_made_up_images_have_the_size_that_the_folders_processor_makes(tmp_path):
    sizes = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**sizes))
    assert made_up_inputs(model)["pixel_values"].shape == (2, 3, 224, 224)
    for options, shape in (
        ({"size": {"height": 32, "width": 48}}, (32, 48)),
        ({"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, "do_center_crop": True}, (32, 32)),
    ):
        model.save_pretrained(tmp_path)
        CLIPImageProcessor(**{"do_center_crop": False, **options}).save_pretrained(tmp_path)
        loaded = ResNetForImageClassification.from_pretrained(tmp_path)
        assert made_up_inputs(loaded)["pixel_values"].shape == (2, 3, *shape)
