"""Tiny models in the layouts that language models are released in, written by the public layouts."""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    DeepseekV3Config,
    FineGrainedFP8Config,
    GptOssConfig,
    LlamaConfig,
    Mxfp4Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 64
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = (
    "gpt_oss", "qwen3_fp8", "qwen3_moe_fp8", "deepseek_v3_fp8", "kimi_int4", "nemotron_nvfp4", "llama_fp8",
    "llama_int8", "llama_int4_asym", "llama_mxfp4", "llama_mxfp8", "llama_gptq", "llama_gptq8", "llama_gptq_asym",
    "llama_awq",
)  # fmt: skip
"""What transformers loads on a CPU; it has no right way for ``llama_mixed``."""


def write_released(
    kind: str, folder: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **sizes: int
) -> Path:
    """Write a released folder of one of `KINDS`, with random weights in two files; return it."""
    torch.manual_seed(seed)
    config = _CONFIGS[kind]()
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for name, value in model.named_parameters():  # zeros would hide a mistake
        if name.endswith("bias"):
            torch.nn.init.normal_(value, std=0.02)
    model.save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors, quantization = _QUANTIZERS[kind](load_file(file))
    file.unlink()
    keys = sorted(tensors)
    files = {
        f"model-0000{part + 1}-of-00002.safetensors": keys[part * len(keys) // 2 : (part + 1) * len(keys) // 2]
        for part in range(2)
    }
    for name, own in files.items():
        save_file({key: tensors[key].contiguous() for key in own}, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": {key: name for name, own in files.items() for key in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    return folder


def load_released(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a released folder as users do: dequantized by transformers on a CPU."""
    method = AutoConfig.from_pretrained(folder).quantization_config["quant_method"]
    if method in ("gptq", "awq"):
        import hf_eff  # noqa: F401 - its import lets transformers load these

        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    how = {
        "mxfp4": lambda: Mxfp4Config(dequantize=True),
        "fp8": lambda: FineGrainedFP8Config(dequantize=True),
        "compressed-tensors": lambda: CompressedTensorsConfig(dequantize=True),
    }[method]()
    # transformers (5.23) leaves weights without codes beside FP8 in the file's dtype
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=how).to(dtype)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder."""
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


def tokens(seed: int = 0) -> dict[str, Tensor]:
    """Return inputs of every kind."""
    return {"input_ids": torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))}


def _gpt_oss() -> Any:
    return GptOssConfig(
        hidden_size=64, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, head_dim=32,
        num_key_value_heads=1, layer_types=["full_attention", "full_attention"], **_SIZES,
    )  # fmt: skip


def _qwen3_moe(width: int = 128) -> Any:
    return Qwen3MoeConfig(
        hidden_size=width, intermediate_size=2 * width, moe_intermediate_size=width, num_experts=4,
        num_experts_per_tok=2, head_dim=64, num_key_value_heads=2, mlp_only_layers=[0], **_SIZES,
    )  # fmt: skip


def _qwen3() -> Any:
    return Qwen3Config(hidden_size=128, intermediate_size=256, head_dim=64, num_key_value_heads=2, **_SIZES)


def _deepseek_v3(width: int = 128) -> Any:
    return DeepseekV3Config(
        hidden_size=width, intermediate_size=2 * width, moe_intermediate_size=width, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=width,
        kv_lora_rank=width, qk_rope_head_dim=width, qk_nope_head_dim=64, v_head_dim=64, num_key_value_heads=2, **_SIZES,
    )  # fmt: skip


def _llama() -> Any:
    return LlamaConfig(hidden_size=64, intermediate_size=128, num_key_value_heads=1, **_SIZES)


_CONFIGS = {
    "gpt_oss": _gpt_oss, "qwen3_fp8": _qwen3, "qwen3_moe_fp8": _qwen3_moe, "deepseek_v3_fp8": _deepseek_v3,
    "kimi_int4": lambda: _deepseek_v3(64), "nemotron_nvfp4": _llama,
    **dict.fromkeys(
        ("llama_fp8", "llama_int8", "llama_int4_asym", "llama_mxfp4", "llama_mxfp8", "llama_mixed", "llama_gptq",
         "llama_gptq8", "llama_gptq_asym", "llama_awq"), _llama
    ),
}  # fmt: skip


def _codes(values: Tensor) -> Tensor:
    """Return E2M1 codes with signs, -0 included, of values up to 6."""
    index = (values.abs().unsqueeze(-1) - _FP4).abs().argmin(-1).to(torch.uint8)
    return index | (torch.signbit(values).to(torch.uint8) << 3)


def _pairs(codes: Tensor) -> Tensor:
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _mxfp4(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    found = {}
    for key, value in tensors.items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[key] = value
            continue
        blocks = value.float().mT.unflatten(-1, (-1, 32))
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
        found[f"{key}_blocks"] = _pairs(_codes((blocks / torch.exp2(exponent).unsqueeze(-1)).clamp(-6, 6)))
        found[f"{key}_scales"] = (exponent + 127).to(torch.uint8)
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return found, {"quant_method": "mxfp4", "modules_to_not_convert": left}


def _fp8(power: bool) -> Any:
    def quantize(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        found = {}
        for key, value in tensors.items():
            left = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "norm.weight")
            if value.ndim != 2 or key.endswith(left):
                found[key] = value
                continue
            blocks = value.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = blocks.abs().amax((1, 3)) / 448
            scale = torch.exp2(torch.ceil(torch.log2(scale))) if power else scale
            codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            found[key] = codes.flatten(2).flatten(0, 1)
            found[f"{key}_scale_inv"] = scale
        config = {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"],
        }  # fmt: skip
        return found, config

    return quantize


def _compressed(targets: list[str], ignore: list[str], format: str, preset: str, **change: Any) -> Any:
    """Quantize with the package's own observers' rule and compressor."""

    def quantize(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        scheme = preset_name_to_scheme(preset, targets)
        for name, value in change.items():
            setattr(scheme.weights, name, value)
        compressor, found = BaseCompressor.get_value_from_registry(format), {}
        for key, value in tensors.items():
            quantizes = value.ndim == 2 and ("self_attn" in key or "mlp" in key)
            if not quantizes or any(part in key for part in ignore):
                found[key] = value
                continue
            parts = compressor.compress(_with_scales(value, scheme.weights), scheme)
            if scheme.input_activations is not None and "weight_global_scale" in parts:
                parts["input_global_scale"] = torch.tensor([123.0])
            found |= {f"{key.removesuffix('.weight')}.{part}": one for part, one in parts.items()}
        group = json.loads(scheme.model_dump_json(exclude={"format"})) | {"format": format}
        config = {
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head", *(f"re:.*{part}.*" for part in ignore)],
        }  # fmt: skip
        return found, config

    return quantize


def _with_scales(weight: Tensor, args: Any) -> dict[str, Tensor]:
    groups = weight.float().unflatten(1, (-1, args.group_size or weight.shape[1]))
    whole = generate_gparam(groups.amin(), groups.amax()) if args.strategy == "tensor_group" else None
    scale, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args, whole)
    parts = {"weight": weight.float(), "weight_scale": scale if whole is not None else scale.to(weight.dtype)}
    if not args.symmetric:
        parts["weight_zero_point"] = zeros.to(torch.int8)
    return parts if whole is None else parts | {"weight_global_scale": whole}


def _mixed(first: Any, second: Any) -> Any:
    def quantize(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, config = first(tensors)
        codes = {key: value for key, value in tensors.items() if "self_attn" in key}
        rest, other = second({key: value for key, value in tensors.items() if key not in codes})
        groups = {"group_0": config["config_groups"]["group_0"], "group_1": other["config_groups"]["group_0"]}
        return codes | rest, config | {"format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}

    return quantize


def _word(codes: list[int], bits: int) -> int:
    """Return an int32 with the first code in its lowest bits."""
    word = sum(code << (bits * place) for place, code in enumerate(codes))
    return word - 2**32 if word >= 2**31 else word


def _packed_rows(codes: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """Pack along the last axis; the code at place i of a word is that of column ``order[i]``."""
    words = codes.unflatten(1, (-1, 32 // bits)).tolist()
    found = [[_word([word[at] for at in order], bits) for word in row] for row in words]
    return torch.tensor(found, dtype=torch.int32)


def _packed(method: str, bits: int = 4, sym: bool = True, group: int = 32, version: str = "gptq") -> Any:
    """Quantize into AutoGPTQ's or AutoAWQ's tensors, word by word in Python."""

    def quantize(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        found, last, awq = {}, 2**bits - 1, method == "awq"
        order = (0, 2, 4, 6, 1, 3, 5, 7) if awq else tuple(range(32 // bits))
        for key, value in tensors.items():
            if value.ndim != 2 or not ("self_attn" in key or "mlp" in key):
                found[key] = value
                continue
            groups = value.double().unflatten(1, (-1, group))
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            span = 2 * torch.maximum(-low, high) if sym else high - low
            scale = (span / last).half()
            zeros = torch.full_like(low, 2 ** (bits - 1)) if sym else (-low / scale.double()).round()
            zeros = zeros.clamp(1, last)
            codes = (groups / scale.double().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
            codes = codes.clamp(0, last).flatten(1).long()
            stem, saved_zeros = key.removesuffix("weight"), zeros.long() - int(not awq and version == "gptq")
            packs = _packed_rows(codes.t() if awq else codes, bits, order)
            found[f"{stem}qweight"] = packs if awq else packs.t()
            found[f"{stem}qzeros"] = _packed_rows(saved_zeros.t(), bits, order)
            found[f"{stem}scales"] = scale.t()
            if not awq:
                found[f"{stem}g_idx"] = (torch.arange(value.shape[1]) // group).int()
        config = {"quant_method": method, "bits": bits, "group_size": group}
        own = {"version": "gemm", "zero_point": True, "modules_to_not_convert": None} if awq else {
            "sym": sym, "desc_act": False, "checkpoint_format": version, "damp_percent": 0.01,
        }  # fmt: skip
        return found, config | own

    return quantize


_QUANTIZERS = {
    "llama_gptq": _packed("gptq"), "llama_gptq8": _packed("gptq", bits=8),
    "llama_gptq_asym": _packed("gptq", sym=False, version="gptq_v2"), "llama_awq": _packed("awq", sym=False),
    "gpt_oss": _mxfp4, "qwen3_fp8": _fp8(False), "qwen3_moe_fp8": _fp8(False), "deepseek_v3_fp8": _fp8(True),
    "kimi_int4": _compressed(
        ["Linear"], ["self_attn", "shared_experts", "mlp.gate.", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj"],
        "pack-quantized", "W4A16", group_size=32,
    ),
    "nemotron_nvfp4": _compressed(["Linear"], [], "nvfp4-pack-quantized", "NVFP4"),
    "llama_fp8": _compressed(["Linear"], [], "float-quantized", "FP8_DYNAMIC"),
    "llama_int8": _compressed(["Linear"], [], "int-quantized", "INT8"),
    "llama_int4_asym": _compressed(["Linear"], [], "pack-quantized", "W4A16_ASYM", group_size=32),
    "llama_mxfp4": _compressed(["Linear"], [], "mxfp4-pack-quantized", "MXFP4A16"),
    "llama_mxfp8": _compressed(["Linear"], [], "mxfp8-quantized", "MXFP8"),
    "llama_mixed": _mixed(
        _compressed(["re:.*self_attn.*"], ["mlp"], "float-quantized", "FP8_DYNAMIC"),
        _compressed(["re:.*mlp.*"], ["self_attn"], "pack-quantized", "W4A16", group_size=32),
    ),
}  # fmt: skip
