"""TRL's trainers with the techniques, unchanged; which can be distilled; Axolotl's plugin, without Axolotl."""

import functools
import json
import sys
from types import ModuleType

import pytest
import torch
from hf_gradients import Gradients, distance
from safetensors.torch import load_file
from trl_trainers import BUILDERS, rows_of, scorer, sft, trainer_of

from hf_eff import attach
from hf_eff.callbacks import session_callback_of
from shared_core.errors import CompatibilityError, ConfigError

STEPS = 4
RECIPES = {
    "weights": {
        "prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1},
        "qat": {"scheme": "int8"},
        "average": {"kind": "ema", "decay": 0.5},
        "checkpointing": {"policy": "block"},
    },
    "adapters": {"lora": {"rank": 2, "base": "none"}, "loss_scale": {"kind": "dynamic", "init_scale": 64.0}},
    "steps": {"fp8": {"recipe": "tensorwise"}, "soup": {"kind": "uniform"}},
}
DONE = {"prune": "pruned", "qat": "range_updates", "average": "updates", "checkpointing": "recomputations",
        "lora": "trained_parameters", "loss_scale": "steps", "fp8": "layers", "soup": "candidates"}  # fmt: skip


def build(name, make, folder, **settings):
    return sft(make, folder, **settings) if name == "SFT" else trainer_of(name, make, folder, **settings)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["SFT", *BUILDERS])
def test_techniques_attach_unchanged(make, tmp_path, name, recipe):
    settings = {"save_strategy": "steps", "save_steps": 2} if recipe == "steps" else {}
    trainer = build(name, make, tmp_path, max_steps=STEPS, fp16=recipe == "adapters", **settings)
    attach(trainer, RECIPES[recipe])
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    told = json.loads((tmp_path / "eff_receipt.json").read_text())
    assert told["steps"]["applied"] == STEPS
    for key in RECIPES[recipe]:
        assert told["techniques"][key][DONE[key]]
    if recipe == "weights":
        weights = [value for key, value in load_file(tmp_path / "saved" / "model.safetensors").items()
                   if "_proj" in key or ".query" in key]  # fmt: skip
        assert sum(int((value == 0).sum()) for value in weights) >= 0.3 * sum(value.numel() for value in weights)


@pytest.mark.parametrize("beside", [{}, {"distill": {"temperature": 3.0}}])
def test_the_output_layer_trains_quantized_as_in_the_stock_trainer(make, tmp_path, beside):
    recipe = {"qat": {"scheme": "int8"}, **beside}
    if beside:
        recipe["distill"]["teacher"] = make.language_model(seed=5)

    def trained(build, data, **settings):
        model = make.language_model()
        trainer = build(tmp_path, model=model, data=data, max_steps=3, optim="sgd", learning_rate=0.5, **settings)
        attach(trainer, recipe)
        trainer.train()
        told = json.loads((tmp_path / "eff_receipt.json").read_text())["techniques"]["qat"]
        assert not told["without_range"]
        return {layer["name"]: torch.tensor([layer.get("scale", 0.0)]) for layer in told["per_layer"]}, {
            name: weight.detach().clone() for name, weight in model.named_parameters()
        }

    stock = trained(make.trainer, make.texts(8))
    fused = trained(functools.partial(sft, make), rows_of(make.texts(8)))
    assert all(distance(*pair) < 1e-5 for pair in zip(stock, fused, strict=True))


@pytest.mark.parametrize("key", ["fp8", "lora"])
def test_what_an_output_layer_would_do_in_vain_is_refused(make, tmp_path, key):
    options = {"recipe": "tensorwise"} if key == "fp8" else {"rank": 2, "base": "none"}
    trainer = sft(make, tmp_path, model=make.language_model(vocab_size=32))
    attach(trainer, {key: {**options, "include": ["lm_head", "*_proj"]}})
    with pytest.raises(CompatibilityError, match="output layer with TRL's SFTTrainer"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "why"),
    [("DPO", "scores whole"), ("KTO", "scores whole"), ("GRPO", "scores whole"), ("GKD", "its own teacher"),
     ("Distillation", "its own teacher")],
)  # fmt: skip
def test_a_loss_that_no_soft_term_can_join_is_refused_at_start(make, tmp_path, name, why):
    recipe = {"distill": {"teacher": make.language_model(seed=5)}}
    with pytest.raises(CompatibilityError, match=rf"must train on labels.*got {name}Trainer.*{why}"):
        attach(trainer_of(name, make, tmp_path), recipe)


def test_a_reward_model_learns_its_teachers_scores(make, tmp_path):
    teacher = scorer(make, 5)

    def gradients(alpha, size=2, windows=4):
        found = Gradients()
        trainer = trainer_of(
            "Reward", make, tmp_path, max_steps=1, per_device_train_batch_size=size, max_grad_norm=0.0, optim="sgd",
            gradient_accumulation_steps=windows,
        )  # fmt: skip
        trainer.add_callback(found)
        attach(trainer, {"distill": {"teacher": teacher, "divergence": "logit_mse", "alpha": alpha}})
        trainer.train()
        return trainer, found.first

    trainer, soft = gradients(0.0)
    _, task = gradients(1.0)
    _, both = gradients(0.4)
    assert distance({name: 0.4 * task[name] + 0.6 * soft[name] for name in soft}, both) < 1e-6
    student = scorer(make).double()
    rows = [row[name] for row in trainer.train_dataset for name in ("chosen_ids", "rejected_ids")]
    scores = [[model(torch.tensor([row])).logits for row in rows] for model in (student, teacher.double())]
    mine, its = map(torch.cat, scores)
    (mine - its.detach()).square().mean().backward()
    expected = {name: weight.grad.float() for name, weight in student.named_parameters() if weight.grad is not None}
    assert distance(expected, soft) < 1e-5
    with pytest.raises(ConfigError, match=r"divergence must be logit_mse with TRL's RewardTrainer.*got forward_kl"):
        attach(trainer_of("Reward", make, tmp_path), {"distill": {"teacher": teacher}})


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
        ({}, "got None; leave out the plugin"),
        ({"eff": {}}, "got {}"),
        ({"eff": {"prune": {"sparsity": 75}}}, "sparsity must be in"),
        ({"eff": {"purne": {}}}, "prune"),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_is_loaded(module, asked, told):
    with pytest.raises(ConfigError) as error:
        module.EffPlugin().register(Missing(asked))
    assert told in str(error.value)
