"""Small decoders of the kinds that llama.cpp computes, with settings that show where it would compute another."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "initializer_range": 0.08,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8}
_OPTIONS = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 96},
    "qwen3_moe": _EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},
    "gemma3_text": _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "gpt2": {"n_inner": 192, "num_key_value_heads": 4},
}


def decoder_of(kind):
    """Return one, whose vectors are random too: norms and biases start as ones and zeros."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES | _OPTIONS.get(kind, {})))
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value += 0.2 * torch.randn_like(value)
    return model
