"""Decoders of transformers as llama.cpp's architectures: names and order of their tensors, and their settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared_core.errors import CompatibilityError

_WHERE = "export_gguf"


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's computation of a model of transformers.

    Attributes:
        name: Of ``gguf.MODEL_ARCH``.
        activation: The only one that it has.
        side_by_side: Whether pairs of queries and keys that are rotated lie side by side.
        norm_offset: What is added to the weights of norms.
        windows: Whether layers may have sliding windows; elsewhere a window limits the context.
        normalizes_experts: Whether the weights of the chosen experts sum to 1; None: there are none, or no choice.
        scale_layers: Layers of its one size whose attention is scaled by hidden size over heads; None: the width of a
            head scales it in all.
        loads: Whether transformers' loader of GGUF knows it (5.23).
    """

    name: str
    activation: str = "silu"
    side_by_side: bool = False
    norm_offset: float = 0.0
    windows: bool = False
    normalizes_experts: bool | None = None
    scale_layers: int | None = None
    loads: bool = True


_GELU = "gelu_pytorch_tanh"
ARCHITECTURES = {
    "llama": Architecture("LLAMA", side_by_side=True),
    "mistral": Architecture("LLAMA", side_by_side=True, loads=False),
    "mixtral": Architecture("LLAMA", side_by_side=True, loads=False),
    "qwen2": Architecture("QWEN2"),
    "qwen3": Architecture("QWEN3"),
    "qwen2_moe": Architecture("QWEN2MOE", normalizes_experts=False),
    "qwen3_moe": Architecture("QWEN3MOE", normalizes_experts=True),
    "gemma2": Architecture("GEMMA2", _GELU, norm_offset=1.0, windows=True, scale_layers=46),
    "gemma3_text": Architecture("GEMMA3", _GELU, norm_offset=1.0, windows=True, scale_layers=62),
    "phi3": Architecture("PHI3"),
    "olmo2": Architecture("OLMO2", loads=False),
    "starcoder2": Architecture("STARCODER2", _GELU),
    "gpt2": Architecture("GPT2", "gelu_new"),
}


def architecture_of(config: Any) -> Architecture:
    """Return the architecture of a configuration."""
    return ARCHITECTURES[config.model_type]


def file_tensors(name: str, value: Tensor, config: Any, names: Any) -> dict[str, Tensor]:
    """Return a parameter, or its packed bytes, under its names in the file: experts' gates and what they gate apart.

    Args:
        name: In the model.
        value: (outputs, …), or of experts (experts, outputs, …).
        config: Of the model.
        names: The map of gguf's package.
    """
    base, _, leaf = name.rpartition(".")
    parts = {name: value}
    if leaf == "gate_up_proj":
        middle = value.shape[1] // 2
        parts = {f"{base}.gate_proj": value[:, :middle], f"{base}.up_proj": value[:, middle:]}
    found = {}
    for part, rows in parts.items():
        other = names.get_name(part, try_suffixes=(".weight", ".bias"))
        if other is None:
            raise CompatibilityError(
                _WHERE, f"{name} must have a name in llama.cpp's {config.model_type}, got none", "export a causal model"
            )
        stacked = "" if leaf in ("weight", "bias") else ".weight"
        found[f"{other}{stacked}"] = _ordered(part, rows, config).contiguous()
    return found


def _ordered(name: str, value: Tensor, config: Any) -> Tensor:
    """Return rows in llama.cpp's order: where pairs that are rotated lie side by side, queries and keys in that one."""
    if name.endswith("shared_expert_gate.weight"):
        return value[0]
    if not architecture_of(config).side_by_side or (".q_proj." not in name and ".k_proj." not in name):
        return value
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def float_tensor(name: str, value: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    """Return a parameter without codes as the file has it: vectors, tables of positions and routers in float32."""
    if name.endswith("norm.weight"):
        return value.float() + architecture_of(config).norm_offset
    router = name.endswith((".mlp.gate.weight", ".shared_expert_gate.weight", ".wpe.weight"))
    return value.float() if value.dim() == 1 or router else value.to(dtype)


def add_shape(writer: Any, config: Any) -> Tensor | None:
    """Write a configuration; return what Llama 3 divides its frequencies by, None if nothing."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    _check_settings(config, width)
    windows = architecture_of(config).windows
    window = getattr(config, "sliding_window", None) or math.inf
    writer.add_context_length(
        int(config.max_position_embeddings if windows else min(config.max_position_embeddings, window))
    )
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(
        getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    )
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", heads))
    writer.add_key_length(width)
    writer.add_value_length(width)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_epsilon)
    if windows:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if config.final_logit_softcapping:
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        if config.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if hasattr(config, "shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    return _add_positions(writer, config, width)


def _check_settings(config: Any, width: int) -> None:
    """Refuse settings that llama.cpp's architecture has not."""
    own = architecture_of(config)
    activation = next(
        value
        for name in ("hidden_act", "hidden_activation", "activation_function")
        if (value := getattr(config, name, None))
    )
    allowed: dict[str, tuple[Any, Any]] = {"activation": (activation, own.activation)}
    if own.normalizes_experts is not None:
        allowed["norm_topk_prob"] = (config.norm_topk_prob, own.normalizes_experts)
        dense = config.mlp_only_layers or config.decoder_sparse_step != 1
        allowed["layers without experts"] = (bool(dense), False)
    if own.scale_layers is not None:
        scaled = config.hidden_size // config.num_attention_heads
        expected = scaled if config.num_hidden_layers == own.scale_layers else width
        allowed["query_pre_attn_scalar"] = (config.query_pre_attn_scalar, expected)
        allowed["use_bidirectional_attention"] = (bool(getattr(config, "use_bidirectional_attention", False)), False)
        allowed["attn_logit_softcapping"] = (bool(config.attn_logit_softcapping), own.name == "GEMMA2")
    if config.model_type == "gpt2":
        odd = config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights or config.add_cross_attention
        allowed["other scales of attention, or cross-attention"] = (odd, False)
    for name, (found, expected) in allowed.items():
        if found != expected:
            raise CompatibilityError(
                _WHERE, f"{name} must be {expected} for llama.cpp's {config.model_type}, got {found}", "use onnx"
            )


def _add_positions(writer: Any, config: Any, width: int) -> Tensor | None:
    import gguf

    if config.model_type == "gpt2":
        return None
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0})
    sliding = dict(rope.get("sliding_attention") or {})
    rope = dict(rope.get("full_attention") or rope)
    scaling, of_windows = (part.get("rope_type", "default") for part in (rope, sliding))
    if scaling not in ("default", "linear", "llama3") or of_windows != "default":
        found = scaling if of_windows == "default" else f"{of_windows} in windows"
        raise CompatibilityError(_WHERE, f"model must have default, linear or llama3 positions, got {found}")
    writer.add_rope_dimension_count(int(width * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if sliding:
        writer.add_rope_freq_base_swa(float(sliding["rope_theta"]))
    if scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    return _frequency_factors(rope, width) if scaling == "llama3" else None


def _frequency_factors(rope: dict[str, Any], width: int) -> Tensor:
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    factors: Tensor = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return factors.float()
