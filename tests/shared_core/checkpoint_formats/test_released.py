"""Released formats: the grids read from a file give the weights that transformers loads, for the same layers."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from released_models import KINDS, load_released, tensors_of, write_released

from shared_core.checkpoint_formats.released import (
    Released,
    grids_of,
    released_config,
    released_options,
)
from shared_core.checkpoint_formats.released_layouts import Fp8Layout, over_blocks, spread
from shared_core.checkpoint_formats.saved_rows import saved_rows
from shared_core.errors import CheckpointError
from shared_core.modules.weight_views import as_rows, weights_of
from shared_core.quantization.config import QatConfig
from shared_core.quantization.selection import layer_schemes, select_layers

FORMATS = {
    "gpt_oss": ("mxfp4", "none"), "qwen3_fp8": ("fp8_block", "fp8_group"), "qwen3_moe_fp8": ("fp8_block", "fp8_group"),
    "deepseek_v3_fp8": ("fp8_block", "fp8_group"), "kimi_int4": ("int4", "none"), "nemotron_nvfp4": ("nvfp4", "nvfp4"),
    "llama_fp8": ("fp8", "fp8_token"), "llama_int8": ("int8", "int8_token"), "llama_int4_asym": ("int4_asym", "none"),
    "llama_mxfp4": ("mxfp4", "none"), "llama_mxfp8": ("mxfp8", "mxfp8"),
    "llama_gptq": ("int4", "none"), "llama_gptq8": ("int4", "none"), "llama_gptq_asym": ("int4_asym", "none"),
    "llama_awq": ("int4_asym", "none"),
}  # fmt: skip
CODES = {
    "mxfp4": torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
    "nvfp4": torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
}


def nearest(ratio, weights):
    """The nearest code, in float64."""
    if weights in CODES:
        index = (ratio.abs().unsqueeze(-1) - CODES[weights].double()).abs().argmin(-1)
        return CODES[weights].double()[index] * ratio.sign()
    return ratio.round() if weights.startswith("int") else ratio.to(torch.float8_e4m3fn).double()


@pytest.fixture
def released(tmp_path):
    return lambda kind: write_released(kind, tmp_path / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_grids_hold_the_weights_that_transformers_loads_in_exactly_the_layers_with_codes(kind, released):
    folder = released(kind)
    model = load_released(folder)
    options = released_options(released_config(folder)[1], model, folder)
    assert (options["weights"], options["inputs"]) == FORMATS[kind]
    config = QatConfig(**options)
    layers, _ = select_layers(model, config.include, config.skip)
    assert {*layers} == {*options["include"]}
    schemes = layer_schemes(config, layers)

    names = {f"{name}.{own}": layer for name, layer in layers.items() for own in weights_of(layer)}
    grids = grids_of(Released(folder), saved_rows(model, names), model, names)
    assert grids.keys() == names.keys()
    for name, grid in grids.items():
        rows = as_rows(names[name], model.get_parameter(name).detach()).double()
        scheme = schemes[name.rpartition(".")[0]]
        assert grid.group_size == (scheme.block or scheme.group_size or rows.shape[1])
        step = grid.spread(rows.shape[1]).double()
        zeros = 0 if grid.zero_point is None else spread(grid.zero_point, (1, grid.group_size), rows.shape).double()
        found = (nearest(rows / step + zeros, options["weights"]) - zeros) * step
        # compressed-tensors computes in bfloat16
        rounds = kind.startswith(("llama", "kimi", "nemotron"))
        torch.testing.assert_close(found, rows, rtol=2**-7 if rounds else 1e-6, atol=0)


@pytest.mark.parametrize("kind", ["llama_mixed", "llama_int4_asym", "nemotron_nvfp4", "llama_mxfp8"])
def test_each_weight_equals_the_formats_own_decompression_in_its_own_group(kind, released):
    folder = Released(released(kind))
    for name, layout in folder.weights.items():
        parts = folder.parts(layout)
        (stored,) = folder.read(name)
        compressor = BaseCompressor.get_value_from_registry(layout.format)
        own = compressor.decompress(dict(parts), layout.scheme)["weight"].float()
        torch.testing.assert_close(stored.values, own, rtol=2**-7, atol=0)
        written = layout.write(stored, parts)
        assert all(torch.equal(written[part], parts[part]) for part in written)


def test_groups_become_overrides_and_need_the_model_if_patterns_name_them(released):
    folder = released("llama_mixed")
    config = released_config(folder)[1]
    with pytest.raises(CheckpointError, match="pass model and folder"):
        released_options(config)
    model = load_released(released("llama_fp8"))  # the same architecture
    options = released_options(config, model, folder)
    schemes = layer_schemes(QatConfig(**options), {name: model.get_submodule(name) for name in options["include"]})
    assert {("fp8" if "self_attn" in name else "group") == scheme.weight for name, scheme in schemes.items()} == {True}
    assert schemes["model.layers.0.mlp.up_proj"].group_size == 32


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "no quantization_config"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "bits of gptq must be one of 2, 4, 8, got 3"),
        ({"quant_method": "gptq", "bits": "4", "group_size": 32}, "got '4'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "group_size of gptq .* got -1"),
        ({"quant_method": "gptq", "bits": 4, "group_size": float("nan")}, "group_size of gptq .* got nan"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": "no"}, "sym must be true or false"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:a": {}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits of awq must be one of 4, got 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}, "zero_point false"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp4"),
    ],
)
def test_other_formats_are_refused_by_name(config, told, released):
    folder = released("llama_fp8")
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=told):
        released_config(folder)


def test_modelopts_own_config_is_refused_by_name(released):
    folder = released("llama_fp8")
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(CheckpointError, match="modelopt"):
        released_config(folder)


def test_a_model_knows_its_folder_and_other_models_do_not(released, tmp_path):
    folder = released("qwen3_fp8")
    assert released_config(load_released(folder))[0] == folder
    with pytest.raises(CheckpointError, match="loaded from"):
        released_config(torch.nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match="nowhere"):
        released_config(tmp_path / "nowhere")


def test_float_weights_have_no_grid_and_odd_blocks_cannot_be_trained(released):
    folder = released("qwen3_fp8")
    model = load_released(folder)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        grids_of(Released(folder), saved_rows(model, ["lm_head.weight"]), model, ["lm_head.weight"])
    config = released_config(folder)[1] | {"weight_block_size": [64, 64]}
    with pytest.raises(CheckpointError, match="weight_block_size"):
        released_options(config)


def test_cut_blocks_are_read_and_written():
    """DeepSeek-V3 has matrices of 576 rows, which blocks of 128 do not divide."""
    torch.manual_seed(0)
    layout = Fp8Layout("a.weight", {}, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    weight = torch.randn(200, 130)
    parts = {"weight": torch.zeros(200, 130, dtype=torch.float8_e4m3fn), "scale": torch.zeros(2, 2)}
    low, high = (over_blocks(weight, (128, 128), way) for way in ("amin", "amax"))
    assert high[1, 1] == weight[128:, 128:].max()
    assert low[0, 1] == weight[:128, 128:].min()
    stored = layout.read(parts)
    scale, _ = layout.fresh(low, high, layout.read(parts | {"scale": torch.rand(2, 2)}))
    parts |= layout.write(stored, parts | {"scale": scale}) | {"scale": scale}
    parts |= layout.write(layout.encoded(weight, layout.read(parts)), parts)
    torch.testing.assert_close(layout.read(parts).values, weight, rtol=2**-4, atol=2**-9 * float(scale.max()))


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe_fp8"])
def test_rows_gathered_for_the_files_are_the_files(kind, released):
    folder = released(kind)
    model = load_released(folder)
    names = tuple(name for name, value in model.named_parameters() if value.ndim == 3 or name.endswith("norm.weight"))
    rows = {
        name: as_rows(model.get_submodule(name.rpartition(".")[0]), value) if value.ndim == 3 else value[:, None]
        for name in names
        for value in [model.get_parameter(name).detach()]
    }
    back = {name: torch.full_like(value, torch.nan) for name, value in rows.items()}
    there, written = tensors_of(folder), Released(folder)
    for key, at in saved_rows(model, names).items():
        found = at.gather(rows)
        at.scatter_(back, found)
        if key in written.weights:
            assert torch.equal(found, torch.cat([stored.values for stored in written.read(key)]))
        else:
            assert torch.equal(found.flatten(), there[key].float())
    assert all(torch.equal(back[name], value) for name, value in rows.items())
