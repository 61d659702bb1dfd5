"""Architectures of transformers: masked, shrunk, saved, reloaded by `from_pretrained`, with the same outputs."""

import copy

import pytest
import torch
import transformers
from zeroed import zero_every

from shared_core.tools.shrink import shrink

ENCODER = {
    "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = {**ENCODER, "num_key_value_heads": 2}
GPT = {
    "vocab_size": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
BOTH = {
    "vocab_size": 48, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 48, "max_position_embeddings": 24,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 48, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}


def tokens():
    return {"input_ids": torch.randint(3, 40, (2, 7)), "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2])}


def pairs():
    return {**tokens(), "decoder_input_ids": torch.randint(3, 40, (2, 5))}


def pixels(size=16):
    return {"pixel_values": torch.randn(2, 3, size, size)}


NEURONS, HEADS, CHANNELS = {"neuron"}, {"head", "neuron"}, {"channel"}
# model class: (configuration, inputs, the kinds of units that go)
SHRINK = {
    "BertForSequenceClassification": (ENCODER, tokens, NEURONS),
    "RobertaForSequenceClassification": (ENCODER, tokens, NEURONS),
    "CamembertForMaskedLM": (ENCODER, tokens, NEURONS),
    "DistilBertForSequenceClassification": (
        {"vocab_size": 48, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "max_position_embeddings": 24},
        tokens, NEURONS,
    ),
    "ElectraForSequenceClassification": ({**ENCODER, "embedding_size": 16}, tokens, NEURONS),
    "AlbertForSequenceClassification": ({**ENCODER, "embedding_size": 16}, tokens, NEURONS),
    "DebertaForSequenceClassification": (
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, tokens, NEURONS,
    ),
    "DebertaV2ForSequenceClassification": (
        {**ENCODER, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}, tokens, NEURONS,
    ),
    "MPNetForSequenceClassification": (ENCODER, tokens, NEURONS),
    "MobileBertForSequenceClassification": (
        {**ENCODER, "embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32}, tokens, NEURONS,
    ),
    "ModernBertForSequenceClassification": ({**ENCODER, "cls_token_id": 1, "sep_token_id": 2}, tokens, NEURONS),
    "RoFormerForSequenceClassification": (ENCODER, tokens, NEURONS),
    "GPT2LMHeadModel": (GPT, tokens, NEURONS),
    "GPTJForCausalLM": ({**GPT, "rotary_dim": 4}, tokens, NEURONS),
    "GPTNeoForCausalLM": (
        {"vocab_size": 48, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 24,
         "attention_types": [[["global", "local"], 1]], "bos_token_id": 1, "eos_token_id": 2}, tokens, NEURONS,
    ),
    "GPTNeoXForCausalLM": (ENCODER, tokens, NEURONS),
    "OPTForCausalLM": (
        {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40,
         "max_position_embeddings": 24, "word_embed_proj_dim": 32}, tokens, NEURONS,
    ),
    "LlamaForCausalLM": (DECODER, tokens, HEADS),
    "MistralForCausalLM": (DECODER, tokens, HEADS),
    "MixtralForCausalLM": ({**DECODER, "num_local_experts": 2, "num_experts_per_tok": 1}, tokens, HEADS),
    "Qwen2ForCausalLM": (DECODER, tokens, HEADS),
    "Qwen3ForCausalLM": ({**DECODER, "head_dim": 8}, tokens, HEADS),
    "GemmaForCausalLM": ({**DECODER, "head_dim": 8}, tokens, HEADS),
    "Gemma2ForCausalLM": ({**DECODER, "head_dim": 8}, tokens, HEADS),
    "Gemma3ForCausalLM": ({**DECODER, "head_dim": 8}, tokens, HEADS),
    "PhiForCausalLM": (DECODER, tokens, HEADS),
    "Phi3ForCausalLM": (DECODER, tokens, HEADS),
    "CohereForCausalLM": (DECODER, tokens, HEADS),
    "GraniteForCausalLM": (DECODER, tokens, HEADS),
    "Olmo2ForCausalLM": (DECODER, tokens, NEURONS),
    "StableLmForCausalLM": (DECODER, tokens, NEURONS),
    "FalconForCausalLM": (
        {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 40,
         "bos_token_id": 1, "eos_token_id": 2}, tokens, NEURONS,
    ),
    "T5ForConditionalGeneration": (T5, pairs, HEADS),
    "MT5ForConditionalGeneration": (T5, pairs, HEADS),
    "BartForConditionalGeneration": (BOTH, pairs, NEURONS),
    "MarianMTModel": (BOTH, pairs, NEURONS),
    "PegasusForConditionalGeneration": (BOTH, pairs, NEURONS),
    "WhisperForConditionalGeneration": (
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 12, "suppress_tokens": [],
         "begin_suppress_tokens": []},
        lambda: {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": torch.randint(3, 40, (2, 5))}, NEURONS,
    ),
    "ViTForImageClassification": (VISION, pixels, HEADS),
    "DeiTForImageClassification": (VISION, pixels, HEADS),
    "BeitForImageClassification": (VISION, pixels, HEADS),
    "Dinov2ForImageClassification": (
        {**{name: value for name, value in VISION.items() if name != "intermediate_size"}, "mlp_ratio": 4},
        pixels, HEADS,
    ),
    "SwinForImageClassification": ({**SWIN, "mlp_ratio": 2.0}, lambda: pixels(32), NEURONS),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "basic"},
        lambda: pixels(32), CHANNELS,
    ),
    "CLIPTextModelWithProjection": ({**ENCODER, "projection_dim": 16}, tokens, NEURONS),
    "CLIPVisionModelWithProjection": ({**VISION, "projection_dim": 16}, pixels, NEURONS),
    "SiglipVisionModel": (VISION, pixels, NEURONS),
    "Wav2Vec2ForSequenceClassification": (
        {**ENCODER, "conv_dim": [16, 16], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16},
        lambda: {"input_values": torch.randn(2, 400)}, NEURONS | CHANNELS,
    ),
}  # fmt: skip
# what the configuration has no number for
KEPT = {
    "BloomForCausalLM": ({"vocab_size": 48, "hidden_size": 32, "n_layer": 2, "n_head": 4}, tokens, "no number"),
    "ConvNextForImageClassification": (
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, lambda: pixels(32), "no number",
    ),
    "SegformerForImageClassification": (
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
         "num_attention_heads": [2, 4], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]},
        lambda: pixels(32), "no number",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def masked_model(name, config):
    """Return a model in which a quarter of the units of every layer are zero, and their kinds by group."""
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**copy.deepcopy(config))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # biases and scales of norms too
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("name", SHRINK)
def test_it_shrinks_and_loads(name, tmp_path):
    config, make_inputs, expected = SHRINK[name]
    model, inputs = masked_model(name, config), make_inputs()
    kinds = {group.name: group.kind for group in zero_every(4, model, inputs)}
    result = shrink(model, inputs, latency_repeats=0, multiple_of=4 if "Mixtral" in name else 1)
    assert {kinds[group] for group in result.removed} == expected, result.kept
    assert result.bytes[1] < result.bytes[0]
    assert result.flops[1] < result.flops[0]
    result.model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    for given in (inputs, make_inputs()):  # not only on the example
        with torch.no_grad():
            wanted, found = model(**given)[0], loaded(**given)[0]
        assert (wanted - found).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", KEPT)
def test_what_no_configuration_describes_is_kept_and_told(name):
    config, make_inputs, reason = KEPT[name]
    model, inputs = masked_model(name, config), make_inputs()
    zero_every(4, model, inputs)
    result = shrink(model, inputs, latency_repeats=0)
    assert result.removed == {}
    assert any(reason in told for told in result.kept.values())
    cut = shrink(model, inputs, latency_repeats=0, from_config=False)  # without one it can be cut
    assert cut.removed
    with torch.no_grad():
        wanted, found = model(**inputs)[0], cut.model(**inputs)[0]
    assert (wanted - found).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))
