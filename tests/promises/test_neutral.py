"""A technique at the setting where it does nothing: the bits of the bare trainer, losses included."""

import pytest
import torch
from promise_drivers import difference, hf_trainer, run_hf, run_lightning

from shared_core.errors import TrainingError

NEUTRAL = {
    "distill": {"teacher": "ema", "ema_decay": 0.5, "alpha": 1.0},
    "loss_scale": {"kind": "static", "init_scale": 1.0},
    "matmul": {"precision": "highest"},
    "checkpointing": {"policy": "block", "include": ["*norm", "*dropout", "*hidden"]},
    "activations": {"pack": "exact", "min_size": 32},
}
TRAINERS = {"hf": run_hf, "lightning": run_lightning}
RANDOM = {"dropout": 0.4, "shuffle": True, "accumulate": 2}


@pytest.mark.parametrize("house", TRAINERS)
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


@pytest.mark.parametrize(
    ("house", "key", "settings"),
    [
        ("hf", "activations", RANDOM),
        ("hf", "activations", {"bf16": True}),
        ("hf", "activations", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
        ("hf", "checkpointing", RANDOM),
        ("lightning", "activations", RANDOM),
        ("lightning", "activations", {"precision": "bf16-mixed"}),
        ("lightning", "checkpointing", RANDOM),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else value,
)
def test_what_saves_memory_changes_no_bit(house, key, settings, tmp_path):
    found = []
    for recipe in ({}, {key: NEUTRAL[key]}):
        torch.manual_seed(0)
        found.append(TRAINERS[house](recipe, tmp_path / str(len(recipe)), plugin=bool(recipe), **settings))
    assert difference(found[0].weights, found[1].weights) is None
    told = found[1].receipt["techniques"][key]
    if key == "activations":
        assert told["kinds"]
    else:
        assert (told["never_recomputed"], told["recomputations_per_step"]) == ([], 2 * 3)


@pytest.mark.parametrize("house", TRAINERS)
def test_a_run_that_packs_nothing_fails_in_its_first_step(house, tmp_path):
    with pytest.raises(TrainingError, match=r"activations: .* must pack a tensor"):
        TRAINERS[house]({"activations": {"pack": "exact", "min_size": 10**6}}, tmp_path, save_every=1)
    assert [*tmp_path.glob("checkpoint-*"), *tmp_path.glob("*.ckpt")] == []
