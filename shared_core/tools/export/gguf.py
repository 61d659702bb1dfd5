"""Write a transformers decoder as a GGUF file for llama.cpp: architecture, tokenizer and codes in its terms."""

from __future__ import annotations

import copy
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared_core.errors import CompatibilityError, ConfigError
from shared_core.files.atomic import atomic_write
from shared_core.modules.weight_views import weights_of
from shared_core.quantization.schemes import LayerScheme
from shared_core.tools.export.served import ServedReport, check_difference, served_model
from shared_core.tools.export.source import quiet
from shared_core.tools.measuring import difference, outputs


@dataclass(frozen=True)
class Architecture:
    """llama.cpp's implementation of a transformers model.

    Attributes:
        name: Name in ``gguf.MODEL_ARCH``.
        activation: The only supported one.
        side_by_side: True if rotated pairs of queries and keys are adjacent.
        norm_offset: Number added to the weights of norms.
        windows: True if layers may have sliding windows; otherwise a window limits the context.
        normalizes_experts: True if the weights of the chosen experts sum to 1; None: no experts, or no choice.
        scale_layers: Number of layers of the one size whose attention is scaled by hidden size over heads; None: always
            by the width of a head.
        loads: True if transformers' GGUF loader supports it (5.23).
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


def _architecture_of(config: Any) -> Architecture:
    return ARCHITECTURES[config.model_type]


def _file_tensors(name: str, value: Tensor, config: Any, names: Any) -> dict[str, Tensor]:
    """Return a parameter, or its packed bytes, under its names in the file. Experts' gate and up weights are split."""
    base, _, leaf = name.rpartition(".")
    parts = {name: value}
    if leaf == "gate_up_proj":
        middle = value.shape[1] // 2
        parts = {f"{base}.gate_proj": value[:, :middle], f"{base}.up_proj": value[:, middle:]}
    found = {}
    for part, rows in parts.items():
        other = names.get_name(part, try_suffixes=(".weight", ".bias"))
        if other is None:
            rule = f"llama.cpp's {config.model_type} has no tensor for {name}"
            raise CompatibilityError(_WHERE, rule, "export a causal model")
        stacked = "" if leaf in ("weight", "bias") else ".weight"
        found[f"{other}{stacked}"] = _ordered(part, rows, config).contiguous()
    return found


def _ordered(name: str, value: Tensor, config: Any) -> Tensor:
    """Return rows in llama.cpp's order: queries and keys with adjacent rotated pairs, if the architecture has them."""
    if name.endswith("shared_expert_gate.weight"):
        return value[0]
    if not _architecture_of(config).side_by_side or (".q_proj." not in name and ".k_proj." not in name):
        return value
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def _float_tensor(name: str, value: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    """Return a parameter without codes as stored: vectors, position tables and routers in float32."""
    if name.endswith("norm.weight"):
        return value.float() + _architecture_of(config).norm_offset
    router = name.endswith((".mlp.gate.weight", ".shared_expert_gate.weight", ".wpe.weight"))
    return value.float() if value.dim() == 1 or router else value.to(dtype)


def _add_shape(writer: Any, config: Any) -> Tensor | None:
    """Write a configuration. Return the divisors of Llama 3's frequencies, None if there are none."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    _check_settings(config, width)
    windows = _architecture_of(config).windows
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
    """Raise an error for settings that llama.cpp's architecture does not support."""
    own = _architecture_of(config)
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
            rule = f"{name} must be {expected} for llama.cpp's {config.model_type}, got {found}"
            raise CompatibilityError(_WHERE, rule, "use onnx")


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


_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe", _LETTERS + r"\p{N}" + _REST: "qwen2"}
"""The pattern that splits text before merges → llama.cpp's name."""


def add_tokenizer(writer: Any, folder: Path | None, size: int) -> None:
    """Write a folder's ``tokenizer.json`` for a model of `size` tokens, or record that there is none."""
    import gguf

    if folder is None:
        writer.add_tokenizer_model("no_vocab")
        return
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    kind, split = _kind(described)
    tokens, types = _tokens(described, size, kind)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    if kind == "llama":
        writer.add_token_scores(_scores(described, tokens))
        writer.add_add_space_prefix(_adds_space(described))
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=kind == "gpt2", n_vocab=size)
    for name in ("bos", "eos"):  # otherwise llama.cpp uses its own default
        special.add_special_token.setdefault(name, False)
    special.add_to_gguf(writer, quiet=True)


def _parts(described: dict[str, Any], name: str) -> list[dict[str, Any]]:
    part = described.get(name) or {}
    return part.get("pretokenizers") or part.get("normalizers") or [part]


def _kind(described: dict[str, Any]) -> tuple[str, str]:
    """Return llama.cpp's names of a tokenizer and of its pre-tokenizer."""
    model, parts = described.get("model", {}), _parts(described, "pre_tokenizer")
    split = next((part.get("pattern", {}).get("Regex", "?") for part in parts if part.get("type") == "Split"), None)
    levels = [part for part in parts if part.get("type") == "ByteLevel"]
    name = None
    if model.get("type") == "BPE" and levels:
        name = "gpt-2" if split is None and levels[0].get("use_regex", True) else SPLITS.get(split or "")
        kind = "gpt2"
    elif model.get("type") == "BPE" and model.get("byte_fallback"):
        name, kind = "default", "llama"
    if name is None:
        rule = "tokenizer must be BPE that splits text as Llama's, Qwen2's or GPT-2's does, for llama.cpp, got"
        got = f"{model.get('type')} with {split or [part.get('type') for part in parts]}"
        raise CompatibilityError(_WHERE, f"{rule} {got}", "leave the tokenizer out, and give llama.cpp token ids")
    return kind, name


def _tokens(described: dict[str, Any], size: int, kind: str) -> tuple[list[str], list[int]]:
    from gguf import TokenType

    model = described["model"]
    tokens, types = [f"[PAD{index}]" for index in range(size)], [int(TokenType.UNUSED)] * size
    added = {token["content"]: token for token in described.get("added_tokens", [])}
    numbers = {**model["vocab"], **{content: token["id"] for content, token in added.items()}}
    if (largest := max(numbers.values())) >= size:
        raise CompatibilityError(
            _WHERE, f"tokenizer must have at most the model's {size} tokens, got token id {largest}"
        )
    for content, number in numbers.items():
        tokens[number], found = content, TokenType.NORMAL
        if content == model.get("unk_token"):
            found = TokenType.UNKNOWN
        elif content in added:
            found = TokenType.CONTROL if added[content]["special"] else TokenType.USER_DEFINED
        elif kind == "llama" and re.fullmatch(r"<0x[0-9A-F]{2}>", content):
            found = TokenType.BYTE
        types[number] = int(found)
    return tokens, types


def _scores(described: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return a score per token that makes llama.cpp merge in the right order."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(described["model"]["merges"]):
        scores.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), -float(rank))
    last = -float(len(scores))
    return [scores.get(token, last) for token in tokens]


def _adds_space(described: dict[str, Any]) -> bool:
    prepends = any(part.get("type") == "Prepend" for part in _parts(described, "normalizer"))
    return prepends or any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never"
        for part in _parts(described, "pre_tokenizer")
    )


_WHERE = "export_gguf"
_BLOCK = 32  # weights that share a scale in the file
_TOLERANCE = {torch.float32: 1e-2}  # of outputs: scales are float16 in the file


def export_gguf(
    model: nn.Module,
    path: Path | str,
    *,
    tokenizer: Path | str | None = None,
    example_inputs: Any = None,
    verify: bool = True,
) -> ServedReport:
    """Write a quantized decoder to a GGUF file that llama.cpp runs; return a report.

    The codes of linear layers and embeddings are those of training. The format stores their scales in float16:
    `ServedReport.scale_error` is the resulting error. llama.cpp itself rounds inputs in blocks of 32.

    Args:
        model: A float32 transformers decoder (`ARCHITECTURES`) in or after quantization-aware training, or with
            `apply_ranges` called. Its config gives the dtype of weights without codes. It is not changed.
        path: The file.
        tokenizer: A folder with ``tokenizer.json``, which goes into the file. None: the file has no tokenizer, and
            llama.cpp takes token ids.
        example_inputs: Inputs on which the model and the file, loaded by transformers, are compared.
        verify: Compare the file's codes with the model's and, with `example_inputs`, the outputs.

    Raises:
        MissingExtraError: If gguf is not installed.
        CompatibilityError: If the format or llama.cpp does not support a layer, a setting or the tokenizer, or the file
            differs from the model; nothing is written.
        ConfigError: If an argument breaks its rule.

    Source: gguf 0.19; llama.cpp's convert_hf_to_gguf.py.

    Example:
        ``export_gguf(apply_ranges(model, ranges), "model.gguf", tokenizer="runs/student").format``
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(_WHERE, f"model must be one of {known} for llama.cpp, got {kind}", "take another format")
    served = served_model(model, _WHERE, "llama.cpp", "gguf", _check_layer, experts=True, conv1d=True)
    exported, dtype = served.exported, served.dtype
    made: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    for name, layer in served.layers.items():
        for weight in weights_of(layer).values():
            codes, scale = served.codes(name, weight.detach().flatten(0, -2))
            made[id(weight)] = _blocks(name, codes, scale, weight, served.schemes[name])
    compares = verify and example_inputs is not None and ARCHITECTURES[kind].loads
    expected = outputs(exported, example_inputs) if compares else None
    with atomic_write(path) as temporary:
        types = _write(exported, made, dtype, temporary, None if tokenizer is None else Path(tokenizer))
        change = (
            None
            if expected is None
            else _check_outputs(temporary, exported, expected, example_inputs, _TOLERANCE.get(dtype, 5e-2))
        )
        error = _check_codes(temporary, exported, made) if verify else None
        size = temporary.stat().st_size
    return served.report(
        path, size, ", ".join(types), equal_layers=len(served.layers) if verify else None,
        largest_difference=change, scale_error=error,
    )  # fmt: skip


def _check_layer(name: str, module: Any, where: str) -> None:
    """Raise an error for a layer that no type of the format supports."""
    scheme: LayerScheme = module.quantizer.scheme
    widths = {scheme.group_size or weight.shape[-1] for weight in weights_of(module).values()}
    odd = [width for width in sorted(widths) if width % _BLOCK]
    fits = scheme.has_integers and not (scheme.affine and scheme.weight_bits > 4)
    fits &= scheme.has_integer_inputs or scheme.input == "none"
    if not fits or odd:
        rule = f"have codes of Q8_0, Q4_0 or Q4_1, got {scheme}"
        remedy = "choose scheme int8_dynamic, int8_weight or int4_weight"
        if fits:
            rule = f"have a multiple of {_BLOCK} weights for each scale, got {odd[0]}"
            remedy = "set qat.group_size, or skip the layer"
        raise CompatibilityError(where, f"{name} must {rule}", remedy)


def _blocks(
    name: str, codes: Tensor, scale: Tensor, weight: Tensor, scheme: LayerScheme
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, scales, smallest values) of blocks of 32 weights; symmetric ones have no smallest values."""
    repeats = codes.shape[1] // _BLOCK
    low = codes.amin(1).clamp(max=0) if scheme.affine else torch.zeros(0)
    values = (scale * low).half() if scheme.affine else low.half()
    half = scale.half()
    off = (half.float() - scale).abs() > 1e-2 * scale
    if bool(off.any()) or not bool(torch.isfinite(half).all() & torch.isfinite(values).all()):
        got = f"{float(scale[off | half.isinf()].max()):.3g}"
        rule = f"{name} must have scales that float16 represents within 1 %, got {got}"
        raise CompatibilityError(_WHERE, rule, "skip the layer in qat")
    whole = codes - low.unsqueeze(1) if scheme.affine else codes
    shape = (*weight.shape[:-1], weight.shape[-1] // _BLOCK)
    spread = [part.repeat_interleave(repeats).view(shape) if len(part) else part for part in (half, values)]
    return whole.to(torch.int8).view(*shape, _BLOCK), spread[0], spread[1]


def _type_of(block: tuple[Tensor, Tensor, Tensor]) -> str:
    codes, _, low = block
    if low.numel():
        return "Q4_1"
    return "Q4_0" if int(codes.abs().max()) <= 7 else "Q8_0"


def _packed(block: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the bytes of a weight, (outputs, bytes)."""
    codes, scale, low = block
    parts = [scale.unsqueeze(-1).contiguous().view(torch.uint8)]
    if low.numel():
        parts.append(low.unsqueeze(-1).contiguous().view(torch.uint8))
    if _type_of(block) == "Q8_0":
        parts.append(codes.view(torch.uint8))
    else:
        nibbles = (codes if low.numel() else codes + 8).to(torch.uint8)
        parts.append(nibbles[..., : _BLOCK // 2] | nibbles[..., _BLOCK // 2 :] << 4)
    return torch.cat(parts, -1).flatten(-2)


def _values(block: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the weight that a block represents."""
    codes, scale, low = block
    values = codes.float() * scale.float().unsqueeze(-1)
    return (values + low.float().unsqueeze(-1) if low.numel() else values).flatten(-2)


def _tensors(exported: Any) -> dict[str, Tensor]:
    """Return name → parameter, without a tied head."""
    state = {id(value): (name, value) for name, value in reversed(exported.state_dict(keep_vars=True).items())}
    return {name: value for name, value in reversed(state.values())}


def _write(
    exported: Any,
    made: dict[int, tuple[Tensor, Tensor, Tensor]],
    dtype: torch.dtype,
    path: Path,
    tokenizer: Path | None,
) -> tuple[str, ...]:
    """Write the file; return the types of its quantized weights, the most common first."""
    import gguf

    config = exported.config
    kind = gguf.MODEL_ARCH[_architecture_of(config).name]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    types = Counter(_type_of(block) for block in made.values())
    names = tuple(name for name, _ in types.most_common())
    writer.add_name(config.model_type)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{names[0]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    factors = _add_shape(writer, config)
    add_tokenizer(writer, tokenizer, config.vocab_size)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    of_file = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, value in _tensors(exported).items():
        block = made.get(id(value))
        rows = _float_tensor(name, value.detach(), config, dtype) if block is None else _packed(block)
        raw = None if block is None else gguf.GGMLQuantizationType[_type_of(block)]
        if rows.dtype == torch.bfloat16:
            rows, raw = rows.view(torch.uint8), gguf.GGMLQuantizationType.BF16
        for other, data in _file_tensors(name, rows, config, of_file).items():
            writer.add_tensor(other, data.numpy(), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names


def _check_codes(path: Path, exported: Any, made: dict[int, tuple[Tensor, Tensor, Tensor]]) -> float:
    """Dequantize the file with the format's package; return float16's error relative to the largest weight."""
    import gguf

    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config = exported.config
    of_file = gguf.get_tensor_name_map(gguf.MODEL_ARCH[_architecture_of(config).name], config.num_hidden_layers)
    worst = 0.0
    for name, value in _tensors(exported).items():
        if id(value) not in made:
            continue
        expected = _values(made[id(value)])
        for other, rows in _file_tensors(name, expected, config, of_file).items():
            weight = torch.from_numpy(gguf.dequantize(found[other].data, found[other].tensor_type).copy())
            if not torch.equal(weight.view_as(rows), rows):
                rule = f"quantized weights of {name} differ between the file and the model"
                raise CompatibilityError(_WHERE, rule, "nothing was written")
        peak = float(value.detach().abs().max())
        worst = max(worst, float((expected - value.detach()).abs().max()) / peak if peak else 0.0)
    return worst


def _check_outputs(path: Path, exported: Any, expected: Any, inputs: Any, tolerance: float) -> float:
    """Return the difference of the outputs when transformers loads the file in float."""
    with quiet():
        loaded = type(exported).from_pretrained(
            path.parent, gguf_file=path.name, config=copy.deepcopy(exported.config), dtype=torch.float32
        )
    change = difference(expected, outputs(loaded, inputs))
    check_difference(_WHERE, "file", change, tolerance)
    return change
