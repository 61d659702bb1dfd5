"""GPTQ and AWQ files hold what their published layouts say, and damaged ones are refused."""

import json

import pytest
import torch
from released_models import load_released, tensors_of, write_released
from safetensors.torch import load_file, save_file

from shared_core.checkpoint_formats.packed_layouts import PackedLayout
from shared_core.checkpoint_formats.released import Released
from shared_core.errors import CheckpointError

KINDS = ("llama_gptq", "llama_gptq8", "llama_gptq_asym", "llama_awq")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}


def nibble(words, row, column, place, bits):
    return (int(words[row, column]) % 2**32 >> bits * place) % 2**bits


def weight_of(tensors, stem, config):
    """The weight in float64, one code at a time from the layouts' descriptions."""
    bits, group = config["bits"], config["group_size"]
    words, zeros, scales = (tensors[f"{stem}.{name}"] for name in ("qweight", "qzeros", "scales"))
    each, awq = 32 // bits, config["quant_method"] == "awq"
    # AutoAWQ writes column order[i] of a word at its bits 4i
    order = [0, 2, 4, 6, 1, 3, 5, 7] if awq else [*range(each)]
    inputs, outputs = len(words) * (1 if awq else each), scales.shape[1]
    first = int(not awq and config["checkpoint_format"] == "gptq")
    found = torch.empty(outputs, inputs, dtype=torch.float64)
    for column in range(outputs):
        place = order.index(column % each)
        for row in range(inputs):
            code = (
                nibble(words, row, column // each, place, bits)
                if awq
                else nibble(words, row // each, column, row % each, bits)
            )
            zero = nibble(zeros, row // group, column // each, place, bits) + first
            found[column, row] = (code - zero) * float(scales[row // group, column])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_the_weights_that_the_layout_describes(kind, tmp_path):
    folder = write_released(kind, tmp_path)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    model, tensors = load_released(folder), tensors_of(folder)
    assert not hasattr(model.config, "quantization_config")
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.o_proj"):
        found = model.get_submodule(name).weight
        torch.testing.assert_close(found.double(), weight_of(tensors, name, config), rtol=0, atol=0)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].float())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
def test_any_words_come_back_bit_for_bit(bits, sym):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (64 * bits // 32, 32), generator=generator).int()
    middle = sum(2 ** (bits - 1) << place for place in range(0, 32, bits))
    zeros = torch.randint(-(2**31), 2**31, (8, bits), generator=generator).int()
    zeros = torch.full_like(zeros, middle - 2**32) if sym else zeros
    config = {**GPTQ, "bits": bits, "sym": sym, "checkpoint_format": "gptq_v2"}
    parts = {"qweight": words, "qzeros": zeros, "scales": torch.rand(8, 32, generator=generator).half()}
    layout = PackedLayout("a.weight", {}, config)
    written = layout.write(layout.read(parts), parts)
    assert all(torch.equal(written[part], parts[part]) for part in written)


def damaged(folder, change):
    """Change the tensors of a layer's file."""
    name = "model.layers.0.self_attn.k_proj"
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if f"{name}.qweight" in tensors:
            change(tensors, name)
            save_file({key: value.contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
    return f"{name}.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda one, key: one.update({f"{key}.g_idx": one[f"{key}.g_idx"].flip(0)}), "activation order"),
        (lambda one, key: one.update({f"{key}.scales": one[f"{key}.scales"][:1]}), "group_size"),
        (lambda one, key: one.update({f"{key}.qzeros": one[f"{key}.qzeros"] + 1}), "sym"),
        (lambda one, key: one.update({f"{key}.qweight": one[f"{key}.qweight"].long()}), "int64"),
    ],
)
def test_an_activation_order_and_damaged_layers_are_refused(change, told, tmp_path):
    folder = write_released("llama_gptq", tmp_path)
    name = damaged(folder, change)
    with pytest.raises(CheckpointError, match=told):
        list(Released(folder).read(name))


def test_a_layer_without_scales_is_refused():
    layout = PackedLayout("a.weight", {}, GPTQ)
    with pytest.raises(CheckpointError, match="lack scales"):
        layout.read({"qweight": torch.zeros(1, 8).int(), "qzeros": torch.zeros(1, 1).int()})
