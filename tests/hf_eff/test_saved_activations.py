"""Packed activations in the Hugging Face Trainer."""

import pytest
import torch
from promise_drivers import difference, hf_trainer, run_hf
from promise_table import DigitsNet
from torch import nn

from hf_eff import ActivationCompression

EXACT = {"activations": {"pack": "exact", "min_size": 32}}


def told(callback):
    return callback.session.receipt()["techniques"]["activations"]


def weights_after(trainer, seed=0):
    torch.manual_seed(seed)
    trainer.train()
    return trainer.model.state_dict()


@pytest.mark.parametrize("pack", ["exact", "int8"])
def test_a_language_model_with_gradient_checkpointing(pack, make, tmp_path):
    losses = []
    for callbacks in ([], [ActivationCompression(pack=pack, min_size=32)]):
        trainer = make.trainer(
            tmp_path, model=make.language_model(), data=make.texts(), callbacks=callbacks, gradient_checkpointing=True
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == losses[0] if pack == "exact" else losses[1] == pytest.approx(losses[0], rel=0.05)
    assert told(callbacks[0])["share_saved"] > 0
    assert "activations/saved" in trainer.state.log_history[0]


def test_evaluation_is_left_alone(tmp_path):
    receipt = run_hf(EXACT, tmp_path, eval_strategy="steps", eval_steps=2).receipt
    assert receipt["techniques"]["activations"]["forwards"] == 8


def test_a_loss_outside_of_the_model_is_packed_too(tmp_path):
    class NoLoss(DigitsNet):
        def forward(self, x, labels=None):
            return super().forward(x)

    seen = []
    for recipe in ({}, EXACT):
        trainer = hf_trainer(recipe, tmp_path, plugin=bool(recipe))
        torch.manual_seed(0)
        trainer.model = trainer.model_wrapped = NoLoss()
        trainer.compute_loss_func = lambda outputs, labels, **_: nn.functional.cross_entropy(outputs["logits"], labels)
        seen.append(dict(weights_after(trainer)))
    assert difference(*seen) is None
