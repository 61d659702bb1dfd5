"""What is saved when training is cut short, and a Trainer that trains on afterwards."""

import itertools

import pytest
import torch
from lightning_world import BOTH, fit, make_trainer, module_class
from pytorch_lightning.callbacks import OnExceptionCheckpoint

from lightning_eff import EffCallback

NEUTRAL = {"activations": {"pack": "exact", "min_size": 1}}
ADAPTED = {"lora": {"rank": 2, "base": "none"}}
FACTORIZED = {"low_rank": {"rank": 4, "force": True, "merge": True, "min_size": 1}, "average": {"kind": "ema"}}


class BoomError(Exception):
    pass


class Fuse(module_class(BOTH[0])):
    """Fails in one of its hooks at a call of it."""

    place, calls = "", range(1)

    def burn(self, place):
        if place == self.place and next(self.calls) == 0:
            raise BoomError

    def training_step(self, batch, batch_idx):
        self.burn("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        torch.rand(1)
        self.burn("validation_step")
        super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, *args):
        self.burn("on_train_batch_end")


def run(folder, recipe, place="", call=0, ckpt_path=None, **options):
    torch.manual_seed(0)
    callback, module = EffCallback(recipe), Fuse(dropout=0.0)
    module.place, module.calls = place, itertools.count(1 - call)
    saver = OnExceptionCheckpoint(folder)
    trainer = make_trainer(folder, callbacks=[callback, saver], enable_checkpointing=True, **options)
    if place:
        with pytest.raises(BoomError):
            fit(trainer, module, val=True)
        assert not {"training_step", "on_save_checkpoint"} & set(vars(module))
        assert "on_exception" not in vars(saver)
    else:
        fit(trainer, module, val=True, ckpt_path=ckpt_path)
    return callback, trainer, module


@pytest.mark.parametrize(
    ("recipe", "place", "call", "accumulate"),
    [
        (NEUTRAL, "training_step", 6, 1),  # the last batch of an epoch, which is not over
        (NEUTRAL, "training_step", 7, 1),  # the first batch of an epoch: its shuffle was drawn already
        (NEUTRAL, "training_step", 8, 2),  # closes a window, of which gradients are there
        (NEUTRAL, "validation_step", 2, 1),
        (ADAPTED, "on_train_batch_end", 8, 1),  # its layers are the user's own again after an exception
        (FACTORIZED, "validation_step", 9, 1),
    ],
)
def test_a_checkpoint_on_an_exception_is_plain_and_goes_on_exactly(recipe, place, call, accumulate, tmp_path):
    options = {"accumulate_grad_batches": accumulate}
    _, _, whole = run(tmp_path / "whole", recipe, **options)
    run(tmp_path, recipe, place, call, **options)
    path = tmp_path / "on_exception.ckpt"
    Fuse.load_from_checkpoint(path)
    callback, _, again = run(tmp_path, recipe, ckpt_path=path, **options)
    for name, weight in whole.named_parameters():
        assert torch.equal(weight, again.get_parameter(name)), name
    told = [note for note in callback.receipt["notes"] if "saved in the middle of" in note]
    assert len(told) == (place == "training_step")


def test_a_trainer_that_was_interrupted_trains_on(tmp_path):
    recipe = {"prune": {"sparsity": 0.5, "end": 4}}
    callback, trainer, module = run(tmp_path, recipe, "on_train_batch_end", 8)
    trainer.callbacks.pop()  # from whose file Lightning would resume
    pruned = module.net[0].weight == 0
    assert pruned.any()
    module.place = ""
    fit(trainer, module)
    assert bool((module.net[0].weight[pruned] == 0).all())
    assert callback.receipt["steps"]["applied"] == trainer.global_step > 8
