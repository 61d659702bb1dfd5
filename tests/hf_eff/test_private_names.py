import re
from pathlib import Path

import pytest
import torch
from private_names import names_in
from transformers import Trainer

import hf_eff
from hf_eff import Distillation, Pruning, attach
from hf_eff._private_names import USED, WRAPPED
from shared_core.errors import CompatibilityError, TrainingError

NAMES = {**WRAPPED, **USED}
OURS = {"_eff_installed"}


@pytest.mark.parametrize("name", NAMES)
def test_transformers_still_has_a_private_name_where_it_was_seen(name):
    """What fails here has moved in transformers: find its new place, then mend the table and its hook."""
    user = getattr(Trainer, NAMES[name].user, None)
    assert user is not None, f"Trainer.{NAMES[name].user} is gone; who uses {name} now?"
    assert name in names_in(user), f"Trainer.{NAMES[name].user} no longer uses {name}"
    assert callable(getattr(Trainer, name, None)) == NAMES[name].is_method


def test_the_table_holds_every_private_name_of_the_trainer_that_we_use():
    files = [file for file in Path(hf_eff.__file__).parent.rglob("*.py") if file.name != "_private_names.py"]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    used = {*re.findall(r"trainer\.(_[a-z]\w*)", text)} - OURS
    by_name = {name for name in re.findall(r'"(_[a-z]\w*)"', text) if hasattr(Trainer, name) or name in NAMES}
    assert used | by_name == NAMES.keys()


def test_a_trainer_without_a_method_that_is_needed_is_refused_by_name(make, tmp_path, monkeypatch):
    trainer = make.trainer(tmp_path)
    monkeypatch.setattr(Trainer, "_clip_grad_norm", None)
    with pytest.raises(CompatibilityError, match=r"must have _clip_grad_norm .*; install transformers"):
        attach(trainer, {"prune": {"sparsity": 0.5}})


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
