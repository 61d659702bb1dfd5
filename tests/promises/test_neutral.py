"""A technique at the setting where it does nothing: the bits of the bare trainer, losses included."""

import pytest
import torch
from promise_drivers import difference, hf_trainer, run_lightning

NEUTRAL = {
    "distill": {"teacher": "ema", "ema_decay": 0.5, "alpha": 1.0},
    "loss_scale": {"kind": "static", "init_scale": 1.0},
    "matmul": {"precision": "highest"},
    "checkpointing": {"policy": "block", "include": ["*norm", "*dropout", "*hidden"]},
    "activations": {"pack": "exact", "min_size": 32},
}


@pytest.mark.parametrize("house", ["hf", "lightning"])
def test_neutral_techniques_together_are_the_bare_trainer(house, tmp_path):
    found = []
    for plugin in (True, False):
        torch.manual_seed(3)
        if house == "hf":
            trainer = hf_trainer(NEUTRAL, tmp_path, plugin=plugin, dropout=0.3, shuffle=True, seed=3)
            trainer.train()
            losses = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
            assert len(losses) == 8
            found.append((losses, dict(trainer.model.state_dict())))
        else:
            found.append(run_lightning(NEUTRAL, tmp_path, plugin=plugin, dropout=0.3, shuffle=True).weights)
    assert difference(*found) is None
