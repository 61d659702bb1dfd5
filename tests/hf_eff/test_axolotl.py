"""The plugin without Axolotl, whose base class has nothing but the events that it may override."""

import sys
from types import ModuleType

import pytest
from safetensors.torch import load_file

from hf_eff.callbacks import session_callback_of
from shared_core.errors import ConfigError

PRUNE = {"sparsity": 0.75, "begin": 1, "end": 6, "every": 2}


@pytest.fixture
def module(monkeypatch):
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), {})
    monkeypatch.setitem(sys.modules, "axolotl.integrations.base", base)
    monkeypatch.delitem(sys.modules, "hf_eff.axolotl", raising=False)
    import hf_eff.axolotl

    yield hf_eff.axolotl
    sys.modules.pop("hf_eff.axolotl", None)


class Missing(dict):
    """As Axolotl reads its YAML: what is not there is None."""

    def __missing__(self, name):
        return None


def test_a_recipe_in_the_yaml_is_attached_to_the_trainer(module, make, tmp_path):
    plugin = module.EffPlugin()
    asked = {"eff": {"prune": PRUNE, "average": {"kind": "ema", "decay": 0.5}}}
    parsed = module.EffArguments.model_validate(asked).model_dump(exclude_none=True)
    assert parsed == asked
    read = Missing(eff=Missing(prune=Missing(PRUNE), average=Missing(kind="ema", decay=0.5)))
    plugin.register(read)
    trainer = make.trainer(tmp_path)
    plugin.post_trainer_create(read, trainer)
    trainer.train()
    trainer.save_model()
    saved = [value for name, value in load_file(tmp_path / "model.safetensors").items() if "encoder" in name]
    matrices = [value for value in saved if value.ndim == 2]
    zeros = sum(int((value == 0).sum()) for value in matrices)
    assert zeros / sum(value.numel() for value in matrices) == pytest.approx(0.75, abs=0.05)


def test_a_file_of_a_recipe_is_read(module, make, tmp_path):
    (tmp_path / "recipe.yaml").write_text("prune: {sparsity: 0.75}\n")
    trainer = make.trainer(tmp_path)
    module.EffPlugin().post_trainer_create({"eff": str(tmp_path / "recipe.yaml")}, trainer)
    callback = session_callback_of(trainer)
    assert callback is not None
    assert list(callback.session.recipe) == ["prune"]


def test_the_key_is_where_axolotl_looks_for_it(module):
    assert module.EffPlugin().get_input_args() == "hf_eff.axolotl.EffArguments"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "axolotl: eff must be a recipe or a file of one, got None; leave out the plugin"),
        ({"eff": {}}, "axolotl: eff must be a recipe or a file of one, got {}"),
        ({"eff": {"prune": {"sparsity": 75}}}, "sparsity must be in"),
        ({"eff": {"purne": {}}}, "prune"),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_is_loaded(module, asked, told):
    with pytest.raises(ConfigError) as error:
        module.EffPlugin().register(Missing(asked))
    assert told in str(error.value)
