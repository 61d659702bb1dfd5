from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback
from trl_trainers import tokenizer

from hf_eff import (
    Distillation,
    EffCallback,
    EffTrainer,
    EffTrainerMixin,
    LossScaling,
    ModelSoup,
    Pruning,
    QuantizationAwareTraining,
    attach,
)
from hf_eff.front_end import FRONT_END
from shared_core import Recipe
from shared_core.errors import CheckpointError, CompatibilityError, ConfigError, MatchError, TrainingError

pytestmark = pytest.mark.matrix

PRUNE = {"sparsity": 0.5, "begin": 1, "end": 6, "every": 2}
QAT = {"scheme": "int8", "begin": 2}


def weights(trainer):
    return [value.clone() for value in trainer.model.state_dict().values()]


def train(trainer):
    torch.manual_seed(11)  # the trainer seeds when it is constructed, and dropout draws from what is left
    trainer.train()


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_flags_of_eff_run_join_the_callbacks_of_a_script(make, tmp_path, request):
    both = make.trainer(tmp_path / "both", callbacks=[QuantizationAwareTraining(**QAT), Pruning(**PRUNE)])
    train(both)
    request.addfinalizer(lambda: FRONT_END.install(Recipe({})))
    FRONT_END.install(Recipe.from_dict({"prune": PRUNE}))
    mixed = make.trainer(tmp_path / "mixed", callbacks=[QuantizationAwareTraining(**QAT)])
    train(mixed)
    assert equal(weights(both), weights(mixed))
    assert FRONT_END.used()
    with pytest.raises(ConfigError, match="prune was given twice"):
        make.trainer(tmp_path / "twice", callbacks=[Pruning(**PRUNE)]).train()


def test_nothing_switched_on_is_the_stock_trainer_bit_for_bit(make, tmp_path):
    stock, ours, attached = (
        make.trainer(tmp_path / name, trainer_class=kind)
        for name, kind in (("a", Trainer), ("b", EffTrainer), ("c", Trainer))
    )
    assert not attach(attached, {}).recipe
    for trainer in (stock, ours, attached):
        train(trainer)
    assert equal(weights(stock), weights(ours))
    assert equal(weights(stock), weights(attached))
    assert not (tmp_path / "b" / "eff_receipt.json").exists()


def test_callbacks_attach_and_subclass_train_the_same_bits(make, tmp_path):
    recipe = {"prune": PRUNE, "qat": QAT}
    attached = make.trainer(tmp_path / "attach")
    attach(attached, recipe)
    (tmp_path / "recipe.yaml").write_text(
        "qat: {scheme: int8, begin: 2}\nprune: {sparsity: 0.5, begin: 1, end: 6, every: 2}\n"
    )
    others = [
        make.trainer(tmp_path / "each", callbacks=[QuantizationAwareTraining(**QAT), Pruning(**PRUNE)]),
        make.trainer(tmp_path / "one", callbacks=[EffCallback(recipe)]),
        make.trainer(tmp_path / "file", callbacks=[EffCallback(tmp_path / "recipe.yaml")]),
        make.trainer(tmp_path / "sub", trainer_class=EffTrainer, extra={"recipe": recipe}),
        make.trainer(
            tmp_path / "both", trainer_class=EffTrainer, extra={"recipe": {"qat": QAT}}, callbacks=[Pruning(**PRUNE)]
        ),
    ]
    train(attached)
    for trainer in others:
        train(trainer)
        assert equal(weights(attached), weights(trainer))
    assert list(others[0].callback_handler.callbacks[0].session.recipe) == ["prune", "qat"]
    assert "prune/sparsity" not in attached.evaluate()


class Own(Trainer):
    """A user's subclass with everything overridden."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        self.losses = getattr(self, "losses", 0) + 1
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)

    def training_step(self, *args, **kwargs):
        self.steps = getattr(self, "steps", 0) + 1
        return super().training_step(*args, **kwargs)

    def evaluate(self, *args, **kwargs):
        return super().evaluate(*args, **kwargs) | {"eval_mine": 1.0}

    def train(self, *args, **kwargs):
        self.trained = True
        return super().train(*args, **kwargs)


def test_a_users_subclass_keeps_its_own_methods(make, tmp_path):
    teacher = make.classifier(seed=9, hidden_size=32)
    trainer = make.trainer(
        tmp_path, trainer_class=Own, callbacks=[Distillation(teacher=teacher)], eval_strategy="steps", eval_steps=4
    )
    trainer.train()
    assert trainer.trained
    assert trainer.steps == 8
    assert trainer.losses == 8 + 2 * 2
    assert trainer.evaluate()["eval_mine"] == 1.0
    assert trainer.callback_handler.callbacks[0].session.receipt()["techniques"]["distill"]["batches"] == 8


def test_the_mixin_refuses_to_come_last():
    with pytest.raises(TypeError, match="EffTrainerMixin must come before"):

        class Wrong(Trainer, EffTrainerMixin):
            pass

    class Right(EffTrainerMixin, Seq2SeqTrainer):
        pass


def test_a_callback_added_before_training_is_as_one_of_construction(make, tmp_path):
    given = make.trainer(tmp_path / "a", callbacks=[Pruning(**PRUNE), QuantizationAwareTraining(**QAT)])
    given.train()
    added = make.trainer(tmp_path / "b")
    added.add_callback(QuantizationAwareTraining(**QAT))
    added.add_callback(Pruning(**PRUNE))
    added.train()
    state = added.model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in given.model.state_dict().items())
    assert list(attach(added).recipe) == ["prune", "qat"]
    assert attach(added).receipt()["techniques"]["prune"]["sparsity"] == pytest.approx(0.5, abs=1e-3)


def test_a_callback_that_cannot_be_added_leaves_the_trainer_as_it_was(make, tmp_path):
    trainer = make.trainer(tmp_path)
    before = list(trainer.callback_handler.callbacks)
    with pytest.raises(MatchError):
        trainer.add_callback(Pruning(sparsity=0.5, include=["nothing*"]))
    assert trainer.callback_handler.callbacks == before
    trainer.callback_handler.add_callback(Pruning(**PRUNE))
    with pytest.raises(TrainingError, match=r"Pruning must be known to the trainer before it trains.*add_callback"):
        trainer.train()


def test_a_callback_added_to_eff_trainer_joins(make, tmp_path):
    ours = make.trainer(tmp_path, trainer_class=EffTrainer, extra={"recipe": {"qat": QAT}})
    ours.add_callback(Pruning(**PRUNE))
    assert list(ours.session.recipe) == ["prune", "qat"]
    ours.train()
    assert ours.session.receipt()["techniques"]["prune"]["sparsity"] == pytest.approx(0.5, abs=1e-3)


class RenamesItsLoss(Trainer):
    def log(self, logs, *args, **kwargs):
        super().log({"embedding_loss" if key == "loss" else key: value for key, value in logs.items()}, *args, **kwargs)


def test_a_class_around_a_trainer_as_setfits_is_attached_to(make, tmp_path):
    around = SimpleNamespace(st_trainer=make.trainer(tmp_path, trainer_class=RenamesItsLoss, logging_steps=1))
    session = attach(around, {"prune": PRUNE})
    around.st_trainer.train()
    logged = [entry for entry in around.st_trainer.state.log_history if "embedding_loss" in entry]
    assert logged[-1]["prune/sparsity"] == 0.5
    assert session.receipt()["techniques"]["prune"]["sparsity"] == 0.5


def test_setfit_that_trains_the_body_on_is_refused(make, tmp_path):
    trainer = make.trainer(tmp_path)
    trainer.setfit_args = SimpleNamespace(end_to_end=True)
    with pytest.raises(CompatibilityError, match="SetFit's end_to_end must be False, got True"):
        attach(SimpleNamespace(st_trainer=trainer), {"prune": PRUNE})


def test_a_technique_given_twice_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match="prune was given twice"):
        make.trainer(tmp_path, callbacks=[Pruning(**PRUNE), EffCallback({"prune": PRUNE})])
    trainer = make.trainer(tmp_path, callbacks=[Pruning(**PRUNE)])
    with pytest.raises(ConfigError, match="prune was given twice"):
        attach(trainer, {"prune": PRUNE})
    with pytest.raises(ConfigError, match="trainer must be a transformers Trainer, got "):
        attach(trainer.model, {"prune": PRUNE})


def test_a_model_from_model_init_is_the_one_that_is_pruned(make, tmp_path):
    trainer = Trainer(
        model_init=lambda: make.classifier(), args=make.arguments(tmp_path), train_dataset=make.examples(),
        callbacks=[Pruning(**PRUNE), QuantizationAwareTraining(**QAT)],
    )  # fmt: skip
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    share = float((trainer.model.bert.encoder.layer[0].output.dense.weight == 0).float().mean())
    assert share > 0.2


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"bf16": True},
        {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3},
        {"auto_find_batch_size": True},
        {"eval_strategy": "epoch", "eval_on_start": True, "max_steps": -1, "num_train_epochs": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing")
def test_it_runs_with_the_trainers_other_features(make, tmp_path, settings):
    teacher = make.classifier(seed=9, hidden_size=32)
    callbacks = [Pruning(**PRUNE), QuantizationAwareTraining(**QAT), Distillation(teacher=teacher)]
    trainer = make.trainer(tmp_path, callbacks=callbacks, **settings)
    trainer.train()
    report = trainer.callback_handler.callbacks[0].session.receipt()["techniques"]
    assert report["prune"]["sparsity"] == pytest.approx(0.5, abs=2e-3)
    assert report["distill"]["batches"] > 0
    assert report["qat"]["range_updates"] == 8


def test_a_retry_with_a_smaller_batch_starts_afresh(make, tmp_path):
    class TooBig(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if len(inputs["labels"]) > 2 and self.state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    trainer = make.trainer(
        tmp_path, trainer_class=TooBig, auto_find_batch_size=True,
        callbacks=[Pruning(**PRUNE), LossScaling(kind="dynamic")],
    )  # fmt: skip
    trainer.train()
    receipt = trainer.callback_handler.callbacks[0].session.receipt()
    assert receipt["steps"]["applied"] == 8
    assert receipt["techniques"]["loss_scale"]["steps"] == 8


def test_adapters_are_saved_as_adapters(make, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model = get_peft_model(make.classifier(), LoraConfig(target_modules=["query", "value"], r=2))
    trainer = make.trainer(
        tmp_path, model=model, callbacks=[QuantizationAwareTraining(scheme="int8", begin=2, skip=("*lora_*",))]
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    assert PeftModel.from_pretrained(make.classifier(), tmp_path / "out")


def test_what_would_fail_at_the_end_fails_at_the_start(make, tmp_path):
    def build(folder=tmp_path, **settings):
        return make.trainer(folder, callbacks=[ModelSoup(kind="greedy")], **settings)

    with pytest.raises(ConfigError, match="save_strategy"):
        build(save_strategy="no")
    with pytest.raises(ConfigError, match="save_total_limit must keep at least two checkpoints, got 1"):
        build(save_strategy="steps", save_total_limit=1)
    trainer = make.trainer(tmp_path, save_strategy="steps")
    trainer.eval_dataset = None
    with pytest.raises(ConfigError, match="eval_dataset"):
        attach(trainer, {"soup": {"kind": "greedy"}})
    with pytest.raises(MatchError, match="nothing_like_it"):
        make.trainer(tmp_path, callbacks=[Pruning(sparsity=0.5, include=("nothing_like_it",))])
    trainer = make.trainer(tmp_path / "gone")
    Path(tmp_path / "gone").rmdir()
    Path(tmp_path / "gone").write_text("a file")
    with pytest.raises(CheckpointError, match="output_dir must be a writable folder"):
        attach(trainer, {"prune": PRUNE})
    with pytest.raises(ConfigError, match="within the 8 steps"):
        make.trainer(tmp_path, callbacks=[Pruning(sparsity=0.5, end=900)]).train()


def test_lbfgs_is_refused(make, tmp_path):
    trainer = make.trainer(tmp_path)
    trainer.optimizer = torch.optim.LBFGS(trainer.model.parameters())
    with pytest.raises(CompatibilityError, match="LBFGS"):
        attach(trainer, {"prune": PRUNE})


def test_trl_trains_with_it(make, tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class EffSFTTrainer(EffTrainerMixin, SFTTrainer):
        pass

    rows = [{"input_ids": text["input_ids"].tolist(), "labels": text["labels"].tolist()} for text in make.texts(16)]

    def build(recipe, **settings):
        arguments = make.arguments(
            tmp_path, SFTConfig, bf16=False, gradient_checkpointing=False, max_steps=2,
            dataset_kwargs={"skip_prepare_dataset": True}, **settings,
        )  # fmt: skip
        return EffSFTTrainer(
            model=make.language_model(), args=arguments, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(), recipe=recipe,
        )  # fmt: skip

    recipe = {"prune": {"sparsity": 0.5, "schedule": "one_shot", "begin": 1}}
    trainer = build(recipe)
    trainer.train()
    assert trainer.session.receipt()["techniques"]["prune"]["sparsity"] == pytest.approx(0.5, abs=1e-3)
    recipe["distill"] = {"teacher": make.language_model(seed=5)}
    trainer = build(recipe, label_smoothing_factor=0.1)
    trainer.train()
    assert trainer.session.receipt()["techniques"]["distill"]["batches"] == 2


def test_dead_gradients_move_no_live_weight_of_adafactor_where_nothing_is_clipped(make, tmp_path):
    def trained(zeroed):
        trainer = make.trainer(tmp_path / str(zeroed), optim="adafactor", max_grad_norm=0.0, max_steps=4)
        attach(trainer, {"prune": {"sparsity": 0.5, "begin": 0, "schedule": "one_shot"}})
        if zeroed:
            for weight in (weight for weight in trainer.model.parameters() if weight.ndim > 1):
                weight.register_hook(lambda gradient, weight=weight: gradient.masked_fill(weight == 0, 0.0))
        train(trainer)
        return {name: weight for name, weight in trainer.model.named_parameters() if "query.weight" in name}

    found, expected = trained(False), trained(True)
    for name, weight in found.items():
        assert torch.equal(weight, expected[name])
        assert weight.count_nonzero() < weight.numel()


@pytest.mark.parametrize("event", ["on_train_begin", "on_epoch_begin", "on_step_begin", "on_step_end"])
@pytest.mark.parametrize("beside", [{}, {"qat": QAT}])
def test_a_callback_that_comes_in_training_is_refused(make, tmp_path, event, beside):
    class Adds(TrainerCallback):
        pass

    def add(self, args, state, control, **kwargs):
        if not any(isinstance(callback, Pruning) for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(Pruning(**PRUNE))

    setattr(Adds, event, add)
    trainer = make.trainer(tmp_path, callbacks=[Adds()])
    attach(trainer, beside)
    with pytest.raises(TrainingError, match="attached before train, got a trainer that trains"):
        trainer.train()


def test_attaching_to_a_trainer_that_trains_or_has_trained_is_refused(make, tmp_path):
    found = []

    class Attaches(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if not found:
                with pytest.raises(TrainingError, match="attached before train, got a trainer that trains"):
                    attach(trainer, {"prune": PRUNE})
                found.append(attach(trainer, {}))

    trainer = make.trainer(tmp_path, callbacks=[Attaches()], max_steps=2)
    trainer.train()
    assert len(found) == 1
    with pytest.raises(TrainingError, match="got a trainer that has trained"):
        attach(trainer, {"prune": PRUNE})


def test_deepspeed_that_accelerate_does_not_use_is_refused(make, tmp_path):
    trainer = make.trainer(tmp_path)
    trainer.args.deepspeed_plugin = object()  # as transformers makes it of deepspeed=
    with pytest.raises(CompatibilityError, match=r"DeepSpeed was.*\(distributed type NO\)"):
        attach(trainer, {"prune": PRUNE})
    trainer.is_deepspeed_enabled = True
    with pytest.raises(CompatibilityError, match="cluster cannot be combined with DeepSpeed"):
        attach(trainer, {"cluster": {"bits": 3}})


class OwnStep(Trainer):
    """A subclass that computes its loss by itself."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


def test_only_techniques_that_need_the_loss_ask_a_training_step_for_compute_loss(make, tmp_path):
    pruned = make.trainer(tmp_path / "pruned", trainer_class=OwnStep, callbacks=[Pruning(sparsity=0.5)])
    pruned.train()
    assert pruned.state.global_step == 8
    trainer = make.trainer(
        tmp_path / "own", trainer_class=OwnStep, callbacks=[Distillation(teacher=make.classifier(seed=7))]
    )
    before = [value.clone() for value in trainer.model.parameters()]
    with pytest.raises(TrainingError, match=r"OwnStep must call self.compute_loss"):
        trainer.train()
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_a_replaced_method_that_leaves_gradients_to_nobody_is_refused(make, tmp_path):
    trainer = make.trainer(tmp_path, callbacks=[Pruning(sparsity=0.5)], max_grad_norm=0.0)
    trainer._get_grad_norm = lambda *args, **kwargs: 1.0
    with pytest.raises(TrainingError, match=r"Trainer must call self._get_grad_norm"):
        trainer.train()
