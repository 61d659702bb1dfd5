"""Runs that are killed again and again end as one that was never stopped, and a finished one stays as it is."""

import random
import shutil

import pytest
import torch
from transformers import TrainerCallback

from hf_eff import attach
from shared_core.engine.saving.state_file import load_state

RECIPES = [
    {"prune": {"sparsity": 0.5, "begin": 1, "end": 8, "every": 2}, "average": {"kind": "swa", "begin": 4}},
    {"qat": {"scheme": "int8", "begin": 2, "ema_constant": 0.3}, "average": {"kind": "ema", "decay": 0.8}},
    {"prune": {"sparsity": 0.5, "begin": 1, "end": 8}, "loss_scale": {"kind": "dynamic", "init_scale": 2.0**126}},
]


class Killed(BaseException):
    """The process is gone."""


class KilledAfterSave(TrainerCallback):
    def __init__(self, dice, odds):
        self.dice, self.odds = dice, odds

    def on_save(self, args, state, control, **kwargs):
        if state.global_step < state.max_steps and self.dice.random() < self.odds:
            raise Killed


def everything(trainer):
    inner = trainer.optimizer.optimizer
    found = {
        f"{number}.{name}": value
        for number, state in enumerate(inner.state.values())
        for name, value in state.items()
        if torch.is_tensor(value)
    }
    rate = torch.tensor(inner.param_groups[0]["lr"], dtype=torch.float64)
    return {**trainer.model.state_dict(), **found, "rate": rate, "random": torch.get_rng_state()}


@pytest.fixture
def chain(make, tmp_path):
    def run(seed):
        dice = random.Random(seed)
        recipe = dice.choice(RECIPES)
        settings = {
            "max_steps": dice.choice([9, 11]), "save_strategy": "steps", "save_steps": dice.choice([1, 2, 3]),
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": dice.choice([1, 2, 3]),
            "eval_strategy": dice.choice(["no", "steps"]), "eval_steps": 2,
        }  # fmt: skip
        # ten examples, batches of 2: five micro-batches an epoch, which no window of 2 or 3 divides

        def build(folder, model_seed, odds=0.0):
            trainer = make.trainer(
                tmp_path / folder,
                model=make.classifier(model_seed),
                data=make.examples(10),
                callbacks=[KilledAfterSave(dice, odds)],
                **settings,
            )
            return trainer, attach(trainer, recipe)

        whole, whole_session = build("whole", 0)
        whole.train()
        kills = []
        for attempt in range(7):
            again, session = build("again", attempt, 0.0 if attempt == 6 else dice.choice([0.2, 0.5]))
            try:
                again.train(resume_from_checkpoint=bool(kills))
                break
            except Killed:
                kills.append(again.state.global_step)
        assert again.state.global_step == settings["max_steps"], kills
        applied = [one.receipt()["steps"] for one in (whole_session, session)]
        assert applied[0] == applied[1], kills
        expected, found = everything(whole), everything(again)
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == [], (kills, settings)

    return run


QUICK = (0, 3, 4)


@pytest.mark.parametrize(
    "seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12) if seed not in QUICK)]
)
def test_a_chain_of_kills_ends_as_the_run_that_was_never_stopped(chain, seed):
    chain(seed)


@pytest.mark.parametrize("recipe", [{"average": {"kind": "swa", "begin": 2}}, RECIPES[0]], ids=["average", "prune"])
def test_a_finished_run_that_is_resumed_takes_no_step(make, tmp_path, recipe):
    # the trainer (transformers 5.23) trains one more at rate 0 where the end lies inside an epoch, and tells no one
    def run(seed, **options):
        # 32 examples, batches of 4: the ninth step lies inside the second epoch
        settings = {"max_steps": 9, "save_strategy": "steps", "save_steps": 3, "weight_decay": 0.1}
        trainer = make.trainer(tmp_path, model=make.classifier(seed), **settings)
        session = attach(trainer, recipe)
        trainer.train(**options)
        return trainer, session

    whole, _ = run(0)
    again, session = run(1, resume_from_checkpoint=True)
    assert again.state.global_step == 9
    assert session.receipt()["steps"] == {"applied": 9, "skipped": 0, "planned": 9}
    assert any("taken its 9 steps" in note for note in session.receipt()["notes"])
    states = [one.model.state_dict() for one in (whole, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert load_state(tmp_path / "checkpoint-9")["step"] == 9
    shutil.rmtree(tmp_path / "checkpoint-9")
    trained, session = run(2, resume_from_checkpoint=True)  # and one that had not finished goes on to its end
    assert trained.state.global_step == 9
    assert all(torch.equal(states[0][name], value) for name, value in trained.model.state_dict().items())
