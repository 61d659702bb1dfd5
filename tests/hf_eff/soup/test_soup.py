"""Soups at the end of runs of the Hugging Face Trainer: of whole models, of PEFT's adapters, of adapters of ours."""

import copy
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from promise_drivers import hf_trainer
from torch.utils.data import IterableDataset
from transformers import Trainer

from hf_eff import ModelSoup, attach
from hf_eff.callbacks import Lora
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError

SAVING = {"save_strategy": "steps", "save_steps": 2}


class Stream(IterableDataset):
    def __init__(self, rows, once):
        self.rows, self.left = rows, iter(rows * 3) if once else None

    def __iter__(self):
        return self.left or iter(self.rows)


@pytest.mark.parametrize("once", [False, True])
def test_norms_are_estimated_from_a_stream_that_starts_anew(tmp_path, once):
    trainer = hf_trainer({"soup": {"kind": "uniform", "bn_batches": 2}}, tmp_path, plugin=True, save_every=2)
    rows = list(trainer.train_dataset)
    trainer.train_dataset = Stream(rows, once)
    if once:
        trainer.args.max_steps = len(rows) * 3 // 8  # to the end of the stream
        with pytest.raises(TrainingError, match="must give batches to estimate statistics on"):
            trainer.train()
    else:
        trainer.train()
        assert int(trainer.model.norm.num_batches_tracked) == 2


def test_several_validation_sets_and_the_order_that_was_logged(make, tmp_path):
    soup = ModelSoup(kind="greedy", metric="eval_two_loss", order="logged")
    trainer = make.trainer(tmp_path, callbacks=[soup], eval_strategy="steps", eval_steps=2, **SAVING)
    trainer.eval_dataset = {"one": make.examples(8, seed=4), "two": make.examples(8, seed=5)}
    trainer.train()
    told = soup.session.receipt()["techniques"]["soup"]
    logged = {row["step"]: row["eval_two_loss"] for row in trainer.state.log_history if "eval_two_loss" in row}
    tried = [int(row["name"].rsplit("-", 1)[1]) for row in told["history"]]
    assert tried == sorted(logged, key=lambda step: logged[step])
    assert told["first_single"] == pytest.approx(min(logged.values()))
    assert trainer.evaluate()["eval_two_loss"] == pytest.approx(told["score"], rel=1e-6)


def test_what_a_soup_needs_is_said_at_the_start(make, tmp_path):
    with pytest.raises(ConfigError, match="eval_strategy must evaluate while training for order logged"):
        make.trainer(tmp_path, callbacks=[ModelSoup(kind="greedy", order="logged")], **SAVING)
    for nothing in (None, [], {"one": [], "two": make.examples(8)}):
        trainer = make.trainer(tmp_path, **SAVING)
        trainer.eval_dataset = nothing
        with pytest.raises(ConfigError, match="eval_dataset must hold examples"):
            attach(trainer, {"soup": {"kind": "greedy"}})
    trainer = make.trainer(tmp_path, callbacks=[ModelSoup(kind="greedy", metric="eval_acuracy")],
                           eval_strategy="steps", eval_steps=2, max_steps=20, **SAVING)  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'eval_accuracy'"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert torch.isfinite(next(trainer.model.parameters())).all()


@pytest.mark.parametrize("validates", [True, False])
def test_an_evaluate_that_returns_nothing_is_told(make, tmp_path, validates):
    class Silent(Trainer):
        def evaluate(self, *args, **kwargs):
            super().evaluate(*args, **kwargs)

    soup = ModelSoup(kind="greedy", metric="eval_accuracy")
    during = {"eval_strategy": "steps", "eval_steps": 2} if validates else {}
    trainer = make.trainer(tmp_path, trainer_class=Silent, callbacks=[soup], max_steps=4, **during, **SAVING)
    with pytest.raises(ConfigError, match="evaluate of Silent must return its metrics, got None"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.slow
def test_equal_weights_get_equal_metrics_though_ranges_are_estimated_with_dropout(make, tmp_path):
    trainer = make.trainer(tmp_path, **SAVING)  # its attention has dropout
    session = attach(trainer, {"soup": {"kind": "greedy"}, "qat": {"scheme": "int8"}})
    trainer.train()
    told = session.receipt()["techniques"]["soup"]
    assert told["repeat"][0] == told["repeat"][1]


LORA = {"r": 2, "lora_alpha": 8, "target_modules": ["query", "value", "word_embeddings"],
        "modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}  # fmt: skip


def train(make, folder, soup, lora=None, resume=None, **settings):
    model = get_peft_model(make.classifier(hidden_dropout_prob=0.0), LoraConfig(**(LORA | (lora or {}))))
    callback = ModelSoup(**soup)
    settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1, **settings}
    trainer = make.trainer(folder, model=model, callbacks=[callback], **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback.session.receipt()["techniques"]["soup"]


def merged(make, folder):
    model = PeftModel.from_pretrained(make.classifier(hidden_dropout_prob=0.0), folder)
    return {name: value.clone() for name, value in model.merge_and_unload().state_dict().items()}


def test_the_model_is_the_mean_of_the_merged_models_and_saves_as_an_adapter(make, tmp_path):
    trainer, told = train(make, tmp_path, {"kind": "weighted", "weights": [1, 1, 2]})
    expected = [merged(make, tmp_path / f"checkpoint-{step}") for step in (4, 6, 8)]
    trainer.save_model(str(tmp_path / "soup"))
    saved = merged(make, tmp_path / "soup")
    live = copy.deepcopy(trainer.model).merge_and_unload().state_dict()
    for name, value in saved.items():
        mean = (expected[0][name].double() + expected[1][name].double() + 2 * expected[2][name].double()) / 4
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)
        assert torch.equal(live[name], value)
    assert told["adapter"]["r"] == 6
    assert [name.rsplit("-")[-1] for name in told["ingredients"]] == ["4", "6", "8"]


@pytest.mark.parametrize("rank", [None, 2])
def test_the_greedy_soup_is_what_the_trainer_measures(make, tmp_path, rank):
    trainer, told = train(make, tmp_path, {"kind": "greedy", "rank": rank}, {"use_rslora": True})
    assert told["candidates"] == 4
    assert told["score"] <= told["best_single"]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(told["score"], rel=1e-6)
    assert told["repeat"][0] == told["repeat"][1]
    trainer.save_model(str(tmp_path / "soup"))
    again = Trainer(model=PeftModel.from_pretrained(make.classifier(hidden_dropout_prob=0.0), tmp_path / "soup"),
                    args=trainer.args, eval_dataset=trainer.eval_dataset)  # fmt: skip
    assert again.evaluate()["eval_loss"] == pytest.approx(told["score"], rel=1e-6)


def test_a_cut_soup_fits_a_model_that_was_built_like_the_first(make, tmp_path):
    trainer, told = train(make, tmp_path, {"kind": "uniform", "rank": 2}, {"use_rslora": True})
    assert told["adapter"]["r"] == 2
    assert 0 < told["rank_error"] < 1
    layer = trainer.model.base_model.model.bert.encoder.layer[0].attention.self.query
    assert layer.lora_A["default"].weight.shape == (2, 16)
    assert layer.scaling["default"] == pytest.approx(8 / 2**0.5)


@pytest.mark.parametrize(
    ("lora", "soup", "kind", "match"),
    [
        ({"use_dora": True}, {}, CheckpointError, "must have no use_dora"),
        ({"init_lora_weights": "pissa"}, {}, CheckpointError, "must leave the base model as it is"),
        ({}, {"bn_batches": 2}, MatchError, "bn_batches must be 0"),
    ],
)
def test_what_cannot_be_averaged_is_refused_before_the_first_step(make, tmp_path, lora, soup, kind, match):
    with pytest.raises(kind, match=match):
        train(make, tmp_path, {"kind": "uniform", **soup}, lora)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_resumed_run_ends_with_the_same_soup(make, tmp_path):
    straight, _ = train(make, tmp_path / "one", {"kind": "uniform"})
    for step in (2, 4):
        shutil.copytree(tmp_path / "one" / f"checkpoint-{step}", tmp_path / "two" / f"checkpoint-{step}")
    resumed, told = train(make, tmp_path / "two", {"kind": "uniform"}, resume=True)
    assert told["candidates"] == 4
    ends = resumed.model.state_dict()
    assert all(torch.equal(value, ends[name]) for name, value in straight.model.state_dict().items())


def test_what_holds_single_weights_is_refused_beside_it(make, tmp_path):
    model = get_peft_model(make.classifier(), LoraConfig(**LORA))
    with pytest.raises(CompatibilityError, match="soup of a PEFT model cannot be combined with prune"):
        attach(make.trainer(tmp_path, model=model, save_strategy="epoch"),
               {"prune": {"sparsity": 0.5}, "soup": {"kind": "uniform"}})  # fmt: skip


def test_adapters_without_a_peft_model_are_refused(make, tmp_path):
    model = make.classifier()
    model.add_adapter(LoraConfig(**LORA))
    with pytest.raises(CompatibilityError, match="PeftModel"):
        make.trainer(tmp_path, model=model, callbacks=[ModelSoup(kind="uniform")], save_strategy="epoch").train()


def test_own_adapters_are_averaged_as_the_merged_models_that_checkpoints_hold(make, tmp_path):
    from safetensors.torch import load_file

    recipe = [Lora(rank=2, alpha=8, save="merged"), ModelSoup(kind="uniform")]
    trainer = make.trainer(tmp_path, callbacks=recipe, save_strategy="steps", save_steps=2, learning_rate=0.1)
    trainer.train()
    saved = [load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4, 6, 8)]
    for name, value in trainer.model.state_dict().items():
        mean = sum(weights[name].double() for weights in saved) / 4
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)
    with pytest.raises(CompatibilityError, match="requantize"):
        make.trainer(tmp_path, callbacks=[Lora(rank=2, base="nf4", save="merged", requantize=True),
                                           ModelSoup(kind="uniform")],
                     save_strategy="epoch").train()  # fmt: skip
