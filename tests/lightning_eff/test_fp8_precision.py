"""FP8 by precision plugin: the callback's weights, joined techniques, checkpoints, refusals."""

import pytest
import torch
from lightning_world import make_trainer
from promise_drivers import assert_resumes, difference, lightning_module, run_lightning
from promise_table import NUM_STEPS, recipe_of

import lightning_eff
from lightning_eff.pytorch import Fp8Precision
from shared_core.errors import ConfigError

OPTIONS = recipe_of("fp8")["fp8"]


@pytest.mark.parametrize("with_callback", [False, True])
def test_the_plugin_trains_as_the_callback_does(with_callback, tmp_path):
    recipe = recipe_of("prune") if with_callback else {}
    plugin = Fp8Precision(precision="32-true", **OPTIONS)
    by_plugin = run_lightning(recipe, tmp_path / "plugin", plugin=with_callback, plugins=[plugin])
    by_callback = run_lightning(recipe | {"fp8": OPTIONS}, tmp_path / "callback")
    assert difference(by_plugin.weights, by_callback.weights) is None
    told = by_plugin.receipt["techniques"]["fp8"]
    assert (told["layers"], told["recipe"]) == (1, "delayed")
    assert by_plugin.receipt["steps"]["applied"] == NUM_STEPS


def test_it_resumes_bit_for_bit(tmp_path):
    def run(recipe, folder, **options):
        return run_lightning(recipe, folder, plugin=False, plugins=[Fp8Precision(**OPTIONS)], shuffle=True, **options)

    assert_resumes(run, dict, tmp_path, [2], save_every=2)


def test_bf16_autocast_is_on_by_default(tmp_path):
    seen = []
    module = lightning_module()
    module.net.head.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    loader = torch.utils.data.DataLoader([{"x": torch.randn(1, 8, 8), "labels": torch.tensor(1)}] * 4, batch_size=2)
    trainer = make_trainer(tmp_path, max_steps=1, plugins=Fp8Precision(include=["hidden"]))
    with pytest.raises(Exception, match="include pattern 'hidden' matches no module"):
        trainer.fit(module, loader)
    trainer = make_trainer(tmp_path, max_steps=1, plugins=Fp8Precision(include=["net.hidden"]))
    trainer.fit(module, loader)
    assert seen == [torch.bfloat16]


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="precision must be one of bf16-mixed, 32-true, got '16-mixed'"):
        Fp8Precision(precision="16-mixed")
    with pytest.raises(ConfigError, match="fp8 must be given once, got it in a callback and in Fp8Precision"):
        run_lightning({"fp8": {"recipe": "rowwise", "include": ["first"]}}, tmp_path, plugins=[Fp8Precision(**OPTIONS)])
    assert lightning_eff.Fp8Precision is not None
