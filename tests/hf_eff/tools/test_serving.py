"""Folders for engines: transformers' own loaders give the weights that training saw."""

import importlib.util
import json
import math
import re

import commands
import gguf
import pytest
import tokenizers
import torch
from decoders import decoder_of
from mixtures import mixture
from qat_step import qat_result, qat_step
from safetensors.torch import load_file
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from shared_core.checkpoint_formats.plain import write_deployment
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MissingExtraError
from shared_core.quantization import apply_ranges
from shared_core.tools.export import export_compressed_tensors, export_gguf, export_torchao
from shared_core.tools.export.gguf import add_tokenizer
from shared_core.tools.export.served import exact_grid

INPUTS = {"input_ids": torch.arange(1, 17).view(2, 8)}
FORMATS = {
    "int8": ("int-quantized", {"weight", "weight_scale", "input_scale", "input_zero_point"}),
    "int8_dynamic": ("int-quantized", {"weight", "weight_scale"}),
    "int8_weight": ("pack-quantized", {"weight_packed", "weight_scale", "weight_shape"}),
    "int4_weight": ("pack-quantized", {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"}),
    "fp8": ("float-quantized", {"weight", "weight_scale"}),
    "fp8_static": ("float-quantized", {"weight", "weight_scale", "input_scale"}),
    "mxfp4": ("mxfp4-pack-quantized", {"weight_packed", "weight_scale"}),
    "nvfp4": ("nvfp4-pack-quantized", {"weight_packed", "weight_scale", "weight_global_scale"}),
}
PACKED = ("pack-quantized", {"weight_packed", "weight_scale", "weight_shape"})
# formats with other inputs, or as released: options of qat → the format, parts of a layer, inputs in config.json
RELEASED = [
    ({"scheme": "W4A16", "group_size": 32}, *PACKED, None),
    ({"scheme": "W8A16", "group_size": 32}, *PACKED, None),
    ({"scheme": "W4A8", "group_size": 32}, "int-quantized", {"weight", "weight_scale"}, ("int", 8, "token")),
    ({"scheme": "W4AFP8", "group_size": 32}, "int-quantized", {"weight", "weight_scale"}, ("float", 8, "token")),
    ({"scheme": "MXFP4A16"}, *FORMATS["mxfp4"], None),
    ({"weights": "mxfp4", "inputs": "mxfp8"}, *FORMATS["mxfp4"], ("float", 8, "group")),
    ({"scheme": "MXFP6A16"}, "mxfp6-pack-quantized", FORMATS["mxfp4"][1], None),
    ({"scheme": "MXFP6A8"}, "mxfp6-pack-quantized", FORMATS["mxfp4"][1], ("float", 8, "group")),
    ({"scheme": "MXFP8A16"}, "mxfp8-quantized", {"weight", "weight_scale"}, None),
    ({"scheme": "MXFP8"}, "mxfp8-quantized", {"weight", "weight_scale"}, ("float", 8, "group")),
    ({"scheme": "NVFP4A16"}, *FORMATS["nvfp4"], None),
    ({"weights": "fp8_tensor", "inputs": "fp8_static"}, *FORMATS["fp8_static"], ("float", 8, "tensor")),
    ({"scheme": None, "weights": "fp8"}, "naive-quantized", {"weight", "weight_scale"}, None),
]


@pytest.fixture
def folder(make, tmp_path):
    def save(scheme="int8_dynamic", dtype=torch.float32, tied=False, vocabulary=32, **options):
        shape = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3, "vocab_size": vocabulary}
        network = make.language_model(**shape, tie_word_embeddings=tied).to(dtype)
        model, ranges = qat_result(network, INPUTS, scheme=scheme, **options)
        model.save_pretrained(tmp_path / "run")
        write_deployment(tmp_path / "run", {"qat": {"ranges": ranges}})
        (tmp_path / "run" / "tokenizer.json").write_text("{}")
        return model, ranges

    return save


def eff(tmp_path, *arguments, kind="compressed-tensors", out="out"):
    command = ["export", tmp_path / "run", "--format", kind, "--out", tmp_path / out, *arguments]
    return commands.eff(*command)


def test_a_multimodal_model_whose_files_name_its_parts_in_another_order_loads(tmp_path):
    text = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=31)
    LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "run")
    network = LlavaForConditionalGeneration.from_pretrained(tmp_path / "run")
    inputs = {"input_ids": torch.tensor([[31] * 4 + [1, 2, 3]]), "pixel_values": torch.rand(1, 3, 8, 8)}
    tower = ["Conv2d", "Embedding", "*vision_tower*", "lm_head"]
    model, ranges = qat_result(network, inputs, scheme="int8_dynamic", skip=tower)
    baked = {name: value.clone() for name, value in model.state_dict().items()}
    report = export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "out", example_inputs=inputs)
    assert report.equal_layers == 9
    assert report.largest_difference <= 1e-6
    assert "language_model.model.layers.0.mlp.up_proj.weight_scale" in load_file(tmp_path / "out" / "model.safetensors")
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        loaded(**inputs)
    assert all(torch.equal(value, baked[name]) for name, value in loaded.state_dict().items() if name in baked)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "language_model.lm_head"} <= {*ignored}


@pytest.mark.parametrize("scheme", FORMATS)
def test_the_folder_loads_in_transformers_as_training_saw_the_model(scheme, folder, tmp_path):
    model, ranges = folder(scheme, **({"group_size": 32} if scheme == "int4_weight" else {}))
    baked = {name: value.clone() for name, value in model.state_dict().items()}
    report = json.loads(eff(tmp_path, "--json").stdout)
    assert report["largest_difference"] <= (5e-2 if "fp4" in scheme else 1e-6)
    assert report["relative_change"] <= {"int8_dynamic": 0.2, "mxfp4": 1.0, "nvfp4": 0.1}.get(scheme, 1e-3)
    assert (report["equal_layers"], report["values"]) == (15, ["model.embed_tokens"])
    assert (tmp_path / "out" / "tokenizer.json").exists()
    kind, parts = FORMATS[scheme]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    described = config["quantization_config"]
    assert (described["quant_method"], described["format"], described["ignore"]) == ("compressed-tensors", kind, [])
    assert config["use_cache"] is True
    names = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj."
    assert {name.removeprefix(layer) for name in names if name.startswith(layer)} == parts
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        loaded(**INPUTS)
    assert all(torch.equal(value, baked[name]) for name, value in loaded.state_dict().items() if name in baked)
    if scheme == "int8":
        scale, zero_point = names[layer + "input_scale"], names[layer + "input_zero_point"]
        quantizer = apply_ranges(model, ranges).get_submodule(layer[:-1]).quantizer
        assert quantizer.qparams(None) == (scale.item(), zero_point.item())


@pytest.mark.parametrize(("options", "kind", "parts", "inputs"), RELEASED, ids=[str(one[0]) for one in RELEASED])
def test_released_formats_load_as_training_saw_the_model(options, kind, parts, inputs, folder, tmp_path):
    model, ranges = folder(**options)
    report = export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "out", example_inputs=INPUTS)
    assert (report.format, report.equal_layers, report.unrounded_inputs) == (kind, 15, ())
    assert report.rounds_inputs == (inputs is not None)
    assert report.largest_difference <= 1e-6
    (group,) = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"][
        "config_groups"
    ].values()
    found = group["input_activations"]
    assert inputs == (None if found is None else (found["type"], found["num_bits"], found["strategy"]))
    names = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj."
    assert {name.removeprefix(layer) for name in names if name.startswith(layer)} == parts
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        loaded(**INPUTS)
    assert all(torch.equal(value.float(), model.state_dict()[name].to(value.dtype).float())
               for name, value in loaded.state_dict().items() if name in model.state_dict())  # fmt: skip


@pytest.mark.parametrize("options", [
    {"scheme": "W4A16", "group_size": 32}, {"scheme": "int8_weight"}, {"scheme": "FP8_DYNAMIC"}, {"scheme": "MXFP8A16"},
    {"scheme": "NVFP4A16"}, {"scheme": "int4_weight", "group_size": 32},
], ids=lambda options: options["scheme"])  # fmt: skip
def test_weights_that_moved_on_scales_that_training_kept_are_exported(options, folder, make, tmp_path):
    model, _ = folder(**options)
    shape = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.3, "vocab_size": 32}
    options = {"init": str(tmp_path / "run")}  # takes the folder's weights
    again, _ = qat_result(make.language_model(**shape, tie_word_embeddings=False), INPUTS, **options)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    for fewer in (0.9, 0.4):  # so that most groups do not reach their largest codes any more
        network = make.language_model(**shape, tie_word_embeddings=False)
        network, technique, context = qat_step(network, INPUTS, **options)
        with torch.no_grad():
            for value in network.parameters():
                value *= fewer
        ranges = technique.deployment()["ranges"]
        technique.finish(context)
        out = tmp_path / f"out{fewer}"
        report = export_compressed_tensors(apply_ranges(network, ranges), out, example_inputs=INPUTS)
        assert report.equal_layers == 15
        assert report.largest_difference <= 5e-2


def test_layers_of_a_model_have_formats_of_their_own(folder, tmp_path):
    folder(
        "MXFP4A16", skip=("*self_attn*",), overrides={"*down_proj": {"weights": "fp8"}, "lm_head": {"scheme": "W8A8"}}
    )
    report = json.loads(eff(tmp_path, "--json").stdout)
    assert (report["format"], report["equal_layers"]) == ("mixed-precision", 7)
    assert report["largest_difference"] <= 5e-2
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    formats = {group["targets"][0].rpartition(".")[2]: group["format"]
               for group in described["config_groups"].values()}  # fmt: skip
    assert sorted(formats.values()) == ["int-quantized", "mxfp4-pack-quantized", "naive-quantized"]
    assert formats["lm_head"] == "int-quantized"
    assert sum(name.endswith("_proj") for name in described["ignore"]) >= 8


def test_nvfp4_with_scales_of_inputs_computes_what_training_saw(folder, tmp_path, monkeypatch):
    model, ranges = folder("nvfp4")
    with torch.no_grad():  # values of another tensor scale, on the grid too
        model.model.layers[0].self_attn.k_proj.weight *= 8
    model.save_pretrained(tmp_path / "run")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fp4_task.py").write_text(
        "import torch\n\ndef batches():\n    return [torch.arange(1, 17).view(2, 8)]\n"
    )
    report = json.loads(eff(tmp_path, "--calibration", "fp4_task:batches", "--json").stdout)
    assert (report["format"], report["unrounded_inputs"]) == ("nvfp4-pack-quantized", [])
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for kind in ("weight", "input"):  # vLLM multiplies them as one matrix
        found = {saved[f"model.layers.0.self_attn.{part}_proj.{kind}_global_scale"].item() for part in "qkv"}
        assert len(found) == 1
        assert math.frexp(found.pop())[0] == 0.5  # a power of two
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reference = apply_ranges(model, ranges)
    with torch.no_grad():
        loaded(**INPUTS)  # which dequantizes
        torch.nn.Module.float(loaded)
        mine, theirs = reference(**INPUTS).logits, loaded(**INPUTS).logits
    assert (mine - theirs).abs().max() <= 0.05 * mine.abs().max()  # equal, unless a code lies next to a tie


def test_nvfp4_on_no_common_grid_and_needless_calibration_are_refused(folder, tmp_path):
    model, ranges = folder("nvfp4")
    k_proj = model.model.layers[0].self_attn.k_proj
    with torch.no_grad():  # blocks too small for the tensor scale of the others
        k_proj.weight *= 2.0**-20
    with pytest.raises(CompatibilityError, match=r"k_proj must have weights on .*, got nvfp4"):
        export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "out")
    model, ranges = folder("int8_weight")
    with pytest.raises(ConfigError, match=r"calibration .*inputs in NVFP4, got none"):
        export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "out", calibration=[INPUTS])


def test_a_tied_head_stays_in_float_beside_its_embedding(folder, tmp_path):
    model, _ = folder(tied=True)
    output = eff(tmp_path).stdout
    assert "rounded to the grid: model.embed_tokens, lm_head" in output
    assert "Inputs that training rounded, but engines don't: lm_head" in output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(saved["model.embed_tokens.weight"], model.lm_head.weight)
    assert not any(name.startswith("lm_head") for name in saved)


@pytest.mark.parametrize("scheme", ["int8_dynamic", "int4_weight"])
def test_weights_of_16_bits_have_the_codes_of_training(scheme, folder, tmp_path):
    folder(scheme, torch.bfloat16)
    assert "bit for bit, in 15 layers" in eff(tmp_path).stdout
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved["model.norm.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("other", "loads"), [("int8_weight", True), ("int4_weight", False)])
def test_layers_of_several_schemes(other, loads, folder, tmp_path):
    folder("int8_dynamic", overrides={"*down_proj": {"scheme": other}})
    report = json.loads(eff(tmp_path, "--json").stdout)
    assert (report["format"], report["equal_layers"]) == ("mixed-precision", 15)
    # transformers loads zero points of one scheme alone
    assert report["largest_difference"] == (0.0 if loads else None)


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "initializer_range": 0.3,
}
# kind → where the experts lie in the file, and the matrices of each: as checkpoints of these models have them
EXPERTS = {
    "mixtral": ("model.layers.0.block_sparse_moe.experts.", {"w1", "w2", "w3"}),
    "qwen3_moe": ("model.layers.0.mlp.experts.", {"gate_proj", "up_proj", "down_proj"}),
}


@pytest.mark.parametrize("scheme", [scheme for scheme in FORMATS if "fp4" not in scheme])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_are_written_one_by_one_as_vllm_names_them(kind, scheme, tmp_path):
    group = {"group_size": 32} if scheme == "int4_weight" else {}
    model, ranges = qat_result(mixture(kind, **SIZES), INPUTS, scheme=scheme, **group)
    report = export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "out", example_inputs=INPUTS)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    place, parts = EXPERTS[kind]
    # inputs of experts have no static ranges: they stay in float, or have scales per token
    stored = FORMATS[{"int8": "int8_weight", "fp8_static": "fp8"}.get(scheme, scheme)][1]
    names = {f"{place}{expert}.{part}.{tensor}" for expert in range(4) for part in parts for tensor in stored}
    assert {name for name in saved if ".experts." in name} == names
    assert report.equal_layers == len(report.quantized) == 5 + 4 * 3
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"]
    targets = [target for group in groups.values() for target in group["targets"]]
    (pattern,) = (target.removeprefix("re:") for target in targets if target.startswith("re:"))
    assert all(re.match(pattern, name) for name in names)
    assert not any(re.match(pattern, name) for name in saved.keys() - names)
    assert "Linear" not in targets  # the router of some is one to vLLM
    if scheme in ("int8_dynamic", "int4_weight"):  # transformers reads neither such experts
        assert report.largest_difference is None
        return
    assert report.largest_difference <= 1e-6
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


@pytest.mark.parametrize(("options", "loads"), [
    ({"weights": "mxfp4", "inputs": "mxfp8"}, True), ({"scheme": "MXFP4A16"}, True), ({"scheme": "MXFP8A16"}, False),
], ids=str)  # fmt: skip
def test_experts_in_mx_formats_are_compared_where_transformers_loads_them(options, loads, tmp_path):
    model, ranges = qat_result(mixture("mixtral", **SIZES), INPUTS, **options)
    report = export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "out", example_inputs=INPUTS)
    assert report.equal_layers == len(report.quantized) == 5 + 4 * 3
    if not loads:
        assert report.largest_difference is None
        return
    assert report.largest_difference <= 1e-6
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[0].mlp.experts
    assert torch.equal(loaded.gate_up_proj.float(), model.model.layers[0].mlp.experts.gate_up_proj)


def test_experts_that_files_stack_or_that_engines_multiply_in_floats_of_other_sizes_are_refused(tmp_path):
    for kind, options, rule in (
        ("gpt_oss", SIZES | {"scheme": "int8_dynamic"}, "must be one matrix each .* for vLLM, got .* with parameters"),
        (
            "mixtral",
            {"scheme": "int8_weight", "skip": ("*_proj", "lm_head")},
            "experts must have a multiple of 32 outputs for vLLM's",
        ),
        ("mixtral", SIZES | {"scheme": "nvfp4"}, "experts must have no scale per tensor, got experts in NVFP4"),
    ):
        sizes = {name: options.pop(name) for name in SIZES if name in options}
        model, ranges = qat_result(mixture(kind, **sizes), INPUTS, **options)
        with pytest.raises(CompatibilityError, match=rule):
            export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "out")
        assert not (tmp_path / "out").exists()


VLLM, TORCHAO_FORMAT, GGUF = ("compressed-tensors", "out"), ("torchao", "out"), ("gguf", "model.gguf")


@pytest.mark.parametrize(
    ("place", "options", "rule"),
    [
        (VLLM, {"scheme": "ternary"}, "q_proj must have codes that vLLM multiplies, got ternary weights"),
        (
            VLLM,
            {"scheme": "int8_dynamic_int4_weight"},
            "must have codes .* vLLM .* inputs per token with zero points",
        ),
        (VLLM, {"scheme": "int8", "activation_bits": 4}, "must have codes that vLLM .* int4 inputs with fixed ranges"),
        (VLLM, {"scheme": "int4_weight", "group_size": 16}, "must have a group_size of 32, 64, 128 for vLLM, got 16"),
        (VLLM, {"scheme": "int4_weight", "vocabulary": 24}, "lm_head must have a multiple of 32 outputs .* got 24"),
        (VLLM, {"skip": ("*k_proj",)}, "q_proj and .*k_proj must be quantized alike for vLLM"),
        (TORCHAO_FORMAT, {"scheme": "int8"}, "q_proj must have codes that .* torchao .*, .* inputs with fixed ranges"),
        (
            TORCHAO_FORMAT,
            {"scheme": "int8_dynamic_int4_weight"},
            "q_proj must have codes .* got int4 weights in groups",
        ),
        (TORCHAO_FORMAT, {"scheme": "ternary"}, "embed_tokens must have codes .* got ternary weights"),
        (GGUF, {"scheme": "fp8"}, "embed_tokens must have codes of Q8_0, Q4_0 or Q4_1, got fp8 weights"),
        (
            GGUF,
            {"scheme": "int4_weight", "group_size": 16},
            "must have a multiple of 32 weights for each scale, got 16",
        ),
        (GGUF, {"scheme": "int8_dynamic"}, "tokenizer must be BPE that splits text .* got None"),
    ],
)
def test_what_a_format_or_its_engine_has_no_place_for_is_refused(place, options, rule, folder, tmp_path):
    folder(**options)
    with pytest.raises(CompatibilityError, match=rule):
        eff(tmp_path, kind=place[0], out=place[1])
    assert not (tmp_path / place[1]).exists()


def test_other_refusals(folder, tmp_path, monkeypatch, make):
    model, ranges = folder()
    with pytest.raises(ConfigError, match=r"--opset .*--format onnx, got --format compressed-tensors"):
        eff(tmp_path, "--opset", "22")
    assert "not compared with the model" in eff(tmp_path, "--no-verify").stdout
    with pytest.raises(CheckpointError, match="--out must be a new or empty folder"):
        eff(tmp_path)
    with pytest.raises(ConfigError, match=r"--length must be in \[1, inf\), got -3"):
        eff(tmp_path, "--length", "-3", out="other")
    with pytest.raises(ConfigError, match="model must have quantized layers, got none"):
        export_compressed_tensors(make.language_model(), tmp_path / "other")
    with pytest.raises(ConfigError, match="model must be one of transformers, got Linear"):
        export_compressed_tensors(torch.nn.Linear(2, 2), tmp_path / "other")
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=24)
    gpt2, _ = qat_result(GPT2LMHeadModel(config), INPUTS, scheme="int8_weight")
    with pytest.raises(CompatibilityError, match="must be a linear layer for vLLM, got transformers'"):
        export_compressed_tensors(gpt2, tmp_path / "other")
    ragged = make.language_model(hidden_size=32, intermediate_size=48, vocab_size=32)
    ragged, _ = qat_result(ragged, INPUTS, scheme="mxfp4")
    with pytest.raises(CompatibilityError, match="down_proj must have a multiple of 32 inputs for MXFP4, got 48"):
        export_compressed_tensors(ragged, tmp_path / "other")
    with torch.no_grad():
        model.lm_head.weight[0, 0] *= 0.999
    with pytest.raises(CompatibilityError, match="lm_head must have weights on"):
        export_compressed_tensors(apply_ranges(model, ranges), tmp_path / "other")
    falcon, _ = qat_result(
        FalconForCausalLM(FalconConfig(num_hidden_layers=1, hidden_size=64, vocab_size=32, num_attention_heads=2)),
        INPUTS,
        scheme="int8_weight",
    )
    with pytest.raises(
        ConfigError, match=r"model must be one of llama, mistral, .*, gpt2 for llama\.cpp, got falcon; take"
    ):
        export_gguf(falcon, tmp_path / "other.gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for write in (export_compressed_tensors, export_torchao, export_gguf):
        with pytest.raises(MissingExtraError, match=r"needs (compressed-tensors|torchao|gguf)"):
            write(model, tmp_path / "other")


@pytest.mark.parametrize(("scheme", "kind"), [("int8_dynamic", "compressed-tensors"), ("int8_weight", "torchao")])
def test_an_exported_folder_is_refused_where_weights_in_float_are_needed(scheme, kind, folder, tmp_path):
    folder(scheme)
    eff(tmp_path, kind=kind)
    for command in (
        ["export", "--format", kind],
        ["quantize", "--scheme", "int8_weight"],
        ["prune", "--sparsity", "0.5"],
    ):
        words = [command[0], tmp_path / "out", *command[1:], "--out", tmp_path / "other"]
        with pytest.raises(CheckpointError, match="out must hold float weights"):
            commands.eff(*words)
    assert not (tmp_path / "other").exists()


TORCHAO = {
    "int8_dynamic": "Int8Tensor",
    "int8_weight": "Int8Tensor",
    "int4_weight": "IntxUnpackedToInt8Tensor",
    "fp8": "Float8Tensor",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scheme", "tied"), [*((scheme, False) for scheme in TORCHAO), ("int8_dynamic", True)])
def test_a_folder_of_torchao_loads_with_the_codes_of_training(scheme, tied, dtype, folder, tmp_path):
    model, _ = folder(scheme, dtype, tied)
    baked = {name: value.clone() for name, value in model.state_dict().items()}
    report = json.loads(eff(tmp_path, "--json", kind="torchao").stdout)
    assert (report["equal_layers"], report["format"], report["values"]) == (16, TORCHAO[scheme], [])
    assert report["largest_difference"] <= (1e-5 if dtype == torch.float32 else 5e-2)
    assert report["relative_change"] <= 0.2
    assert len(report["unrounded_inputs"]) == (15 if scheme == "fp8" else 0)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, layer in loaded.named_modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding):
            assert type(layer.weight).__name__ == TORCHAO[scheme]
            assert torch.equal(layer.weight.dequantize(), baked[f"{name}.weight"])
    assert (loaded.lm_head.weight.dtype, loaded.model.norm.weight.dtype) == (dtype, dtype)
    with torch.no_grad():
        loaded(**INPUTS)


def test_torchao_keeps_skipped_layers_in_float_and_mixes_schemes(folder, tmp_path):
    folder("int8_dynamic", skip=("*q_proj",), overrides={"*down_proj": {"scheme": "int4_weight"}})
    report = json.loads(eff(tmp_path, "--json", kind="torchao").stdout)
    assert report["format"] == "Int8Tensor, IntxUnpackedToInt8Tensor"
    assert [name.rpartition(".")[2] for name in report["float_layers"]] == ["q_proj", "q_proj"]


@pytest.mark.parametrize(
    ("scheme", "types", "options"),
    [
        ("int8_dynamic", "Q8_0", {}),
        ("int8_weight", "Q4_0", {"weight_bits": 4}),
        ("int4_weight", "Q4_1", {"tied": True}),
        ("int8_dynamic", "Q8_0", {"dtype": torch.bfloat16, "skip": ("*q_proj",)}),
    ],
)
def test_a_gguf_file_has_the_codes_of_training(scheme, types, options, folder, tmp_path):
    model, _ = folder(scheme, **options)
    tokens = tokenizers.Tokenizer(BPE({"a": 0, "b": 1, "ab": 2, "<s>": 3}, [("a", "b")]))
    tokens.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.add_special_tokens(["<s>"])
    tokens.save(str(tmp_path / "run" / "tokenizer.json"))
    report = json.loads(eff(tmp_path, "--json", kind="gguf", out="model.gguf").stdout)
    assert (report["equal_layers"], report["format"]) == (16 - len(report["float_layers"]), types)
    assert report["largest_difference"] <= (1e-2 if "dtype" not in options else 5e-2)
    assert report["scale_error"] <= (1e-3 if "dtype" not in options else 4e-3) * (1 if types == "Q8_0" else 3)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    down = torch.from_numpy(
        gguf.dequantize(found["blk.1.ffn_down.weight"].data, found["blk.1.ffn_down.weight"].tensor_type).copy()
    )
    torch.testing.assert_close(down, model.model.layers[1].mlp.down_proj.weight.float(), rtol=2e-2, atol=2e-3)
    skipped = found["blk.0.attn_q.weight"].tensor_type.name
    assert skipped == ("BF16" if "skip" in options else types)
    assert found["output_norm.weight"].tensor_type.name == "F32"
    assert ("output.weight" in found) != options.get("tied", False)
    values = {
        name: reader.get_field(f"tokenizer.ggml.{name}").contents()
        for name in ("model", "pre", "tokens", "token_type", "merges")
    }
    assert (values["model"], values["pre"], values["merges"]) == ("gpt2", "gpt-2", ["a b"])
    assert (values["tokens"][:5], values["token_type"][:5]) == (["a", "b", "ab", "<s>", "[PAD4]"], [1, 1, 1, 3, 5])


KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2", "starcoder2", "gpt2")


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_of_other_kinds_have_their_tensors_where_llama_cpp_reads_them(kind, tmp_path):
    model, ranges = qat_result(decoder_of(kind), INPUTS, scheme="int8_weight")
    report = export_gguf(apply_ranges(model, ranges), tmp_path / "m.gguf", example_inputs=INPUTS)
    assert report.equal_layers == len(ranges)
    assert report.scale_error < 1e-3
    loaded = kind not in ("mixtral", "olmo2")  # by transformers
    assert report.largest_difference is None if not loaded else report.largest_difference < 5e-3
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    if "layers.0.mlp.experts" in str(model.state_dict().keys()):
        stack = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
        for name, rows in zip(("gate", "up"), stack.chunk(2, 1), strict=True):
            found = tensors[f"blk.0.ffn_{name}_exps.weight"]
            assert found.tensor_type.name == "Q8_0"
            values = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())
            torch.testing.assert_close(values, rows, rtol=1e-3, atol=1e-4)
    if kind.startswith("gemma"):  # the norm adds 1 there, and here
        expected = model.model.norm.weight + 1
        torch.testing.assert_close(torch.from_numpy(tensors["output_norm.weight"].data.copy()), expected.detach())


@pytest.mark.parametrize(
    ("kind", "setting", "rule"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob must be True for llama.cpp's qwen3_moe, got False"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, "layers without experts must be False .* got True"),
        ("gemma2", {"query_pre_attn_scalar": 32}, "query_pre_attn_scalar must be 64 for llama.cpp's gemma2, got 32"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping must be True .* got False"),
        ("starcoder2", {"hidden_act": "gelu"}, "activation must be gelu_pytorch_tanh for llama.cpp's starcoder2"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "other scales of attention, or cross-attention must be"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "model must have default, linear or llama3 positions, got yarn",
        ),
    ],
)
def test_settings_that_its_architecture_lacks_are_refused(kind, setting, rule, tmp_path):
    model, ranges = qat_result(decoder_of(kind), INPUTS, scheme="int8_weight")
    for name, value in setting.items():
        setattr(model.config, name, value)
    with pytest.raises(CompatibilityError, match=rule):
        export_gguf(apply_ranges(model, ranges), tmp_path / "m.gguf", verify=False)
    assert not (tmp_path / "m.gguf").exists()


def test_sentencepiece_tokens_have_the_order_of_their_merges(tmp_path):
    vocabulary = {"<unk>": 0, "<0x41>": 1, "a": 2, "b": 3, "bb": 4, "ab": 5}
    tokens = tokenizers.Tokenizer(BPE(vocabulary, [("a", "b"), ("b", "b")], unk_token="<unk>", byte_fallback=True))
    tokens.normalizer = tokenizers.normalizers.Prepend("▁")
    tokens.save(str(tmp_path / "tokenizer.json"))
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    add_tokenizer(writer, tmp_path, 6)
    values = {name.removeprefix("tokenizer.ggml."): field.value for name, field in writer.kv_data[0].items()}
    assert (values["model"], values["scores"]) == ("llama", [-2.0, -2.0, -2.0, -2.0, -1.0, 0.0])
    assert (values["token_type"], values["add_space_prefix"]) == ([2, 6, 1, 1, 1, 1], True)
    assert values["add_bos_token"] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grid_is_found_from_values_alone(dtype):
    torch.manual_seed(0)
    codes = torch.randint(-8, 8, (50, 32)).float()
    codes[:, 0] = -8
    values = (codes * torch.rand(50, 1).add(0.1)).to(dtype).float()
    found, scale = exact_grid(values, range(15, 0, -1), torch.int8, dtype)
    assert torch.equal(found, codes)
    assert torch.equal((found * scale.unsqueeze(1)).to(dtype).float(), values)
    values[3, 5] += 0.01
    assert exact_grid(values, range(15, 0, -1), torch.int8, dtype) is None
