"""Activation checkpointing in the Hugging Face Trainer: language models, and what is refused."""

import pytest
import torch
from promise_drivers import hf_trainer
from promise_table import recipe_of
from transformers import Trainer

from hf_eff import ActivationCheckpointing
from shared_core.errors import CompatibilityError


@pytest.mark.parametrize("options", [{"policy": "block"}, {"policy": "sqrt"}, {"policy": "selective"}], ids=str)
def test_a_language_model_with_a_callback(options, tmp_path, make):
    weights = []
    for callbacks in ([], [ActivationCheckpointing(**options)]):
        torch.manual_seed(0)
        model = make.language_model(attention_dropout=0.2)
        trainer = Trainer(model, make.arguments(tmp_path, max_steps=2), train_dataset=make.texts(), callbacks=callbacks)
        trainer.train()
        weights.append(model.state_dict())
        assert not any("forward" in vars(module) for layer in model.model.layers for module in layer.modules())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    told = callbacks[0].session.receipt()["techniques"]["checkpointing"]
    assert told["modules"] == ["model.layers.0", "model.layers.1"]
    assert told["saved_bytes"] > 0


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_the_trainers_own_checkpointing_is_refused(name, tmp_path):
    with pytest.raises(CompatibilityError, match="the trainer's own activation checkpointing: blocks would be"):
        hf_trainer(recipe_of("checkpointing"), tmp_path, **{name: True})
