"""After `import hf_eff`, transformers loads GPTQ and AWQ models in float, or refuses them by name."""

import json

import pytest
from released_models import load_released, write_released
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.quantizers import auto

from hf_eff import _packed_loading
from shared_core.errors import CheckpointError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}


def test_transformers_keeps_its_own_loading_where_gptqmodel_is_installed(monkeypatch):
    mapping = dict.fromkeys(("gptq", "awq"), "own")
    monkeypatch.setattr(auto, "AUTO_QUANTIZER_MAPPING", mapping)
    with monkeypatch.context() as patch:
        patch.setattr(_packed_loading, "installed_version", lambda _: "7.0.0")
        _packed_loading.load_packed_in_float(auto)
    assert mapping == {"gptq": "own", "awq": "own"}


@pytest.mark.parametrize(
    ("change", "told"), [({"group_size": -1}, "group_size"), ({"checkpoint_format": "marlin"}, "marlin")]
)
def test_formats_that_cannot_be_read_are_refused_while_loading(change, told, tmp_path):
    folder = write_released("llama_gptq", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=told):
        load_released(folder)


def test_stacked_experts_are_refused_before_they_load_as_random_numbers(tmp_path):
    config = MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, num_local_experts=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": GPTQ}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="experts"):
        load_released(tmp_path)
